"""The laboratory's long run: what happens to a moving average that is decoded and encoded ten thousand times.

Gradients are normal and stationary, each element at its own scale over some six octaves, so that nothing should change but the noise. What
is measured is AdamW's v̂ against the same average in float64, with beta2 = 0.999 and 0.9999; of Lion and SGD, whose only state is a
momentum, that momentum. Every state goes through the codec as in training, both moments together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..codecs.base import Codec
from .report import Report, Row
from .subjects import Algorithm, Subject
from .variants import Variant

ELEMENTS = 2048
BETA2 = (0.999, 0.9999)
LR, EPS = 1e-3, 1e-8

Decoded = Callable[[Tensor, int], Tensor]
"""(gradient, step count) -> the state that is measured after this step, fp32 of the gradient's shape."""


def looks(steps: int) -> list[int]:
    """The steps after which the state is compared: a tenth of all, three tenths, and all."""
    return sorted({max(1, round(steps * share)) for share in (0.1, 0.3, 1.0)})


def stationary(steps: int, seed: int = 0) -> Iterator[Tensor]:
    """Normal gradients of 1e-3, at scales of 2^z with z normal; fp32 (ELEMENTS,)."""
    generator = torch.Generator().manual_seed(seed)
    scale = 1e-3 * torch.exp2(torch.randn(ELEMENTS, generator=generator))
    for _ in range(steps):
        yield scale * torch.randn(ELEMENTS, generator=generator)


def ours(codec: Codec, algorithm: Algorithm, beta2: float) -> Decoded:
    """The last state of an algorithm of this package, through a codec."""
    rule = algorithm.rule
    planes = [torch.zeros(plane.entries(ELEMENTS), dtype=plane.dtype) for plane in codec.parts]
    weight = torch.zeros(ELEMENTS)
    # each algorithm takes of these what it knows
    options = {"betas": (0.9, beta2), "eps": EPS, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
    options["decoupled_weight_decay"] = False

    def step(grad: Tensor, t: int) -> Tensor:
        states, _ = rule.eager(codec.decode(planes, ELEMENTS), weight, grad, (LR, *rule.scalars(options, t)))
        codec.encode(states, planes, step=t)
        codec.advance(planes, t)
        return codec.decode(planes, ELEMENTS)[-1]

    return step


def exact(algorithm: Algorithm, beta2: float) -> Decoded:
    """The same state in float64."""
    state = torch.zeros(ELEMENTS, dtype=torch.float64)
    decay, rest = {"adamw": (beta2, 1 - beta2), "lion": (beta2, 1 - beta2), "sgd": (0.9, 1.0)}[algorithm.rule.name]

    def step(grad: Tensor, t: int) -> Tensor:  # noqa: ARG001
        value = grad.double() ** (2 if len(algorithm.rule.states) == 2 else 1)
        state.mul_(decay).add_(value, alpha=rest)
        return state

    return step


def bitsandbytes_v(beta2: float) -> Decoded:
    """v̂ of `bitsandbytes.optim.AdamW8bit`, decoded with its own table."""
    from bitsandbytes.optim import AdamW8bit

    param = torch.nn.Parameter(torch.zeros(ELEMENTS))
    optimizer = AdamW8bit([param], lr=LR, betas=(0.9, beta2), eps=EPS, weight_decay=0.0, min_8bit_size=1)

    def step(grad: Tensor, t: int) -> Tensor:  # noqa: ARG001
        _step(optimizer, param, grad)
        state = optimizer.state[param]
        block = ELEMENTS // state["absmax2"].numel()
        return state["qmap2"][state["state2"].long()] * state["absmax2"].repeat_interleave(block)

    return step


def torchao_v(beta2: float) -> Decoded:
    """v̂ of `torchao.optim.AdamW8bit`; the stream twice, since smaller tensors are left in fp32."""
    from torchao.optim import AdamW8bit

    param = torch.nn.Parameter(torch.zeros(2 * ELEMENTS))
    optimizer = AdamW8bit([param], lr=LR, betas=(0.9, beta2), eps=EPS, weight_decay=0.0)

    def step(grad: Tensor, t: int) -> Tensor:  # noqa: ARG001
        with torch.compiler.set_stance("force_eager"):
            _step(optimizer, param, grad.repeat(2))
        return optimizer.state[param]["exp_avg_sq"].dequantize()[:ELEMENTS]

    return step


def _step(optimizer: Any, param: Tensor, grad: Tensor) -> None:
    param.grad = grad
    optimizer.step()


PEERS: dict[str, Callable[[float], Decoded]] = {"bitsandbytes": bitsandbytes_v, "torchao": torchao_v}
"""Peers whose v can be read. flashoptim's has the codes of `softsign`, and with them its values."""


def measure(report: Report, variants: Sequence[Variant], peers: Sequence[Subject], algorithm: Algorithm, steps: int) -> None:
    """Rows "horizon/beta2=B/step=T": mean and root mean square of what a codec makes of the state, relative to what it should be.

    SGD has no beta2; its decay is 0.9, and so it says.
    """
    two, name = len(algorithm.rule.states) == 2, algorithm.rule.name
    for beta2 in (0.9,) if name == "sgd" else BETA2:
        runs = {variant.name: ours(variant.make(algorithm), algorithm, beta2) for variant in variants}
        runs |= {peer.name: PEERS[peer.name](beta2) for peer in peers if two and peer.name in PEERS}
        truth, marks = exact(algorithm, beta2), looks(steps)
        for t, grad in enumerate(stationary(steps), start=1):
            true = truth(grad, t)
            for subject, run in runs.items():
                value = run(grad, t)
                if t in marks:
                    bias, rms = compare(value, true)
                    case = f"horizon/{'momentum' if name == 'sgd' else 'beta2'}={beta2:g}/step={t}"
                    report.add(case, subject, "bias", bias)
                    report.add(case, subject, "bias_rms", rms)


def compare(value: Tensor, true: Tensor) -> tuple[float, float]:
    """Mean and root mean square of the relative error over all elements, counted away from zero.

    Of v relative to each element's own. A momentum passes zero, so that it is relative to the mean magnitude.
    """
    size = true if bool((true >= 0).all()) else true.abs().mean()
    off = (value.double() - true) * true.sign() / size
    return off.mean().item(), off.square().mean().sqrt().item()


def rows(report: Report) -> list[Row]:
    """The table's rows: bias and root mean square at each look."""
    words = {"bias": "mean", "bias_rms": "rms"}
    return [
        replace(row, case=f"{row.case.removeprefix('horizon/').replace('/step=', ', after ')}: {words[row.metric]}")
        for row in report.rows
        if row.case.startswith("horizon/")
    ]
