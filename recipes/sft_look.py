"""A first look at the data before training: rendered samples with the trained tokens marked, and how long samples are."""

from __future__ import annotations

import statistics
from itertools import groupby
from typing import Any

from datasets import Dataset
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from sft_data import IGNORED, Counts
from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "⟦", "⟧"  # around what is trained on, for terminals and log files without colours
HEAD, TAIL = 160, 80  # tokens shown of a longer sample


def lengths(rows: Dataset) -> dict[str, int]:
    """Median, 95th percentile and maximum of the samples' lengths in tokens."""
    found = sorted(map(len, rows["input_ids"]))
    return {
        "median": round(statistics.median(found)),
        "p95": found[-(-95 * len(found) // 100) - 1],  # the smallest length that 95 % of the samples do not exceed
        "max": found[-1],
    }


def rendered(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    """A sample's text, special tokens too, in green and brackets where it is trained on; the middle of a long one is left out."""
    pairs = list(zip(row["input_ids"], (label != IGNORED for label in row["labels"]), strict=True))
    gap = len(pairs) - HEAD - TAIL
    text = Text()
    for part in [pairs] if gap <= 0 else [pairs[:HEAD], None, pairs[-TAIL:]]:
        if part is None:
            text.append(f"\n[... {gap} tokens ...]\n", style="dim")
            continue
        for trained, run in groupby(part, key=lambda pair: pair[1]):
            piece = tokenizer.decode([token for token, _ in run])
            text.append(f"{OPEN}{piece}{CLOSE}" if trained else piece, style="bold green" if trained else "")
    return text


def show(
    rows: dict[str, Dataset | None], counts: dict[str, Counts], form: str, tokenizer: PreTrainedTokenizerBase, samples: int = 3
) -> None:
    """Print the first, a middle and the last sample, and a table of lengths and of what became of the samples.

    Args:
        rows: prepared samples by split; None where there is none.
        counts: of the same splits.
        form: the samples' format.
        samples: how many training samples to show; 0: the table alone.
    """
    console, train = Console(), rows["train"]
    if train is not None and samples > 0:
        places = sorted({round(i * (len(train) - 1) / max(samples - 1, 1)) for i in range(samples)})
        for place in places:
            title = f"training sample {place} of {len(train)}; trained on: {OPEN}green{CLOSE}"
            console.print(Panel(rendered(train[place], tokenizer), title=title))
    table = Table(title=f"data, format {form}")
    for column in ("", "samples", "tokens", "median", "p95", "max", "trained on", "cut off", "dropped"):
        table.add_column(column, justify="left" if not column else "right")
    for name, count in counts.items():
        size = lengths(rows[name])
        figures = (count.samples, count.tokens, size["median"], size["p95"], size["max"])
        table.add_row(name, *map(str, figures), f"{count.share:.1%}", str(count.truncated), str(count.dropped))
    console.print(table)
