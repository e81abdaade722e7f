"""Rows, the JSON that checks read, tables and charts."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys

import pytest

from flashoptim_hf.bench import report as report_module
from flashoptim_hf.bench.report import Panel, Report, Row, check_outputs, commit, cpu_name, draw, figure, table, versions
from flashoptim_hf.errors import ConfigurationError, UnsupportedError


def test_json_has_exactly_the_documented_keys(tmp_path):
    report = Report("demo", "a machine")
    report.add("case", "ours", "update_error", 0.25)
    report.rows.append(Row.timing("case", "ours", "seconds", [3.0, 1.0, 2.0], "s"))
    report.write_json(tmp_path / "demo.json")
    found = json.loads((tmp_path / "demo.json").read_text())
    assert set(found) == {"bench", "commit", "date", "versions", "device", "rows"}
    assert (found["bench"], found["device"]) == ("demo", "a machine")
    assert found["rows"][0] == {"case": "case", "subject": "ours", "metric": "update_error", "value": 0.25, "unit": "1"}
    assert set(found["rows"][1]) == {"case", "subject", "metric", "value", "unit", "p20", "p80"}
    assert [file.name for file in tmp_path.iterdir()] == ["demo.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_hold_becomes_null(tmp_path, value):
    report = Report("demo", "a machine")
    report.add("case", "ours", "update_error", value)
    report.write_json(tmp_path / "demo.json")
    text = (tmp_path / "demo.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["rows"][0]["value"] is None


def test_timing_is_the_median_with_percentiles():
    row = Row.timing("case", "ours", "seconds", [5.0, 1.0, 2.0, 4.0, 3.0, 100.0], "s")
    assert (row.value, row.p20, row.p80) == (3.5, 2.0, 5.0)
    assert Row.timing("case", "ours", "seconds", [7.0], "s").to_dict().items() >= {"value": 7.0, "p20": 7.0, "p80": 7.0}.items()


def test_versions_name_what_is_installed_only(monkeypatch):
    monkeypatch.setattr(report_module, "PACKAGES", ("torch", "no-such-package-anywhere"))
    assert set(versions()) == {"python", "torch"}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_is_that_of_the_checkout_the_file_is_tracked_in(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    file = tmp_path / "report.py"
    file.write_text("a")
    monkeypatch.setattr(report_module, "__file__", str(file))
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "somebody else's")
    assert commit() is None, "an untracked file does not speak for the repository around it"
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    assert commit() == git("rev-parse", "HEAD")
    file.write_text("b")
    assert commit() == git("rev-parse", "HEAD") + "+"


def test_the_machine_has_a_name_and_cores():
    name, cores = cpu_name().rsplit(", ", 1)
    assert name
    assert int(cores.split()[0]) >= 1


def test_outputs_are_checked_before_the_run(tmp_path, monkeypatch):
    check_outputs(tmp_path / "new" / "a.json", None)
    assert (tmp_path / "new").is_dir()
    with pytest.raises(ConfigurationError, match=r"\.txt.*png"):
        check_outputs(None, tmp_path / "a.txt")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        check_outputs(None, tmp_path / "a.png")
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        draw([], tmp_path / "a.png")


ROWS = [
    Row("b", "ours", "update_error", 0.012345, "1"),
    Row("b", "peer", "update_error", math.nan, "lr"),
    Row("a", "peer", "update_error", 0.0, "1"),
    Row("a", "other", "seconds", 2.0, "s", 1.0, 3.0),
]


def test_table_pivots_in_order_of_appearance():
    shown = table(ROWS, "a title", digits=2)
    assert [column.header for column in shown.columns] == ["case", "ours", "peer", "other"]
    lines = list(zip(*(list(column.cells) for column in shown.columns), strict=True))
    assert lines == [("b", "0.012", "nan", ""), ("a", "", "0", "2 (1 to 3) s")]
    by_metric = table(ROWS, "a title", down="subject", across="metric")
    assert [column.header for column in by_metric.columns] == ["subject", "update_error", "seconds"]


def test_chart_has_one_colour_per_subject_and_writes_out_what_the_axis_cannot_hold(tmp_path):
    panels = [Panel("one", "x", ROWS[:3]), Panel("two", "x", ROWS[1:])]
    drawn = figure(panels)
    legend = {patch.get_label(): patch.get_facecolor() for patch in drawn.legends[0].get_patches()}
    assert list(legend) == ["ours", "peer", "other"]
    assert len(set(legend.values())) == 3
    one, two = drawn.axes
    assert [bar.get_width() for bar in one.patches] == [0.012345]
    assert one.patches[0].get_facecolor() == legend["ours"]
    assert {"peer: nan", "peer: 0"} <= {text.get_text().strip() for text in one.texts}
    assert two.patches[-1].get_facecolor() == legend["other"]
    draw(panels, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
