"""The bench of whole steps on small tensors: every case is there, and steps what it says."""

from __future__ import annotations

import json

import pytest
import torch

from flashoptim_hf.bench import adamw_peers, cpu_step
from flashoptim_hf.bench.cpu_step import FUSED, HEADLINE, PARTS, Tensors, build, fill, measure
from flashoptim_hf.bench.report import Report
from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.kernels import cpu

SMALL = 200_000

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the compiled CPU path was not built")


def test_every_case_has_its_metrics(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cpu_step, "cores", lambda: 2)
    file = tmp_path / "out.json"
    before = torch.get_num_threads()
    cpu_step.run(SMALL, repeats=2, threads=1, peers=False, json_file=file)
    assert torch.get_num_threads() == before
    written = json.loads(file.read_text())
    assert written["bench"] == "cpu-step"
    rows = {(row["case"], row["subject"], row["metric"]): row for row in written["rows"]}
    for case in ("adamw/log/bf16+24", "adamw/log/bf16+32", "adamw/log/fp32", f"{HEADLINE}/nonfinite=off", f"{HEADLINE}/eager"):
        assert rows[case, "ours", "seconds"]["value"] > 0
        assert {"p20", "p80"} <= rows[case, "ours", "ratio_to_torch_fused_fp32"].keys()
    assert rows["adamw/fp32", "torch_fused", "seconds"]["unit"] == "s"
    assert (*FUSED, "ratio_to_torch_fused_fp32") not in rows
    assert rows[HEADLINE, "ours", "speedup_of_second_core"]["value"] > 0
    assert (HEADLINE + "/2thread", "ours", "seconds") in rows
    assert (HEADLINE + "/1thread", "ours", "seconds") not in rows
    assert "torch_fused" in capsys.readouterr().out


def test_one_core_has_no_second(monkeypatch):
    monkeypatch.setattr(cpu_step, "cores", lambda: 1)
    report, _ = measure(SMALL, 1, 1, peers=False)
    assert not [row for row in report.rows if "thread" in row.case or row.metric == "speedup_of_second_core"]


def test_threads_and_kernels_are_what_the_case_says(monkeypatch):
    monkeypatch.setattr(cpu_step, "cores", lambda: 2)
    seen = {}
    turns = build(Tensors(SMALL), 1, 3, [])
    before = torch.get_num_threads()
    for key, turn in turns.items():
        with turn.around():
            seen[key] = torch.get_num_threads()
    torch.set_num_threads(before)
    assert {count for key, count in seen.items() if "thread" not in key[0]} == {3}
    assert (seen[HEADLINE + "/1thread", "ours"], seen[HEADLINE + "/2thread", "ours"]) == (1, 2)
    kernels = {case: turn.step.__self__.defaults["kernel"] for (case, subject), turn in turns.items() if subject == "ours"}
    assert kernels.pop(HEADLINE + "/eager") == "eager"
    assert set(kernels.values()) == {"cpu"}


@pytest.mark.parametrize("peer", cpu_step.SLOW)
def test_speedup_is_the_peers_time_over_ours(peer):
    pytest.importorskip(peer)
    turns = build(Tensors(PARTS[0] * cpu_step.MULTIPLE), 1, 1, [peer])
    turn = turns[cpu_step.PEER_CASE, peer]
    params = turn.step.__self__.param_groups[0]["params"]
    start = params[0].detach().clone()
    with turn.around():
        turn.step()
    assert not torch.equal(params[0], start)
    state = turn.step.__self__.state[params[0]]
    codes = state["state1"] if peer == "bitsandbytes" else state["exp_avg"].codes
    assert codes.dtype == torch.uint8  # it is the 8-bit optimizer that was timed

    for key, other in turns.items():
        other.samples = {0: 6.0 if key[1] == peer else 2.0}
    report = Report("cpu-step", "")
    fill(report, turns, 1)
    assert [row.value for row in report.rows if row.metric == f"speedup_over_{peer}"] == [3, 3, 3]


def test_peers_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(adamw_peers, "installed", lambda name: name in ("torch", "bitsandbytes"))
    chosen, missing = adamw_peers.available(["torch_fused", "torchao", "bitsandbytes_paged_8bit", "flashoptim", "bitsandbytes"])
    assert chosen == ["torch_fused", "bitsandbytes_paged_8bit", "bitsandbytes"]
    assert missing == ["torchao", "flashoptim"]


@pytest.mark.parametrize("params", [0, 100, float("nan")])
def test_too_few_parameters_are_refused(params):
    with pytest.raises(ConfigurationError, match="--params"):
        cpu_step.run(params)
