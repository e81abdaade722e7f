"""Where state lies must not show: any order of steps, saves, loads and evictions equals the unpaged optimizer bit for bit."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashoptim_hf.errors import ConfigurationError, DeviceMemoryError, HostMemoryError, OffloadError
from flashoptim_hf.optim import layout
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.paging.host_limits import HostMemory
from flashoptim_hf.paging.simulated import SimulatedBackend

SHAPES = [(64, 40), (7,), (300, 11), (129,), (64, 20), (1,)]
DTYPES = [torch.float32, torch.bfloat16]
BUDGETS = [0, 0.2, 0.5, 0.8, 1.0, "auto", 3000, 12_000]
ACTIONS = ["step"] * 6 + ["some", "nan", "save", "load", "fresh", "evict", "evict part", "trim", "synchronize", "decode"]
ACTIONS += ["group", "unfreeze", "reset", "bits", "state", "pickle"]


class Player:
    """Plays one schedule on an optimizer with the given placement."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.params = [self.parameter(i) for i in range(4)]
        self.params[3].requires_grad_(False)
        self.optimizer = FlashAdamW(self.params, lr=1e-3, weight_decay=0.1, **options)
        self.saved: Any = None
        self.seen: list[Any] = []

    @staticmethod
    def parameter(i: int) -> nn.Parameter:
        generator = torch.Generator().manual_seed(i)
        return nn.Parameter(torch.randn(SHAPES[i % len(SHAPES)], generator=generator).to(DTYPES[i % 2]))

    def gradients(self, seed: int, some: bool = False, nan: bool = False) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        for param in self.params:
            grad = torch.randn(param.shape, generator=generator).to(param.dtype) * 1e-2
            param.grad = grad if param.requires_grad and not (some and rng.random() < 0.5) else None
        if nan:
            self.params[0].grad = torch.full_like(self.params[0], float("nan"))

    def play(self, action: str, seed: int) -> None:
        optimizer, rng = self.optimizer, random.Random(seed)
        if action in ("step", "some", "nan"):
            self.gradients(seed, action == "some", action == "nan")
            optimizer.step()
        elif action == "save":
            self.saved = (copy.deepcopy(optimizer.state_dict()), [param.detach().clone() for param in self.params])
        elif action == "load" and self.saved is not None and len(self.saved[1]) == len(self.params):
            optimizer.load_state_dict(self.saved[0])
            for param, value in zip(self.params, self.saved[1], strict=True):
                param.data.copy_(value)
        elif action == "fresh":
            state = optimizer.state_dict()
            groups = [{"params": group["params"]} for group in optimizer.param_groups]
            self.optimizer = FlashAdamW(groups, lr=1e-3, weight_decay=0.1, **self.options)
            self.optimizer.load_state_dict(state)
        elif action == "evict":
            optimizer.evict()
        elif action == "evict part":
            optimizer.evict(rng.choice([1, 3000, "4KiB"]))
        elif action == "trim":
            optimizer.trim()
        elif action == "synchronize":
            optimizer.synchronize()
        elif action == "decode" and self.params[0] in optimizer.state:
            self.seen.append(optimizer.decoded_state(self.params[0]))
        elif action == "group" and len(self.params) < 8:
            self.params.append(self.parameter(len(self.params)))
            optimizer.add_param_group({"params": [self.params[-1]], "lr": 2e-3})
        elif action == "unfreeze":
            self.params[3].requires_grad_(True)
        elif action == "reset":
            optimizer.reset_master()
        elif action == "bits":
            optimizer.param_groups[0]["master_bits"] = rng.choice([24, 32, None])
        elif action == "state":
            # what is written by hand after a save is what the next step finds
            optimizer.synchronize()
            for values in optimizer.state.values():
                values["exp_avg"].view(-1)[::7] = 5
        elif action == "pickle":
            params, self.optimizer = pickle.loads(pickle.dumps((self.params, optimizer)))
            self.params = params

    def result(self) -> list[Any]:
        return [self.seen, [param.detach() for param in self.params], self.optimizer.state_dict()["state"]]


def schedule(seed: int) -> list[tuple[str, int]]:
    rng = random.Random(seed)
    return [("step", seed), *((rng.choice(ACTIONS), rng.randrange(10**6)) for _ in range(14)), ("step", seed + 1)]


