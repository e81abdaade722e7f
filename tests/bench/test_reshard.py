"""`bench reshard`: how cases are written, and what the report makes of findings. `tests/optim/test_sharded.py` judges them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flashoptim_hf.bench import reshard, reshard_ranks
from flashoptim_hf.bench.report import Report
from flashoptim_hf.errors import ConfigurationError, UnsupportedError


def test_cases() -> None:
    assert reshard_ranks.parse("2-4") == ((2, "sharded"), (4, "sharded"))
    assert reshard_ranks.parse(" 1-1f ") == ((1, "plain"), (1, "sharded"))


@pytest.mark.parametrize("case", ["", "2", "2-0", "0-2", "2-4-1", "2f-1", "2->4", "a-b"])
def test_malformed_cases(case: str) -> None:
    with pytest.raises(ConfigurationError, match="two numbers of ranks"):
        reshard_ranks.parse(case)


def test_the_report_holds_the_worst_way() -> None:
    found = [{"from": 2, "to": 4, "name": "odd", "codes": codes, "v_steps": 0.5, "m_steps": 0.25} for codes in (3, 7, 5)]
    report = Report("reshard", "cpu")
    reshard.add(report, found)
    assert [(row.case, row.metric, row.value) for row in report.rows] == [
        ("2->4/odd (5, 7)", "codes", 7.0),
        ("2->4/odd (5, 7)", "v_steps", 0.5),
        ("2->4/odd (5, 7)", "m_steps", 0.25),
    ]


def test_differences() -> None:
    base = {
        "exp_avg": torch.tensor([1.0, 2.0]),
        "exp_avg_sq": torch.tensor([1.0, 4.0]),
        "master_weight": torch.ones(2),
        "m_code": torch.tensor([3, -128], dtype=torch.int8),
        "v_code": torch.tensor([3, 255], dtype=torch.uint8),
        "v_step": torch.tensor([0.5, 0.5]),
        "m_step": torch.tensor([0.1, 0.1]),
    }
    assert reshard_ranks.compare(base, base) == {"codes": 0, "v_steps": 0.0, "m_steps": 0.0, "master": True, "exact": True}
    other = {**base, "exp_avg": torch.tensor([1.0, 2.05]), "exp_avg_sq": torch.tensor([1.0, 8.0])}
    other |= {"m_code": torch.tensor([3, 127], dtype=torch.int8), "v_code": torch.tensor([3, 0], dtype=torch.uint8)}
    result = reshard_ranks.compare(base, other)
    assert result["codes"] == 255
    assert result["v_steps"] == pytest.approx(1.0)
    assert result["m_steps"] == pytest.approx(0.5)
    assert (result["master"], result["exact"]) == (True, False)


def test_a_rank_that_fails_is_an_error_with_what_it_said() -> None:
    with pytest.raises(UnsupportedError, match="'2-x' must be two numbers"):
        reshard.measure(["2-x"])


def test_the_table_in_the_docs_is_the_measured_one() -> None:
    root = Path(__file__).resolve().parents[2]
    rows = json.loads((root / "benchmarks/results/reshard.json").read_text(encoding="utf-8"))["rows"]
    table = {}
    for line in (root / "docs/several-gpus.md").read_text(encoding="utf-8").split("shape | ")[1].split("\n\n")[0].splitlines():
        shape, *cells = [cell.strip() for cell in line.strip("| ").split("|")]
        table[shape] = cells
    columns = [shape.replace(" → ", "->") for shape in ("2 → 2", *next(iter(table.values())))]
    measured: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        case, _, name = row["case"].partition("/")
        shape = name.partition(" ")[2] + (" LoRA" if name.startswith("lora") else "")
        measured.setdefault((shape, case), {})[row["metric"]] = row["value"]
    assert {shape for shape, _ in measured} == set(list(table)[2:])
    for (shape, case), values in measured.items():
        text = f"{values['codes']:.0f} codes; v {values['v_steps']:.2f}, m {values['m_steps']:.2f}" if any(values.values()) else "exact"
        assert table[shape][columns.index(case)] == text
        assert max(values["v_steps"], values["m_steps"]) <= 1.001
