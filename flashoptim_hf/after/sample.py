"""`flashoptim-hf sample`: what a model or an adapter answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..errors import ConfigurationError
from . import load, texts


def run(
    model: Annotated[str, typer.Argument(help="A model's or an adapter's folder, or a hub id.")],
    prompt: Annotated[list[str] | None, typer.Option(help="What is asked; may be given several times.")] = None,
    prompts: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A file of prompts: lines, or JSON lines.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For a temperature above 0.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Go on from the text as it is, without the chat template.")] = False,
    base: Annotated[str | None, typer.Option(help="The adapter's base model; default: the one that it names.")] = None,
    load_in_4bit: Annotated[
        bool | None, typer.Option("--load-in-4bit/--no-load-in-4bit", help="Weights in NF4; default: under an adapter.")
    ] = None,
) -> None:
    """Print the answers of a model, or of an adapter on its base in NF4, to prompts."""
    rows: list[object] = [*(prompt or []), *(texts.read(prompts) if prompts else [])]
    if not rows:
        raise ConfigurationError("there is nothing to answer: give --prompt TEXT, or --prompts FILE.")
    loaded = load.load(model, base, load_in_4bit)
    for row in rows:
        row = {"prompt": row} if isinstance(row, str) else row
        ids = texts.given(row, loaded.tokenizer, 10**9, raw)
        typer.echo(f"> {texts.sample(row, loaded.tokenizer, raw).question.strip()}\n{answer(loaded, ids, tokens, temperature, seed)}\n")


@torch.no_grad()
def answer(loaded: load.Loaded, ids: list[int], tokens: int, temperature: float = 0.0, seed: int = 0) -> str:
    """The model's answer to a prompt of token ids, without special tokens; `temperature` 0: greedy."""
    torch.manual_seed(seed)
    prompt = torch.tensor([ids], device=next(loaded.model.parameters()).device)
    how = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    out = loaded.model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, **how)
    return str(loaded.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)).strip()
