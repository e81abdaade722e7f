"""Codecs that learn, where a step fails half-way right after a look: no parameter is stored by one curve here and by another there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashoptim_hf.codecs import learned
from flashoptim_hf.kernels import eager, select
from flashoptim_hf.optim import finite, learning
from flashoptim_hf.optim.adamw import FlashAdamW

PLACED = {
    "plain": {"page_bytes": 2048},
    "eager": {"page_bytes": 2048, "kernel": "eager"},
    "paged": {"paged": True, "page_bytes": 2048},
    "simulated": {"paged": True, "page_bytes": 2048, "simulate": 3},
    "zero_copy": {"paged": True, "page_bytes": 2048, "simulate": 3, "transport": "zero_copy"},
}


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number, param in enumerate(params):
        scale = torch.exp(1.5 * torch.randn(param.shape, generator=torch.Generator().manual_seed(number)))
        param.grad = (torch.randn(param.shape, generator=generator) * scale * 1e-2).to(param.dtype)


def state(optimizer: FlashAdamW, params: list[nn.Parameter]) -> list[Tensor]:
    found = [optimizer.decoded_state(param) for param in params]
    return [torch.cat([values[name].flatten() for values in found]) for name in ("exp_avg", "exp_avg_sq")]


def mixed(optimizer: FlashAdamW, params: list[nn.Parameter]) -> list[bool]:
    return [not torch.equal(*optimizer.state[param]["exp_avg_sq_curve"].view(2, -1)) for param in params]


def prepared(options: dict[str, Any]) -> tuple[list[nn.Parameter], FlashAdamW]:
    """Parameters of several pages with two curves each, and gradients for the next step."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in ((64, 80), (70,), (300, 11), (129,))]
    optimizer = FlashAdamW(params, lr=1e-3, codec="learned", **options)
    for step in range(1, 5):
        give_gradients(params, step)
        optimizer.step()
    assert all(mixed(optimizer, params))
    give_gradients(params, 5)
    return params, optimizer


def break_off(monkeypatch: pytest.MonkeyPatch, failing: int, error: BaseException, after: bool) -> None:
    """The kernel fails at its call number `failing`, counted from 0: before it does anything, or when it is done."""
    kernel_for, calls = select.kernel_for, []

    def breaking(*args: Any) -> Callable[..., None]:
        kernel = kernel_for(*args)

        def breaks(*args: Any, **options: Any) -> None:
            calls.append(None)
            if after or len(calls) != failing + 1:
                kernel(*args, **options)
            if len(calls) == failing + 1:
                raise error

        return breaks

    monkeypatch.setattr(select, "kernel_for", breaking)


