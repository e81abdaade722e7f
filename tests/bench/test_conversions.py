"""The table of conversions: which cells are exact, within bound, refused; and docs/conversion.md says what the bench says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flashoptim_hf import cli
from flashoptim_hf.bench import conversion_model as runs
from flashoptim_hf.bench.conversion_model import Job
from flashoptim_hf.bench.conversions import CODECS, PACKAGES, WEIGHTS, converted, masters_kept, refusals, table_of

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


def test_cells_of_bf16_weights_say_where_masters_go():
    cells = table_of("adamw", "bitsandbytes", before=4, after=2, dtype="bfloat16")
    for (source, target), cell in cells.items():
        expected = None if source not in CODECS["adamw"] else target in CODECS["adamw"]
        assert cell.masters is expected, (source, target, cell)
        assert cell.text.split(", ")[1:-1] == {None: [], True: ["masters"], False: ["no masters"]}[expected]
        assert cell.difference < 1e-2, (source, target, cell)
    exact = {pair for pair, cell in cells.items() if cell.error == 0}
    assert {pair[1] for pair in exact} == set(EXACT)


def test_masters_come_along_to_flashoptim_and_back():
    first = runs.train(runs.ours("adamw", "softsign"), Job("adamw", {}, None, 0, 3, "bfloat16"))
    there, _ = converted("adamw", first.state, "flashoptim", "bfloat16")
    assert masters_kept(first.state, there)
    back = converted("adamw", there, "softsign", "bfloat16")[0]["state"]
    assert all(torch.equal(back[key][name], value) for key, values in first.state["state"].items() for name, value in values.items())
    for values in there["state"].values():
        values.pop("error_bits")
    assert masters_kept(first.state, there) is False
    assert masters_kept(there, first.state) is None


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
    lines = text.splitlines()
    for algorithm, dtype in ((algorithm, dtype) for dtype in WEIGHTS for algorithm in CODECS):
        codecs = CODECS[algorithm]
        names = [*codecs, *PACKAGES[algorithm]]
        heads = [f"`{name}`" if name in codecs else name for name in names]
        title = [algorithm, *filter(None, [WEIGHTS[dtype]])]
        start = next(i for i, line in enumerate(lines) if line.startswith(f"| {' '.join(title)}, from"))
        assert [cell.strip() for cell in lines[start].strip("|").split("|")][1:] == heads
        for source, line in zip(names, lines[start + 2 :], strict=False):
            cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
            for target, cell in zip(names, cells, strict=True):
                case = "/".join([*title, f"{source}->{target}"])
                if source == target:
                    assert cell == ""
                elif values[case, "refused"]:
                    assert cell == "refused"
                else:
                    error = values[case, "state_error"]
                    assert cell.startswith("exact" if error == 0 else f"{error:.2g}"), (case, cell)
                    assert cell.endswith(f"±{values[case, 'loss_difference']:.1g}"), (case, cell)
                    kept = values.get((case, "masters_kept"))
                    assert cell.split(", ")[1:-1] == {None: [], 1: ["masters"], 0: ["no masters"]}[kept], (case, cell)
