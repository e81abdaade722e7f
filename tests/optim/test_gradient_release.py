"""Gradient release: pages are updated during backward, and every bit is what `step()` alone would have made of the same gradients."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashoptim_hf import FlashAdamW, FlashLion, FlashSGD
from flashoptim_hf.errors import DeviceMemoryError, UnsupportedError
from flashoptim_hf.optim import gradient_release
from flashoptim_hf.paging import simulated
from flashoptim_hf.paging.simulated_model import InjectedError

WIDTH = 32
PLACEMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one page": {"page_bytes": "1MiB"},
    "paged": {"paged": True, "page_bytes": 2048},
    "simulated": {"paged": True, "page_bytes": 2048, "simulate": 3},
    "simulated, half stays": {"paged": True, "page_bytes": 5000, "simulate": 4, "device_budget_bytes": 0.5},
    "simulated, zero copy": {"paged": True, "page_bytes": 3000, "simulate": 5, "transport": "zero_copy"},
    "simulated, all stays": {"paged": True, "page_bytes": 3000, "simulate": 6, "transport": "resident"},
}
RELEASED = {"gradient_release": True, "paged": True, "page_bytes": 2048, "simulate": 1}


def layers(count: int = 4, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    body = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())]
    return nn.Sequential(*body, nn.Linear(WIDTH, 1)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).float().square().mean()


def step_on(optimizer: Any, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and the rest, as the Trainer divides them."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def trained(
    model: nn.Module,
    steps: int = 5,
    cls: Any = FlashAdamW,
    forward: Callable[[Tensor], Tensor] | None = None,
    schedule: bool = False,
    **options: Any,
) -> tuple[Any, list[float]]:
    optimizer = cls(groups_of(model), lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) if schedule else None
    losses = []
    for step in range(steps):
        loss = loss_of(forward or model, batch(step, next(model.parameters()).dtype))
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return optimizer, losses


@pytest.fixture
def same(as_bits: Callable[[Any], Any]) -> Callable[..., None]:
    """Asserts that two runs (model, (optimizer, losses)) agree in every bit."""

    def compare(one: tuple[nn.Module, Any], two: tuple[nn.Module, Any]) -> None:
        assert one[1][1] == two[1][1]
        assert as_bits(list(one[0].parameters())) == as_bits(list(two[0].parameters()))
        assert as_bits(one[1][0].state_dict()) == as_bits(two[1][0].state_dict())

    return compare


def run(make: Callable[[], nn.Module] = layers, **options: Any) -> tuple[nn.Module, Any]:
    model = make()
    return model, trained(model, **options)


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_bit_is_that_of_step_alone(placement: str, dtype: torch.dtype, same: Callable[..., None]) -> None:
    def make() -> nn.Module:
        return layers(dtype=dtype)

    plain = run(make, schedule=True)
    same(run(make, schedule=True, gradient_release=True, **PLACEMENTS[placement]), plain)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (FlashLion, {}),
        (FlashSGD, {"momentum": 0.9}),
        (FlashSGD, {}),
        (FlashAdamW, {"codec": "none"}),
        (FlashAdamW, {"master_bits": 32}),
        (FlashAdamW, {"nonfinite": "off"}),
        (FlashAdamW, {"nonfinite": "raise"}),
        (FlashAdamW, {"lr": torch.tensor(1e-2)}),
    ],
)
def test_other_rules_and_options(cls: Any, options: dict[str, Any], same: Callable[..., None]) -> None:
    options = dict(options)
    rate = options.pop("lr", None)

    def go(**more: Any) -> tuple[nn.Module, Any]:
        model = layers()
        groups = [{**group, "lr": rate.clone()} for group in groups_of(model)] if rate is not None else groups_of(model)
        optimizer = cls(groups, lr=1e-2, **options, **more)
        losses = []
        for step in range(4):
            loss = loss_of(model, batch(step))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            optimizer.zero_grad()
        return model, (optimizer, losses)

    same(go(**RELEASED), go())


def test_auto_master_bits_decides_alike(monkeypatch: pytest.MonkeyPatch, same: Callable[..., None]) -> None:
    """Weights that move little: some tensors get 32 bits, the same ones at the same step."""
    from flashoptim_hf.optim import auto_master

    monkeypatch.setattr(auto_master, "INTERVAL", 4)

    def go(**options: Any) -> tuple[nn.Module, Any]:
        model = layers()
        optimizer = FlashAdamW(groups_of(model), master_bits="auto", **options)
        for group in optimizer.param_groups:
            group["lr"] = 2e-5
        for step in range(10):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, (optimizer, [])

    with pytest.warns(UserWarning, match="32-bit master weights"):
        plain = go()
    with pytest.warns(UserWarning, match="32-bit master weights"):
        same(go(**RELEASED), plain)


def strided(model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


class Shared(nn.Module):
    """A layer that is used twice, a weight that is tied, and an embedding that only some steps need."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.again, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.seldom = nn.Linear(WIDTH, WIDTH)
        self.bfloat16()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.again(torch.tanh(self.frozen(self.again(torch.tanh(self.first(x))))))
        if self.calls % 3 == 2:
            x = self.seldom(x)
        return self.last(x)[:, :1]


