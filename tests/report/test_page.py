"""The page itself: well-formed, without a reference to anything outside, every text escaped, and its numbers those of the log."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flashoptim_hf.report import charts, page
from flashoptim_hf.report.charts import Chart, Line
from flashoptim_hf.report.history import Run

NASTY = '</script><img src="http://example.org/x.png" onerror=alert(1)> & \x1b[31m \x00 \ud800 \u0085 ]]> "\''

LOG = [
    {"step": 0, "eval_loss": 3.5},
    {
        "step": 1,
        "epoch": 0.1,
        "loss": 3.25,
        "grad_norm": 1.5,
        "learning_rate": 1e-4,
        "optim_state_bytes": 3000,
        "optim_page_in_bytes": 2000,
    },
    {"step": 2, "epoch": 0.2, "loss": float("nan"), "grad_norm": float("inf"), "optim_state_bytes": 3000, "optim_skipped_steps": 1},
    {"step": 3, "epoch": 0.3, "loss": 2.125, "eval_loss": 3.0, "rewards/margins": 0.25, "optim_state_bytes": 3000, "note": "text"},
    {"step": 3, "eval_loss": 3.25, "rewards/margins": 0.5},
    {"step": 3, "train_runtime": 12.5},
]
RECORDS = [{"step": 1, "step_seconds": 0.5, "host_rss_bytes": 2**30}, {"step": 3, "step_seconds": 0.25, "host_rss_bytes": 2**30}]


def whole_run() -> Run:
    return Run(
        name=NASTY,
        ended=f"finished {NASTY}",
        step=3,
        max_steps=4,
        log=LOG,
        records=RECORDS,
        facts={NASTY: [(NASTY, NASTY)], "empty": []},
        planned=[(NASTY, 3000, 3000, 3000), ("peak", 10, 20, 15), ("more", 10, 20, 30), ("less", 10, 10, 9), ("unseen", 1, 2, None)],
        plan_remark=NASTY,
        samples=[{"label": NASTY, "prompt": NASTY, "answer": NASTY}, {"label": "after", "prompt": NASTY, "answer": "second"}],
        warnings=[NASTY],
    )


def test_well_formed_self_contained_and_escaped(read: Any) -> None:
    found = read(page.render(whole_run()))
    tags = {node.tag.partition("}")[2] for node in found.root.iter()}
    assert not tags & {"script", "img", "link", "iframe", "object", "embed", "base", "a", "form"}
    for node in found.root.iter():
        for key, value in node.attrib.items():
            assert key not in ("href", "src", "srcset", "data", "action", "style")
            assert not key.startswith("on")
            assert "//" not in value
    (style,) = found.all("style")
    assert not re.search(r"url\(|@import|//", style.text)
    (policy,) = [meta.get("content") for meta in found.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    # what was given is what is read, but for what XML cannot hold
    clean = re.sub("[\x00\x1b\ud800\u0085]", "\ufffd", NASTY)
    assert found.text(found.all("h1")[0]) == clean
    assert [found.text(node) for node in found.all("pre")] == [clean, clean, "second"]
    assert found.text().count(clean) >= 9
    found.source.encode("utf-8")


def test_numbers_are_those_of_the_log(read: Any, agrees: Any) -> None:
    found = read(page.render(whole_run()))
    assert agrees(found.log(), LOG)
    assert not agrees(found.log(), [*LOG[:1], {**LOG[1], "loss": 3.2500001}, *LOG[2:]])
    assert found.marks("Loss") == [
        "step 1: training 3.25",  # a loss that is no number has no place in a chart
        "step 3: training 2.125",
        "step 0: held out 3.5",
        "step 3: held out 3",
        "step 3: held out 3.25",
    ]
    assert found.marks("Moved by a step") == ["step 1: pages in 1.953 KiB"]
    assert found.marks("Time of a step") == ["step 1: mean since the last log 500 ms", "step 3: mean since the last log 250 ms"]
    assert found.marks("rewards/margins") == ["step 3: rewards/margins 0.25", "step 3: rewards/margins 0.5"]


def test_what_is_wrong_is_said_and_the_plan_is_judged(read: Any) -> None:
    found = read(page.render(whole_run()))
    said = [found.text(node) for node in found.all("li")]
    assert said[0] == "The loss is not a finite number at step 2."
    assert said[1] == "1 steps were skipped because a gradient was not finite."
    assert said[2].startswith("The held-out loss was lowest at step 3 (3) and is 3.25 at the end")
    assert len(said) == 4
    words = [found.text(cell) for cell in found.all("td") if not cell.get("class")]
    for word in ("equal", "within", "50.00% more than planned", "10.00% less than planned"):
        assert word in words
    assert "not measured" in found.text()
    calm = read(page.render(Run(log=LOG[1:2])))
    assert not calm.all("li")
    assert "Warnings" not in calm.text()


def test_an_empty_run_is_a_page_too(read: Any) -> None:
    found = read(page.render(Run(name="nothing", ended="no steps")))
    assert not found.all("svg")
    assert not found.all("table")
    assert "0" in found.text(found.all("div", "tiles")[0])


def test_numbers_that_no_axis_holds_are_left_out(read: Any) -> None:
    log = [
        {"step": 1, "loss": 1e308, "x": 10**400},
        {"step": 2, "loss": -1e308, "x": 1},
        {"step": 3, "loss": 2.5, "x": 2},
        {"loss": float("nan")},
    ]
    found = read(page.render(Run(log=log)))
    assert found.marks("Loss") == ["step 3: training 2.5"]
    assert found.marks("x") == ["step 2: x 1", "step 3: x 2"]


def test_a_long_log_is_thinned_and_says_so(read: Any) -> None:
    log = [{"step": step, "loss": 100.0 if step == 777 else -50.0 if step == 2345 else 1.0} for step in range(1, 5001)]
    found = read(page.render(Run(log=log)))
    assert len(found.log()) == page.MOST_ROWS
    assert found.log()[-1] == {"step": 5000, "loss": 1}
    assert f"{page.MOST_ROWS} of 5000 rows" in found.text()
    (line,) = found.all("polyline")
    heights = [float(point.partition(",")[2]) for point in line.get("points").split()]
    assert len(heights) <= charts.MOST_POINTS
    # the highest and the lowest value are still drawn, each once
    assert heights.count(min(heights)) == heights.count(max(heights)) == 1


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0.0], "number"),
        ([5.0, 5.0], "number"),
        ([-1e-9, 1e-9], "number"),
        ([0, 0], "bytes"),
        ([17e9, 16e9], "bytes"),
        ([3e-5], "seconds"),
        ([9e299, -9e299], "number"),
        ([0.0, 5e-324, 1e-323], "number"),
        ([1e-300, 1e-310], "number"),
    ],
)
def test_points_lie_within_the_axes(values: list[float], kind: str) -> None:
    for zero in (False, True):
        drawn = charts.draw(Chart("c", (Line("l", [(i, value) for i, value in enumerate(values)]),), kind, zero=zero and min(values) >= 0))
        (points,) = re.findall(r'points="([^"]*)"', drawn)
        for point in points.split():
            x, y = map(float, point.split(","))
            assert charts.LEFT <= x <= charts.WIDTH - charts.RIGHT
            assert charts.TOP - 0.05 <= y <= charts.HEIGHT - charts.BOTTOM + 0.05
        assert 2 <= drawn.count('class="y"') <= 8
        assert "nan" not in drawn


def test_values_have_their_unit() -> None:
    assert [charts.text(value, "bytes") for value in (0, 512, 2048, 15416640)] == ["0 B", "512 B", "2 KiB", "14.7 MiB"]
    assert [charts.text(value, "seconds") for value in (0.0125, 2.5, 90)] == ["12.5 ms", "2.5 s", "1.5 min"]
    assert [charts.text(value) for value in (2e-4, 3.14159, 12345)] == ["0.0002", "3.142", "12,345"]
