"""Shared by the tests of kernels: a page of parameters for the eager path, and AdamW in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flashoptim_hf.codecs.base import ALIGN, Codec, get_codec
from flashoptim_hf.codecs.weight_split import CORRECTION_DTYPE, join
from flashoptim_hf.kernels import eager
from flashoptim_hf.kernels.rule import Format, Segment
from flashoptim_hf.optim.adamw import RULE

OPTIONS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


class Page:
    """Parameters side by side in one page, as a pager lays them out: each at a multiple of ALIGN, with a gap after it."""

    def __init__(self, params: Sequence[Tensor], codec: str | Codec = "log", master_bits: int = 0, dither: bool = True) -> None:
        self.params = [p.flatten().clone() for p in params]
        codec = get_codec(codec, RULE.states, dither) if isinstance(codec, str) else codec
        self.fmt = Format(RULE, codec, master_bits)
        self.starts, end = [], ALIGN
        for p in self.params:
            self.starts.append(end)
            end += -(-p.numel() // ALIGN) * ALIGN + ALIGN
        self.planes = [torch.zeros(plane.entries(end), dtype=plane.dtype) for plane in codec.planes]
        if master_bits:
            self.planes.append(torch.zeros(end, dtype=CORRECTION_DTYPE[master_bits]))
        self.time = 0

    def step(self, grads: Sequence[Tensor], lr: float | Tensor = 1e-3, options: dict | None = None, **kwargs: Tensor) -> None:
        self.time += 1
        hyper = (lr, *RULE.scalars({**OPTIONS, **(options or {})}, self.time))
        segments = [
            Segment(p, g.flatten(), start, index=0, step=self.time, hyper=hyper)
            for p, g, start in zip(self.params, grads, self.starts, strict=True)
        ]
        eager.update_page(self.planes, segments, self.fmt, **kwargs)

    def state(self, i: int = 0) -> tuple[Tensor, ...]:
        """Decoded states of parameter i."""
        n, start = self.params[i].numel(), self.starts[i]
        specs = self.fmt.codec.planes
        views = [p[start // s.group : -(-(start + n) // s.group)] for p, s in zip(self.planes, specs, strict=False)]
        return self.fmt.codec.decode(views, n)

    def master(self, i: int = 0) -> Tensor:
        """The fp32 weight of parameter i, copied."""
        p, start = self.params[i], self.starts[i]
        return join(p, self.planes[-1][start : start + p.numel()]) if self.fmt.master_bits else p.float().clone()

    def bits(self) -> list[Tensor]:
        """Everything that a step may change, as bytes, copied."""
        return [x.view(torch.uint8).clone() for x in (*self.params, *self.planes)]


class Reference:
    """AdamW in fp64, from the paper; shares no code with the package."""

    def __init__(self, weight: Tensor) -> None:
        self.w = weight.double().flatten()
        self.start = self.w
        self.m, self.v, self.time = torch.zeros_like(self.w), torch.zeros_like(self.w), 0

    def step(self, grad: Tensor, lr: float = 1e-3, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        self.time += 1
        g = grad.double().flatten()
        self.m = betas[0] * self.m + (1 - betas[0]) * g
        self.v = betas[1] * self.v + (1 - betas[1]) * g * g
        m_hat, v_hat = self.m / (1 - betas[0] ** self.time), self.v / (1 - betas[1] ** self.time)
        update = torch.where(v_hat.sqrt() + eps > 0, m_hat / (v_hat.sqrt() + eps), 0)
        self.w = self.w - lr * weight_decay * self.w - lr * update

    def error(self, weight: Tensor) -> float:
        """Error of a weight's total update, relative to the update."""
        return ((weight.double() - self.w).norm() / (self.w - self.start).norm()).item()


@pytest.fixture(name="Page")
def page_class() -> type[Page]:
    """The class: `Page(params, codec, master_bits, dither)`."""
    return Page


@pytest.fixture(name="Reference")
def reference_class() -> type[Reference]:
    """The class: `Reference(weight)`."""
    return Reference