@pytest.mark.parametrize("make", [lambda: strided(layers()), Shared], ids=["strided", "shared"])
def test_other_models(make: Callable[[], nn.Module], same: Callable[..., None], as_bits: Callable[[Any], Any]) -> None:
    """A parameter that is used twice is stepped once; what gets no gradient is not stepped, and may be at any other step."""
    plain, released = run(make, steps=8), run(make, steps=8, **RELEASED)
    # a parameter without a gradient has a place from the start here, with step 0
    assert as_bits(list(plain[0].parameters())) == as_bits(list(released[0].parameters()))
    steps = [int(released[1][0].state[p]["step"]) for p in released[0].parameters() if p.requires_grad]
    assert steps == [int(plain[1][0].state[p]["step"]) for p in plain[0].parameters() if p.requires_grad]
    same(released, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, same: Callable[..., None]) -> None:
    """Weights that were updated are not needed any more when other blocks are computed again."""

    def go(**options: Any) -> tuple[nn.Module, Any]:
        model = layers()
        blocks = [model[:6], model[6:]]

        def forward(x: Tensor) -> Tensor:
            for block in blocks:
                x = checkpoint(block, x.requires_grad_(), use_reentrant=reentrant)
            return x

        return model, trained(model, forward=forward, **options)

    same(go(**RELEASED), go())


def test_a_compiled_model(same: Callable[..., None]) -> None:
    def go(**options: Any) -> tuple[nn.Module, Any]:
        torch._dynamo.reset()
        model = layers(2)
        return model, trained(model, steps=3, forward=torch.compile(model, backend="aot_eager"), **options)

    same(go(**RELEASED), go())


def test_a_closure(as_bits: Callable[[Any], Any]) -> None:
    results = []
    for options in ({}, RELEASED):
        model = layers()
        optimizer = FlashAdamW(model.parameters(), lr=1e-2, **options)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch(0))
            loss.backward()
            return loss

        results.append([optimizer.step(closure).item() for _ in range(3)])
        results.append(as_bits(list(model.parameters())))
    assert results[:2] == results[2:]


def test_two_losses_over_different_parameters_are_one_step() -> None:
    left, right = layers(1), layers(1, seed=1)
    optimizer = FlashAdamW([*left.parameters(), *right.parameters()], lr=1e-2, **RELEASED)
    loss_of(left, batch(0)).backward()
    loss_of(right, batch(0)).backward()
    optimizer.step()
    assert {int(values["step"]) for values in optimizer.state.values()} == {1}


# ---------------------------------------------------------------------- memory and traffic