@pytest.mark.parametrize("after", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("failing", [0, 1, 3])
@pytest.mark.parametrize("placed", PLACED)
def test_a_step_that_fails_half_way_leaves_each_parameter_on_one_curve(placed, failing, after, monkeypatch, as_bits) -> None:
    """What was updated is as after the whole step, and the rest as before it but for one rounding."""
    params, optimizer = prepared(PLACED[placed])
    (m0, v0), saved = state(optimizer, params), as_bits(optimizer.state_dict()["state"])
    others, other = copy.deepcopy((params, optimizer))
    give_gradients(others, 5)
    other.step()
    m1, v1 = state(other, others)

    # a simulated device reports its failure at the end of the step, as devices do; a user does not wait
    simulated = "simulate" in PLACED[placed]
    break_off(monkeypatch, failing, RuntimeError("launch") if simulated else KeyboardInterrupt(), after)
    with pytest.raises(RuntimeError if simulated else KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    if not (simulated or after or failing):
        assert as_bits(optimizer.state_dict()["state"]) == saved, "nothing was changed, so that nothing was to be put in order"
        return
    assert not any(mixed(optimizer, params))
    m, v = state(optimizer, params)
    updated = (m == m1) & (v == v1)
    assert 0.05 < updated.float().mean() <= 1
    nonzero = ~updated & (v0 > 0)
    assert ((v / v0)[nonzero] - 1).abs().max() < 0.05 if nonzero.any() else simulated
    assert (m - m0)[~updated].norm() <= 0.01 * m0[~updated].norm()

    for step in range(5, 8):
        give_gradients(params, step)
        optimizer.step()
    assert all(torch.isfinite(values).all() for values in state(optimizer, params))


def test_the_eager_kernel_may_fail_within_a_page(monkeypatch) -> None:
    """And within a parameter."""
    monkeypatch.setattr(eager, "CHUNK", 1024)
    monkeypatch.setattr(learning, "CHUNK", 1024)
    params, optimizer = prepared({"kernel": "eager"})
    others, other = copy.deepcopy((params, optimizer))
    give_gradients(others, 5)
    other.step()
    (m0, v0), (m1, v1) = state(optimizer, params), state(other, others)
    update, calls = eager._update_chunk, []

    def failing(*args: Any) -> None:
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        update(*args)

    monkeypatch.setattr(eager, "_update_chunk", failing)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    m, v = state(optimizer, params)
    assert torch.equal(m[:3072], m1[:3072])
    assert torch.equal(v[:3072], v1[:3072])
    assert (v[3072:] / v0[3072:] - 1).abs().max() < 0.05
    assert (m - m0)[3072:].norm() <= 0.01 * m0[3072:].norm()


def test_rows_without_gradients_do_not_hide_an_update() -> None:
    """An embedding's rows of words that never came are 0, and stay 0."""
    params = [nn.Parameter(torch.randn(9, 640)), nn.Parameter(torch.randn(640))]
    optimizer = FlashAdamW(params, lr=1e-3, codec="learned", page_bytes=2048)

    def rare(step: int) -> None:
        give_gradients(params, step)
        for number, row in enumerate(params[0].grad):
            row[: 576 if number % 2 else 64] = 0
            row[640 - (64 if number % 2 else 576) :] *= number != 8

    for step in range(1, 5):
        rare(step)
        optimizer.step()
    others, other = copy.deepcopy((params, optimizer))
    rare(5)
    for mine, param in zip(others, params, strict=True):
        mine.grad = param.grad.clone()
    other.step()
    with pytest.MonkeyPatch.context() as patch:
        break_off(patch, 3, KeyboardInterrupt(), False)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    (m, v), (m1, v1) = state(optimizer, params[:1]), state(other, others[:1])
    assert torch.equal(m[:1536], m1[:1536])
    assert torch.equal(v[:1536], v1[:1536])


def test_a_step_that_the_device_skips_may_fail_too(monkeypatch, as_bits) -> None:
    monkeypatch.setattr(finite, "known_at_once", lambda _: False)
    params, optimizer = prepared(PLACED["plain"])
    saved = as_bits(optimizer.state_dict()["state"])
    assert params[0].grad is not None
    params[0].grad[3, 3] = float("inf")
    break_off(monkeypatch, 2, KeyboardInterrupt(), True)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert as_bits(optimizer.state_dict()["state"]) == saved


def test_a_failure_of_what_puts_things_in_order_is_said(monkeypatch) -> None:
    _, optimizer = prepared(PLACED["plain"])
    break_off(monkeypatch, 2, RuntimeError("the first"), False)

    def broken(*_: Any) -> None:
        raise RuntimeError("the second")

    monkeypatch.setattr(learned.LearnedCodec, "settled", broken)
    with pytest.warns(RuntimeWarning, match=r"'learned' could not be put in order.*the second.*last checkpoint"):  # noqa: SIM117
        with pytest.raises(RuntimeError, match="the first"):
            optimizer.step()


def test_a_step_that_does_not_fail_takes_no_samples_where_curves_are_one(monkeypatch) -> None:
    params, optimizer = prepared(PLACED["plain"])
    optimizer.step()
    assert not any(mixed(optimizer, params))
    monkeypatch.setattr(learning, "_Parts", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
