"""What a step remembers of the one before must never be used for what has changed since.

Two optimizers go through the same steps, and between steps through the same changes. One of them remembers, the other one is made to forget
everything before each step. They must agree bit for bit, at whatever addresses things lie. Memory of gradients that are gone is filled with
NaN, so that a step that still reads it shows.
"""

from __future__ import annotations

import ctypes
import gc
import pickle
import random
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flashoptim_hf.errors import UnsupportedError
from flashoptim_hf.kernels import cpu, select, tensors
from flashoptim_hf.kernels.rule import DTYPE_CODE
from flashoptim_hf.optim import finite, gradients, work
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.optim.gradients import Gradients, Likeness, Spans

NAN = float("nan")
SHAPES = ((8, 8), (130,), (), (16, 16), (3, 50), (64,), (1000,))


class World:
    """Parameters, their optimizer, and what may happen to them between steps."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.rng = random.Random(seed)
        self.gen = torch.Generator().manual_seed(seed)
        # of one dtype, most about gradients can be known from the step before
        dtypes = (torch.bfloat16, torch.float32) if seed % 2 else (torch.bfloat16,)
        self.params = [self.param(shape, dtype) for shape in SHAPES for dtype in dtypes]
        named = [{"params": self.params[:4]}, {"params": self.params[4:], "lr": 3e-3}]
        self.opt = FlashAdamW(named, lr=1e-2, **options)
        self.graveyard: list[Tensor] = []

    def param(self, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
        made = nn.Parameter(torch.randn(shape, generator=self.gen).to(dtype))
        if hasattr(made, "grad_dtype"):
            made.grad_dtype = None  # gradients may have any dtype
        return made

    def any(self) -> nn.Parameter:
        return self.rng.choice(self.params)

    def square(self) -> nn.Parameter:
        return self.rng.choice([p for p in self.params if p.shape in ((8, 8), (16, 16))])

    def new_gradient(self, p: nn.Parameter) -> Tensor:
        return (torch.randn(p.shape, generator=self.gen) * 1e-2).to(p.dtype)

    # ------------------------------------------------------------------ what happens

    def nothing(self) -> None:
        """The same gradients, at the same addresses, with other numbers."""
        for p in self.params:
            if p.grad is not None:
                p.grad.copy_(self.new_gradient(p))

    def zero_grad(self) -> None:
        """New gradients, the old ones' memory spoiled."""
        for p in self.params:
            if p.grad is not None:
                self.graveyard.append(p.grad.detach())
            p.grad = self.new_gradient(p)
        for grad in self.graveyard:
            grad.fill_(NAN)

    def gradient_swaps_storage(self) -> None:
        """The same gradient object, other memory."""
        p = self.any()
        if p.grad is not None:
            old = p.grad.data
            p.grad.data = self.new_gradient(p)
            old.fill_(NAN)

    def gradient_is_strided(self) -> None:
        p = self.square()
        p.grad = self.new_gradient(p).t()

    def gradient_is_part_of_a_bucket(self) -> None:
        p = self.any()
        bucket = torch.full((p.numel() + 3,), NAN, dtype=p.dtype)
        bucket[1:-2] = self.new_gradient(p).flatten()
        p.grad = bucket[1:-2].view(p.shape)

    def gradient_is_missing(self) -> None:
        self.any().grad = None

    def gradient_is_of_another_dtype(self) -> None:
        p = self.any()
        if hasattr(p, "grad_dtype"):
            p.grad = self.new_gradient(p).to(self.rng.choice([torch.float16, torch.float32, torch.bfloat16, torch.float64]))

    def freeze(self) -> None:
        p = self.any()
        p.requires_grad_(not p.requires_grad)
        if not p.requires_grad:
            p.grad = None

    def weights_move(self) -> None:
        p = self.any()
        old, p.data = p.data, p.data.clone()
        old.fill_(NAN)

    def weights_are_transposed_in_place(self) -> None:
        """The same memory, another meaning."""
        p = self.square()
        p.data = p.data.t()

    def weights_change_their_dtype_in_place(self) -> None:
        """As when memory is given back and given out again: the address says nothing."""
        p = self.any()
        if p.dtype == torch.bfloat16:
            p.grad = None
            p.data = p.data.copy_(p.data.half().view(torch.bfloat16)).view(torch.float16)
            p.grad = self.new_gradient(p)

    def parameter_is_replaced(self) -> None:
        group = self.rng.choice(self.opt.param_groups)
        at = self.rng.randrange(len(group["params"]))
        old = group["params"][at]
        new = self.param(old.shape, old.dtype)
        new.grad = self.new_gradient(new)
        group["params"][at] = self.params[next(i for i, p in enumerate(self.params) if p is old)] = new

    def parameter_changes_groups(self) -> None:
        """The order of all parameters stays what it was."""
        first, second = self.opt.param_groups[:2]
        if len(first["params"]) > 1:
            second["params"].insert(0, first["params"].pop())

    def group_is_added(self) -> None:
        if len(self.opt.param_groups) < 4:
            p = self.param((70,), torch.bfloat16)
            p.grad = self.new_gradient(p)
            self.params.append(p)
            self.opt.add_param_group({"params": [p], "lr": 1e-3})

    def lr_changes(self) -> None:
        group = self.rng.choice(self.opt.param_groups)
        group["lr"] = torch.tensor(self.rng.random()) if self.rng.random() < 0.3 else self.rng.random() * 1e-2

    def options_change(self) -> None:
        group = self.rng.choice(self.opt.param_groups)
        group["weight_decay"], group["betas"] = self.rng.random(), (self.rng.random(), 0.99)

    def storage_changes(self) -> None:
        group = self.rng.choice(self.opt.param_groups)
        group["codec"] = "none" if group["codec"] == "log" else "log"

    def state_is_taken_out(self) -> None:
        self.opt.state.pop(self.any(), None)

    def state_is_emptied(self) -> None:
        p = self.any()
        if p in self.opt.state:
            self.opt.state[p].clear()

    def step_count_is_set(self) -> None:
        p = self.any()
        if self.opt.state.get(p):
            self.opt.state[p]["step"].fill_(self.rng.randrange(100))

    def nan_comes(self) -> None:
        p = self.any()
        if p.grad is not None:
            p.grad[(-1,) * p.dim()] = NAN

    def state_is_saved_and_loaded(self) -> None:
        self.opt.load_state_dict(self.opt.state_dict())


