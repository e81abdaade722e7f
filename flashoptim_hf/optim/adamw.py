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
from ..errors import ConfigurationError
from ..kernels.rule import UpdateRule
from .base import FlashOptimizer, ParamsT

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


RULE = UpdateRule(
    name="adamw",
    states=(State("exp_avg", signed=True), State("exp_avg_sq", signed=False)),
    hyper=HYPER,
    scalars=scalars,
    eager=adamw_eager,
    device=adamw_device,
)


class FlashAdamW(FlashOptimizer):
    """AdamW with 8-bit moments and low-precision master weights; the arithmetic of each step is fp32.

    Args:
        params: parameters, named parameters or groups, as for `torch.optim.AdamW`: bf16, fp16 or fp32.
        lr: learning rate, a float or a 0-dim tensor. Default 1e-3.
        betas: decay rates of the two moments, each in [0, 1). Default (0.9, 0.999).
        eps: added to the denominator, at least 0. Default 1e-8.
        weight_decay: decoupled decay, at least 0. Default 1e-2, as in `torch.optim.AdamW`.

    The keyword options are those of `FlashOptimizer`. `codec` and `master_bits` may also be set for each parameter group.

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
