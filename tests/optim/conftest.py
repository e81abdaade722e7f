"""Shared by the optimizer's tests: the ways in which an optimizer can be placed, and a dumb fp64 AdamW to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from flashoptim_hf.optim.adamw import FlashAdamW

# name -> options: state in plain memory, paged on the host alone, and paged through the simulated device with pages of a few groups
PLACEMENTS = {
    "resident": {},
    "paged": {"paged": True},
    "simulated": {"paged": True, "page_bytes": 4096, "simulate": 3},
}


@pytest.fixture(params=PLACEMENTS, ids=list(PLACEMENTS))
def opt(request: pytest.FixtureRequest) -> Callable[..., FlashAdamW]:
    """`FlashAdamW` in each placement."""
    return lambda params, **options: FlashAdamW(params, **{**PLACEMENTS[request.param], **options})


class Reference:
    """AdamW in fp64 on copies of the parameters, written from the paper, sharing no code with the package. One step count per parameter."""

    def __init__(self, params: Iterable[Tensor], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2) -> None:
        self.params = list(params)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.weights = [p.detach().double().clone() for p in self.params]
        self.start = [w.clone() for w in self.weights]
        self.m = [torch.zeros_like(w) for w in self.weights]
        self.v = [torch.zeros_like(w) for w in self.weights]
        self.t = [0] * len(self.params)

    def step(self) -> None:
        """Use the `.grad` that the real parameters hold now."""
        b1, b2 = self.betas
        for i, p in enumerate(self.params):
            if p.grad is None:
                continue
            g = p.grad.double()
            self.t[i] += 1
            self.m[i] = b1 * self.m[i] + (1 - b1) * g
            self.v[i] = b2 * self.v[i] + (1 - b2) * g * g
            m_hat, v_hat = self.m[i] / (1 - b1 ** self.t[i]), self.v[i] / (1 - b2 ** self.t[i])
            self.weights[i] = self.weights[i] * (1 - self.lr * self.weight_decay) - self.lr * m_hat / (v_hat.sqrt() + self.eps)

    def error(self, i: int = 0, weight: Tensor | None = None) -> float:
        """Relative error of the total update of parameter i (of its weight as it is, or of `weight`)."""
        weight = self.params[i].detach() if weight is None else weight
        moved = self.weights[i] - self.start[i]
        return ((weight.double() - self.weights[i]).norm() / moved.norm().clamp_min(1e-300)).item()


@pytest.fixture
def reference() -> type[Reference]:
    return Reference


def gradients(params: Iterable[Tensor], seed: int, scale: float = 1e-2) -> None:
    """Give every parameter a gradient whose elements differ in scale by two orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        spread = torch.exp(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        p.grad = (torch.randn(p.shape, generator=generator) * spread * scale).to(p.dtype)


@pytest.fixture
def set_gradients() -> Callable[..., None]:
    return gradients


def bits(state: dict) -> dict:
    """A nested state dict with every tensor as raw bytes, so that == compares bits (and NaN equals itself)."""
    if isinstance(state, Tensor):
        return (tuple(state.shape), str(state.dtype), state.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [bits(value) for value in state]
    return state


@pytest.fixture
def as_bits() -> Callable[[dict], dict]:
    return bits
