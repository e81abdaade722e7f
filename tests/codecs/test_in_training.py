"""What low-precision states are known to do to training, for every codec, rounding and algorithm, through the optimizers themselves."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashoptim_hf import FlashAdamW, FlashLion, FlashSGD
from flashoptim_hf.codecs.base import get_codec, grouped
from flashoptim_hf.codecs.joint import FINE_ENTRIES, lattice
from tests.codecs.bounds import MOMENTS

LR = 1e-3
MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p, **o: FlashAdamW(p, lr=LR, weight_decay=0.0, **o),
    "lion": lambda p, **o: FlashLion(p, lr=LR, **o),
    "sgd": lambda p, **o: FlashSGD(p, lr=LR, momentum=0.9, **o),
}
CODECS = {
    "adamw": ["log", "joint", "learned", "softsign", "none"],
    "lion": ["square", "softsign", "none"],
    "sgd": ["square", "softsign", "none"],
}
EVERY = [(a, codec, dither) for a, codecs in CODECS.items() for codec in codecs for dither in (True, False)]
every = pytest.mark.parametrize(
    ("algorithm", "codec", "dither"), EVERY, ids=[f"{a}-{c}-{'dither' if d else 'nearest'}" for a, c, d in EVERY]
)
relative = pytest.mark.parametrize(
    ("algorithm", "codec", "dither"),
    [case for case in EVERY if case[1] != "softsign"],
    ids=lambda x: str(x) if not isinstance(x, bool) else "dn"[not x],
)


def lion(param: Tensor) -> Callable[[], None]:
    """Lion as published, in fp64: torch has none."""
    m = torch.zeros_like(param)

    def step() -> None:
        with torch.no_grad():
            param.sub_(LR * torch.sign(0.9 * m + 0.1 * param.grad))
            m.mul_(0.99).add_(param.grad, alpha=0.01)

    return step


def exact(algorithm: str, grads: Tensor, eps: float = 1e-8) -> Tensor:
    """Weights after each step, fp64 [steps, elements], from zero."""
    param = torch.nn.Parameter(torch.zeros(grads.shape[1], dtype=torch.float64))
    if algorithm == "lion":
        step = lion(param)
    elif algorithm == "adamw":
        step = torch.optim.AdamW([param], lr=LR, eps=eps, weight_decay=0.0).step
    else:
        step = torch.optim.SGD([param], lr=LR, momentum=0.9).step
    weights = []
    for grad in grads:
        param.grad = grad.double()
        step()
        weights.append(param.detach().clone())
    return torch.stack(weights)


def trained(algorithm: str, codec: str, dither: bool, grads: Tensor, **options: Any) -> Tensor:
    """The same with an optimizer of this package and fp32 weights."""
    param = torch.nn.Parameter(torch.zeros(grads.shape[1]))
    optimizer = MAKE[algorithm]([param], codec=codec, dither=dither, kernel="eager", **options)
    weights = []
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        weights.append(param.detach().double())
    return torch.stack(weights)


def moves(weights: Tensor) -> Tensor:
    return torch.cat((weights[:1], weights.diff(dim=0))).abs()


def residue() -> Tensor:
    """One of 32 alternates between +-1, one stands at 1e-3 for 60 steps and then has gradients of exactly 0."""
    grads = torch.zeros(65, 64)
    grads[:60:2, ::32], grads[1:60:2, ::32] = 1.0, -1.0
    grads[:60, 1::32] = 1e-3
    return grads


def vanishing(sigma: float) -> Tensor:
    """An embedding: scales lognormal, gradients on even steps, zeros on odd ones, rows that are never used."""
    generator = torch.Generator().manual_seed(0)
    grads = torch.exp(sigma * torch.randn(256, generator=generator)) * torch.randn(40, 256, generator=generator) * 1e-3
    grads[1::2] = 0
    grads[:, 64:128] = 0
    grads[:, 160:176] = 0
    return grads


def lora_start() -> Tensor:
    """LoRA's A while B is 0: no gradients at first, small ones then."""
    generator = torch.Generator().manual_seed(1)
    grads = 1e-4 * torch.randn(60, 128, generator=generator) * torch.linspace(0, 1, 60)[:, None]
    grads[:5] = 0
    return grads


STREAMS = {"residue": residue(), "embedding 1": vanishing(1.0), "embedding 2": vanishing(2.0), "LoRA": lora_start()}


