"""`flashoptim-hf merge`: an adapter put into its base model.

QLoRA trains an adapter on the weights as NF4 gives them back. So those are what it is added to, in 16 bits, and not the weights that the
base model was published with; and the sum is not rounded to 4 bits again, which would take away much of what the adapter has learned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ..errors import ConfigurationError
from . import load, texts

PROMPTS = ("The capital of France is", "Explain what a list is in Python.", "Once upon a time", "def add(a, b):")
"""What logits are compared on where no file is given."""

LIMIT = 256


def run(
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder, as a run has left it.")],
    out: Annotated[Path, typer.Argument(help="Folder for the merged model; must not exist, or be empty.")],
    base: Annotated[str | None, typer.Option(help="The base model; default: the one that the adapter names.")] = None,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit/--no-load-in-4bit", help="Whether the adapter was trained on a base in NF4.")
    ] = True,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Texts to compare logits on: lines, or JSON lines.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the figures to this JSON file.")] = None,
) -> None:
    """Merge an adapter into its base model, dequantized to 16 bits, and report how far logits are from those of the adapter on NF4."""
    from rich.console import Console
    from rich.table import Table

    folder = load.find(adapter)
    if folder is None:
        raise ConfigurationError(f"{adapter} holds no {load.ADAPTER_CONFIG}: it is not the folder of an adapter.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"{out} is there already: name a folder that does not exist, or empty it.")
    loaded = load.load(str(folder), base, load_in_4bit)
    rows = texts.read(prompts) if prompts else list(PROMPTS)
    ids = [texts.given(row, loaded.tokenizer, LIMIT) for row in rows]
    ids = [row for row in ids if row]
    reference = [logits(loaded.model, row) for row in ids]
    merged, quantized = merge(loaded, folder)
    merged.save_pretrained(out)
    loaded.tokenizer.save_pretrained(out)
    figures = {"16 bit": difference(reference, [logits(merged, row) for row in ids])}
    if quantized:
        again_in_4bit(merged, quantized)
        figures["4 bit"] = difference(reference, [logits(merged, row) for row in ids])
    table = Table(title=f"merged against adapter on {'NF4' if load_in_4bit else '16 bit'}, {len(ids)} prompts")
    for column in ("merged in", "logits, root mean square", "largest", "KL, mean nats", "same next token"):
        table.add_column(column, justify="right" if column != "merged in" else "left")
    for name, found in figures.items():
        table.add_row(name, f"{found['rms']:.4f}", f"{found['largest']:.3f}", f"{found['kl']:.2e}", f"{found['same']:.1%}")
    Console(width=110, highlight=False).print(table)
    typer.echo(f"{out}: the model merged in 16 bit, with its tokenizer")
    if json_file is not None:
        json_file.write_text(
            json.dumps({"adapter": str(folder), "base": loaded.base, "prompts": len(ids), "differences": figures}, indent=1)
        )


def merge(loaded: load.Loaded, adapter: Path) -> tuple[Any, set[str]]:
    """The base model in 16 bits with the adapter added to it, and the names of its layers that were in 4 bits and got something added.

    `loaded` is used up: its base model is turned into the merged one, so that no second one is in memory.
    """
    peft = load.need("peft", "peft")
    adapted = {
        name.removeprefix("base_model.model.")
        for name, module in loaded.model.named_modules()
        if hasattr(module, "lora_A") and type(module.get_base_layer()).__name__ == "Linear4bit"
    }
    base = loaded.model.unload()
    if getattr(base, "is_loaded_in_4bit", False):
        base = base.dequantize()
    model = peft.PeftModel.from_pretrained(base, str(adapter)).merge_and_unload(safe_merge=True)
    return model.eval(), adapted


def again_in_4bit(model: Any, names: set[str]) -> None:
    """Round the named layers' weights to NF4 with double quantization and back, in place: what a merge in 4 bits leaves of them."""
    functional = load.need("bitsandbytes", "bitsandbytes").functional
    for name in names:
        weight = model.get_submodule(name).weight
        packed, state = functional.quantize_4bit(weight.data.contiguous(), quant_type="nf4", compress_statistics=True)
        weight.data = functional.dequantize_4bit(packed, state).to(weight.dtype)


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> Tensor:
    """Logits after each token of a prompt, fp32 on the host, of shape (tokens, vocabulary)."""
    device = next(model.parameters()).device
    return model(input_ids=torch.tensor([ids], device=device)).logits[0].float().cpu()


def difference(reference: list[Tensor], found: list[Tensor]) -> dict[str, float]:
    """How far logits are from others, over all tokens of all prompts.

    Returns:
        `rms` and `largest` difference of logits, `kl` the mean Kullback-Leibler divergence of the next token from the reference in nats,
        `same` the share of positions where the likeliest next token is the same.
    """
    gap = torch.cat([(b - a).flatten() for a, b in zip(reference, found, strict=True)])
    pairs = [(a.log_softmax(-1), b.log_softmax(-1)) for a, b in zip(reference, found, strict=True)]
    kl = torch.cat([(a.exp() * (a - b)).sum(-1) for a, b in pairs])
    same = torch.cat([a.argmax(-1) == b.argmax(-1) for a, b in pairs])
    return {
        "rms": gap.square().mean().sqrt().item(),
        "largest": gap.abs().max().item(),
        "kl": kl.mean().item(),
        "same": same.float().mean().item(),
    }
