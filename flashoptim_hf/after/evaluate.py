"""`flashoptim-hf eval`: perplexity on a file, and tasks of lm-eval where that is installed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
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
        typer.Argument(exists=True, dir_okay=False, help="Texts: lines, or JSON lines as the recipes train on them."),
    ] = None,
    max_length: Annotated[int, typer.Option(min=2, help="Longest text in tokens; what is beyond is not counted.")] = 1024,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts and instructions as plain text, without the chat template.")] = False,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm-eval, with commas: mmlu,hellaswag. Needs pip install lm-eval.")] = None,
    base: Annotated[str | None, typer.Option(help="The adapter's base model; default: the one that it names.")] = None,
    load_in_4bit: Annotated[
        bool | None, typer.Option("--load-in-4bit/--no-load-in-4bit", help="Weights in NF4; default: under an adapter.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the figures to this JSON file.")] = None,
) -> None:
    """Measure the perplexity per token of a model, or of an adapter on its base in NF4, on a file; or run tasks of lm-eval.

    Of conversations, prompts with completions, and instructions with outputs, the answers are what counts; all tokens are told beside it.
    """
    if file is None and tasks is None:
        raise ConfigurationError("there is nothing to evaluate on: give a file of texts, or --tasks for lm-eval.")
    harness = load.need("lm_eval", "lm-eval") if tasks else None
    loaded = load.load(model, base, load_in_4bit)
    found: dict[str, Any] = {"model": model}
    if file is not None:
        rows = [texts.encode(row, loaded.tokenizer, max_length, raw) for row in texts.read(file)]
        found |= perplexity(loaded.model, rows)
        for line in lines(str(file), found):
            typer.echo(line)
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


def lines(file: str, found: dict[str, Any]) -> list[str]:
    """What `perplexity` found, for people."""
    whole = found.get("all_tokens")
    what = "" if whole is None else " of answers"
    said = [
        f"{file}: {_texts(found['texts'])}, {found['tokens']} tokens{what} predicted, loss {found['loss']:.4f}, "
        f"perplexity {found['perplexity']:.3f}"
    ]
    if whole is not None:
        said.append(
            f"over all {whole['tokens']} tokens of {_texts(whole['texts'])}, prompts included: loss {whole['loss']:.4f}, "
            f"perplexity {whole['perplexity']:.3f}"
        )
    if found["unmarked"]:
        said.append(
            f"in {_texts(found['unmarked'])} the chat template hides where answers begin: of those, no token counts as an answer."
            if whole is not None
            else "every token is counted: the chat template hides where answers begin."
        )
    return said


def _texts(count: int) -> str:
    return f"{count} text{'s' * (count != 1)}"


@torch.no_grad()
def perplexity(model: Any, rows: list[texts.Encoded]) -> dict[str, Any]:
    """Loss in nats per predicted token over all texts together, and its exponential. Texts of one token have nothing to predict.

    Returns:
        `counted`: "answers" where a token of an answer is predicted, else "all". `texts`, `tokens`, `loss` and `perplexity` of what is
        counted; `all_tokens`: the same four over all tokens, where answers are counted. `unmarked`: texts whose answers cannot be found.

    Raises:
        ConfigurationError: there is no token to predict.
    """
    device = next(model.parameters()).device
    whole, answers = Total(), Total()
    for row in rows:
        if len(row.ids) < 2:
            continue
        batch = torch.tensor([row.ids], device=device)
        logits = model(input_ids=batch).logits[0, :-1].float()
        losses = torch.nn.functional.cross_entropy(logits, batch[0, 1:], reduction="none")
        whole.add(losses)
        if row.answers is not None:
            answers.add(losses[torch.tensor(row.answers[1:], device=device)])
    if not whole.tokens:
        raise ConfigurationError("no text has two tokens or more, so there is nothing to predict.")
    unmarked = sum(row.hidden for row in rows)
    if not answers.tokens:
        return {"counted": "all", **whole.figures(), "unmarked": unmarked}
    return {"counted": "answers", **answers.figures(), "all_tokens": whole.figures(), "unmarked": unmarked}


@dataclass
class Total:
    """Sums over texts: losses in nats, tokens, and the texts that have some."""

    loss: float = 0.0
    tokens: int = 0
    texts: int = 0

    def add(self, losses: torch.Tensor) -> None:
        """Take in the losses of one text's tokens."""
        self.loss += losses.sum().item()
        self.tokens += losses.numel()
        self.texts += bool(losses.numel())

    def figures(self) -> dict[str, Any]:
        """Texts, tokens, mean loss and perplexity."""
        loss = self.loss / self.tokens
        return {"texts": self.texts, "tokens": self.tokens, "loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
