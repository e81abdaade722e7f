"""Steps whose gradients are not finite leave no trace."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from flashoptim_hf.optim.adamw import FlashAdamW

NAN, INF = float("nan"), float("inf")


def run(optimizer, w, seeds, spoil=None, value=NAN):
    for seed in seeds:
        w.grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(seed)).to(w.dtype)
        if seed == spoil:
            w.grad.view(-1)[7] = value
        optimizer.step()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_spoiled_batch_is_as_if_it_had_not_been(opt, value, dtype, as_bits):
    a, b = nn.Parameter(torch.ones(64, dtype=dtype)), nn.Parameter(torch.ones(64, dtype=dtype))
    spoiled, clean = opt([a]), opt([b])
    with pytest.warns(RuntimeWarning, match="skipped"):
        run(spoiled, a, range(12), spoil=1, value=value)
    run(clean, b, [0, *range(2, 12)])
    assert torch.equal(a, b)
    assert as_bits(spoiled.state_dict()) == as_bits(clean.state_dict())
    assert spoiled.memory_report().skipped_steps == 1


def test_warned_once_and_counted(opt):
    w = nn.Parameter(torch.ones(64))
    optimizer = opt([w])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in (1, 2, 3):
            run(optimizer, w, [seed], spoil=seed)
    assert len(caught) == 1
    assert optimizer.memory_report().skipped_steps == 3
    assert optimizer.state_dict()["state"] == {}


def test_one_bad_parameter_stops_all(opt):
    a, b = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer = opt([a, b])
    a.grad, b.grad = torch.ones(5), torch.tensor([1.0, NAN, 1.0, 1.0, 1.0])
    with pytest.warns(RuntimeWarning):
        optimizer.step()
    assert torch.equal(a, torch.ones(5))


def test_raise_and_off():
    w = nn.Parameter(torch.ones(64))
    with pytest.raises(FloatingPointError, match="nonfinite='skip'"):
        run(FlashAdamW([w], nonfinite="raise"), w, [1], spoil=1)
    assert torch.equal(w, torch.ones(64))
    run(FlashAdamW([w], nonfinite="off"), w, [1], spoil=1)
    assert torch.isnan(w).any()


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 65504.0), (torch.bfloat16, 1e18), (torch.float32, 4e18)])
def test_large_gradients_are_not_mistaken_for_infinity(opt, dtype, value):
    """Their sum is above the limit, and none of them is. Such a step moves every weight by lr, as AdamW's first step does."""
    w = nn.Parameter(torch.ones(64, dtype=dtype))
    optimizer = opt([w], lr=1e-3, weight_decay=0.0)
    w.grad = torch.full_like(w, value)
    optimizer.step()
    assert optimizer.memory_report().skipped_steps == 0
    torch.testing.assert_close(optimizer.decoded_state(w)["master_weight"], torch.full((64,), 0.999), rtol=0, atol=2e-5)


@pytest.mark.parametrize("value", [1e19, 1e25, 3e38])
def test_gradients_whose_square_would_overflow_count_as_infinite(opt, value):
    w = nn.Parameter(torch.ones(64))
    optimizer = opt([w])
    w.grad = torch.ones(64)
    w.grad[5] = value
    with pytest.warns(RuntimeWarning):
        optimizer.step()
    assert torch.equal(w, torch.ones(64))


def test_grad_scaler_skips_and_unscales(opt, reference):
    w = nn.Parameter(torch.ones(100))
    optimizer, ref = opt([w], lr=1e-2), reference([w], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i in range(6):
        w.grad = torch.randn(100, generator=torch.Generator().manual_seed(i))
        if i == 0:
            w.grad[3] = INF
        else:
            ref.step()
            w.grad = w.grad * scaler.get_scale()
        scaler.scale(torch.zeros(()))
        if i == 0:
            with pytest.warns(RuntimeWarning):
                scaler.step(optimizer)
            assert optimizer.state_dict()["state"] == {}
            assert torch.equal(w, torch.ones(100))
        else:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    assert int(optimizer.state[w]["step"]) == 5
    assert ref.error() < 0.03


def test_accelerate_knows_that_a_step_was_skipped():
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    w = nn.Parameter(torch.ones(10))
    inner = FlashAdamW([w], paged=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    seen = []
    for bad in (True, False, True, False):
        scaler.scale(torch.zeros(()))
        w.grad = torch.full((10,), INF if bad else 1.0)
        optimizer.step()
        seen.append(optimizer.step_was_skipped)
    assert seen == [True, False, True, False]
    assert int(inner.state[w]["step"]) == 2


@pytest.mark.parametrize("skipped", [True, False])
def test_step_counts_are_taken_back_when_the_device_says_so(skipped):
    w = nn.Parameter(torch.ones(10))
    optimizer = FlashAdamW([w])
    w.grad = torch.ones(10)
    optimizer.step()
    optimizer._guard.defer({w.device: torch.tensor(float(skipped))}, optimizer._plan, optimizer._layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = optimizer.state_dict()
    assert int(saved["state"][0]["step"]) == (0 if skipped else 1)