class Watch:
    """Bytes of gradients that are alive when a gradient is final: whoever holds them, hooks, closures or `.grad`."""

    def __init__(self, model: nn.Module) -> None:
        self.now = self.peak = 0
        self.seen: set[int] = set()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.born)

    def born(self, param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        nbytes = grad.nbytes
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(grad.untyped_storage(), self.gone, nbytes)

    def gone(self, nbytes: int) -> None:
        self.now -= nbytes


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device runs everything at once, as a real one has begun it when the call returns: nothing waits in closures."""
    for name in simulated.POLICIES:
        monkeypatch.setitem(simulated.POLICIES, name, simulated.STREAMS)


@pytest.mark.usefixtures("prompt")
@pytest.mark.parametrize("count", [10, 40])
def test_live_gradients_are_about_a_page_whatever_the_depth(count: int) -> None:
    model = layers(count)
    watch = Watch(model)
    total = sum(p.nbytes for p in model.parameters())
    optimizer, _ = trained(model, steps=3, gradient_release=True, paged=True, page_bytes=4096, simulate=1)
    small = sum(p.nbytes for p in model.parameters() if p.dim() < 2)
    page = 2 * 4096 // 3
    largest = 2 * WIDTH * WIDTH
    assert watch.now == 0
    # a large parameter, the one before that shares a page with it, a page; and what lies in the pages of norms and biases
    assert watch.peak <= 2 * largest + page + small + 2
    assert watch.peak < total / (2 if count == 10 else 5)
    report = optimizer.memory_report()
    assert report.device_bytes == report.staging_bytes <= 10 * (4096 + 5 * 256), "ten slots for pages this small, whatever the depth"


def test_without_release_all_gradients_are_alive() -> None:
    """The measurement above can fail."""
    model = layers(10)
    watch = Watch(model)
    trained(model, steps=2)
    assert watch.peak == sum(p.nbytes for p in model.parameters())


@pytest.mark.usefixtures("prompt")
def test_the_first_step_takes_no_more_than_the_others() -> None:
    model = layers(20)
    watch = Watch(model)
    peaks = []
    optimizer = FlashAdamW(groups_of(model), lr=1e-2, gradient_release=True, paged=True, page_bytes=4096, simulate=1)
    for step in range(4):
        watch.peak = 0
        loss_of(model, batch(step)).backward()
        optimizer.step()
        peaks.append(watch.peak)
    assert max(peaks) == peaks[0] == peaks[-1]


def test_traffic_is_that_of_a_step_and_every_page_moves_once() -> None:
    model = layers(10)
    optimizer, _ = trained(model, steps=3, gradient_release=True, paged=True, page_bytes=4096, simulate=2, device_budget_bytes=0.25)
    report = optimizer.memory_report()
    stored = sum(page.nbytes for pool in optimizer._layout.pools.values() for page in pool.store.pages)
    assert report.page_in_bytes == report.page_out_bytes == stored - report.resident_bytes
    assert report.launches == report.pages > 10
    assert report.hidden_share is not None
    assert report.hidden_share > 0


def test_pages_are_updated_while_backward_runs() -> None:
    model = layers(8)
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, **RELEASED)
    before = [p.detach().clone() for p in model[-1].parameters()]
    seen: list[bool] = []

    def look(grad: Tensor) -> Tensor:
        optimizer._layout.engine(torch.device("cpu")).backend.wait_host(None)
        seen.append(not torch.equal(before[0], model[-1].weight))
        return grad

    x = model[:3](batch(0))
    x.register_hook(look)
    loss_of(model[3:], x).backward()
    assert seen == [True]


def test_gradients_in_the_worst_order_stay_within_the_limit() -> None:
    """Parameters whose gradients come in an order that has nothing to do with where they lie."""

    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.ones(60)) for _ in range(200))

        def forward(self, order: list[int]) -> Tensor:
            value = torch.ones(60)
            for i in order:
                value = value * self.parts[i].cos()
            return value.sum()

    generator = torch.Generator().manual_seed(0)
    results, peaks = [], []
    for options in ({}, {"gradient_release": True, "page_bytes": 1024}):
        model = Shuffled()
        watch = Watch(model)
        optimizer = FlashAdamW(model.parameters(), lr=1e-2, **options)
        generator.manual_seed(0)
        for _ in range(3):
            model(torch.randperm(200, generator=generator).tolist()).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
        peaks.append(watch.peak)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert peaks[0] == 200 * 240
    page = 1024 // 2 * 4
    assert peaks[1] <= 3 * 240 + page + 240


# ---------------------------------------------------------------------- saving, loading, copies


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_going_on_from_a_copy(how: str, as_bits: Callable[[Any], Any]) -> None:
    whole = layers()
    expected, losses = trained(whole, steps=6, **RELEASED)
    model = layers()
    first, half = trained(model, steps=3, **RELEASED)
    assert half == losses[:3]
    if how == "state_dict":
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        other = copy.deepcopy(model)
        second = FlashAdamW(groups_of(other), lr=1e-2, **RELEASED)
        second.load_state_dict(torch.load(file, weights_only=True))
    elif how == "pickle":
        other, second = pickle.loads(pickle.dumps((model, first)))
    else:
        other, second = copy.deepcopy((model, first))
    assert len(hooks_of(other)) == len(list(other.parameters())), "the copies have hooks of their own, and only those"
    for step in range(3, 6):
        loss = loss_of(other, batch(step))
        loss.backward()
        assert all(p.grad is None or p.dim() < 2 for p in other.parameters() if p is not other[0].weight)
        second.step()
        assert loss.item() == losses[step]
    assert as_bits(list(other.parameters())) == as_bits(list(whole.parameters()))
    assert as_bits(second.state_dict()["state"]) == as_bits(expected.state_dict()["state"])
    assert as_bits(list(model.parameters())) != as_bits(list(whole.parameters())), "the original is where it was"


def test_states_move_between_runs_with_and_without(as_bits: Callable[[Any], Any]) -> None:
    whole = layers()
    trained(whole, steps=6)
    for first, second in ((RELEASED, {}), ({}, RELEASED)):
        model = layers()
        state = trained(model, steps=3, **first)[0].state_dict()
        optimizer = FlashAdamW(groups_of(model), lr=1e-2, **second)
        optimizer.load_state_dict(state)
        for step in range(3, 6):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert as_bits(list(model.parameters())) == as_bits(list(whole.parameters()))


def test_saving_evicting_and_decoding_between_backward_and_step(as_bits: Callable[[Any], Any]) -> None:
    whole = layers()
    trained(whole, steps=3)
    model = layers()
    optimizer = FlashAdamW(groups_of(model), lr=1e-2, **{**RELEASED, "device_budget_bytes": 0.5})
    for step in range(3):
        loss_of(model, batch(step)).backward()
        optimizer.state_dict()
        optimizer.evict()
        optimizer.decoded_state(model[0].weight)
        optimizer.trim()
        optimizer.step()
        optimizer.zero_grad()
    assert as_bits(list(model.parameters())) == as_bits(list(whole.parameters()))


# ---------------------------------------------------------------------- hooks


def hooks_of(model: nn.Module) -> list[Any]:
    found = [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]
    return [hook for hook in found if isinstance(hook, gradient_release._Hook)]


def test_hooks_go_with_the_optimizer() -> None:
    model = layers()
    optimizer = FlashAdamW(model.parameters(), gradient_release=True)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    alive = weakref.ref(optimizer)
    assert len(hooks_of(model)) == len(list(model.parameters()))
    del optimizer
    gc.collect()
    assert alive() is None, "the hooks do not keep it"
    assert hooks_of(model) == []


def test_a_second_optimizer_takes_the_parameters_over(as_bits: Callable[[Any], Any]) -> None:
    """Also one without release, and only those parameters that it has."""
    expected = layers()
    trained(expected, steps=1)
    for options in ({}, RELEASED):
        model = layers()
        older = FlashAdamW(model.parameters(), lr=0.5, **RELEASED)
        newer = FlashAdamW(groups_of(model), lr=1e-2, **options)
        assert len(hooks_of(model)) == (len(list(model.parameters())) if options else 0)
        loss_of(model, batch(0)).backward()
        older.step() if options else None
        newer.step()
        assert as_bits(list(model.parameters())) == as_bits(list(expected.parameters()))
        assert not older.state
    model = layers()
    older = FlashAdamW(model.parameters(), lr=0.5, **RELEASED)
    FlashAdamW(list(model.parameters())[:2])
    assert len(hooks_of(model)) == len(list(model.parameters())) - 2


def test_closing_and_opening(as_bits: Callable[[Any], Any]) -> None:
    expected, model = layers(), layers()
    trained(expected, steps=6)
    optimizer = FlashAdamW(groups_of(model), lr=1e-2, **RELEASED)
    for step in range(6):
        if step == 2:
            optimizer.close()
            optimizer.close()
            assert hooks_of(model) == []
        if step == 4:
            optimizer.reopen()
            optimizer.reopen()
            assert len(hooks_of(model)) == len(list(model.parameters()))
        loss_of(model, batch(step)).backward()
        assert (model[-1].weight.grad is None) == (step not in (2, 3))
        optimizer.step()
        optimizer.zero_grad()
    assert as_bits(list(model.parameters())) == as_bits(list(expected.parameters()))


def test_unfrozen_and_late_parameters_and_gradients_set_by_hand(as_bits: Callable[[Any], Any]) -> None:
    results = []
    for options in ({}, RELEASED):
        model, extra = layers(), nn.Linear(WIDTH, WIDTH, bias=False).bfloat16()
        with torch.no_grad():
            extra.weight.copy_(torch.eye(WIDTH))
        model[0].requires_grad_(False)
        optimizer = FlashAdamW(model.parameters(), lr=1e-2, **options)
        for step in range(6):
            if step == 2:
                model[0].requires_grad_(True)
            if step == 3:
                optimizer.add_param_group({"params": list(extra.parameters())})
            loss_of(model, extra(batch(step))).backward()
            if step == 4:
                optimizer.add_param_group({"params": [late := nn.Parameter(torch.ones(70))]})
                late.grad = torch.full((70,), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            extra.zero_grad()
        results.append(as_bits([list(model.parameters()), extra.weight, late]))
    assert results[0] == results[1]


# ---------------------------------------------------------------------- gradients that are not finite


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.mark.parametrize("options", [{}, RELEASED | {"page_bytes": 3000}], ids=["plain", "simulated"])
def test_a_batch_that_is_nan_throughout_leaves_nothing(options: dict[str, Any], as_bits: Callable[[Any], Any]) -> None:
    model, clean = layers(), layers()
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, **{**options, "gradient_release": True})
    other = FlashAdamW(clean.parameters(), lr=1e-2)
    for step in range(4):
        x = batch(step)
        if step == 1:
            with pytest.warns(RuntimeWarning, match="left out of this step"):
                step_on(optimizer, loss_of(model, x) * float("nan"))
            continue
        for m, o in ((model, optimizer), (clean, other)):
            loss_of(m, x).backward()
            o.step()
            o.zero_grad()
    assert optimizer.memory_report().skipped_steps == 1
    assert as_bits(list(model.parameters())) == as_bits(list(clean.parameters()))
    assert as_bits(optimizer.state_dict()["state"]) == as_bits(other.state_dict()["state"])


@pytest.mark.usefixtures("quiet")
def test_pages_before_a_bad_gradient_are_stepped_and_a_parameter_moves_as_a_whole_or_not(as_bits: Callable[[Any], Any]) -> None:
    model = layers(6)
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, **RELEASED)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    middle = model[9].weight
    handle = middle.register_hook(lambda grad: grad * float("nan"))
    before = [p.detach().clone() for p in model.parameters()]
    saved = as_bits(optimizer.state_dict()["state"])
    loss_of(model, batch(1)).backward()
    optimizer.step()
    handle.remove()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    steps = [int(optimizer.state[p]["step"]) for p in model.parameters()]
    assert steps == [2 if m else 1 for m in moved]
    place = next(i for i, p in enumerate(model.parameters()) if p is middle)
    assert not moved[place]
    assert any(moved[place + 1 :])
    after = as_bits(optimizer.state_dict()["state"])
    assert [after[i] != saved[i] for i in range(len(moved))] == moved, "state moves with its weight"
    assert optimizer.memory_report().skipped_steps == 1
    for p in model.parameters():
        assert torch.isfinite(p).all()


def test_raising_names_what_has_happened() -> None:
    model = layers()
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, nonfinite="raise", **RELEASED)
    handle = model[0].weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(FloatingPointError, match=r"zero_grad\(\) drops what waits"):
        loss_of(model, batch(0)).backward()
    handle.remove()
    with pytest.warns(RuntimeWarning, match=r"zero_grad\(\) before step\(\)"):
        optimizer.zero_grad()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model[0].weight)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    assert int(optimizer.state[model[0].weight]["step"]) == 1
    assert int(optimizer.state[model[-1].weight]["step"]) == 2


@pytest.mark.usefixtures("quiet")
def test_flags_that_only_the_device_knows_count_the_same(monkeypatch: pytest.MonkeyPatch, as_bits: Callable[[Any], Any]) -> None:
    """The way of a device, where nobody waits for flags: kernels obey them, and counts are set right later."""
    from flashoptim_hf.optim import backward_pass

    results = []
    for deferred in (False, True):
        model = layers(6)
        optimizer = FlashAdamW(model.parameters(), lr=1e-2, gradient_release=True, page_bytes=2048)
        with monkeypatch.context() as patch:
            if deferred:
                patch.setattr(backward_pass, "known_at_once", lambda _: False)
            for step in range(4):
                handle = model[9].weight.register_hook(lambda grad, step=step: grad * float("nan") if step == 1 else grad)
                loss_of(model, batch(step)).backward()
                optimizer.step()
                handle.remove()
            if deferred:
                assert optimizer._guard._pending is not None
            state = optimizer.state_dict()["state"]
        results.append(as_bits([list(model.parameters()), state]))
        assert optimizer.memory_report().skipped_steps == 1
    assert results[0] == results[1]


# ---------------------------------------------------------------------- what is refused


def test_a_second_backward_before_step_is_refused() -> None:
    model = layers()
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, **RELEASED)
    loss_of(model, batch(0)).backward()
    with pytest.raises(UnsupportedError, match=r"second gradient.*gradient_accumulation_steps=1.*use_reentrant=False"):
        loss_of(model, batch(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, batch(1)).backward()
    optimizer.step()
    assert {int(values["step"]) for values in optimizer.state.values()} == {2}


def test_a_parameter_shared_by_blocks_of_reentrant_checkpointing_is_refused() -> None:
    layer = nn.Linear(WIDTH, WIDTH).bfloat16()
    optimizer = FlashAdamW(layer.parameters(), lr=1e-2, gradient_release=True)
    x = batch(0).requires_grad_()
    out = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        out.float().sum().backward()
    optimizer.zero_grad()
    checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=False).float().sum().backward()
    optimizer.step()


def test_a_gradient_scaler_is_refused() -> None:
    param = nn.Parameter(torch.ones(70))
    optimizer = FlashAdamW([param], gradient_release=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((param * 2).sum()).backward()
    with pytest.raises(UnsupportedError, match=r"GradScaler.*bf16"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("where", "values", "message"),
    [
        ("GradientState", {"sync_gradients": False}, "gradient_accumulation_steps=1"),
        ("AcceleratorState", {"_mixed_precision": "fp16"}, "bf16=True"),
    ],
)
def test_what_accelerate_was_told_is_refused_before_anything_changes(where: str, values: dict[str, Any], message: str) -> None:
    import accelerate.state

    model = layers()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = FlashAdamW(model.parameters(), **RELEASED)
    shared = getattr(accelerate.state, where)._shared_state
    old = dict(shared)
    shared.update(values)
    try:
        with pytest.raises(UnsupportedError, match=message):
            loss_of(model, batch(0)).backward()
    finally:
        shared.clear()
        shared.update(old)
    assert not optimizer.state
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_plain_parameters_in_a_job_of_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_release.sharded, "several_ranks", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = layers()
    optimizer = FlashAdamW(model.parameters(), gradient_release=True)
    with pytest.raises(UnsupportedError, match=r"DDP.*2 processes"):
        loss_of(model, batch(0)).backward()
    assert not optimizer.state


def test_a_gradient_that_comes_back_is_refused() -> None:
    """As DDP writes them in a job of one process."""
    model = layers()
    optimizer = FlashAdamW(model.parameters(), gradient_release=True, page_bytes=1024)
    loss_of(model, batch(0)).backward()
    model[-1].weight.grad = torch.zeros_like(model[-1].weight)
    with pytest.raises(UnsupportedError, match="came again"):
        optimizer.step()


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(70, 4, sparse=True)
    optimizer = FlashAdamW(table.parameters(), gradient_release=True)
    with pytest.raises(UnsupportedError, match="sparse"):
        table(torch.tensor([1, 2])).sum().backward()
    assert not any(values["step"] for values in optimizer.state.values())


# ---------------------------------------------------------------------- failures and second thoughts


def test_no_device_memory_is_said_before_a_weight_changes(as_bits: Callable[[Any], Any]) -> None:
    expected, model = layers(), layers()
    trained(expected, steps=3)
    optimizer = FlashAdamW(groups_of(model), lr=1e-2, **RELEASED)
    for step in range(3):
        if step == 1:
            optimizer.trim()
            before = as_bits(list(model.parameters()))
            backend = optimizer._layout.engine(torch.device("cpu")).backend
            backend.capacity = 0
            with pytest.raises(DeviceMemoryError, match="page_bytes"):
                loss_of(model, batch(step)).backward()
            assert as_bits(list(model.parameters())) == before
            backend.capacity = None
            optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert as_bits(list(model.parameters())) == as_bits(list(expected.parameters()))


@pytest.mark.parametrize("what", ["copy", "launch"])
def test_after_a_failure_a_page_was_updated_once_or_not_at_all(what: Any) -> None:
    """Nothing is updated twice: what went through stands, the rest is stepped by the next backward."""
    model = layers()
    optimizer = FlashAdamW(groups_of(model), lr=1e-2, **RELEASED)
    backend = optimizer._layout.engine(torch.device("cpu")).backend
    loss_of(model, batch(0)).backward()
    optimizer.step()
    backend.fail(what, at=9)
    with pytest.raises(InjectedError):
        step_on(optimizer, loss_of(model, batch(1)))
    optimizer.step()
    optimizer.zero_grad()
    assert {int(values["step"]) for values in optimizer.state.values()} <= {1, 2}
    loss_of(model, batch(2)).backward()
    optimizer.step()
    assert {int(values["step"]) for values in optimizer.state.values()} <= {2, 3}
    for p in model.parameters():
        assert torch.isfinite(p).all()


def test_zero_grad_before_step_drops_what_waits_and_says_so() -> None:
    model = layers()
    optimizer = FlashAdamW(groups_of(model), lr=1e-2, gradient_release=True, page_bytes=1 << 20)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    loss = loss_of(model, batch(1))
    small = [p for p in model.parameters() if p.dim() < 2]
    loss.backward(inputs=small[:3])
    optimizer.zero_grad()  # nothing had been updated: nothing to say
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    loss_of(model, batch(1)).backward(inputs=[p for p in model.parameters() if p.dim() > 1])
    with pytest.warns(RuntimeWarning, match=r"zero_grad\(\) before step\(\)"):
        optimizer.zero_grad()
    assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [2 if p.dim() > 1 else 1 for p in model.parameters()]


def test_host_memory_is_planned_as_it_is_taken() -> None:
    model = layers()
    optimizer = FlashAdamW(groups_of(model), gradient_release=True, paged=True, page_bytes=2048)
    planned = optimizer.planned_bytes()[0]
    loss_of(model, batch(0)).backward()
    optimizer.step()
    assert optimizer.memory_report().host_bytes == planned


def test_pages_hold_parameters_that_become_final_together() -> None:
    """Last parameter first, and what belongs to another group on pages of its own."""
    model = layers()
    optimizer = FlashAdamW(groups_of(model), **RELEASED)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    order: list[Tensor] = []
    for pool in optimizer._layout.pools.values():
        for page in pool.store.pages:
            order += [piece.block.owner for piece in page.pieces]
            assert len({piece.block.owner.dim() > 1 for piece in page.pieces}) == 1
    large = [p for p in dict.fromkeys(order) if p.dim() > 1]
    assert [id(p) for p in large] == [id(p) for p in reversed(list(model.parameters())) if p.dim() > 1]
