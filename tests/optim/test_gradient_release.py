"""Gradient release: pages are updated during backward, and every bit is what `step()` alone would have made of the same gradients."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashoptim_hf import FlashAdamW, FlashLion, FlashSGD
from flashoptim_hf.errors import UnsupportedError
from flashoptim_hf.optim import gradient_release
from tests.optim.release import RELEASED, WIDTH, batch, groups_of, hooks_of, layers, loss_of, run, trained

PLACEMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one page": {"page_bytes": "1MiB"},
    "paged": {"paged": True, "page_bytes": 2048},
    "simulated": {"paged": True, "page_bytes": 2048, "simulate": 3},
    "simulated, half stays": {"paged": True, "page_bytes": 5000, "simulate": 4, "device_budget_bytes": 0.5},
    "simulated, zero copy": {"paged": True, "page_bytes": 3000, "simulate": 5, "transport": "zero_copy"},
    "simulated, all stays": {"paged": True, "page_bytes": 3000, "simulate": 6, "transport": "resident"},
}


@pytest.fixture
def same(as_bits: Callable[[Any], Any]) -> Callable[..., None]:
    """Asserts that two runs (model, (optimizer, losses)) agree in every bit."""

    def compare(one: tuple[nn.Module, Any], two: tuple[nn.Module, Any]) -> None:
        assert one[1][1] == two[1][1]
        assert as_bits(list(one[0].parameters())) == as_bits(list(two[0].parameters()))
        assert as_bits(one[1][0].state_dict()) == as_bits(two[1][0].state_dict())

    return compare


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


def test_a_gradient_of_before_the_parameter_was_replaced_is_refused() -> None:
    """Compiled kernels would read on behind its end."""
    weight = nn.Parameter(torch.ones(8, 8))
    optimizer = FlashAdamW([weight], gradient_release=True)
    loss = nn.functional.linear(torch.ones(1, 8), weight).sum()
    weight.data = torch.zeros(800, 8)
    with pytest.raises(UnsupportedError, match=r"shape \(8, 8\), and its parameter has \(800, 8\) now"):
        loss.backward()
    assert not weight.any()
    assert optimizer.state[weight]["step"] == 0


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(70, 4, sparse=True)
    optimizer = FlashAdamW(table.parameters(), gradient_release=True)
    with pytest.raises(UnsupportedError, match="sparse"):
        table(torch.tensor([1, 2])).sum().backward()
    assert not any(values["step"] for values in optimizer.state.values())
