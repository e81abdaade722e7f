"""Gradients to judge a codec on: streams captured from real training, and synthetic ones with known faults built in.

A stream is a tensor [steps, elements] of gradients of one parameter. A new synthetic stream is one entry of `SYNTHETIC`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..errors import ConfigurationError


@dataclass(frozen=True)
class Problem:
    """One stream of gradients and AdamW's options; weights start at zero and there is no decay.

    Attributes:
        case: its name in a report.
        grads: fp32, shape (steps, elements).
        eps: AdamW's epsilon. Default 1e-8.
        lr: learning rate. Default 1e-3.
        betas: decay rates. Default (0.9, 0.999).
    """

    case: str
    grads: Tensor
    eps: float = 1e-8
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)

    def scaled(self, scale: float, zero_eps: bool = False) -> Problem:
        """The same problem with gradients and eps multiplied by `scale`, which in exact arithmetic moves the weights alike.

        `zero_eps` sets eps to 0 instead. Both show in the name.
        """
        prefix = f"scale={scale:g}{',eps=0' if zero_eps else ''}/"
        return replace(self, case=prefix + self.case, grads=self.grads * scale, eps=0.0 if zero_eps else self.eps * scale)


def from_file(path: Path) -> list[Problem]:
    """Every tensor of a safetensors file, in the order of the names.

    Raises:
        ConfigurationError: not a safetensors file, no tensors in it, or one that is not a finite floating [steps, elements].
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{path} cannot be read as a safetensors file ({error}).") from error
    if not tensors:
        raise ConfigurationError(f"{path} holds no tensors; each one should be [steps, elements] gradients of one parameter.")
    return [Problem(name, _checked(tensors[name], f"{path}: tensor {name!r}")) for name in sorted(tensors)]


def _checked(grads: Tensor, what: str) -> Tensor:
    """`grads` in fp32, or an error."""
    if grads.dim() != 2 or not grads.is_floating_point() or grads.numel() == 0:
        raise ConfigurationError(f"{what} is {grads.dtype} of shape {tuple(grads.shape)}; it should be floating [steps, elements].")
    grads = grads.float()
    if not bool(torch.isfinite(grads).all()):
        raise ConfigurationError(f"{what} has entries that are not finite; a run skips such a step, so leave it out of the file.")
    return grads


def drifting(sigma: float, keep: float, seed: int, steps: int, elements: int) -> Tensor:
    """Noise around a drifting mean, each element at its own scale; fp32 [steps, elements].

    g_i(t) = s_i (0.3 mu_i + z) 1e-3 (1 + 0.5 sin(t / 30)) for t = 1, 2, ..., with z normal, s_i lognormal(0, sigma) and mu_i normal; every
    50 steps mu becomes 0.7 mu + 0.7 z'. Each entry is kept with probability `keep`, else 0.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(elements, generator=generator)

    scale, mean = torch.exp(sigma * normal()), normal()
    grads = torch.empty(steps, elements)
    for t in range(1, steps + 1):
        if t % 50 == 0:
            mean = 0.7 * mean + 0.7 * normal()
        grads[t - 1] = scale * (0.3 * mean + normal()) * 1e-3 * (1 + 0.5 * math.sin(t / 30))
        if keep < 1:
            grads[t - 1] *= torch.rand(elements, generator=generator) < keep
    return grads


SYNTHETIC: Mapping[str, tuple[float, float]] = {
    "lognormal_0.5": (0.5, 1.0),
    "lognormal_1.5": (1.5, 1.0),
    "lognormal_2.5": (2.5, 1.0),
    "sparse": (0.5, 0.05),
}
"""Name to the sigma and keep of `drifting`. Sigma 1.5 and 2.5 spread the scales within a group over some 6 and 10 octaves."""


def synthetic(seeds: Sequence[int], *, steps: int = 1000, elements: int = 4096) -> list[Problem]:
    """Every stream of `SYNTHETIC` with every seed; the case is "synthetic/NAME/seed=N". Defaults: 1000 steps of 4096 elements."""
    return [
        Problem(f"synthetic/{name}/seed={seed}", drifting(sigma, keep, seed, steps, elements))
        for name, (sigma, keep) in SYNTHETIC.items()
        for seed in seeds
    ]