HELPERS = ("__init__", "param", "any", "square", "new_gradient")
EVENTS = [name for name, value in vars(World).items() if callable(value) and name not in HELPERS]


def spans_of_memory(addresses: np.ndarray, numels: np.ndarray, codes: Any, where: torch.device) -> Tensor:  # noqa: ARG001
    """`look.too_large` for memory of the CPU, through nothing but addresses, elements and codes."""
    codes = np.broadcast_to(np.asarray(codes), addresses.shape)
    found = False
    for address, numel, code in zip(addresses.tolist(), numels.tolist(), codes.tolist(), strict=True):
        dtype = next(dtype for dtype, number in DTYPE_CODE.items() if number == code)
        if numel:
            raw = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address)
            found |= not bool((torch.frombuffer(raw, dtype=dtype).float().abs() < finite.LIMIT).all())
    return torch.tensor(float(found))


@pytest.fixture(params=["compiled", "guards", "attributes"])
def likeness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled reader of tensors, with torch's function for all tensors at once, and without either."""
    if request.param == "compiled":
        if cpu.where("_tensors") is None:
            pytest.skip("no C compiler when the package was installed")
        assert tensors.reader() is not None
        return
    for module in (gradients, work):
        monkeypatch.setattr(module, "reader", lambda: None)
    if request.param == "attributes":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")


def weights(world: World) -> list[bytes]:
    return [p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in world.params]


