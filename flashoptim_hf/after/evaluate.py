"""`flashoptim-hf eval`: perplexity on a file, and tasks of lm-eval where that is installed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..errors import ConfigurationError
from . import load, texts


def run(
    model: Annotated[str, typer.Argument(help="A model's or an adapter's folder, or a hub id.")],
    file: Annotated[
        Path | None,
        typer.Argument(exists=True, dir_okay=False, help="Texts: lines, or JSON lines with messages, prompt and completion, or text."),
    ] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Longest text in tokens; what is beyond is not counted.")] = 1024,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, with commas: mmlu,hellaswag. Needs pip install lm-eval.")] = None,
    base: Annotated[str | None, typer.Option(help="The adapter's base model; default: the one that it names.")] = None,
    load_in_4bit: Annotated[
        bool | None, typer.Option("--load-in-4bit/--no-load-in-4bit", help="Weights in NF4; default: under an adapter.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the figures to this JSON file.")] = None,
) -> None:
    """Measure the perplexity per token of a model, or of an adapter on its base in NF4, on a file; or run tasks of lm-eval."""
    if file is None and tasks is None:
        raise ConfigurationError("there is nothing to evaluate on: give a file of texts, or --tasks for lm-eval.")
    harness = load.need("lm_eval", "lm-eval") if tasks else None
    loaded = load.load(model, base, load_in_4bit)
    found: dict[str, Any] = {"model": model}
    if file is not None:
        rows = [texts.tokens(row, loaded.tokenizer, True, max_length) for row in texts.read(file)]
        found |= perplexity(loaded.model, rows)
        typer.echo(
            f"{file}: {found['texts']} texts, {found['tokens']} tokens predicted, loss {found['loss']:.4f}, "
            f"perplexity {found['perplexity']:.3f}"
        )
    if harness is not None and tasks is not None:
        wrapped = load.need("lm_eval.models.huggingface", "lm-eval").HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer)
        results = harness.simple_evaluate(model=wrapped, tasks=[task.strip() for task in tasks.split(",")])["results"]
        found["tasks"] = {
            task: {name: value for name, value in scores.items() if isinstance(value, int | float)} for task, scores in results.items()
        }
        for task, scores in found["tasks"].items():
            typer.echo(f"{task}: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1))


@torch.no_grad()
def perplexity(model: Any, rows: list[list[int]]) -> dict[str, float]:
    """Loss in nats per predicted token over all texts together, and its exponential. Texts of one token have nothing to predict.

    Raises:
        ConfigurationError: there is no token to predict.
    """
    device, total, count, used = next(model.parameters()).device, 0.0, 0, 0
    for ids in rows:
        if len(ids) < 2:
            continue
        batch = torch.tensor([ids], device=device)
        logits = model(input_ids=batch).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, batch[0, 1:], reduction="sum").item()
        count, used = count + len(ids) - 1, used + 1
    if not count:
        raise ConfigurationError("no text has two tokens or more, so there is nothing to predict.")
    loss = total / count
    return {"texts": used, "tokens": count, "loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
