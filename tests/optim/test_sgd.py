"""`FlashSGD` against `torch.optim.SGD` in fp64, and the parts of the contract that depend on its state, or on having none."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from flashoptim_hf import FlashAdamW
from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.optim.sgd import FlashSGD
from tests.optim import contract

VARIANTS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
CLOSE = 0.02


class Reference:
    """`torch.optim.SGD` on fp64 copies."""

    def __init__(self, params, **options) -> None:
        self.weights = [nn.Parameter(p.detach().double().clone()) for p in params]
        self.optimizer = torch.optim.SGD(self.weights, **options)

    def step(self, params) -> None:
        for copy, p in zip(self.weights, params, strict=True):
            copy.grad = p.grad.double()
        self.optimizer.step()


def follow(params, optimizer, reference, steps=20):
    start = [p.detach().clone() for p in params]
    for step in range(steps):
        contract.set_gradients(params, step)
        reference.step(params)
        optimizer.step()
    return contract.moved(contract.masters(optimizer, params), [w.detach() for w in reference.weights], start)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "bits", "kernel"), contract.WEIGHTS)
def test_follows_torch(variant, dtype, bits, kernel):
    params = contract.parameters(dtype)
    options = {"lr": 0.1, **VARIANTS[variant]}
    optimizer = FlashSGD(params, master_bits=bits, kernel=kernel, **options)
    assert follow(params, optimizer, Reference(params, **options)) < CLOSE


@pytest.mark.parametrize("variant", ["momentum", "dampening", "nesterov"])
@pytest.mark.parametrize("codec", ["none", "softsign", "square"])
def test_every_codec_that_holds_the_momentum(variant, codec):
    params = contract.parameters()
    options = {"lr": 0.1, **VARIANTS[variant]}
    error = follow(params, FlashSGD(params, codec=codec, **options), Reference(params, **options))
    assert error < (1e-5 if codec == "none" else CLOSE)


def test_the_comparison_sees_each_option():
    """With fp32 states the variants are torch's to 1e-5, and any two differ by far more."""
    for name, options in VARIANTS.items():
        for other, wrong in VARIANTS.items():
            params = contract.parameters()
            error = follow(params, FlashSGD(params, lr=0.1, codec="none", **options), Reference(params, lr=0.1, **wrong), steps=4)
            assert error < 1e-5 if name == other else error > 0.01


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_decoupled_decay(momentum):
    params = contract.parameters()
    optimizer = FlashSGD(params, lr=0.1, momentum=momentum, weight_decay=0.5, decoupled_weight_decay=True, codec="none")
    reference = Reference(params, lr=0.1, momentum=momentum)
    for step in range(5):
        contract.set_gradients(params, step)
        with torch.no_grad():
            for w in reference.weights:
                w *= 1 - 0.1 * 0.5
        reference.step(params)
        optimizer.step()
    for p, w in zip(params, reference.weights, strict=True):
        torch.testing.assert_close(p.double(), w, rtol=1e-5, atol=1e-6)


