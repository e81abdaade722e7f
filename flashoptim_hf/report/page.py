"""The page of a run: one HTML file that is well-formed XML too, loads nothing, runs no script, and escapes every text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from . import charts
from .charts import Chart, Line
from .history import Row, Run, numeric_keys, series, trouble
from .style import sheet

MOST_ROWS = 1000
"""Rows of the log that the table shows; of a longer log evenly spaced ones, the last among them."""

UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]|[\x7f-\x9f]")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load for the page: its own style, and nothing else."""

DRAWN = {"loss", "eval_loss", "learning_rate", "grad_norm"}
SUMMARIES = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss", "epoch", "step")


def write(run: Run, path: Path) -> None:
    """Write the page, under another name first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(render(run), encoding="utf-8")
    part.replace(path)


def render(run: Run) -> str:
    """The whole page."""
    body = [
        f"<h1>{_text(run.name)}</h1>",
        f"<p>{_text(run.ended)}</p>",
        _tiles(run),
        _warnings(run),
        _section("Training", [charts.draw(chart) for chart in training(run)], "charts"),
        _section("Memory and page traffic", [charts.draw(chart) for chart in memory(run)], "charts"),
        _still(run),
        _planned(run),
        _samples(run.samples),
        _section("Settings", [_facts(name, rows) for name, rows in run.facts.items() if rows], "facts"),
        _more(run),
        _log(run.log),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml">\n<head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{_text(run.name)}: report</title>\n<style>{sheet()}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def training(run: Run) -> list[Chart]:
    """Loss, learning rate, gradient norm and step time."""
    skipped = series(run.log, "optim_skipped_steps")
    charts_ = [
        Chart("Loss", (Line("training", series(run.log, "loss")), Line("held out", series(run.log, "eval_loss")))),
        Chart("Learning rate", (Line("learning rate", series(run.log, "learning_rate")),), zero=True),
        Chart("Gradient norm, before clipping", (Line("gradient norm", series(run.log, "grad_norm")),), zero=True),
        Chart("Time of a step", (Line("mean since the last log", series(run.records, "step_seconds")),), "seconds", zero=True),
    ]
    if skipped and skipped[-1][1] > 0:
        charts_.append(Chart("Skipped steps, in all", (Line("a gradient was not finite", skipped),), zero=True))
    return charts_


def memory(run: Run) -> list[Chart]:
    """The optimizer's memory, the process's, the device's, and what pages moved."""

    def optim(key: str) -> list[tuple[float, float]]:
        return series(run.log, f"optim_{key}")

    moved = tuple(Line(f"pages {way}", optim(f"page_{way}_bytes")) for way in ("in", "out"))
    return [
        Chart(
            "Optimizer state, and host memory for it",
            (Line("state in use", optim("state_bytes")), Line("allocated on the host", optim("host_bytes"))),
            "bytes",
            zero=True,
        ),
        Chart(
            "Device memory for optimizer state",
            (
                Line("allocated", optim("device_bytes")),
                Line("of it for pages in flight", optim("staging_bytes")),
                Line("of it pages that stay", optim("resident_bytes")),
            ),
            "bytes",
            zero=True,
        ),
        Chart("Moved by a step", () if _unmoved(run) else moved, "bytes", zero=True),
        Chart("Memory of the process on the host", (Line("resident set", series(run.records, "host_rss_bytes")),), "bytes", zero=True),
        Chart(
            "Device memory, all of it",
            (
                Line("allocated", series(run.records, "device_allocated_bytes")),
                Line("the most so far", series(run.records, "device_peak_bytes")),
            ),
            "bytes",
            zero=True,
        ),
    ]


def others(run: Run) -> list[Chart]:
    """Every other number of the log that has at least two values."""
    known = DRAWN | set(SUMMARIES)
    keys = [key for key in numeric_keys(run.log) if key not in known and not key.startswith("optim_")]
    return [Chart(key, (Line(key, points),)) for key in keys if len(points := series(run.log, key)) > 1]


def _unmoved(run: Run) -> bool:
    """Whether pages were counted and none was moved."""
    moved = [value for way in ("in", "out") for _, value in series(run.log, f"optim_page_{way}_bytes")]
    return bool(moved) and not any(moved)


# ---------------------------------------------------------------------- parts of the page


def _still(run: Run) -> str:
    return "<p>No page was moved: the state was updated where it lies.</p>" if _unmoved(run) else ""