def placement(seed: int) -> dict[str, Any]:
    rng = random.Random(seed + 10**6)
    transport = rng.choice(["staged", "staged", "zero_copy", "resident"])
    budget = 0 if transport == "resident" else rng.choice(BUDGETS)
    page = rng.choice([1024, 2048, 4096, 10_000])
    return {"paged": True, "simulate": seed, "page_bytes": page, "transport": transport, "device_budget_bytes": budget}


def played(plan: list[tuple[str, int]], **options: Any) -> Player:
    player = Player(**options)
    for action, seed in plan:
        player.play(action, seed)
    return player


@pytest.mark.filterwarnings("ignore:a gradient held NaN", "ignore:.*have a correction", "ignore:.*master_bits")
@pytest.mark.parametrize("part", range(6))
def test_any_order_of_anything_equals_the_unpaged_optimizer(part: int, as_bits: Callable[[Any], Any]) -> None:
    for seed in range(part, 90, 6):
        plan = schedule(seed)
        expected = as_bits(played(plan).result())
        assert as_bits(played(plan, **placement(seed)).result()) == expected, f"seed {seed}: {plan} on {placement(seed)}"


@pytest.mark.filterwarnings("ignore:a gradient held NaN", "ignore:.*have a correction", "ignore:.*master_bits")
def test_state_in_files_equals_state_in_memory(as_bits: Callable[[Any], Any], tmp_path: Path) -> None:
    """On the host alone and through the simulated device, whatever stays there; the folder is empty when the optimizers are gone."""
    for seed in range(12):
        plan = schedule(seed)
        expected = as_bits(played(plan).result())
        options = placement(seed) | {"transport": "staged", "offload_dir": str(tmp_path)}
        if seed % 3 == 0:
            options = {"paged": True, "offload_dir": str(tmp_path)}
        assert as_bits(played(plan, **options).result()) == expected, f"seed {seed}: {plan} on {options}"
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0, 0.5])
def test_the_report_counts_files(share: float, tmp_path: Path) -> None:
    optimizer, _ = trained(3, device_budget_bytes=share, offload_dir=str(tmp_path))
    report = optimizer.memory_report()
    assert report.host_file_bytes == report.host_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.bin"))
    assert report.host_pinned_bytes == report.host_pageable_bytes == 0
    assert 0 < report.bounce_bytes < report.host_bytes
    assert report.page_in_bytes + report.page_out_bytes == 2 * (report.state_bytes - report.resident_bytes)
    assert optimizer.planned_bytes()[0] == report.host_bytes


def test_a_disk_that_is_too_small_is_refused_before_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    params = [nn.Parameter(torch.zeros(10_000))]
    optimizer = FlashAdamW(params, paged=True, offload_dir=str(tmp_path))
    # files need no RAM to be refused for
    monkeypatch.setattr(layout, "host_memory", lambda: HostMemory(available=0, total=0, source="RAM"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=60_000))
    optimizer.check_host_memory()
    monkeypatch.setattr(layout, "local_ranks", lambda: 4)
    with pytest.raises(OffloadError, match=r"84\.\d+ KiB of disk.*4 processes of 21\.\d+ KiB.*58\.59 KiB are available"):
        optimizer.check_host_memory()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20_000))
    params[0].grad = torch.ones(10_000)
    with pytest.raises(OffloadError, match=r"needs 21\.\d+ KiB of disk"):
        optimizer.step()
    assert not optimizer.state
    assert not params[0].any()


def trained(steps: int, params: list[nn.Parameter] | None = None, **options: Any) -> tuple[FlashAdamW, list[nn.Parameter]]:
    params = params or [nn.Parameter(torch.randn(64 * 64, generator=torch.Generator().manual_seed(i))) for i in range(4)]
    optimizer = FlashAdamW(params, paged=True, page_bytes=2208, simulate=1, **options)
    for step in range(steps):
        gradients(params, step)
        optimizer.step()
    return optimizer, params


def gradients(params: list[nn.Parameter], step: int) -> None:
    for param in params:
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))


def simulated(optimizer: FlashAdamW) -> SimulatedBackend:
    backend = optimizer._layout.engine(torch.device("cpu")).backend
    assert isinstance(backend, SimulatedBackend)
    return backend