@every
@pytest.mark.parametrize("stream", STREAMS)
def test_no_element_runs_away_where_gradients_vanish(algorithm: str, codec: str, dither: bool, stream: str) -> None:
    """No step beyond twice the exact one by a tenth of lr (of SGD: of the largest exact step); `softsign` stays within a few lr."""
    grads = STREAMS[stream]
    mine, truth = trained(algorithm, codec, dither, grads), exact(algorithm, grads)
    unit = moves(truth).max().item() if algorithm == "sgd" else LR
    limit = {"softsign": 4.0}.get(codec, 0.1)
    assert (moves(mine) - 2 * moves(truth)).max() <= limit * unit
    still = (grads == 0).all(0)
    assert not mine[:, still].any(), "what never had a gradient does not move"


@relative
@pytest.mark.parametrize("size", [1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e4, 1e6])
def test_gradients_of_any_size_train(algorithm: str, codec: str, dither: bool, size: float) -> None:
    """30 steps of randn s + s: the mean move is right to 1 %, and the total update to 5 % (Lion, whose moves are signs: 15 %)."""
    generator = torch.Generator().manual_seed(0)
    grads = (torch.randn(30, 256, generator=generator) + 1) * size
    mine, truth = trained(algorithm, codec, dither, grads)[-1], exact(algorithm, grads)[-1]
    assert mine.isfinite().all()
    assert mine.mean().item() == pytest.approx(truth.mean().item(), rel=0.01)
    assert (mine - truth).norm() <= (0.15 if algorithm == "lion" else 0.05) * truth.norm()


@pytest.mark.parametrize("size", [1e-8, 1e-6, 1e4, 1e6])
@pytest.mark.parametrize("algorithm", ["adamw", "lion", "sgd"])
def test_softsign_stays_finite_outside_its_range(algorithm: str, size: float) -> None:
    """Its fp16 scales serve 6e-5 to 65504; outside, weights are finite and do not jump."""
    generator = torch.Generator().manual_seed(0)
    grads = (torch.randn(30, 256, generator=generator) + 1) * size
    mine, truth = trained(algorithm, "softsign", True, grads), exact(algorithm, grads)
    assert mine.isfinite().all()
    assert moves(mine).max() <= 4 * moves(truth).max()


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_that_are_zero_from_the_start_move_nothing(algorithm: str, codec: str, dither: bool, dtype: torch.dtype) -> None:
    for options in ({"eps": 0.0}, {"eps": 1e-8}) if algorithm == "adamw" else ({},):
        param = torch.nn.Parameter(torch.ones(100, dtype=dtype))
        optimizer = MAKE[algorithm]([param], codec=codec, dither=dither, kernel="eager", **options)
        for _ in range(3):
            param.grad = torch.zeros_like(param)
            optimizer.step()
        assert torch.equal(param.detach(), torch.ones(100, dtype=dtype))


