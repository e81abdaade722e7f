"""AdamW: Adam with decoupled weight decay.

Sources: Adam, arXiv 1412.6980, algorithm 1; decoupled decay, arXiv 1711.05101, algorithm 2; 8-bit states and weight splitting,
arXiv 2602.23349; paged states, arXiv 2305.14314, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._triton import jit, tl
from ..codecs import device
from ..codecs.base import State
from ..codecs.learned import INTERVAL
from ..errors import ConfigurationError
from ..kernels.rule import UpdateRule
from .base import FlashOptimizer, ParamsT
from .learning import check_interval

HYPER = ("lr", "weight_decay", "beta1", "beta1_rest", "beta2", "beta2_rest", "rate", "eps")


def scalars(options: dict[str, Any], step: int) -> tuple[float, ...]:
    """The numbers of `HYPER` after lr, in fp64.

    Both bias corrections are folded into `rate` and `eps`: with b1 = 1 - beta1^t and b2 = 1 - beta2^t,
    (m / b1) / (sqrt(v / b2) + eps) = (sqrt(b2) / b1) m / (sqrt(v) + eps sqrt(b2)).
    """
    beta1, beta2 = options["betas"]
    root = math.sqrt(1 - beta2**step)
    return (options["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, root / (1 - beta1**step), options["eps"] * root)


def adamw_eager(states: Sequence[Tensor], weight: Tensor, grad: Tensor, hyper: Sequence[Any]) -> tuple[tuple[Tensor, ...], Tensor]:
    """One step; see `UpdateRule.eager`. Where the denominator is 0 (eps = 0 and no gradient so far) the weight does not move."""
    lr, weight_decay, beta1, beta1_rest, beta2, beta2_rest, rate, eps = hyper
    m = states[0] * beta1 + grad * beta1_rest
    v = states[1] * beta2 + grad * grad * beta2_rest
    denominator = v.sqrt() + eps
    update = torch.where(denominator != 0, m / denominator, 0)
    return (m, v), weight * (1 - lr * weight_decay) - (lr * rate) * update


REACH, SLACK = 1.25, 0.02
"""What `settle` may make of a step: at most 1.25 times its length and 0.02 lr."""
SMALL = 1e-4
"""The least q = beta1^t that `settle` tells from 0, its limit to 5e-5: below, fp32 would not hold 1 - q."""
_REACH, _SLACK, _SMALL = (tl.constexpr(value) for value in (REACH, SLACK, SMALL))


def settle(states: Sequence[Tensor], lost: Tensor, weight: Tensor, hyper: Sequence[Any], step: int) -> Tensor:
    """Move the weight by what an error of the momentum will take from it in the steps to come; see `UpdateRule.settle`.

    With lr and the second moment as they are, an error e of m after step t moves a weight by -lr e rate / (sqrt(v) + eps) times the sum
    over k >= 1 of beta1^k (1 - q) / (1 - q beta1^k), q = beta1^t. The integral over beta1^k instead, beta1 / (1 - beta1) times
    (1 - q) ln(1 / (1 - q)) / q, is within a seventh of it. An element that hardly moves is moved hardly more: the step as a whole stays
    within `REACH` and `SLACK`, and what does not fit is not made up for.
    """
    lr, _, beta1, beta1_rest, _, _, rate, eps = hyper
    m, v = states
    denominator = v.sqrt() + eps
    share = torch.where(denominator != 0, rate / denominator, 0)
    move = m * share
    limit = REACH * move.abs() + SLACK
    q = max(beta1**step, SMALL)
    coast = beta1 / beta1_rest * (q - 1) * math.log(1 - q) / q
    return weight - lr * ((move + coast * lost * share).minimum(limit).maximum(-limit) - move)


@jit
def settle_device(states, lost, weight, hyper, step):  # type: ignore[no-untyped-def]
    """`settle` for one tile."""
    lr, _, beta1, beta1_rest, _, _, rate, eps = hyper
    m, v = states
    share = rate * device.reciprocal(device.sqrt(v) + tl.maximum(eps, 1e-19))
    move = m * share
    limit = tl.abs(move) * _REACH + _SLACK
    q = tl.maximum(device.exp2(device.log2(beta1) * step.to(tl.float32)), _SMALL)
    coast = beta1 / beta1_rest * (q - 1.0) * device.log2(1.0 - q) * 0.6931471805599453 * device.reciprocal(q)
    return weight - lr * (tl.minimum(tl.maximum(move + coast * lost * share, -limit), limit) - move)


@jit
def adamw_device(states, weight, grad, hyper):  # type: ignore[no-untyped-def]
    """`adamw_eager` for one tile.

    An eps below 1e-19 counts as 1e-19, the root of the smallest normal v: the denominator is then never 0, and need not be compared.
    """
    lr, weight_decay, beta1, beta1_rest, beta2, beta2_rest, rate, eps = hyper
    m = states[0] * beta1 + grad * beta1_rest
    v = states[1] * beta2 + grad * grad * beta2_rest
    update = m * device.reciprocal(device.sqrt(v) + tl.maximum(eps, 1e-19))
    return (m, v), weight - (lr * weight_decay) * weight - (lr * rate) * update


@jit
def betas_device(hyper):  # type: ignore[no-untyped-def]
    """See `UpdateRule.device_betas`."""
    return hyper[2], hyper[3], hyper[4], hyper[5]


@jit
def sums_device(states, weight, grad, hyper):  # type: ignore[no-untyped-def]
    """`adamw_device` for states as sums; see `UpdateRule.device_sums`. The root is taken of |v|, since v is below 0 where there is none."""
    lr, weight_decay, _, beta1_rest, _, beta2_rest, rate, eps = hyper
    m = tl.fma(states[0], states[2], grad)
    v = tl.fma(grad, grad, states[1])
    root = device.rsqrt(beta2_rest)
    update = m * device.reciprocal(device.sqrt_abs(v) + tl.maximum(eps, 1e-19) * root)
    return (m, v), weight - (lr * weight_decay) * weight - (lr * rate * beta1_rest * root) * update


RULE = UpdateRule(
    name="adamw",
    states=(State("exp_avg", signed=True), State("exp_avg_sq", signed=False)),
    hyper=HYPER,
    scalars=scalars,
    eager=adamw_eager,
    device=adamw_device,
    device_betas=betas_device,
    device_sums=sums_device,
    settle=settle,
    device_settle=settle_device,
)


class FlashAdamW(FlashOptimizer):
    """AdamW with 8-bit moments and low-precision master weights; the arithmetic of each step is fp32.

    Args:
        params: parameters, named parameters or groups, as for `torch.optim.AdamW`: bf16, fp16 or fp32.
        lr: learning rate, a float or a 0-dim tensor. Default 1e-3.
        betas: decay rates of the two moments, each in [0, 1). Default (0.9, 0.999).
        eps: added to the denominator, at least 0. Default 1e-8.
        weight_decay: decoupled decay, at least 0. Default 1e-2, as in `torch.optim.AdamW`.
        learn_interval: with codec="learned", curves are learned after steps 1, 2, 4, 8, ... and whenever so many steps have passed, at
            least 1. Default 100. Other codecs do not learn.

    The other keyword options are those of `FlashOptimizer`. `codec` and `master_bits` may also be set for each parameter group.

    Raises:
        ConfigurationError: a value out of range, an unknown option value, or a parameter of an unsupported dtype.
    """

    rule = RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        codec: str = "log",
        master_bits: Literal[24, 32, "auto"] | None = 24,
        paged: bool = False,
        page_bytes: int | str = "32MiB",
        device_budget_bytes: int | float | str = 0,
        transport: str = "staged",
        offload_dir: str | None = None,
        offload_keep: bool = False,
        gradient_release: bool = False,
        nonfinite: str = "skip",
        dither: bool = True,
        learn_interval: int = INTERVAL,
        kernel: str = "auto",
        simulate: int | None = None,
    ) -> None:
        options = {key: value for key, value in locals().items() if key not in ("self", "params", "__class__")}
        super().__init__(params, options)

    @classmethod
    def check_group(cls, group: dict[str, Any]) -> None:
        betas = group["betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigurationError(f"betas={betas!r}: two numbers, each at least 0 and below 1, for example (0.9, 0.999).")
        if not group["eps"] >= 0:
            raise ConfigurationError(f"eps={group['eps']!r} must be at least 0; the usual value is 1e-8.")
        check_interval(group["learn_interval"])
