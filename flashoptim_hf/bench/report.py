"""What every bench hands over: rows of numbers, as JSON, as tables and as a chart.

    {"bench", "commit", "date", "versions", "device", "rows": [{"case", "subject", "metric", "value", "unit", ("p20", "p80")}]}

Numbers that are compared stand in one report, measured in one run on one machine.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigurationError, UnsupportedError

PACKAGES = (
    "flashoptim-hf",
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "numpy",
    "flashoptim",
    "bitsandbytes",
    "torchao",
)
"""Packages whose versions a report names, where installed: this one, what it runs on, and the peers."""

JsonOption = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write every number to this JSON file.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Draw the tables to this image file (needs matplotlib).")]


@dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
        case: what was measured, for example a tensor's name or "adamw/log/fp32".
        subject: who was measured: "ours", a codec or a peer.
        metric: which quantity, for example "update_error".
        value: the number; of a timing, the median. Not finite becomes null in JSON.
        unit: its unit; "1" where it has none.
        p20, p80: percentiles of a timing, else None and left out of the JSON.
        note: what a table says after the value; not in the JSON.
    """

    case: str
    subject: str
    metric: str
    value: float
    unit: str
    p20: float | None = None
    p80: float | None = None
    note: str = ""

    @classmethod
    def timing(cls, case: str, subject: str, metric: str, samples: Sequence[float], unit: str) -> Row:
        """Median, 20th and 80th percentile of at least one sample."""
        cuts = statistics.quantiles(samples, n=5, method="inclusive") if len(samples) > 1 else [samples[0]] * 4
        return cls(case, subject, metric, statistics.median(samples), unit, p20=cuts[0], p80=cuts[-1])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        row = {"case": self.case, "subject": self.subject, "metric": self.metric, "value": _finite(self.value), "unit": self.unit}
        if self.p20 is not None:
            row |= {"p20": _finite(self.p20), "p80": _finite(self.p80)}
        return row


def _finite(value: float | None) -> float | None:
    """`value`, or None where JSON has no word for it."""
    return value if value is not None and math.isfinite(value) else None


@dataclass
class Report:
    """The rows of one run of one bench.

    Attributes:
        bench: the bench's name.
        device: the machine's name, see `cpu_name`.
        rows: the numbers, in the order in which tables show them.
    """

    bench: str
    device: str
    rows: list[Row] = field(default_factory=list)

    def add(self, case: str, subject: str, metric: str, value: float, unit: str = "1") -> None:
        """Append one row that is not a timing."""
        self.rows.append(Row(case, subject, metric, float(value), unit))

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "bench": self.bench,
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "device": self.device,
            "rows": [row.to_dict() for row in self.rows],
        }

    def write_json(self, path: Path) -> None:
        """Write the JSON object to `path`, whole or not at all."""
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        part.replace(path)