@pytest.mark.usefixtures("likeness")
@pytest.mark.parametrize("by_address", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_what_changed_between_steps_is_seen(seed: int, by_address: bool, as_bits: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_address:  # as a device does it: the look gets addresses, and the host learns the outcome later
        monkeypatch.setattr(select, "look_for", lambda *_: spans_of_memory)
        monkeypatch.setattr(finite, "known_at_once", lambda _: False)
    options = [{"paged": True, "page_bytes": 4096}, {}, {"paged": True, "page_bytes": 4096, "simulate": seed}][seed % 3]
    remembers, forgets = World(seed, **options), World(seed, **options)
    order = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(30):
            events = [order.choice(("nothing", "zero_grad", "zero_grad"))]
            events += [order.choice(EVENTS) for _ in range(order.choice((0, 0, 1, 1, 2, 3)))]
            for world in (remembers, forgets):
                for event in events:
                    getattr(world, event)()
            forgets.opt._plan = forgets.opt._roster = None
            for world in (remembers, forgets):
                world.opt.step()
            assert weights(remembers) == weights(forgets), events
    assert as_bits(remembers.opt.state_dict()["state"]) == as_bits(forgets.opt.state_dict()["state"])
    assert remembers.opt.memory_report().skipped_steps == forgets.opt.memory_report().skipped_steps


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("event", EVENTS)
def test_each_change_alone_is_seen(event: str, seed: int, as_bits: Callable) -> None:
    worlds = World(seed), World(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for world in worlds:
            for time in range(5):
                world.zero_grad()
                if time in (2, 3):
                    getattr(world, event)()
                if world is worlds[1]:
                    world.opt._plan = world.opt._roster = None
                world.opt.step()
        assert weights(worlds[0]) == weights(worlds[1])
        assert as_bits(worlds[0].opt.state_dict()["state"]) == as_bits(worlds[1].opt.state_dict()["state"])


@pytest.mark.parametrize("event", ["nothing", "zero_grad", "lr_changes", "step_count_is_set", "options_change"])
def test_what_is_usual_makes_no_new_plan(event: str) -> None:
    """And the gradients are taken for what they were, which is the fast way."""
    world = World(0)
    world.zero_grad()
    world.opt.step()
    plan, roster = world.opt._plan, world.opt._roster
    assert plan is not None
    for _ in range(3):
        getattr(world, event)()
        found = Gradients(world.opt.param_groups, roster, plan.known)
        assert found.known is plan.known is not None
        assert found.params is roster.listed
        world.opt.step()
        assert world.opt._plan is plan
        assert world.opt._roster is roster


@pytest.mark.parametrize("strided", [False, True])
def test_what_a_launch_was_given_stays_what_it_was(strided: bool) -> None:
    """It may run later: on a device, or behind the next gradient."""
    params = [nn.Parameter(torch.ones(8, 8).t() if strided else torch.ones(8, 8)) for _ in range(3)]
    opt = FlashAdamW(params)

    def begun() -> Any:
        for p in params:
            p.grad = torch.ones(8, 8)
        opt._plan.begin(Gradients(opt.param_groups), opt.param_groups, opt.rule)
        return opt._plan.segments(next(iter(opt._plan.pages.values()))[0])

    for p in params:
        p.grad = torch.ones(8, 8)
    opt.step()
    first = begun()
    given = list(first.params), list(first.grads), first.rows.copy(), first.hyper.copy()
    second = begun()
    opt._plan.finish()
    assert all(now is then for now, then in zip(first.params + first.grads, given[0] + given[1], strict=True))
    assert (first.rows == given[2]).all()
    assert (first.hyper == given[3]).all()
    assert strided == (second.params[0] is not first.params[0])
    # one by one
    opt._plan.flat.expect()
    for i, p in enumerate(params):
        opt._plan.flat.take_one(i, p.grad)
    third = opt._plan.segments(next(iter(opt._plan.pages.values()))[0])
    opt._plan.flat.let_go(0)
    assert third.grads[0].numel() == 64


def test_sharded_parameters_keep_their_plan() -> None:
    """Their gradients are DTensors, of which the local parts are compared."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        opt = FlashAdamW(model.parameters())
        plans = []
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            opt.step()
            opt.zero_grad()
            plans.append(opt._plan)
        assert plans[0].known is not None
        assert plans[0] is plans[1] is plans[2]
        assert opt._roster.sharded
    finally:
        torch.distributed.destroy_process_group()


def test_a_change_of_shape_in_place_is_refused() -> None:
    """The same memory, the same number of elements, contiguous."""
    p = nn.Parameter(torch.ones(4, 6))
    opt = FlashAdamW([p])
    p.grad = torch.ones(4, 6)
    opt.step()
    p.grad = None
    p.data = p.data.view(6, 4)
    p.grad = torch.ones(6, 4)
    with pytest.raises(UnsupportedError, match="had shape"):
        opt.step()


@pytest.mark.usefixtures("likeness")
def test_likeness() -> None:
    def made() -> list[Tensor]:
        return [torch.ones(4, 6, dtype=torch.bfloat16), torch.ones(5), torch.ones(3, 3)]

    like = Likeness(made())
    assert like.holds(made())
    others: dict[str, Callable[[Tensor], Tensor]] = {
        "dtype": lambda t: t.half(),
        "shape": lambda t: t.view(6, 4),
        "strides": lambda t: t.t().contiguous().t(),
        "smaller": lambda t: t[:2],
        "class": lambda t: nn.Parameter(t),
        "device": lambda t: t.to("meta"),
        "sparse": lambda t: t.to_sparse(),
    }
    for name, change in others.items():
        tensors = made()
        tensors[0] = change(tensors[0])
        assert not like.holds(tensors), name
    assert not like.holds(made()[:2])
    assert not like.holds([*made(), torch.ones(1)])
    assert Likeness([]).holds([])


def test_where_torch_has_no_such_function_attributes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "reader", lambda: None)
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    like = Likeness([torch.ones(3)])
    assert like.addresses([torch.ones(3)]) is None
    assert like.holds([torch.ones(3)])

    def other(*tensors: Tensor, **options: Any) -> None:  # noqa: ARG001
        raise TypeError("another signature")

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", other, raising=False)
    assert Likeness([torch.ones(3)]).holds([torch.ones(3)])


def test_gradients_by_device_and_dtype() -> None:
    spans = Spans([torch.ones(3), torch.ones(4, dtype=torch.bfloat16), torch.ones(0), torch.ones(2, dtype=torch.float64)])
    assert spans.codes.tolist() == [DTYPE_CODE[dtype] for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float32)]
    assert spans.numels.tolist() == [3, 4, 0, 2]
    ((device, mine),) = spans.by_device()
    assert device == torch.device("cpu")
    assert mine.numels.tolist() == [3, 4, 2]
    assert Spans([]).by_device() == []
    assert Spans([torch.ones(0)]).by_device() == []
    assert spans.learn() is None
    assert Spans([torch.ones(3), torch.ones(0)]).learn() is None
    assert Spans([torch.ones(3), torch.ones(2)]).learn().code == DTYPE_CODE[torch.float32]


def test_sparse_gradients_are_named() -> None:
    for grad in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        with pytest.raises(UnsupportedError, match="sparse=False"):
            Spans([torch.ones(2), grad])


def test_the_word_for_all_plain() -> None:
    assert gradients.all_plain([torch.ones(1), nn.Parameter(torch.ones(1))])
    assert not gradients.all_plain([torch.ones(1), torch.Tensor._make_subclass(type("Other", (Tensor,), {}), torch.ones(1))])


def test_frozen_parameters_only_are_said_once() -> None:
    """A loop over them runs and trains nothing; a step without gradients while something can be trained is no reason to speak."""
    param = nn.Parameter(torch.ones(4))
    optimizer = FlashAdamW([param])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    param.requires_grad_(False)
    with pytest.warns(RuntimeWarning, match="none of this optimizer's 1 parameters has requires_grad=True"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def after_steps(sizes: tuple[int, ...], options: dict[str, Any], gradient: Callable[[int, Tensor, int], Tensor]) -> list[Tensor]:
    """Weights after five steps; `gradient` says which: (number of the parameter, parameter, step)."""
    params = [nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = FlashAdamW(params, lr=1e-2, **options)
    for step in range(5):
        for number, param in enumerate(params):
            param.grad = gradient(number, param, step)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("options", [{}, {"kernel": "eager"}, {"gradient_release": True}], ids=["compiled", "eager", "released"])
def test_what_torch_negates_when_it_is_read_is_negated(options: dict[str, Any], as_bits: Callable) -> None:
    """Also where it comes after gradients of the same kind that are not."""

    def gradient(negate: Callable[[Tensor], Tensor], number: int, param: Tensor, step: int) -> Tensor:  # noqa: ARG001
        value = torch.full_like(param, step + 1.0)
        return value if step in (0, 3) else negate(value)

    kinds = [partial(gradient, negate) for negate in (torch._neg_view, torch.neg)]
    assert as_bits(after_steps((70, 1), options, kinds[0])) == as_bits(after_steps((70, 1), options, kinds[1]))
    assert not Likeness([torch.ones(3)]).holds([torch._neg_view(torch.ones(3))])


@pytest.mark.usefixtures("likeness")
@pytest.mark.parametrize("options", [{}, {"kernel": "eager"}, {"simulate": 1, "paged": True}], ids=["compiled", "eager", "simulated"])
def test_gradients_are_gone_when_the_step_is(options: dict[str, Any]) -> None:
    """Not when the garbage collector comes: they are as large as the weights."""
    params = [nn.Parameter(torch.ones(70)), nn.Parameter(torch.ones(5))]
    optimizer = FlashAdamW(params, **options)
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.examine(1)
            optimizer.step()
            optimizer.findings()
            storages = [weakref.ref(param.grad.untyped_storage()) for param in params]
            gone = [weakref.ref(param.grad) for param in params]
            for param in params:
                param.grad = None
            assert [ref() for ref in gone + storages] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.usefixtures("likeness")
@pytest.mark.parametrize("options", [{}, {"kernel": "eager"}, {"simulate": 1, "paged": True}], ids=["compiled", "eager", "simulated"])
def test_gradients_taken_away_during_a_step_are_used(options: dict[str, Any], as_bits: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a signal, another thread, whatever: a step goes by the gradients that it has looked at."""
    results = []
    for take_away in (False, True):
        params = [nn.Parameter(torch.ones(3000 + i)) for i in range(4)]
        optimizer = FlashAdamW(params, lr=1e-2, **options)
        kernel_for, spoiled = select.kernel_for, []

        def taking(*given: Any, params: Any = params, spoiled: Any = spoiled, kernel_for: Any = kernel_for) -> Any:
            for param in params:
                param.grad = None
                spoiled += [torch.full_like(param, NAN) for _ in range(4)]
            return kernel_for(*given)

        with monkeypatch.context() as patch:
            if take_away:
                patch.setattr(select, "kernel_for", taking)
            for step in range(4):
                for i, param in enumerate(params):
                    param.grad = torch.full_like(param, step + i + 0.5)
                optimizer.step()
        results.append(as_bits([param.detach() for param in params]))
    assert results[0] == results[1]


class Wrapper(Tensor):
    """A tensor without numbers of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


def emptied(grad: Tensor) -> Tensor:
    grad.untyped_storage().resize_(0)
    return grad


@pytest.mark.usefixtures("likeness")
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("kernel", ["auto", "eager"])
@pytest.mark.parametrize("without", [Wrapper, emptied])
def test_gradients_without_memory_are_refused(without: Callable[[Tensor], Tensor], kernel: str, first: int) -> None:
    """A kernel would read address 0."""
    params = [nn.Parameter(torch.ones(70)), nn.Parameter(torch.ones(5))]
    optimizer = FlashAdamW(params, kernel=kernel)
    for step in range(first + 1):
        for param in params:
            param.grad = torch.ones_like(param)
        if step == first:
            params[1].grad = without(params[1].grad)
            before = [param.detach().clone() for param in params]
            with pytest.raises(UnsupportedError, match=r"a gradient of shape \(5,\) .* has no memory"):
                optimizer.step()
            assert all(map(torch.equal, params, before))
        else:
            optimizer.step()


@pytest.mark.usefixtures("likeness")
def test_parameters_without_memory_are_refused() -> None:
    """As FSDP1 and offloading leave them between passes."""
    params = [nn.Parameter(torch.ones(70)), nn.Parameter(torch.ones(8, 8).t())]
    optimizer = FlashAdamW(params)
    for at in (None, 0, 1, None):
        for param in params:
            param.grad = torch.ones(param.shape).t() if param.dim() == 2 else torch.ones_like(param)
        if at is None:
            optimizer.step()
            continue
        params[at].untyped_storage().resize_(0)
        with pytest.raises(UnsupportedError, match=r"a parameter of shape .* has no memory"):
            optimizer.step()
        params[at].untyped_storage().resize_(params[at].numel() * 4)
        params[at].data.fill_(1)


@pytest.mark.usefixtures("likeness")
@pytest.mark.parametrize("options", [{}, {"kernel": "eager"}, {"gradient_release": True}], ids=["compiled", "eager", "released"])
def test_zeros_that_torch_does_not_write_out_are_zeros(options: dict[str, Any], as_bits: Callable) -> None:
    def gradient(zeros: Callable[..., Tensor], number: int, param: Tensor, step: int) -> Tensor:
        return zeros(param.shape) if number == 1 and step in (0, 2, 3) else torch.ones_like(param)

    kinds = [partial(gradient, zeros) for zeros in (torch._efficientzerotensor, torch.zeros)]
    assert as_bits(after_steps((70, 5), options, kinds[0])) == as_bits(after_steps((70, 5), options, kinds[1]))


@pytest.mark.usefixtures("likeness")
@pytest.mark.parametrize("entry", [5, None, torch.ones(3), torch.tensor(1.0), {"a": 1}], ids=["int", "none", "tensor", "number", "dict"])
def test_other_entries_of_state_are_the_users(entry: Any) -> None:
    param = nn.Parameter(torch.ones(70))
    optimizer = FlashAdamW([param])
    plans = []
    for step in range(4):
        param.grad = torch.ones_like(param)
        if step == 1:
            optimizer.state["note"] = entry
        optimizer.step()
        plans.append(optimizer._plan)
    assert plans[1] is plans[2] is plans[3]
    assert optimizer.state["note"] is entry
    assert "note" in optimizer.state_dict()["state"]
    again = pickle.loads(pickle.dumps(optimizer))
    assert torch.equal(again.state["note"], entry) if isinstance(entry, Tensor) else again.state["note"] == entry
    again.param_groups[0]["params"][0].grad = torch.ones_like(param)
    again.step()