@pytest.mark.parametrize("transport", ["staged", "zero_copy"])
@pytest.mark.parametrize("share", [0, 0.25, 0.5, 0.75, 1.0])
def test_the_report_says_what_stays_and_what_moves(share: float, transport: str) -> None:
    optimizer, _ = trained(4, device_budget_bytes=share, transport=transport)
    report = optimizer.memory_report()
    assert report.pages == 16
    assert report.resident_bytes == share * report.state_bytes
    assert report.page_in_bytes + report.page_out_bytes == 2 * (report.state_bytes - report.resident_bytes)
    assert report.page_hits == share * report.pages
    assert report.evictions == 0
    assert report.device_bytes == simulated(optimizer).memory.now >= report.staging_bytes + report.resident_bytes
    assert (report.staging_bytes == 0) == (share == 1.0 or transport == "zero_copy")
    assert report.host_pageable_bytes == report.host_bytes
    assert report.host_pinned_bytes == report.host_file_bytes == 0
    if transport == "staged" and share < 1.0:
        assert report.transfer_seconds is not None
        assert report.waited_seconds is not None
        assert report.transfer_seconds > 0
        assert 0 <= report.waited_seconds <= report.transfer_seconds
        assert report.hidden_share == pytest.approx(1 - report.waited_seconds / report.transfer_seconds)


def test_saving_and_loading_take_no_device_memory_and_keep_pages() -> None:
    optimizer, params = trained(3, device_budget_bytes=0.5)
    backend, resident = simulated(optimizer), optimizer.memory_report().resident_bytes
    peak = backend.memory.peak
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert backend.memory.peak == peak
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert backend.memory.peak == peak
    gradients(params, 3)
    optimizer.step()
    report = optimizer.memory_report()
    assert report.resident_bytes == resident
    assert report.page_in_bytes == report.state_bytes, "what was loaded has to come"
    assert backend.memory.peak <= peak


def test_loading_nothing_frees_everything() -> None:
    optimizer, params = trained(2, device_budget_bytes=1.0)
    memory = weakref.ref(next(iter(optimizer._layout.pools.values())).store.pages[0])
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "state": {}})
    report = optimizer.memory_report()
    assert report.resident_bytes == report.host_bytes == report.device_bytes - report.staging_bytes == 0
    gc.collect()
    assert memory() is None
    gradients(params, 5)
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in params] == [1] * 4


def test_evicting_gives_device_memory_back() -> None:
    optimizer, params = trained(2, device_budget_bytes=1.0)
    before = optimizer.memory_report()
    assert optimizer.evict("1KiB") >= 1024
    after = optimizer.memory_report()
    assert 0 < after.resident_bytes < before.resident_bytes
    assert after.evictions == 1
    assert optimizer.trim() == after.device_bytes
    assert optimizer.memory_report().device_bytes == simulated(optimizer).memory.now == 0
    assert optimizer.trim() == 0
    gradients(params, 2)
    optimizer.step()
    assert optimizer.memory_report().resident_bytes == before.resident_bytes


def test_running_out_of_device_memory_leaves_the_step_to_be_repeated(as_bits: Callable[[Any], Any]) -> None:
    """The error comes before any weight has changed; with memory again, the same step gives the same bits."""
    expected, reference = trained(4)
    optimizer, params = trained(3)
    optimizer.trim()
    gradients(params, 3)
    before = as_bits([list(params), optimizer.state_dict()])
    simulated(optimizer).capacity = 0
    for _ in range(2):
        with pytest.raises(DeviceMemoryError, match="page_bytes"):
            optimizer.step()
        assert as_bits([list(params), optimizer.state_dict()]) == before
    simulated(optimizer).capacity = None
    optimizer.step()
    assert as_bits([list(params), optimizer.state_dict()]) == as_bits([list(reference), expected.state_dict()])


