"""The bench of Python time: both optimizers run to the launch, and only the launch is taken out."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from flashoptim_hf.bench import adamw_peers, host_overhead
from flashoptim_hf.bench.host_overhead import LINEARS, flashoptim, lora_parameters, measure, ours, wrapping
from flashoptim_hf.kernels import fused, look, select
from flashoptim_hf.optim import finite, layout

triton = pytest.importorskip("triton")


def test_shapes_are_those_of_the_model():
    params = lora_parameters(30)
    assert len(params) == 420
    assert sum(param.numel() for param in params) == 4_884_480  # what peft prints for r=16 on all linear layers
    assert {param.dtype for param in params} == {torch.bfloat16}
    assert all(param.grad is not None for param in params)


def test_launches_are_pages(tmp_path):
    file = tmp_path / "out.json"
    host_overhead.run(rounds=1, inner=2, layers=4, json_file=file)
    rows = {(row["case"], row["subject"], row["metric"]): row["value"] for row in json.loads(file.read_text())["rows"]}
    for case, subject, metric in rows:
        if metric == "pages":
            assert rows[case, subject, "launches_per_step"] == rows[case, subject, metric]
            looks = 0 if "nonfinite=off" in case or "cpu_check" in case else 1
            assert rows[case, subject, "looks_per_step"] == looks
    assert rows["lora56", "ours", "pages"] == 1
    assert rows["lora56/page_bytes=1MiB", "ours", "pages"] > 1
    assert rows["lora56", "ours", "ms_per_step"] > 0


def test_the_fused_kernel_builds_its_tables(monkeypatch):
    built = []
    tables = fused._Tables
    monkeypatch.setattr(fused, "_Tables", lambda *arguments: built.append(arguments) or tables(*arguments))
    for options, expected in (({}, 1), ({"null_kernel": True}, 0)):
        built.clear()
        subject = ours(1, **options)
        with subject.around():
            subject.counted()
        assert len(built) == expected
        assert subject.launches.count == 1


def test_patches_do_not_outlive_the_step():
    def patched():
        return (select.kernel_for, select.look_for, fused.page_kernel, look.look_kernel, finite.known_at_once, layout.backend_for)

    before = patched()
    with ours(1, stage=True, paged=True).around():
        assert all(now is not then for now, then in zip(patched(), before, strict=True))
    assert patched() == before


def test_a_nan_is_found_where_a_cpu_looks_and_not_by_a_stub() -> None:
    """What stands for a GPU's look must not do the arithmetic of one."""
    for cpu_check in (False, True):
        subject = ours(1, cpu_check=cpu_check, gradients="kept")
        with subject.around():
            subject.counted()
            subject.params[3].grad[0, 0] = float("nan")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                subject.counted()
        assert subject.launches.count == (1 if cpu_check else 2)
        assert subject.launches.looks.count == (0 if cpu_check else 2)


@pytest.mark.parametrize("gradients", ["new", "fresh", "kept"])
def test_gradients_are_what_their_name_says(gradients: str) -> None:
    subject = ours(1, gradients=gradients)
    seen = []
    for _ in range(4):
        subject.renew()
        seen.append([param.grad.data_ptr() for param in subject.params])
    assert (seen[0] == seen[1]) == (gradients == "kept")
    assert seen[0] == seen[2]
    assert torch.equal(subject.params[0].grad, subject._next[0])


def test_what_wraps_gradients_launches_nothing() -> None:
    subject = wrapping(1)
    with subject.around():
        subject.renew()
        assert [id(grad) for grad in subject.step()] == [id(param.grad) for param in subject.params]
    assert (subject.launches.count, subject.launches.looks.count) == (0, 0)


def test_new_gradients_do_not_cost_the_plan() -> None:
    for gradients in ("new", "fresh", "kept"):
        subject = ours(1, gradients=gradients)
        with subject.around():
            subject.renew()
            subject.counted()
            plan = subject.step.__self__._plan
            for _ in range(3):
                subject.renew()
                subject.counted()
        assert subject.step.__self__._plan is plan
        assert plan.known is not None


def test_flashoptim_reaches_its_launch_for_every_tensor():
    pytest.importorskip("flashoptim")
    has_cuda = torch.get_device_module("cuda").is_available()
    subject = flashoptim(1)
    assert torch.get_device_module("cuda").is_available() == has_cuda  # the patch is gone again
    with subject.around():
        subject.counted()
        subject.counted()
    assert subject.launches.count == 2 * 2 * len(LINEARS)
    states = [state for state in subject.step.__self__.state.values() if state]
    assert {int(state["step"]) for state in states} == {2}
    assert {state["exp_avg"].quantized.dtype for state in states} == {torch.int8}
    assert {state["error_bits"].dtype for state in states} == {torch.int8}


def test_triton_is_run_up_to_the_driver():
    """Its launch looks at the arguments: what it cannot take is an error, which a stub would not raise."""
    subject = ours(1, with_triton=True)
    driver = triton.runtime.driver._active
    with subject.around():
        subject.counted()
        subject.counted()
    assert subject.launches.count == 2
    assert triton.runtime.driver._active is driver
    compiled = fused.page_kernel.device_caches[host_overhead.PretendDriver.DEVICE][0]
    assert all(kernel.metadata.target.arch == 90 and "cubin" in kernel.asm for kernel in compiled.values())
    assert compiled
    again = ours(1, with_triton=True)  # compiled kernels are shared, and every subject counts its own launches
    with again.around():
        again.counted()
    assert (subject.launches.count, again.launches.count) == (2, 1)
    assert (subject.launches.looks.count, again.launches.looks.count) == (2, 1)


def test_triton_is_run_up_to_the_driver_by_the_peer_too():
    pytest.importorskip("flashoptim")
    subject = flashoptim(1, with_triton=True)
    with subject.around():
        subject.counted()
    assert subject.launches.count == 2 * len(LINEARS)


def test_without_the_peer_it_is_named(monkeypatch):
    monkeypatch.setattr(adamw_peers, "installed", lambda name: name != "flashoptim")
    report, missing = measure(1, 1, 1)
    assert missing == ["flashoptim"]
    assert {row.subject for row in report.rows} == {"ours", "machine", "wrapping"}
