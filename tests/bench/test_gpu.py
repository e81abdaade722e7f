"""The GPU bench without a GPU: a dry run of all sections, and what happens when something is wrong or takes too long."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from flashoptim_hf.bench import adamw_peers, gpu, gpu_kernels, gpu_machine, gpu_models, gpu_steps
from flashoptim_hf.bench.gpu import SECTIONS, GpuBenchError, measure
from flashoptim_hf.bench.gpu_machine import Machine, OutOfTime
from flashoptim_hf.errors import ConfigurationError, HostMemoryError, UnsupportedError
from flashoptim_hf.kernels import cpu, eager, select
from flashoptim_hf.optim.adamw import FlashAdamW

BENCH = Path(gpu.__file__).parent
HAS_GPU = any(torch.get_device_module(kind).is_available() for kind in gpu_machine.KINDS)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(5, dry=True, json_file=tmp_path / "gpu.json")


def rows(machine: Machine) -> dict[tuple[str, str, str], float]:
    return {(row.case, row.subject, row.metric): row.value for row in machine.report.rows}


def test_dry_run_reaches_every_section(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    gpu.run(dry_run=True, minutes=5, json_file=file)
    written = json.loads(file.read_text())
    found = {(row["case"], row["subject"], row["metric"]): row["value"] for row in written["rows"]}
    assert written["device"].startswith("dry run on")
    for section in SECTIONS:
        assert (f"section/{section}", "bench", "seconds_left") in found
    for name in gpu_kernels.WEIGHTS:
        assert found[f"adamw/log/{name}", "ours", "codes_agree"] == found[f"adamw/log/{name}", "ours", "weights_agree"] == 1
    for name in gpu_kernels.MAIN:
        for what in ("nan_changes_nothing", "found_inf_changes_nothing", "scaled_gradients_are_unscaled", "lr_tensor_is_lr"):
            assert found[f"adamw/log/{name}", "ours", what] == 1
        assert found[f"adamw/softsign/{name}", "ours", "codes_agree"] == 1
        assert found[f"paths/{name}/staged", "ours", "equals_resident"] == 1
        assert found[f"paths/{name}/staged", "ours", "pages"] > 5
    metrics = {(case.partition("/")[0], subject, metric) for case, subject, metric in found}
    for subject in ("ours", "torch_fused"):
        assert {("resident", subject, "share_of_copy_bandwidth"), ("resident", subject, "host_ms_per_step")} <= metrics
        assert {("qlora", subject, "ms_optimizer"), ("full", subject, "fits"), ("full", subject, "peak_bytes")} <= metrics
    assert {("paged", "ours", "copy_time_share"), ("copy", "device", "bandwidth"), ("full", "ours_paged", "ms_per_step")} <= metrics
    assert "seconds_left" in capsys.readouterr().out


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here")
def test_without_a_gpu_it_says_what_works():
    with pytest.raises(UnsupportedError, match="--dry-run"):
        gpu.run(dry_run=False)


def test_unknown_sections_are_refused():
    with pytest.raises(ConfigurationError, match=r"'warp'.*kernels, paths"):
        gpu.run(dry_run=True, sections="warp")
    with pytest.raises(ConfigurationError, match="--minutes 0"):
        gpu.run(dry_run=True, minutes=0)


def test_a_section_that_fails_does_not_end_the_others_and_the_run_fails(tmp_path, monkeypatch, capsys):
    file = tmp_path / "gpu.json"

    def breaks(machine: Machine) -> None:
        machine.add("early", "ours", "number", 3)
        assert json.loads(file.read_text())["rows"][-1]["value"] == 3  # saved before the section ends
        raise ValueError("no such page")

    def late(_: Machine) -> None:
        raise OutOfTime("no time was left for the rest.")

    monkeypatch.setattr(gpu, "SECTIONS", {"one": (breaks, 0.5), "two": (late, 0.25), "three": (lambda m: m.add("c", "ours", "m", 1), 0.25)})
    with pytest.raises(GpuBenchError, match=r"1 of the checks.*\n.*section one ended with ValueError.*no such page"):
        gpu.run(dry_run=True, json_file=file)
    written = json.loads(file.read_text())
    assert [row["case"] for row in written["rows"]] == ["early", "section/one", "section/two", "c", "section/three"]
    assert "section two: no time was left for the rest." in written["notes"]
    assert "ValueError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("code", "codes_agree"),
        ("weight", "weights_agree"),
        ("scale", "scaled_gradients_are_unscaled"),
        ("skip", "found_inf_changes_nothing"),
    ],
)
def test_a_kernel_that_is_wrong_is_found(machine, monkeypatch, fault, found):
    right = cpu.update_page if cpu.library() is not None else eager.update_page

    def wrong(planes, segments, fmt, *, inv_scale, skip):
        right(planes, segments, fmt, inv_scale=None if fault == "scale" else inv_scale, skip=skip)
        if fault == "code":
            planes[0][64 + 3] += 2  # the second parameter begins where the second group does
        if fault == "weight":
            next(iter(segments)).param.add_(0.01)

    pick = select.kernel_for
    monkeypatch.setattr(select, "kernel_for", lambda device, name: pick(device, name) if name == "eager" else wrong)
    if fault == "skip":
        monkeypatch.setattr(FlashAdamW, "found_inf", property(lambda _: None, lambda *_: None), raising=False)
    monkeypatch.setattr(gpu_kernels, "WEIGHTS", {"bf16+24": gpu_kernels.WEIGHTS["bf16+24"]})
    monkeypatch.setattr(gpu_kernels, "MAIN", ("bf16+24",))
    monkeypatch.setattr(gpu_kernels, "codecs", lambda: ["log"])
    gpu_kernels.compare(machine)
    wrong_rows = {
        metric for (_, _, metric), value in rows(machine).items() if value == 0 and metric.endswith(("agree", "ed", "nothing", "is_lr"))
    }
    assert wrong_rows == {found}
    assert [found in text for text in machine.failures] == [True]


def test_paths_that_differ_are_found(machine, monkeypatch):
    walk = gpu_kernels._walk

    def drifting(machine, name, options):
        found, pages = walk(machine, name, options)
        if options and name == "fp32":
            found[0].view(-1)[5] += 1e-6
        return found, pages

    monkeypatch.setattr(gpu_kernels, "_walk", drifting)
    gpu_kernels.paths(machine)
    assert rows(machine)["paths/bf16+24/staged", "ours", "equals_resident"] == 1
    assert rows(machine)["paths/fp32/staged", "ours", "equals_resident"] == 0
    assert machine.failures == [f"paths/fp32/{transport}: equals_resident is not so." for transport in ("staged", "zero_copy", "resident")]


def test_bits_are_compared_not_values():
    zero, minus = torch.zeros(2), -torch.zeros(2)
    nan = torch.full((2,), float("nan"))
    assert gpu_kernels.same([zero, nan], [zero.clone(), nan.clone()])
    assert not gpu_kernels.same([zero], [minus])
    assert not gpu_kernels.same([zero], [zero, zero])
    assert not gpu_kernels.same([zero], [zero.int()])


def test_time_left_decides_whether_a_subject_begins(machine):
    machine.dry = False
    machine.limit_section(100)
    machine.need("this")
    with pytest.raises(OutOfTime, match="torchao"):
        machine.need("torchao", 101)
    machine.limit_section(1e9)
    assert machine.left() <= 5 * 60  # a section cannot have more than the whole


def test_repeats_fit_into_the_time(machine, monkeypatch):
    calls = []
    monkeypatch.setattr(Machine, "left", lambda _: 0.0)
    samples, host = machine.time_ms(lambda: calls.append(1), 50)
    assert len(samples) == 1
    assert len(calls) == 1 + gpu_machine.HOST_CALLS + 1
    assert host >= 0


class FakeDevice:
    """What torch has for a device type, on a clock of its own: each operation takes as long as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        outer = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = outer.now

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        self.Event = Event

    def synchronize(self, _: torch.device) -> None: ...

    def empty_cache(self) -> None: ...

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return 3_000_000, 4_000_000

    def max_memory_allocated(self, _: torch.device) -> int:
        return 2_500_000


