"""`master_bits="auto"`: 32 bits where 24 swallow the updates, and only there."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.optim import auto_master
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.optim.lion import FlashLion
from flashoptim_hf.optim.sgd import FlashSGD


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(auto_master, "INTERVAL", 4)


def train(optimizer, params, steps=16, start=0):
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.rand(p.shape, generator=generator).to(p.dtype) + 0.5  # one direction: what is swallowed adds up
        optimizer.step()


def test_only_what_is_swallowed_gets_more_bits(opt):
    """At lr 3e-6 weights near 1 stand still in 24 bits, and weights near 1e-3 move."""
    large = nn.Parameter(torch.full((700,), 1.0, dtype=torch.bfloat16))
    small = nn.Parameter(torch.full((700,), 1e-3, dtype=torch.bfloat16))
    exact = nn.Parameter(torch.full((70,), 1.0))
    optimizer = opt([large, small, exact], lr=3e-6, weight_decay=0.0, master_bits="auto")
    with pytest.warns(UserWarning, match="1 parameters get 32-bit"):
        train(optimizer, [large, small, exact])
    assert optimizer.state[large]["correction"].dtype == torch.int16
    assert optimizer.state[small]["correction"].dtype == torch.int8
    assert "correction" not in optimizer.state[exact]
    assert int(optimizer.state[large]["step"]) == 16
    before = optimizer.decoded_state(large)["master_weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        train(optimizer, [large, small, exact], start=16)
    moved = before - optimizer.decoded_state(large)["master_weight"]
    assert moved.mean().item() == pytest.approx(16 * 3e-6, rel=0.1)


def test_without_auto_the_weight_stands_still(opt):
    large = nn.Parameter(torch.full((700,), 1.0, dtype=torch.bfloat16))
    optimizer = opt([large], lr=3e-6, weight_decay=0.0, master_bits=24)
    train(optimizer, [large], 32)
    assert torch.equal(optimizer.decoded_state(large)["master_weight"], torch.ones(700))


def test_a_usual_learning_rate_keeps_24_bits(opt):
    params = [nn.Parameter(torch.randn(300).bfloat16() * 0.02), nn.Parameter(torch.randn(5000).bfloat16() * 0.02)]
    optimizer = opt(params, lr=1e-4, master_bits="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, params, 20)
    assert {optimizer.state[p]["correction"].dtype for p in params} == {torch.int8}


def test_no_verdict_where_nothing_should_move(opt):
    """A learning rate of 0, as in the first step of a warm-up, and skipped steps are no reason for more bits."""
    w = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    optimizer = opt([w], lr=0.0, master_bits="auto")
    train(optimizer, [w], 20)
    assert optimizer.state[w]["correction"].dtype == torch.int8


@pytest.mark.parametrize("cls", [FlashLion, FlashSGD])
def test_every_algorithm_has_it(cls):
    w = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    extra = {"momentum": 0.9} if cls is FlashSGD else {}
    optimizer = cls([w], lr=1e-7, weight_decay=0.0, master_bits="auto", **extra)
    with pytest.warns(UserWarning, match="32-bit"):
        train(optimizer, [w])
    assert optimizer.state[w]["correction"].dtype == torch.int16


def test_resume_keeps_the_bits(opt, as_bits):
    def build():
        w = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
        return w, opt([w], lr=3e-6, weight_decay=0.0, master_bits="auto")

    w, optimizer = build()
    with pytest.warns(UserWarning, match="32-bit"):
        train(optimizer, [w])
    v, resumed = build()
    with torch.no_grad():
        v.copy_(w)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(optimizer.state_dict())
    assert as_bits(resumed.state_dict()) == as_bits(optimizer.state_dict())
    train(optimizer, [w], 8, start=16)
    train(resumed, [v], 8, start=16)
    assert torch.equal(w, v)
    assert as_bits(resumed.state_dict()) == as_bits(optimizer.state_dict())


def test_saving_does_not_change_the_run(opt, as_bits):
    """The decision falls at the end of the step that was looked at, whether somebody saves or not."""
    w, v = (nn.Parameter(torch.ones(100, dtype=torch.bfloat16)) for _ in range(2))
    saving, plain = (opt([p], lr=3e-6, weight_decay=0.0, master_bits="auto") for p in (w, v))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3 * auto_master.INTERVAL):
            train(saving, [w], 1, start=step)
            train(plain, [v], 1, start=step)
            saving.state_dict()
    assert saving.state[w]["correction"].dtype == torch.int16
    assert torch.equal(w, v)
    assert as_bits(saving.state_dict()) == as_bits(plain.state_dict())


def test_loading_takes_over_the_bits_that_were_saved(opt):
    w = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    optimizer = opt([w], lr=3e-6, weight_decay=0.0, master_bits="auto")
    train(optimizer, [w], 1)
    early = optimizer.state_dict()
    with pytest.warns(UserWarning, match="32-bit"):
        train(optimizer, [w], auto_master.INTERVAL, start=1)
    assert optimizer.state[w]["correction"].dtype == torch.int16
    optimizer.load_state_dict(early)
    assert optimizer.state[w]["correction"].dtype == torch.int8


def test_named_in_the_error():
    with pytest.raises(ConfigurationError, match="'auto'"):
        FlashAdamW([nn.Parameter(torch.ones(3))], master_bits="sometimes")