def versions() -> dict[str, str]:
    """Versions of Python and of the installed among `PACKAGES`, without importing them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The checkout's commit, with "+" when tracked files differ from it; None where the package does not run from a git checkout."""
    here = Path(__file__).resolve()
    try:
        # An installed copy may lie inside somebody else's checkout: only a file that git tracks speaks for its repository.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        head = _git(here.parent, "rev-parse", "HEAD")
        return head + ("+" if _git(here.parent, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return result.stdout.strip()


def cpu_name() -> str:
    """Model and usable cores of this machine's processor, for example "AMD EPYC 7B13, 2 cores"."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = (line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name"))
        model = next(names, model)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores"


def check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    """Find out before a long run whether its results can be written; makes the folders.

    Raises:
        UnsupportedError: a plot is asked for and matplotlib is missing.
        ConfigurationError: matplotlib does not write the plot's file type.
    """
    if plot_file is not None:
        require_matplotlib()
        from matplotlib.backend_bases import FigureCanvasBase

        known = sorted(FigureCanvasBase.get_supported_filetypes())
        if plot_file.suffix.lstrip(".").lower() not in known:
            raise ConfigurationError(f"--plot {plot_file}: {plot_file.suffix!r} is not a known image type; use one of {', '.join(known)}.")
    for path in (json_file, plot_file):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)


def require_matplotlib() -> None:
    """Raise unless matplotlib is there.

    Raises:
        UnsupportedError: it is not installed; the message says how to get it and what works without it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("--plot needs matplotlib, which is not installed (pip install matplotlib). --json works without it.")


def table(rows: Sequence[Row], title: str, *, down: str = "case", across: str = "subject", digits: int = 4) -> Any:
    """Rows as a rich table.

    Args:
        rows: what to show; the order of lines and columns is that of first appearance.
        title: the heading.
        down, across: which field of a row names the line and the column. Defaults "case" and "subject".
        digits: significant digits. Default 4.
    """
    from rich.table import Table

    lines = list(dict.fromkeys(getattr(row, down) for row in rows))
    columns = list(dict.fromkeys(getattr(row, across) for row in rows))
    cells = {(getattr(row, down), getattr(row, across)): _text(row, digits) for row in rows}
    result = Table(title=title, title_justify="left", min_width=len(title))
    result.add_column(down, overflow="fold", min_width=min(16, max(map(len, lines), default=0)))
    for column in columns:
        result.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        result.add_row(line, *(cells.get((line, column), "") for column in columns))
    return result


def _text(row: Row, digits: int) -> str:
    """A row's value, with the percentiles of a timing and the unit where there is one."""
    text = f"{row.value:.{digits}g}"
    if row.p20 is not None:
        text += f" ({row.p20:.{digits}g} to {row.p80:.{digits}g})"
    if row.note:
        text += f" {row.note}"
    return text if row.unit == "1" or not math.isfinite(row.value) else f"{text} {row.unit}"


def show(*parts: Any) -> None:
    """Print tables and lines; 140 columns where the output is no terminal."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    for part in parts:
        console.print(part, highlight=False)


@dataclass(frozen=True)
class Panel:
    """One chart: horizontal bars, one group per case and one colour per subject, on a logarithmic axis.

    Attributes:
        title: the heading.
        xlabel: quantity and unit.
        rows: what to draw; a value that a logarithmic axis cannot hold (0, or not finite) is written out instead.
    """

    title: str
    xlabel: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Grid:
    """One chart: a square for each case and subject, darker for larger values on a logarithmic scale, with the value written in it.

    Attributes:
        title: the heading.
        rows: what to draw. A value of 0 or less is the lightest, one that is not finite the darkest.
    """

    title: str
    rows: Sequence[Row]


def draw(panels: Sequence[Panel | Grid], path: Path) -> None:
    """Draw the panels into `path`, see `figure`."""
    figure(panels).savefig(path, dpi=120)


def figure(panels: Sequence[Panel | Grid]) -> Any:
    """A matplotlib figure with the panels below one another; a subject has the same colour in each.

    Raises:
        UnsupportedError: matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # not pyplot, which keeps a global list of figures
    from matplotlib.patches import Patch

    subjects = list(dict.fromkeys(row.subject for panel in panels if isinstance(panel, Panel) for row in panel.rows))
    cases = [len({row.case for row in panel.rows}) for panel in panels]
    thickness = [0.13 * len(subjects) + 0.12 if isinstance(panel, Panel) else 0.22 for panel in panels]
    heights = [0.9 + count * each for count, each in zip(cases, thickness, strict=True)]
    result = Figure(figsize=(10, sum(heights)), layout="constrained")
    axes = result.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        if isinstance(panel, Grid):
            _draw_grid(axis, panel)
        else:
            _draw_panel(axis, panel, subjects)
    handles = [Patch(color=f"C{k}", label=subject) for k, subject in enumerate(subjects)]
    result.legend(handles=handles, loc="outside upper center", ncols=len(subjects))
    return result


def _draw_panel(axis: Any, panel: Panel, subjects: Sequence[str]) -> None:
    """One panel; the first case is on top."""
    cases = list(dict.fromkeys(row.case for row in panel.rows))
    thickness = 0.8 / len(subjects)
    axis.set_xscale("log")
    for k, subject in enumerate(subjects):
        rows = [row for row in panel.rows if row.subject == subject]
        place = {row.case: cases.index(row.case) + (k - (len(subjects) - 1) / 2) * thickness for row in rows}
        drawn = [row for row in rows if math.isfinite(row.value) and row.value > 0]
        bars = axis.barh([place[row.case] for row in drawn], [row.value for row in drawn], thickness, color=f"C{k}")
        axis.bar_label(bars, fmt="{:.2g}", padding=2, fontsize=7)
        for row in rows:
            if row not in drawn:
                text = f" {subject}: {row.value:g}"
                axis.text(0, place[row.case], text, transform=axis.get_yaxis_transform(), va="center", fontsize=7, color=f"C{k}")
    axis.set_yticks(range(len(cases)), cases, fontsize=8)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.margins(x=0.1)
    axis.set_xlabel(panel.xlabel)
    axis.set_title(panel.title, loc="left", fontsize=10)
    axis.grid(axis="x", alpha=0.3)


def _draw_grid(axis: Any, grid: Grid) -> None:
    """One grid; colours span the six decades up to 10, so that grids of one picture can be compared."""
    from matplotlib.colors import LogNorm

    cases, subjects = (list(dict.fromkeys(getattr(row, name) for row in grid.rows)) for name in ("case", "subject"))
    places = {(row.case, row.subject): row.value for row in grid.rows}
    values = [[places.get((case, subject), math.nan) for subject in subjects] for case in cases]
    colours = [[min(max(value, 1e-5), 10) if math.isfinite(value) else 10 for value in line] for line in values]
    axis.imshow(colours, norm=LogNorm(1e-5, 10), cmap="Blues", aspect="auto")
    for i, line in enumerate(values):
        for k, value in enumerate(line):
            if (cases[i], subjects[k]) in places:
                axis.text(k, i, f"{value:.2g}", ha="center", va="center", fontsize=7, color="white" if colours[i][k] > 0.05 else "black")
    axis.set_xticks(range(len(subjects)), subjects, fontsize=8)
    axis.set_yticks(range(len(cases)), cases, fontsize=8)
    axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axis.set_title(grid.title, loc="left", fontsize=10)
