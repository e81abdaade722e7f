"""The optimizers of `bench convergence`: fp32, ours and the 8-bit ones of other packages, by algorithm.

Peers run as they come: bitsandbytes and torchao leave tensors below 4096 elements in fp32, and step bf16 weights as they are, since they
have no masters. fp32 of bf16 weights is torch's optimizer on fp32 copies, from which the weights are rounded after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigurationError, UnsupportedError
from ..optim.adamw import FlashAdamW
from ..optim.lion import FlashLion
from ..optim.sgd import FlashSGD
from .adamw_peers import stance
from .peers import installed

Make = Callable[..., Optimizer]
MOMENTUM = 0.9
NUDGE = 1e-6
REFERENCE, CONTROL = "fp32", "fp32_nudged"


def _bitsandbytes(name: str, params: Sequence[nn.Parameter], **options: float) -> Optimizer:
    from bitsandbytes import optim

    return getattr(optim, name)(params, **options)


def _torchao(params: Sequence[nn.Parameter], **options: float) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, **options)


def _with_control(make: Make) -> dict[str, Make]:
    return {REFERENCE: make, CONTROL: make}


OPTIMIZERS: Mapping[str, Mapping[str, Make]] = MappingProxyType(
    {
        "adamw": {
            **_with_control(torch.optim.AdamW),
            "log": FlashAdamW,
            "joint": partial(FlashAdamW, codec="joint"),
            "learned": partial(FlashAdamW, codec="learned"),
            "bitsandbytes": partial(_bitsandbytes, "AdamW8bit"),
            "torchao": _torchao,
        },
        "lion": {
            # torch has no Lion
            **_with_control(partial(FlashLion, codec="none")),
            "square": FlashLion,
            "bitsandbytes": partial(_bitsandbytes, "Lion8bit"),
        },
        "sgd": {
            **_with_control(partial(torch.optim.SGD, momentum=MOMENTUM)),
            "square": partial(FlashSGD, momentum=MOMENTUM),
            "bitsandbytes": partial(_bitsandbytes, "SGD8bit", momentum=MOMENTUM),
        },
    }
)
"""Algorithm to its optimizers; each takes parameters, `lr` and `weight_decay`. The first is what the others are compared with."""

OURS = ("log", "joint", "learned", "square")
"""Those of this package, under the names of their codecs."""
PEERS = ("bitsandbytes", "torchao")
"""Those that are other packages, under their names."""
NAMES = (REFERENCE, CONTROL, *OURS, *PEERS)
"""All, in the order in which they are run and shown."""


def choose(names: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The optimizers to run and the packages that were left out since they are not installed.

    Args:
        names: from `NAMES`; None: all that are installed. fp32 always comes along, since everything is compared with it.

    Raises:
        ConfigurationError: an unknown name.
        UnsupportedError: a package that is asked for by name is not installed.
    """
    missing = [name for name in PEERS if not installed(name)]
    if names is None:
        return [name for name in NAMES if name not in missing], missing
    for name in names:
        if name not in NAMES:
            raise ConfigurationError(f"--optimizers: {name!r} is not known; choose from {', '.join(NAMES)}, or give 'all'.")
        if name in missing:
            raise UnsupportedError(f"--optimizers: {name} is not installed (pip install {name}); 'all' takes those that are there.")
    return [name for name in NAMES if name in (REFERENCE, *names)], []


class Stepper:
    """Steps a model's parameters with one of the optimizers, at a learning rate that is given at each step.

    Args:
        algorithm, name: keys of `OPTIMIZERS`.
        params: fp32 or bf16, on the CPU.
        lr: of the first step.
        weight_decay: see `Task`.
        seed: of the control's nudge, which multiplies every weight by 1 + 1e-6 z, z normal.
    """

    def __init__(self, algorithm: str, name: str, params: Sequence[nn.Parameter], lr: float, weight_decay: float, seed: int) -> None:
        self.params = list(params)
        self.stepped = self.params
        if name in (REFERENCE, CONTROL) and any(param.dtype != torch.float32 for param in self.params):
            self.stepped = [nn.Parameter(param.detach().float().clone()) for param in self.params]
        if name == CONTROL:
            generator = torch.Generator().manual_seed(2000 + seed)
            for param in self.stepped:
                param.data.mul_(1 + NUDGE * torch.randn(param.shape, generator=generator))
            self._round()
        self.optimizer = OPTIMIZERS[algorithm][name](self.stepped, lr=lr, weight_decay=weight_decay)
        self._around = stance(name, torch.device("cpu"))

    def step(self, lr: float) -> None:
        """One step with the gradients that the parameters hold, which are freed."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao's must stay the tensor that it is
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if self.stepped is not self.params:
            for master, param in zip(self.stepped, self.params, strict=True):
                master.grad = None if param.grad is None else param.grad.float()
        with self._around():
            self.optimizer.step()
        self._round()
        for param in (*self.stepped, *self.params):
            param.grad = None

    def _round(self) -> None:
        """bf16 weights from their fp32 copies, where there are copies."""
        if self.stepped is not self.params:
            for master, param in zip(self.stepped, self.params, strict=True):
                param.data.copy_(master.data)
