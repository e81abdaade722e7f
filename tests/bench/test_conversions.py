"""The table of conversions: which cells are exact, within bound, refused; and docs/conversion.md says what the bench says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashoptim_hf import cli
from flashoptim_hf.bench import conversion_model as runs
from flashoptim_hf.bench.conversion_model import Job
from flashoptim_hf.bench.conversions import CODECS, PACKAGES, refusals, table_of

ROOT = Path(__file__).resolve().parents[2]
EXACT = ("none", "torch", "bitsandbytes32")
BOUND = {"log": 0.015, "square": 0.015, "softsign": 0.015, "bitsandbytes8": 0.03, "flashoptim": 0.015}
"""Largest relative error of a state when it is encoded once: about 1 in 127, and 1 in 64 of the dynamic map."""


def check(names, cells):
    """Every cell is what its source and target allow."""
    for (source, target), cell in cells.items():
        where = f"{source} -> {target}: {cell}"
        if target == "torchao":
            assert cell.error is None, where
            assert "read, not written" in cell.message, where
        elif target in EXACT or {source, target} == {"softsign", "flashoptim"}:
            assert cell.error == 0, where
        else:
            assert 0 < cell.error < BOUND[target], where
    assert set(cells) == {(source, target) for source in names for target in names if source != target}


@pytest.mark.parametrize("algorithm", CODECS)
def test_cells(algorithm):
    names = [*CODECS[algorithm], *(name for name in PACKAGES[algorithm] if name != "flashoptim")]
    cells = table_of(algorithm, "bitsandbytes,torchao", before=4, after=3)
    check(names, cells)
    for (source, target), cell in cells.items():
        if cell.difference is not None:
            fp32 = {source, target} <= set(EXACT)
            assert cell.difference < (2e-6 if fp32 else 1e-2), (source, target, cell)


def test_a_loss_that_is_not_the_sources_would_show():
    """The negative control: going on with an empty state is far outside what any cell shows."""
    first = runs.train(runs.ours("adamw", "none"), Job("adamw", {}, None, 0, 4))
    kept = runs.train(runs.ours("adamw", "none"), Job("adamw", first.weights, first.state, 4, 3))
    lost = runs.train(runs.ours("adamw", "none"), Job("adamw", first.weights, None, 4, 3))
    assert max(abs(a - b) for a, b in zip(kept.losses, lost.losses, strict=True)) > 1e-2


def test_the_command_writes_json_and_markdown(tmp_path):
    options = ["--packages", "bitsandbytes", "--algorithms", "lion", "--before", "2", "--after", "1"]
    files = ["--json", str(tmp_path / "c.json"), "--markdown", str(tmp_path / "c.md")]
    result = CliRunner().invoke(cli.app, ["bench", "conversions", *options, *files])
    assert result.exit_code == 0, result.output
    rows = {(row["case"], row["metric"]): row["value"] for row in json.loads((tmp_path / "c.json").read_text())["rows"]}
    assert rows["lion/none->bitsandbytes32", "state_error"] == 0
    assert rows["lion/none->bitsandbytes32", "loss_difference"] < 2e-6
    assert rows["lion/none->square", "refused"] == 0
    assert "| `none` |" in (tmp_path / "c.md").read_text()


def test_refusals_name_both_algorithms():
    text = refusals(["adamw", "lion", "sgd"])
    assert text.count("\n- ") == 6
    for own, other in (("FlashAdamW", "lion"), ("FlashLion", "sgd"), ("FlashSGD", "adamw")):
        assert re.search(rf"state of flashoptim_hf {own} .* takes states of {other}", text)


def test_the_documented_table_is_the_recorded_one():
    """docs/conversion.md shows what benchmarks/results/conversions.json holds."""
    rows = json.loads((ROOT / "benchmarks/results/conversions.json").read_text())["rows"]
    text = (ROOT / "docs/conversion.md").read_text()
    values = {(row["case"], row["metric"]): row["value"] for row in rows}
    for algorithm, codecs in CODECS.items():
        names = [*codecs, *PACKAGES[algorithm]]
        heads = [f"`{name}`" if name in codecs else name for name in names]
        lines = text.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith(f"| {algorithm}, from"))
        assert [cell.strip() for cell in lines[start].strip("|").split("|")][1:] == heads
        for source, line in zip(names, lines[start + 2 :], strict=False):
            cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
            for target, cell in zip(names, cells, strict=True):
                case = f"{algorithm}/{source}->{target}"
                if source == target:
                    assert cell == ""
                elif values[case, "refused"]:
                    assert cell == "refused"
                else:
                    error = values[case, "state_error"]
                    assert cell.startswith("exact" if error == 0 else f"{error:.2g}"), (case, cell)
                    assert cell.endswith(f"±{values[case, 'loss_difference']:.1g}"), (case, cell)