def test_device_time_leaves_out_what_keeps_the_device_busy(machine, monkeypatch):
    machine.api = fake = FakeDevice()
    monkeypatch.setattr(gpu_machine, "SPACER", 8)
    products = []

    def mm(*_, **__):
        products.append(1)
        fake.now += 100

    monkeypatch.setattr(torch, "mm", mm)

    def step() -> None:
        fake.now += 7

    assert machine.time_ms(step, 3)[0] == [7, 7, 7]
    assert products == []
    assert machine.time_ms(step, 3, apart=True)[0] == [7, 7, 7]
    assert len(products) >= 4 + 16 + 3 * 4


def test_cap_takes_memory_that_peaks_do_not_count(machine):
    machine.api = FakeDevice()
    with machine.capped(1_000_000):
        assert machine._ballast.numel() == 2_000_000
        assert machine.peak_bytes() == 500_000
    assert machine.peak_bytes() == 2_500_000
    with machine.capped(3_500_000):
        assert machine._ballast is None


@pytest.mark.parametrize("kind", gpu_machine.KINDS)
def test_torch_has_what_the_bench_asks_of_a_device(kind):
    names = {name for file in BENCH.glob("gpu*.py") for name in re.findall(r"\bapi\.(\w+)", file.read_text(encoding="utf-8"))}
    assert len(names) > 8
    api = torch.get_device_module(kind)
    assert [name for name in sorted(names) if not hasattr(api, name)] == []


