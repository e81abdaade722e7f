"""`FlashLion` against Lion in fp64, and the parts of the contract that depend on its state."""

from __future__ import annotations

import inspect

import pytest
import torch

from flashoptim_hf import FlashAdamW
from flashoptim_hf.codecs.base import get_codec
from flashoptim_hf.errors import CheckpointError, ConfigurationError
from flashoptim_hf.optim.lion import RULE, FlashLion
from tests.optim import contract

CLOSE = {"square": 0.12, "softsign": 0.25, "none": 2e-3}


class Reference:
    """Lion in fp64, from its paper's program 1."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0) -> None:
        self.lr, self.betas, self.weight_decay = lr, betas, weight_decay
        self.weights = [p.detach().double().clone() for p in params]
        self.m = [torch.zeros_like(w) for w in self.weights]

    def step(self, params) -> None:
        b1, b2 = self.betas
        for i, p in enumerate(params):
            g = p.grad.double()
            c = b1 * self.m[i] + (1 - b1) * g
            self.weights[i] = self.weights[i] - self.lr * (c.sign() + self.weight_decay * self.weights[i])
            self.m[i] = b2 * self.m[i] + (1 - b2) * g


@pytest.mark.parametrize("placement", contract.PLACEMENTS)
@pytest.mark.parametrize(("dtype", "bits", "kernel"), contract.WEIGHTS)
def test_follows_lion(placement, dtype, bits, kernel):
    params = contract.parameters(dtype)
    start = [p.detach().clone() for p in params]
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = FlashLion(params, master_bits=bits, kernel=kernel, **options, **contract.PLACEMENTS[placement])
    reference, other = Reference(params, **options), Reference(params, lr=1e-2, weight_decay=0.1, betas=(0.5, 0.99))
    for step in range(30):
        contract.set_gradients(params, step)
        reference.step(params)
        other.step(params)
        optimizer.step()
    weights = contract.masters(optimizer, params)
    assert contract.moved(weights, reference.weights, start) < CLOSE["square"]
    assert contract.moved(weights, other.weights, start) > 2 * CLOSE["square"]  # another beta1 would show
    m = optimizer.decoded_state(params[0])["exp_avg"].double()
    assert ((m - reference.m[0]).norm() / reference.m[0].norm()) < 0.03


@pytest.mark.parametrize("codec", CLOSE)
def test_every_codec_that_holds_the_momentum(codec):
    params = contract.parameters()
    start = [p.detach().clone() for p in params]
    optimizer, reference = FlashLion(params, lr=1e-2, codec=codec), Reference(params, lr=1e-2)
    for step in range(30):
        contract.set_gradients(params, step)
        reference.step(params)
        optimizer.step()
    assert contract.moved(params, reference.weights, start) < CLOSE[codec]
    per_element = get_codec(codec, RULE.states).nbytes(6400) / 6400
    assert per_element == {"square": 1.0625, "softsign": 1.0625, "none": 4}[codec]


def test_defaults_are_those_of_the_paper_and_rebuild_it():
    w = contract.parameters()
    optimizer = FlashLion(w)
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"], optimizer.defaults["weight_decay"]) == (1e-4, (0.9, 0.99), 0.0)
    assert optimizer.defaults["codec"] == "square"
    assert type(optimizer)(w, **optimizer.defaults).defaults == optimizer.defaults
    shared = list(inspect.signature(FlashAdamW).parameters)
    assert list(inspect.signature(FlashLion).parameters) == [name for name in shared if name not in ("eps", "learn_interval")]


def test_state_has_the_names_of_the_field():
    params = contract.parameters(torch.bfloat16)
    optimizer = FlashLion(params)
    contract.run(optimizer, params, range(1))
    assert set(optimizer.state[params[0]]) == {"exp_avg", "exp_avg_max", "correction", "step"}
    assert set(optimizer.decoded_state(params[0])) == {"exp_avg", "master_weight"}
    report = optimizer.memory_report()
    assert report.moment_bytes == sum(p.numel() + 2 * -(-p.numel() // 32) for p in params)
    assert report.quantized_share == 1


def test_where_nothing_pulls_the_weight_only_decays():
    (w,) = contract.parameters(shapes=((64,),))
    before = w.detach().clone()
    optimizer = FlashLion([w], lr=0.5, weight_decay=0.1)
    w.grad = torch.zeros(64)
    optimizer.step()
    torch.testing.assert_close(w.detach(), before * 0.95)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_bit_for_bit(dtype, as_bits):
    contract.check_resumes(FlashLion, as_bits, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_equals_resident(dtype, as_bits):
    contract.check_placements_agree(FlashLion, as_bits, dtype)


@pytest.mark.filterwarnings("ignore:a gradient held NaN")
def test_skips_a_step_that_is_not_finite(as_bits):
    contract.check_skips(FlashLion, as_bits)


def test_groups_may_come_late(as_bits):
    contract.check_late_groups(FlashLion, as_bits, {"lr": 3e-3, "betas": (0.5, 0.9), "weight_decay": 0.1})


def test_a_codec_that_cannot_hold_it_is_refused_at_once():
    params = contract.parameters()
    with pytest.raises(ConfigurationError, match=r"codec='log' cannot store the states of FlashLion \(exp_avg\).*'square'"):
        FlashLion(params, codec="log")
    with pytest.raises(ConfigurationError, match=r"codec='square' cannot store the states of FlashAdamW \(exp_avg, exp_avg_sq\).*'log'"):
        FlashAdamW(params, codec="square")
    with pytest.raises(ConfigurationError, match="codec='log' cannot store"):
        FlashLion([{"params": params, "codec": "log"}])
    optimizer = FlashLion(params[:1])
    with pytest.raises(ConfigurationError, match="codec='log' cannot store"):
        optimizer.add_param_group({"params": params[1:], "codec": "log"})
    assert len(optimizer.param_groups) == 1


def test_the_state_of_another_algorithm_is_refused():
    params = contract.parameters()
    lion, adamw = FlashLion(params), FlashAdamW(params)
    contract.run(lion, params, range(1))
    contract.run(adamw, params, range(1))
    with pytest.raises(CheckpointError, match="FlashAdamW"):
        adamw.load_state_dict(lion.state_dict())
    with pytest.raises(CheckpointError, match="FlashLion"):
        lion.load_state_dict(adamw.state_dict())


def test_a_state_of_another_codec_is_converted(as_bits):
    params = contract.parameters(torch.bfloat16)
    source = FlashLion(params, codec="none")
    contract.run(source, params, range(4))
    target = FlashLion(params)
    with pytest.warns(UserWarning, match="codec='none'"):
        target.load_state_dict(source.state_dict())
    was, now = source.decoded_state(params[0]), target.decoded_state(params[0])
    assert (now["exp_avg"] - was["exp_avg"]).norm() < 0.02 * was["exp_avg"].norm()
    assert as_bits(now["master_weight"]) == as_bits(was["master_weight"])


@pytest.mark.parametrize(("option", "message"), [({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"), ({"betas": (0.9,)}, r"betas=\(0.9,\)")])
def test_bad_options_are_named(option, message):
    with pytest.raises(ConfigurationError, match=message):
        FlashLion(contract.parameters(), **option)
