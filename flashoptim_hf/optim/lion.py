"""Lion: sign of an interpolated momentum, with decoupled weight decay.

Sources: arXiv 2302.06675, section 3.2 and program 1; 8-bit states and weight splitting, arXiv 2602.23349; paged states, arXiv 2305.14314,
section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._triton import jit, tl
from ..codecs.base import State
from ..errors import ConfigurationError
from ..kernels.rule import UpdateRule
from .base import FlashOptimizer, ParamsT

HYPER = ("lr", "weight_decay", "beta1", "beta1_rest", "beta2", "beta2_rest")


def scalars(options: dict[str, Any], step: int) -> tuple[float, ...]:  # noqa: ARG001
    """The numbers of `HYPER` after lr. Lion has no bias correction, so that the step count does not matter."""
    beta1, beta2 = options["betas"]
    return (options["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2)


def lion_eager(states: Sequence[Tensor], weight: Tensor, grad: Tensor, hyper: Sequence[Any]) -> tuple[tuple[Tensor, ...], Tensor]:
    """One step; see `UpdateRule.eager`. Where momentum and gradient are both 0, or cancel, the weight only decays."""
    lr, weight_decay, beta1, beta1_rest, beta2, beta2_rest = hyper
    direction = torch.sign(states[0] * beta1 + grad * beta1_rest)
    m = states[0] * beta2 + grad * beta2_rest
    return (m,), weight * (1 - lr * weight_decay) - lr * direction


@jit
def lion_device(states, weight, grad, hyper):  # type: ignore[no-untyped-def]
    """`lion_eager` for one tile."""
    lr, weight_decay, beta1, beta1_rest, beta2, beta2_rest = hyper
    mix = states[0] * beta1 + grad * beta1_rest
    m = states[0] * beta2 + grad * beta2_rest
    # lr with the sign of the mix: one bit operation, where a comparison would take two for each sign
    move = (mix.to(tl.int32, bitcast=True) & -2147483648) | lr.to(tl.int32, bitcast=True)
    move = tl.where(mix == 0, 0.0, move.to(tl.float32, bitcast=True))
    return (m,), weight - (lr * weight_decay) * weight - move


RULE = UpdateRule(
    name="lion",
    states=(State("exp_avg", signed=True),),
    hyper=HYPER,
    scalars=scalars,
    eager=lion_eager,
    device=lion_device,
)


class FlashLion(FlashOptimizer):
    """Lion with an 8-bit momentum and low-precision master weights; the arithmetic of each step is fp32.

    Every weight moves by lr at each step, so lr is usually 3 to 10 times smaller than AdamW's, and weight_decay as much larger.

    Args:
        params: parameters, named parameters or groups, as for `torch.optim.AdamW`: bf16, fp16 or fp32.
        lr: learning rate, a float or a 0-dim tensor. Default 1e-4.
        betas: weight of the momentum in the update's direction, and decay rate of the momentum, each in [0, 1). Default (0.9, 0.99).
        weight_decay: decoupled decay, at least 0. Default 0.

    The keyword options are those of `FlashOptimizer`. `codec` and `master_bits` may also be set for each parameter group.

    Raises:
        ConfigurationError: a value out of range, an unknown option value, or a parameter of an unsupported dtype.
    """

    rule = RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        codec: str = "square",
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
            raise ConfigurationError(f"betas={betas!r}: two numbers, each at least 0 and below 1, for example (0.9, 0.99).")