def test_missing_peers_are_noted_once(machine, monkeypatch):
    monkeypatch.setattr(adamw_peers, "installed", lambda name: name == "torch")
    assert machine.peers("torch_fused", "bitsandbytes", "torchao") == ["torch_fused"]
    machine.peers("bitsandbytes")
    assert sorted(machine.report.notes) == ["bitsandbytes is not installed and was left out.", "torchao is not installed and was left out."]


def test_state_bytes_are_those_of_the_formats():
    params = [nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))]
    params[0].grad = torch.ones_like(params[0])
    found = {}
    for name, optimizer in (("ours", FlashAdamW(params)), ("torch", torch.optim.AdamW(params))):
        optimizer.step()
        found[name] = adamw_peers.state_bytes(optimizer) / 4096
    assert found == {"ours": 2 + 10 / 64 + 1, "torch": 4}


def test_what_does_not_fit_is_recorded_and_the_next_one_runs(machine, monkeypatch):
    model = gpu_models.random_model(gpu_models.DRY_MODEL, machine.device)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    make = Machine.make

    def short(self, subject, params, **options):
        if subject == "ours":
            raise RuntimeError("CUDA error: out of memory")
        if subject == "ours_paged":
            raise HostMemoryError("no host memory")
        return make(self, subject, params, **options)

    monkeypatch.setattr(Machine, "make", short)
    gpu_models.train(machine, "c", model, list(model.parameters()), ("ours", "ours_paged", "torch_fused"))
    fits = {subject: value for (_, subject, metric), value in rows(machine).items() if metric == "fits"}
    assert fits == {"ours": 0, "ours_paged": 0, "torch_fused": 1}

    monkeypatch.setattr(Machine, "make", lambda *_: (_ for _ in ()).throw(RuntimeError("illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal"):
        gpu_models.train(machine, "c", model, list(model.parameters()), ("ours",))


@pytest.mark.parametrize("four_bit", [False, True])
def test_adapters_sit_on_frozen_layers(four_bit):
    if four_bit:
        pytest.importorskip("bitsandbytes")
    device = torch.device("cpu")
    model = gpu_models.random_model(gpu_models.DRY_MODEL, device)
    adapters = gpu_models.adapt(model, device, four_bit=four_bit)
    assert len(adapters) == 2 * 7 * gpu_models.DRY_MODEL["num_hidden_layers"]
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in adapters}
    assert model.model.layers[0].mlp.up_proj.base.weight.dtype == (torch.uint8 if four_bit else torch.bfloat16)
    assert isinstance(model.lm_head, nn.Linear)
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(param.grad is not None for param in adapters)


def test_full_model_has_as_many_layers_as_fit():
    def parameters(shapes):
        config = gpu_models.LLAMA_8B
        kept = config["num_key_value_heads"] / config["num_attention_heads"]
        width, inner = config["hidden_size"], config["intermediate_size"]
        return shapes["num_hidden_layers"] * (width**2 * (2 + 2 * kept) + 3 * width * inner) + 2 * width * config["vocab_size"]

    most = 24 * 10**9
    shapes = gpu_models.full_shapes(most, 10**12)
    assert 0.75 * most < 4 * parameters(shapes) <= 0.8 * most
    assert gpu_models.full_shapes(10**12, 10**12)["num_hidden_layers"] == 32
    assert abs(parameters(gpu_models.full_shapes(10**12, 10**12)) - 8.03e9) < 1e7  # Llama-3-8B, norms left out
    assert gpu_models.full_shapes(most, 20 * 10**9)["num_hidden_layers"] < shapes["num_hidden_layers"]
    assert gpu_models.full_shapes(10**9, 10**9)["num_hidden_layers"] == 1


def test_large_case_shrinks_with_memory_and_says_so(machine, monkeypatch):
    machine.dry = False
    monkeypatch.setattr(machine, "free_bytes", lambda: 10**12)
    assert gpu_steps.big_sizes(machine) == gpu_steps.LLAMA_1B
    assert machine.report.notes == []
    monkeypatch.setattr(machine, "free_bytes", lambda: 10**10)
    sizes = gpu_steps.big_sizes(machine)
    assert sum(sizes) * gpu_steps.BYTES_PER_PARAM <= 0.8 * 10**10
    assert "0.44B parameters" in machine.report.notes[0]


def test_sections_share_the_time(machine, monkeypatch):
    limits = []
    names = {name: (lambda m: limits.append(m.left()), share) for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2))}
    monkeypatch.setattr(gpu, "SECTIONS", names)
    measure(machine, ["a", "b", "c"])
    # nothing was used, so that each gets its share of what those before it left over
    assert [round(limit / 300, 1) for limit in limits] == [0.5, 0.6, 1.0]