def test_too_little_host_memory_is_refused_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [nn.Parameter(torch.zeros(10_000))]
    optimizer = FlashAdamW(params, paged=True)
    monkeypatch.setattr(layout, "host_memory", lambda: HostMemory(available=60_000, total=70_000, source="RAM"))
    optimizer.check_host_memory()
    monkeypatch.setattr(layout, "local_ranks", lambda: 4)
    with pytest.raises(HostMemoryError, match=r"84\.\d+ KiB .*4 processes of 21\.\d+ KiB.*58\.59 KiB are available.*RAM"):
        optimizer.check_host_memory()
    params[0].grad = torch.ones(10_000)
    # others may have taken theirs already: all together do not fit into the whole
    with pytest.raises(HostMemoryError, match=r"68\.36 KiB are available"):
        optimizer.step()
    assert not optimizer.state
    assert optimizer.memory_report().host_bytes == 0
    assert not params[0].any()
    monkeypatch.setattr(layout, "local_ranks", lambda: 3)
    optimizer.step()
    assert optimizer.memory_report().num_params == 10_000


@pytest.mark.parametrize(
    ("budget", "means"),
    [("1MiB", 2**20), (0.5, 0.5), ("0.5", 0.5), ("50%", 0.5), ("100%", 1.0), (1.0, 1.0), ("auto", "auto"), (0.0, 0), ("0", 0), (1, 1)],
)
def test_budgets_are_bytes_shares_or_auto(budget: Any, means: Any) -> None:
    optimizer = FlashAdamW([nn.Parameter(torch.zeros(3))], device_budget_bytes=budget)
    assert optimizer.defaults["device_budget_bytes"] == means
    assert type(optimizer.defaults["device_budget_bytes"]) is type(means)
    again = FlashAdamW([nn.Parameter(torch.zeros(3))], **optimizer.defaults)
    assert again.defaults == optimizer.defaults


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_budget_bytes": 1.5}, r"device_budget_bytes: 1\.5 is no share"),
        ({"device_budget_bytes": "120%"}, r"device_budget_bytes: '120%' is no share"),
        ({"device_budget_bytes": -1}, "device_budget_bytes: -1 is not a size.*auto"),
        ({"device_budget_bytes": "all"}, "device_budget_bytes: 'all'.*25%"),
        ({"device_budget_bytes": float("nan")}, "device_budget_bytes: nan is no share"),
        ({"device_budget_bytes": "1GiB", "transport": "resident"}, "transport='resident'.*leave one"),
        ({"offload_dir": "/tmp"}, "offload_dir='/tmp'.*paged=False.*paged=True"),
        ({"offload_dir": "/tmp", "paged": True, "transport": "zero_copy"}, "zero_copy.*offload_dir='/tmp'.*staged"),
        ({"offload_dir": 3, "paged": True}, "offload_dir=3.*folder"),
        ({"offload_dir": "", "paged": True}, "offload_dir=''.*folder"),
        ({"offload_keep": 1}, "offload_keep=1.*True or False"),
    ],
)
def test_bad_budgets_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FlashAdamW([nn.Parameter(torch.zeros(3))], **options)


def test_on_the_cpu_alone_every_placement_is_accepted(as_bits: Callable[[Any], Any]) -> None:
    results: list[Any] = []
    for options in (
        {},
        {"device_budget_bytes": 0.5},
        {"transport": "zero_copy"},
        {"transport": "resident"},
        {"device_budget_bytes": "auto"},
    ):
        param = nn.Parameter(torch.ones(500))
        optimizer = FlashAdamW([param], paged=True, **options)
        for step in range(3):
            gradients([param], step)
            optimizer.step()
        assert optimizer.evict() == optimizer.trim() == optimizer.memory_report().resident_bytes == 0
        results.append(as_bits([param, optimizer.state_dict()["state"]]))
    assert all(result == results[0] for result in results)


def test_tensors_that_nothing_refers_to_are_freed() -> None:
    """Pages of freed parameters do not stay on the device or on the host."""
    optimizer, params = trained(2, device_budget_bytes=1.0)
    before = optimizer.memory_report()
    optimizer.param_groups[0]["params"] = params[:1]
    gradients(params, 2)
    with pytest.warns(UserWarning, match="no longer in any parameter group"):
        optimizer.step()
    after = optimizer.memory_report()
    assert after.resident_bytes == after.state_bytes == before.state_bytes // 4
    held: list[Tensor] = [view for pool in optimizer._layout.pools.values() for page in pool.store.pages for view in page.views]
    assert sum(view.numel() * view.itemsize for view in held) == after.state_bytes
    assert simulated(optimizer).memory.now == after.device_bytes
