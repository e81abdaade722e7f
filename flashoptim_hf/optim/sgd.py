"""SGD with momentum, dampening and Nesterov's variant, as in `torch.optim.SGD`.

Sources: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013, section 2, in the form of
`torch.optim.SGD`, where the learning rate multiplies the momentum; decoupled decay, arXiv 1711.05101, algorithm 1; 8-bit states and weight
splitting, arXiv 2602.23349; paged states, arXiv 2305.14314, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from .._triton import jit, tl
from ..codecs.base import State
from ..errors import ConfigurationError
from ..kernels.rule import UpdateRule
from .base import FlashOptimizer, ParamsT

HYPER = ("lr", "decoupled", "coupled", "momentum", "rest", "grad_share", "buffer_share")


def scalars(options: dict[str, Any], step: int) -> tuple[float, ...]:
    """The numbers of `HYPER` after lr.

    Every variant is one formula: with g = grad + coupled weight and b = momentum b + rest g, the update is grad_share g + buffer_share b.
    At the first step the buffer is 0 and becomes g, not (1 - dampening) g.
    """
    momentum, decay = options["momentum"], options["weight_decay"]
    decays = (decay, 0.0) if options["decoupled_weight_decay"] else (0.0, decay)
    rest = 1.0 if step == 1 else 1 - options["dampening"]
    shares = (1.0, momentum) if options["nesterov"] or momentum == 0 else (0.0, 1.0)
    return (*decays, momentum, rest, *shares)


def sgd_eager(states: Sequence[Tensor], weight: Tensor, grad: Tensor, hyper: Sequence[Any]) -> tuple[tuple[Tensor, ...], Tensor]:
    """One step; see `UpdateRule.eager`. Without states, the plain gradient step."""
    lr, decoupled, coupled, momentum, rest, grad_share, buffer_share = hyper
    grad = grad + coupled * weight
    kept = weight * (1 - lr * decoupled)
    if not states:
        return (), kept - lr * grad
    buffer = states[0] * momentum + grad * rest
    return (buffer,), kept - lr * (grad * grad_share + buffer * buffer_share)


@jit
def sgd_device(states, weight, grad, hyper):  # type: ignore[no-untyped-def]
    """`sgd_eager` for one tile."""
    tl.static_assert(len(states) <= 1)
    lr, decoupled, coupled, momentum, rest, grad_share, buffer_share = hyper
    grad = grad + coupled * weight
    if len(states) == 0:
        buffers = ()
        update = grad
    else:
        buffer = states[0] * momentum + grad * rest
        buffers = (buffer,)  # type: ignore[assignment]
        update = grad * grad_share + buffer * buffer_share
    return buffers, weight - (lr * decoupled) * weight - lr * update


def needs_states(group: dict[str, Any]) -> bool:
    """Whether a group has a momentum to keep."""
    return bool(group["momentum"] != 0)


RULE = UpdateRule(
    name="sgd",
    states=(State("momentum_buffer", signed=True),),
    hyper=HYPER,
    scalars=scalars,
    eager=sgd_eager,
    device=sgd_device,
    needs_states=needs_states,
)


class FlashSGD(FlashOptimizer):
    """SGD with an 8-bit momentum and low-precision master weights; the arithmetic of each step is fp32.

    Args:
        params: parameters, named parameters or groups, as for `torch.optim.SGD`: bf16, fp16 or fp32.
        lr: learning rate, a float or a 0-dim tensor. Default 1e-3.
        momentum: decay rate of the momentum, at least 0. Default 0: no momentum, and no state is stored beside corrections.
        dampening: share of the gradient that does not enter the momentum, from the second step on. Default 0.
        weight_decay: at least 0. Default 0. Added to the gradient, as in `torch.optim.SGD`.
        nesterov: Nesterov's variant, which needs a momentum and no dampening. Default False.
        decoupled_weight_decay: take the decay off the weights themselves, as AdamW does. Default False.

    The keyword options are those of `FlashOptimizer`. `codec` and `master_bits` may also be set for each parameter group.

    Raises:
        ConfigurationError: a value out of range, an unknown option value, or a parameter of an unsupported dtype.
    """

    rule = RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        decoupled_weight_decay: bool = False,
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
        momentum, dampening = group["momentum"], group["dampening"]
        if not 0 <= momentum < float("inf"):
            raise ConfigurationError(f"momentum={momentum!r} must be a finite number, at least 0; the usual value is 0.9.")
        if not abs(dampening) < float("inf"):
            raise ConfigurationError(f"dampening={dampening!r} must be a finite number; the usual value is 0.")
        for name in ("nesterov", "decoupled_weight_decay"):
            if not isinstance(group[name], bool):
                raise ConfigurationError(f"{name}={group[name]!r} must be True or False.")
        if group["nesterov"] and (momentum == 0 or dampening != 0):
            raise ConfigurationError(
                f"nesterov=True with momentum={momentum!r} and dampening={dampening!r}: it needs a momentum above 0, for example 0.9, and "
                "dampening=0."
            )
