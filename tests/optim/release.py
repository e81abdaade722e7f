"""What the tests of gradient release share: a model of a few layers, runs that can be compared, and what is alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flashoptim_hf import FlashAdamW
from flashoptim_hf.optim import gradient_release

WIDTH = 32
RELEASED = {"gradient_release": True, "paged": True, "page_bytes": 2048, "simulate": 1}


def layers(count: int = 4, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    body = [layer for _ in range(count) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())]
    return nn.Sequential(*body, nn.Linear(WIDTH, 1)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x) - x.sum(1, keepdim=True)).float().square().mean()


def step_on(optimizer: Any, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and the rest, as the Trainer divides them."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def trained(
    model: nn.Module,
    steps: int = 5,
    cls: Any = FlashAdamW,
    forward: Callable[[Tensor], Tensor] | None = None,
    schedule: bool = False,
    **options: Any,
) -> tuple[Any, list[float]]:
    optimizer = cls(groups_of(model), lr=1e-2, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) if schedule else None
    losses = []
    for step in range(steps):
        loss = loss_of(forward or model, batch(step, next(model.parameters()).dtype))
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return optimizer, losses


def run(make: Callable[[], nn.Module] = layers, **options: Any) -> tuple[nn.Module, Any]:
    model = make()
    return model, trained(model, **options)


class Watch:
    """Bytes of gradients that are alive when a gradient is final: whoever holds them, hooks, closures or `.grad`."""

    def __init__(self, model: nn.Module) -> None:
        self.now = self.peak = 0
        self.seen: set[int] = set()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.born)

    def born(self, param: Tensor) -> None:
        grad = param.grad
        assert grad is not None
        nbytes = grad.nbytes
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(grad.untyped_storage(), self.gone, nbytes)

    def gone(self, nbytes: int) -> None:
        self.now -= nbytes


def hooks_of(model: nn.Module) -> list[Any]:
    found = [hook for p in model.parameters() for hook in (p._post_accumulate_grad_hooks or {}).values()]
    return [hook for hook in found if isinstance(hook, gradient_release._Hook)]