def _tiles(run: Run) -> str:
    tiles = [("steps", f"{run.step:,} of {run.max_steps:,}" if run.max_steps else f"{run.step:,}")]
    for key, label in (("loss", "training loss, first to last"), ("eval_loss", "held-out loss, first to last")):
        points = series(run.log, key)
        if points:
            tiles.append((label, f"{points[0][1]:.4g} → {points[-1][1]:.4g}" if len(points) > 1 else f"{points[0][1]:.4g}"))
    held_out = [value for _, value in series(run.log, "eval_loss") if value < 700]
    if held_out:
        first, last = math.exp(held_out[0]), math.exp(held_out[-1])
        tiles.append(("held-out perplexity", f"{first:.4g} → {last:.4g}" if len(held_out) > 1 else f"{first:.4g}"))
    for rows, key, label, kind in (
        (run.log, "optim_state_bytes", "optimizer state", "bytes"),
        (run.records, "step_seconds", "time of a step, last", "seconds"),
        (run.log, "train_runtime", "training took", "seconds"),
        (run.log, "optim_skipped_steps", "skipped steps", "number"),
    ):
        points = series(rows, key)
        if points:
            tiles.append((label, charts.text(points[-1][1], kind)))
    return '<div class="tiles">' + "".join(f'<div class="tile"><b>{_text(v)}</b><span>{_text(k)}</span></div>' for k, v in tiles) + "</div>"


def _warnings(run: Run) -> str:
    said = [*trouble(run), *run.warnings]
    if not said:
        return ""
    return f'<h2>Warnings</h2><div class="box warnings"><ul>{"".join(f"<li>{_text(line)}</li>" for line in said)}</ul></div>'


def _section(title: str, parts: Iterable[str], kind: str) -> str:
    kept = [part for part in parts if part]
    return f'<h2>{_text(title)}</h2><div class="{kind}">{"".join(kept)}</div>' if kept else ""


def _planned(run: Run) -> str:
    if not run.planned and not run.plan_remark:
        return ""
    rows = []
    for what, low, high, measured in run.planned:
        bounds = charts.text(low, "bytes") if low == high else f"{charts.text(low, 'bytes')} to {charts.text(high, 'bytes')}"
        cells = [bounds, "not measured", ""]
        if measured is not None:
            word = "equal" if low == high == measured else "within" if low <= measured <= high else _off(low, high, measured)
            cells[1:] = [f"{measured:,} bytes" if low == high else charts.text(measured, "bytes"), word]
        rows.append([what, *cells])
    table = _table(["", "planned", "measured", ""], rows, numbers=(1, 2)) if rows else ""
    return f'<h2>Planned and measured</h2><div class="box wide">{table}<p>{_text(run.plan_remark)}</p></div>'


def _off(low: int, high: int, measured: int) -> str:
    bound, word = (high, "more") if measured > high else (low, "less")
    return f"{abs(measured - bound) / max(bound, 1):.2%} {word} than planned"


def _samples(samples: Sequence[Row]) -> str:
    if not samples:
        return ""
    parts, asked = [], None
    for row in samples:
        if row.get("prompt") != asked:
            asked = row.get("prompt")
            parts.append(f'<div class="box"><p>prompt</p><pre>{_text(asked)}</pre></div>')
        parts.append(f'<div class="box"><p>answer {_text(row.get("label", ""))}</p><pre>{_text(row.get("answer", ""))}</pre></div>')
    return f'<h2>Samples</h2><div class="facts">{"".join(parts)}</div>'


def _facts(name: str, rows: Iterable[Sequence[Any]]) -> str:
    return f'<div class="box"><b>{_text(name)}</b>{_table([], rows)}</div>'


def _more(run: Run) -> str:
    drawn = [charts.draw(chart) for chart in others(run)]
    return f'<details><summary>Other numbers of the log</summary><div class="charts">{"".join(drawn)}</div></details>' if drawn else ""


def _log(log: Sequence[Row]) -> str:
    """Every number of the log as a table."""
    if not log:
        return ""
    places = range(len(log)) if len(log) <= MOST_ROWS else sorted({round(i * (len(log) - 1) / (MOST_ROWS - 1)) for i in range(MOST_ROWS)})
    keys = ["step", *(key for key in numeric_keys(log) if key != "step")]
    rows = [[_number(log[place].get(key)) for key in keys] for place in places]
    left_out = "" if len(places) == len(log) else f"<p>{len(places)} of {len(log)} rows</p>"
    table = _table(keys, rows, numbers=range(len(keys)))
    return f'<details id="log"><summary>All numbers of the log</summary>{left_out}<div class="wide">{table}</div></details>'


def _number(value: Any) -> str:
    return repr(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[int] = ()) -> str:
    def row(cells: Sequence[Any], tag: str) -> str:
        return (
            "<tr>"
            + "".join(
                f"<{tag}{' class=' + chr(34) + 'n' + chr(34) if i in numbers else ''}>{_text(c)}</{tag}>" for i, c in enumerate(cells)
            )
            + "</tr>"
        )

    top = f"<thead>{row(head, 'th')}</thead>" if head else ""
    return f"<table>{top}<tbody>{''.join(row(cells, 'td') for cells in rows)}</tbody></table>"


def _text(value: Any) -> str:
    """Any text, escaped; what XML cannot hold is shown as U+FFFD."""
    return UNPRINTABLE.sub("\ufffd", escape(str(value), quote=True))
