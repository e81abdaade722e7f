"""Random schedules of whole optimizers: anything a training script may do, in any order, with failures, on any placement of the state.

A `Plan` is what happens; a placement is where state lives and how the device behaves. `played(plan)` on the unpaged optimizer says what
must come out, and every placement must give the same bits.
"""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flashoptim_hf.errors import DeviceMemoryError, HostMemoryError
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.paging.engine import Engine
from flashoptim_hf.paging.simulated import SimulatedBackend
from flashoptim_hf.paging.simulated_model import Faults, InjectedError

SHAPES = [(64, 40), (7,), (300, 11), (129,), (64, 20), (1,), (0,), (65,), (33, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BUDGETS = [0, 0, 0.2, 0.5, 0.8, 1.0, "auto", 3000, 12_000]
ACTIONS = ["step"] * 7 + ["some", "nan", "save", "load", "fresh", "evict", "evict part", "trim", "synchronize", "decode"]
ACTIONS += ["group", "unfreeze", "reset", "bits", "state", "pickle", "drop", "codec", "interval"]

HARMLESS = (InjectedError, DeviceMemoryError, HostMemoryError)
"""What may be raised where a failure was asked for. Whatever was tried can be tried again."""
FAULTS = {
    "step": ("allocate", "allocate", "host"),
    "some": ("allocate", "host"),
    **dict.fromkeys(("save", "fresh", "evict", "evict part", "trim", "synchronize", "decode", "reset", "state", "pickle"), ("copy",)),
}
"""By action, what may fail in it so that nothing has happened yet when the error is seen."""


@dataclass(frozen=True)
class Plan:
    """What happens.

    Attributes:
        params: how many parameters there are at first; the last one is frozen until it is unfrozen.
        groups: into how many groups they are divided.
        shapes: shifts the sizes and dtypes.
        options: of the optimizer, the same for every placement.
        actions: name and seed of each.
    """

    params: int
    groups: int
    shapes: int
    options: dict[str, Any]
    actions: tuple[tuple[str, int], ...]


def schedule(seed: int, length: int = 10) -> Plan:
    """A plan at random: it begins and ends with a step."""
    rng = random.Random(seed)
    actions = [("step", seed), *((rng.choice(ACTIONS), rng.randrange(10**6)) for _ in range(length)), ("step", seed + 1)]
    params = rng.randrange(2, 6)
    options = {"codec": rng.choice(["log", "log", "softsign", "none", "learned"]), "master_bits": rng.choice([24, 24, 32, None])}
    return Plan(params, rng.randrange(1, 3), rng.randrange(len(SHAPES)), options, tuple(actions))


def placement(seed: int, folder: str | None = None) -> dict[str, Any]:
    """Where state lives, at random. `folder`: some of it in files there."""
    rng = random.Random(seed + 10**6)
    transport = rng.choice(["staged", "staged", "zero_copy", "resident"])
    budget = 0 if transport == "resident" else rng.choice(BUDGETS)
    page = rng.choice([1024, 2048, 4096, 10_000])
    options = {"paged": True, "simulate": seed, "page_bytes": page, "transport": transport, "device_budget_bytes": budget}
    return options | ({"offload_dir": folder} if folder is not None and transport != "zero_copy" and rng.random() < 0.3 else {})


class Player:
    """Plays one plan on an optimizer with the given placement.

    Args:
        plan: what happens.
        trouble: seed of failures that are injected and of memory that is short, None for none. For the simulated device.
        options: the placement.
    """

    def __init__(self, plan: Plan, trouble: int | None = None, **options: Any) -> None:
        self.options = plan.options | options
        self.plan = plan
        self.trouble = None if trouble is None else random.Random(trouble)
        self.params = [self.parameter(i) for i in range(plan.params)]
        self.late = self.params[-1]
        self.late.requires_grad_(False)
        self.optimizer = self.made([{"params": self.params[i :: plan.groups]} for i in range(plan.groups)])
        self.quiet = False
        self.saved: Any = None
        self.seen: list[Any] = []

    def made(self, groups: list[dict[str, Any]]) -> FlashAdamW:
        optimizer = FlashAdamW(groups, lr=1e-3, weight_decay=0.1, **self.options)
        if self.trouble is not None and self.trouble.random() < 0.3:
            backend_of(optimizer).capacity = self.trouble.choice([4000, 10_000, 40_000])
        return optimizer

    def parameter(self, i: int) -> nn.Parameter:
        generator = torch.Generator().manual_seed(i)
        shape = SHAPES[(i + self.plan.shapes) % len(SHAPES)]
        return nn.Parameter(torch.randn(shape, generator=generator).to(DTYPES[(i + self.plan.shapes) % 3]))

    def gradients(self, seed: int, some: bool = False, nan: bool = False) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        for param in self.params:
            grad = torch.randn(param.shape, generator=generator).to(param.dtype) * 1e-2
            param.grad = grad if param.requires_grad and not (some and rng.random() < 0.5) else None
        if nan:
            self.params[0].grad = torch.full_like(self.params[0], float("nan"))

    def play(self, action: str, seed: int) -> None:
        """One action; where a failure was injected, until it succeeds. Then the invariants hold."""
        if self.trouble is None:
            self.act(action, seed)
            return
        backend, quiet = backend_of(self.optimizer), self.quiet
        self.quiet = action == "step" and backend.capacity is None and self.options["device_budget_bytes"] != "auto"
        if action in FAULTS and self.trouble.random() < 0.3:
            self.quiet = False
            backend.fail(self.trouble.choice(FAULTS[action]), at=self.trouble.randrange(1, 8), times=self.trouble.choice([1, 1, 2, 5]))
        for attempt in range(9):
            try:
                self.act(action, seed)
                break
            except HARMLESS:
                if attempt == 2:
                    backend._faults = Faults()
                if attempt == 4:
                    backend.capacity = None
        else:
            raise AssertionError(f"{action} never succeeds again")
        backend._faults = Faults()
        check(self.optimizer)
        if quiet and self.quiet:
            self.check_traffic()

    def check_traffic(self) -> None:
        """The second of two undisturbed steps moves each page that does not stay, once in each direction."""
        assert self.optimizer._plan is not None
        for device, works in self.optimizer._plan.pages.items():
            engine = self.optimizer._layout.engine(device)
            moved = sum(work.page.nbytes for work in works if work.page not in engine._residents._slots)
            assert (engine.traffic.bytes_in, engine.traffic.bytes_out) == (moved, moved)

    def act(self, action: str, seed: int) -> None:
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
            self.optimizer = self.made([{"params": group["params"]} for group in optimizer.param_groups])
            self.optimizer.load_state_dict(state)
        elif action in ("evict", "evict part"):
            optimizer.evict(rng.choice([1, 3000, "4KiB"]) if action == "evict part" else None)
        elif action in ("trim", "synchronize"):
            getattr(optimizer, action)()
        elif action == "decode" and self.params[0] in optimizer.state:
            self.seen.append(optimizer.decoded_state(self.params[0]))
        elif action == "group" and len(self.params) < 8:
            self.params.append(self.parameter(len(self.params)))
            optimizer.add_param_group({"params": [self.params[-1]], "lr": 2e-3})
        elif action == "unfreeze":
            self.late.requires_grad_(True)
        elif action == "reset":
            optimizer.reset_master()
        elif action == "bits":
            optimizer.param_groups[0]["master_bits"] = rng.choice([24, 32, None])
        elif action == "codec":
            optimizer.param_groups[0]["codec"] = rng.choice(["learned", "learned", "joint", "log"])
        elif action == "interval":
            optimizer.param_groups[0]["learn_interval"] = rng.choice([1, 2, 3, 100])
        elif action == "state":
            # what is written by hand after a save is what the next step finds
            optimizer.synchronize()
            for values in optimizer.state.values():
                values["exp_avg"].view(-1)[::7] = 5
        elif action == "pickle":
            late = next(i for i, param in enumerate(self.params) if param is self.late)
            self.params, self.optimizer = pickle.loads(pickle.dumps((self.params, optimizer)))
            self.late = self.params[late]
        elif action == "drop":
            # whoever takes a parameter's state out wants it to start anew
            optimizer.state.pop(rng.choice(self.params), None)

    def result(self) -> list[Any]:
        return [self.seen, [param.detach() for param in self.params], self.optimizer.state_dict()["state"]]


def played(plan: Plan, trouble: int | None = None, **options: Any) -> Player:
    player = Player(plan, trouble, **options)
    for action, seed in plan.actions:
        player.play(action, seed)
    return player


def backend_of(optimizer: FlashAdamW) -> SimulatedBackend:
    backend = optimizer._layout.engine(torch.device("cpu")).backend
    assert isinstance(backend, SimulatedBackend)
    return backend


# ---------------------------------------------------------------------- what always holds


def check(optimizer: FlashAdamW) -> None:
    """What holds between any two calls, whatever happened before."""
    layout = optimizer._layout
    for device, engine in layout.engines.items():
        pages = [page for pool in layout.pools.values() if pool.key.device == device for page in pool.store.pages]
        check_engine(engine)
        assert set(engine._residents._slots) <= set(pages), "a freed page stays on the device"
    for param, record in layout.records.items():
        if param not in optimizer.state:
            continue  # taken out by hand; the next step sweeps it
        arenas = [extent.arena for extent in record.pool.store._extents]
        for name, view in record.views.items():
            if name != "step" and view is not record.block.table and view.numel():
                assert any(_inside(view, buffer) for arena in arenas for buffer in arena.buffers), f"{name} left its pool"


def check_engine(engine: Engine) -> None:
    """What holds for an engine between two steps: slots are free, staging is bounded, and memory is what it says."""
    staging, backend = engine._staging, engine.backend
    assert list(staging.ring.in_use()) == [], "a page is in use between steps"
    assert len(staging.slots) <= staging.wanted
    assert {slot.buffer.numel() for slot in staging.slots} <= {staging.slot_bytes}
    assert not any(slot.begun for slot in engine._residents._slots.values())
    limit = getattr(engine._residents.policy, "limit", None)
    assert limit is None or engine.resident_bytes <= max(limit, 0) or engine._regrouped or engine._offered == []
    if isinstance(backend, SimulatedBackend):
        assert backend.memory.now >= engine.device_bytes
        moved = (engine.traffic.total_bytes_in, engine.traffic.total_bytes_out)
        assert (backend.total.bytes_in, backend.total.bytes_out) == moved, "bytes that nobody has counted"


def _inside(view: Tensor, buffer: Tensor) -> bool:
    start, stop = buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.itemsize
    return start <= view.data_ptr() and view.data_ptr() + view.numel() * view.itemsize <= stop