def test_defaults_are_those_of_torch_and_rebuild_it():
    w = contract.parameters()
    optimizer, theirs = FlashSGD(w), torch.optim.SGD(w)
    for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov"):
        assert optimizer.defaults[name] == theirs.defaults[name]
    assert optimizer.defaults["codec"] == "square"
    assert type(optimizer)(w, **optimizer.defaults).defaults == optimizer.defaults
    keywords = [p.name for p in inspect.signature(FlashAdamW).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert set(keywords) - {"learn_interval"} <= set(inspect.signature(FlashSGD).parameters)


def test_state_has_torchs_name():
    params = contract.parameters(torch.bfloat16)
    optimizer = FlashSGD(params, momentum=0.9)
    contract.run(optimizer, params, range(1))
    assert set(optimizer.state[params[0]]) == {"momentum_buffer", "momentum_buffer_max", "correction", "step"}
    buffer = optimizer.decoded_state(params[0])["momentum_buffer"]
    # at the first step the buffer is the gradient, whatever the dampening
    assert (buffer - params[0].grad).norm() < 0.02 * buffer.norm()


@pytest.mark.parametrize("placement", contract.PLACEMENTS)
def test_without_momentum_nothing_is_stored(placement, as_bits):
    params = contract.parameters()
    optimizer = FlashSGD(params, lr=0.1, **contract.PLACEMENTS[placement])
    contract.run(optimizer, params, range(3))
    report = optimizer.memory_report()
    assert (report.state_bytes, report.host_bytes, report.quantized_share) == (0, 0, 0.0)
    assert set(optimizer.state[params[0]]) == {"step"}
    assert set(optimizer.decoded_state(params[0])) == {"master_weight"}
    again = contract.parameters()
    resumed = FlashSGD(again, lr=0.1)
    resumed.load_state_dict(optimizer.state_dict())
    assert as_bits(resumed.state_dict()) == as_bits(optimizer.state_dict())
    halves = contract.parameters(torch.bfloat16)
    corrected = FlashSGD(halves, **contract.PLACEMENTS[placement])
    contract.run(corrected, halves, range(2))
    assert corrected.memory_report().planes == {"correction": sum(p.numel() for p in halves)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_momentum_that_is_switched_on_and_off(dtype):
    """Schedules change momentum; the masters stay, and the buffer starts from nothing."""
    params = contract.parameters(dtype)
    optimizer, reference = FlashSGD(params, lr=0.1), Reference(params, lr=0.1)
    start = [p.detach().clone() for p in params]
    for step in range(9):
        momentum = 0.9 if 3 <= step < 6 else 0.0
        if step == 3:
            for state in reference.optimizer.state.values():
                state.pop("momentum_buffer", None)
        optimizer.param_groups[0]["momentum"] = reference.optimizer.param_groups[0]["momentum"] = momentum
        contract.set_gradients(params, step)
        reference.step(params)
        optimizer.step()
        assert ("momentum_buffer" in optimizer.state[params[0]]) == (momentum > 0)
    assert contract.moved(contract.masters(optimizer, params), [w.detach() for w in reference.weights], start) < CLOSE
    assert int(optimizer.state[params[0]]["step"]) == 9


def test_groups_with_and_without_momentum():
    params = contract.parameters()
    optimizer = FlashSGD([{"params": params[:1], "momentum": 0.9}, {"params": params[1:]}])
    contract.run(optimizer, params, range(2))
    assert ["momentum_buffer" in optimizer.state[p] for p in params] == [True, False, False]
    again = contract.parameters()
    resumed = FlashSGD([{"params": again[:1]}, {"params": again[1:]}])
    resumed.load_state_dict(optimizer.state_dict())
    assert ["momentum_buffer" in resumed.state[p] for p in again] == [True, False, False]


def make(params, **options):
    return FlashSGD(params, **{"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_bit_for_bit(dtype, as_bits):
    contract.check_resumes(make, as_bits, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_equals_resident(dtype, as_bits):
    contract.check_placements_agree(make, as_bits, dtype)


@pytest.mark.filterwarnings("ignore:a gradient held NaN")
def test_skips_a_step_that_is_not_finite(as_bits):
    contract.check_skips(make, as_bits)


def test_groups_may_come_late(as_bits):
    contract.check_late_groups(make, as_bits, {"lr": 0.3, "momentum": 0.5, "nesterov": False, "decoupled_weight_decay": True})


def test_one_cycle_schedules_move_the_momentum():
    params = contract.parameters()
    optimizer = make(params, nesterov=False)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    for step in range(5):
        contract.run(optimizer, params, range(step, step + 1))
        schedule.step()
    assert 0.85 <= optimizer.param_groups[0]["momentum"] < 0.95


BAD = [
    ({"momentum": -0.1}, "momentum=-0.1"),
    ({"momentum": 0.9, "dampening": float("nan")}, "dampening=nan"),
    ({"nesterov": True}, "nesterov=True with momentum=0.0"),
    ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov=True with momentum=0.9 and dampening=0.1"),
    ({"nesterov": "yes", "momentum": 0.9}, "nesterov='yes'"),
    ({"decoupled_weight_decay": 1}, "decoupled_weight_decay=1"),
    ({"codec": "log"}, r"codec='log' cannot store the states of FlashSGD \(momentum_buffer\).*'square'"),
]


@pytest.mark.parametrize(("option", "message"), BAD, ids=[str(o) for o, _ in BAD])
def test_bad_options_are_named(option, message):
    with pytest.raises(ConfigurationError, match=message):
        FlashSGD(contract.parameters(), **option)