def everything(optimizer: torch.optim.Optimizer, param: Tensor) -> list[Tensor]:
    """The weight and all planes, as they are."""
    state = optimizer.state_dict()["state"][0]
    return [param.detach().clone(), *(value.clone() for value in state.values() if isinstance(value, Tensor))]


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_gradient_is_as_if_its_batch_had_not_been(algorithm: str, codec: str, dither: bool, bad: float) -> None:
    """64 bf16 weights with corrections: one bad element at step 2, then ten clean steps, and a checkpoint right after the bad one."""
    grads = torch.randn(12, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    ends = []
    for spoil in (False, True):
        param = torch.nn.Parameter(torch.ones(64).bfloat16())
        optimizer = MAKE[algorithm]([param], codec=codec, dither=dither, kernel="eager")
        for step, grad in enumerate(grads):
            if spoil and step == 1:
                before = everything(optimizer, param)
                param.grad = grad.clone()
                param.grad[17] = bad
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    optimizer.step()
                assert all(torch.equal(a, b) for a, b in zip(before, everything(optimizer, param), strict=True))
                buffer = io.BytesIO()
                torch.save(optimizer.state_dict(), buffer)
                buffer.seek(0)
                optimizer.load_state_dict(torch.load(buffer, weights_only=True))
            param.grad = grad.clone()
            optimizer.step()
        ends.append(everything(optimizer, param))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize(("algorithm", "codec"), [("adamw", "log"), ("adamw", "joint"), ("lion", "square"), ("sgd", "square")])
def test_a_parameter_that_is_to_keep_fp32_states_does(algorithm: str, codec: str) -> None:
    """The override is a group's `codec`: fp32 after the first step, after a checkpoint, and in a group that is added later."""
    embed, matrix, late = (torch.nn.Parameter(torch.zeros(96)) for _ in range(3))

    def made() -> torch.optim.Optimizer:
        optimizer = MAKE[algorithm]([{"params": [embed], "codec": "none"}, {"params": [matrix]}], codec=codec, kernel="eager")
        optimizer.add_param_group({"params": [late], "codec": "none"})
        return optimizer

    def dtypes(optimizer: torch.optim.Optimizer) -> list[set[torch.dtype]]:
        for param in (embed, matrix, late):
            param.grad = torch.randn(96)
        optimizer.step()
        states = optimizer.state_dict()["state"]
        return [{v.dtype for k, v in states[i].items() if k in ("exp_avg", "exp_avg_sq", "momentum_buffer")} for i in range(3)]

    first = made()
    expected = [
        {torch.float32},
        {plane.dtype for plane in get_codec(codec, MOMENTS[: 2 if algorithm == "adamw" else 1]).planes[:2] if plane.group == 1},
        {torch.float32},
    ]
    assert dtypes(first) == expected
    second = made()
    second.load_state_dict(first.state_dict())
    assert [group["codec"] for group in second.param_groups] == ["none", codec, "none"]
    assert dtypes(second) == expected


# The code tables: every code of every codec.


@pytest.mark.parametrize("entry", [43, 64, 96, FINE_ENTRIES, 200, 255])
def test_every_word_of_joint_has_its_value(entry: int) -> None:
    """Monotone and symmetric in both parts, 0 where it is 0, and back to the same word when it is encoded beside the group's extremes."""
    codec = get_codec("joint", MOMENTS, dither=False)
    (n,), (levels,), _ = (x.int().tolist() for x in lattice(torch.tensor([float(entry)])))
    span = 2 * n + 1
    word = torch.arange((levels + 1) * span)
    count = -(-len(word) // 30)
    # 30 words to a group, and two that hold its constants: the largest code with the largest u, and the lowest that the range serves
    words = torch.zeros(count, 32, dtype=torch.int64)
    words[:, :30] = grouped(word, 30)
    words[:, 30], words[:, 31] = levels * span + 2 * n, 20 * span + n + 1
    planes = [
        words.flatten() & 255,
        words.flatten() >> 8,
        torch.zeros(count),
        torch.full((count,), float(entry)),
        torch.full((count,), 1.0),
    ]
    planes = [x.to(plane.dtype) for x, plane in zip(planes, codec.planes, strict=True)]
    m, v = codec.decode(planes, count * 32)
    m_, v_ = (x.view(count, 32)[:, :30].flatten()[: len(word)] for x in (m, v))
    table_v, table_m = v_.view(-1, span), m_.view(-1, span)
    assert (table_v.amax(1) == table_v.amin(1)).all()
    assert (table_v[:, 0].diff() > 0).all()
    assert not table_m[0].any()
    assert not table_v[0].any()
    assert (table_m[1:].diff(dim=1) > 0).all()
    assert torch.equal(table_m, -table_m.flip(1))
    assert not table_m[:, n].any()

    served = words[:, :30].flatten()[: len(word)] // span >= 20
    again = [plane.clone() for plane in planes]
    if entry >= FINE_ENTRIES:
        again[4].fill_(100.0)  # what keeps the group's codes fine is umax of the step before
    groups = torch.nn.functional.pad(served, (0, -len(served) % 30)).view(-1, 30).all(1)
    codec.encode((m, v), again, step=10**6)
    assert torch.equal(again[3][groups], planes[3][groups])
    made = (again[1].int() * 256 + again[0]).view(count, 32)[groups]
    assert groups.sum() > 500
    assert torch.equal(made.long(), words[groups])


@pytest.mark.parametrize("dither", [True, False], ids=["dither", "nearest"])
@pytest.mark.parametrize(("codec", "states"), [("log", 2), ("joint", 2), ("softsign", 2), ("softsign", 1), ("square", 1), ("none", 2)])
@pytest.mark.parametrize("numel", range(1, 34))
def test_groups_of_any_size_keep_zeros_signs_and_the_maximum(codec: str, states: int, dither: bool, numel: int) -> None:
    """Constant groups, all-zero groups, one element: zeros stay, signs stay, and no magnitude exceeds the largest by a code."""
    made = get_codec(codec, MOMENTS[:states], dither)
    generator = torch.Generator().manual_seed(numel)
    for m in (torch.zeros(numel), torch.full((numel,), -0.3), torch.randn(numel, generator=generator)):
        v = torch.where(m == 0, 0, m * m * 4)
        planes = [torch.zeros(plane.entries(numel), dtype=plane.dtype) for plane in made.planes]
        made.encode((m, v)[:states], planes, step=numel)
        decoded = made.decode(planes, numel)
        assert not decoded[0][m == 0].any()
        assert (decoded[0] * m >= 0).all()
        assert decoded[0].abs().max() <= m.abs().max() * 1.02
        if states == 2:
            assert not decoded[1][v == 0].any()
            assert decoded[1].max() <= v.max() * 1.02
        if m.numel() and m.abs().amax() == m.abs().amin() > 0 and not dither:
            assert torch.allclose(decoded[0], m, rtol=0.01)
