"""The paging bench: bytes as they must be, times as arithmetic says, and scaling that does not show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashoptim_hf.bench.paging import BUDGETS, add_budgets, add_model, known, panels, run
from flashoptim_hf.bench.paging_model import LINKS, SHAPES, full, lora, simulate
from flashoptim_hf.bench.report import Report, figure
from flashoptim_hf.errors import ConfigurationError

JOB = full(SHAPES["8b"])


@pytest.fixture(scope="module")
def report() -> Report:
    report = Report("paging", "here")
    add_budgets(report, 16)
    add_model(report, "model/8b_full/pcie4", JOB, LINKS["pcie4"], SHAPES["8b"].params, 16)
    return report


def value(report: Report, case: str, subject: str, metric: str) -> float:
    (row,) = [row for row in report.rows if (row.case, row.subject, row.metric) == (case, subject, metric)]
    return row.value


def test_shapes_are_the_published_ones() -> None:
    assert {name: round(shape.lora / 1e6, 1) for name, shape in SHAPES.items()} == {
        "1b": 11.3,
        "3b": 24.3,
        "8b": 41.9,
        "14b": 64.2,
        "32b": 134.2,
        "70b": 207.1,
    }
    for shape in SHAPES.values():
        layer = 2 * shape.hidden * (shape.queries + shape.keys) + 3 * shape.hidden * shape.inner
        # the rest is embeddings: between 1 and 25 per cent
        assert 0.75 < shape.layers * layer / shape.params < 0.99
    assert JOB.state_bytes / JOB.trained == pytest.approx(3.15625)
    assert lora(SHAPES["8b"]).state_bytes / SHAPES["8b"].lora == pytest.approx(2.15625)


def test_every_budget_moves_what_it_must(report: Report) -> None:
    state = JOB.state_bytes
    for budget in BUDGETS:
        case = f"simulated/budget={budget}%"
        for way in ("ours", "release", "least_recently_used"):
            assert value(report, case, way, "bytes_per_step") == value(report, case, way, "bytes_expected")
        assert value(report, case, "ours", "bytes_per_step") == pytest.approx(2 * state * (1 - budget / 100), abs=1)
        assert value(report, case, "least_recently_used", "bytes_per_step") == (2 * state if budget < 100 else 0)


def test_times_are_those_of_the_link(report: Report) -> None:
    """Copies one after the other take all their time, both directions at once about half, and in backward none."""
    one_way = JOB.state_bytes / LINKS["pcie4"]
    case = "model/8b_full/pcie4"
    # latencies and kernels are a few per cent
    assert value(report, case, "no_overlap", "overhead_seconds") == pytest.approx(2 * one_way, rel=0.05)
    assert value(report, case, "ours", "overhead_seconds") == pytest.approx(one_way, rel=0.05)
    assert value(report, case, "release", "overhead_seconds") == 0
    assert value(report, case, "release", "hidden_share") == 1
    base = value(report, case, "ours", "step_seconds") - value(report, case, "ours", "overhead_seconds")
    assert base == pytest.approx(JOB.compute, rel=0.05)
    assert value(report, case, "ours", "overhead_ratio") == pytest.approx(value(report, case, "ours", "overhead_seconds") / base)
    assert value(report, case, "ours", "device_bytes_per_param") == 4
    assert value(report, case, "release", "device_bytes_per_param") == 2


def test_backward_hides_what_takes_no_longer_than_itself() -> None:
    """Over PCIe 3 a page needs nearly all of its part of backward, in each direction; at half of that speed twice as long."""
    base = simulate(JOB, LINKS["pcie3"], "resident", most_pages=16)
    assert JOB.state_bytes / LINKS["pcie3"] < JOB.compute * JOB.backward
    assert simulate(JOB, LINKS["pcie3"], "release", most_pages=16).seconds == pytest.approx(base.seconds, rel=0.01)
    slower = simulate(JOB, LINKS["pcie3"] / 2, "release", most_pages=16)
    backward = 2 * JOB.state_bytes / LINKS["pcie3"]
    assert slower.seconds == pytest.approx(base.seconds + backward - JOB.compute * JOB.backward, rel=0.05)


def test_a_part_stands_for_the_whole() -> None:
    few, many = (simulate(JOB, LINKS["pcie4"], "ours", 0.5, most_pages=pages) for pages in (16, 96))
    assert few.seconds == pytest.approx(many.seconds, rel=0.005)
    assert few.moved == many.moved
    assert few.staging == many.staging
    small = lora(SHAPES["8b"])
    assert small.pages == 3
    assert simulate(small, LINKS["pcie4"], "ours").state == small.state_bytes


def test_the_command_writes_its_rows(tmp_path: Path, report: Report) -> None:
    run(models="1b", links="pcie5", pages=8, json_file=tmp_path / "paging.json")
    written = json.loads((tmp_path / "paging.json").read_text())
    assert written["bench"] == "paging"
    cases = {row["case"] for row in written["rows"]}
    assert {"simulated/budget=25%", "model/1b_full/pcie5", "model/1b_lora/pcie5"} <= cases
    assert {"bytes_per_step", "bytes_expected", "overhead_ratio", "device_bytes_per_param"} <= {row["metric"] for row in written["rows"]}
    assert len(figure(panels(report.rows)).axes) == 3
    with pytest.raises(ConfigurationError, match="model '9b' is not known; choose from 1b"):
        known("1b,9b", SHAPES, "model")
