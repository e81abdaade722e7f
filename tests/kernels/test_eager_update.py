"""Lossy codecs, judged on the update that they give in the eager path: against AdamW in fp64, and beside a codec that must fail."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flashoptim_hf.codecs.base import Codec, get_codec
from flashoptim_hf.codecs.softsign import SoftsignCodec
from flashoptim_hf.optim.adamw import RULE

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CODECS = ["none", "softsign", "log", "joint"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stream(numel: int, steps: int, sigma: float = 1.0, seed: int = 0) -> Tensor:
    """Gradients (steps, numel): element scales lognormal(0, sigma), a drift that changes every 50 steps, and a slow swell."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(sigma * torch.randn(numel, generator=generator))
    drift = torch.randn(numel, generator=generator)
    out = torch.empty(steps, numel)
    for t in range(steps):
        if t and t % 50 == 0:
            drift = 0.7 * drift + 0.7 * torch.randn(numel, generator=generator)
        out[t] = scale * (0.3 * drift + torch.randn(numel, generator=generator)) * 1e-3 * (1 + 0.5 * math.sin(t / 30))
    return out


@pytest.mark.parametrize(("sigma", "limit"), [(0.5, 0.02), (1.5, 0.03), (2.5, 0.05)])
def test_log_follows_fp64_step_by_step(Page: type, Reference: type, sigma: float, limit: float) -> None:
    """The error of the total update at every step, not only at the last; without dither it is larger."""
    grads, start = stream(1024, 150, sigma), torch.zeros(1024)
    page, nearest, reference = Page([start]), Page([start], dither=False), Reference(start)
    for t, grad in enumerate(grads):
        page.step([grad])
        nearest.step([grad])
        reference.step(grad)
        assert reference.error(page.master()) < limit, t
    assert reference.error(page.master()) < reference.error(nearest.master())


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_the_error_does_not_depend_on_the_size_of_the_gradients(Page: type, Reference: type, eps: float) -> None:
    """Gradients times 1e-8 to 1e8, eps 0 or scaled alike: the same error to a tenth. fp16 scales could not do this."""
    grads, start = stream(1024, 60), torch.zeros(1024)
    errors = {}
    for size in (1e-8, 1e-4, 1.0, 1e4, 1e8):
        page, reference = Page([start]), Reference(start)
        for grad in grads:
            page.step([grad * size], options={"eps": eps * size})
            reference.step(grad * size, eps=eps * size)
        errors[size] = reference.error(page.master())
    assert errors[1.0] < 0.03
    assert all(abs(error / errors[1.0] - 1) < 0.1 for error in errors.values()), errors


@pytest.mark.parametrize("size", [1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1.0, 1e4, 1e6])
def test_small_and_large_gradients_train(Page: type, Reference: type, size: float) -> None:
    """With the default eps too, the mean move is that of fp64 to codec error, and everything is finite."""
    start = torch.zeros(512)
    page, reference = Page([start]), Reference(start)
    for t in range(30):
        grad = random(512, seed=t) * size + size
        page.step([grad])
        reference.step(grad)
    assert reference.error(page.master()) < 0.03
    assert abs(page.master().mean().item() / reference.w.mean().item() - 1) < 0.01


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_gradients_that_are_always_zero_move_nothing(Page: type, codec: str, eps: float, dtype: torch.dtype) -> None:
    start = random(200).to(dtype)
    page = Page([start], codec, 0 if dtype == FP32 else 24)
    for _ in range(5):
        page.step([torch.zeros(200, dtype=dtype)], options={"eps": eps})
    assert torch.equal(page.params[0], start)
    assert not any(state.any() for state in page.state())


class Apart(SoftsignCodec):
    """The control: m and v rounded apart, m kept where v has code 0. What 8-bit optimizers usually do."""

    def decode(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        alone = get_codec("softsign", RULE.states[:1])
        return (*alone.decode((planes[0], planes[2]), numel), super().decode(planes, numel)[1])

    def encode(self, values: Sequence[Tensor], planes: Sequence[Tensor], *, index: int = 0, step: int = 0) -> None:
        super().encode(values, planes, index=index, step=step)
        get_codec("softsign", RULE.states[:1]).encode(values[:1], (planes[0], planes[2]))


def largest_moves(Page: type, Reference: type, codec: str | Codec, grads: Sequence[Tensor], lr: float = 1e-3) -> tuple[float, float]:
    """The largest move of any element in any one step, in units of lr, and the error of the total update."""
    start = torch.zeros(len(grads[0]))
    page, reference, largest = Page([start], codec), Reference(start), 0.0
    for grad in grads:
        before = page.master()
        page.step([grad], lr)
        reference.step(grad, lr)
        largest = max(largest, ((page.master() - before).abs().max() / lr).item())
    return largest, reference.error(page.master())


def vanishing_in_a_group() -> list[Tensor]:
    """Element 0 alternates +-1, element 1 has 1e-3 throughout, then one gradient of zero: v of element 1 is far below its group's."""
    grads = []
    for t in range(60):
        grad = torch.zeros(32)
        grad[0], grad[1] = (-1.0) ** t, 1e-3
        grads.append(grad)
    return [*grads, torch.zeros(32)]


def every_other_step(sigma: float) -> list[Tensor]:
    """Rows of an embedding: scales lognormal over elements, real gradients on even steps, none on odd ones."""
    scale = torch.exp(sigma * random(2048, seed=1)) * 1e-3
    return [scale * random(2048, seed=t) if t % 2 == 0 else torch.zeros(2048) for t in range(40)]


def rows_used_once() -> list[Tensor]:
    """Every row has a gradient in one step alone, some rows never."""
    grads = []
    for t in range(40):
        grad = torch.zeros(48, 64)
        grad[t] = random(64, seed=t) * torch.exp(random(64, seed=t + 100))
        grads.append(grad.flatten())
    return grads


VANISHING = {
    "group": vanishing_in_a_group(),
    "sigma 1": every_other_step(1.0),
    "sigma 2": every_other_step(2.0),
    "rows": rows_used_once(),
}


@pytest.mark.parametrize("case", list(VANISHING))
def test_no_element_runs_away_where_gradients_vanish(Page: type, Reference: type, case: str) -> None:
    """No single move beyond a few lr, and `log` stays close to fp64. v decodes to 0 nowhere that m does not."""
    move, error = largest_moves(Page, Reference, "log", VANISHING[case])
    assert move < 4
    assert error < 0.05
    move, _ = largest_moves(Page, Reference, "softsign", VANISHING[case])
    assert move < 4


@pytest.mark.parametrize("case", ["group", "sigma 1", "sigma 2"])
def test_moments_rounded_apart_do_run_away(Page: type, Reference: type, case: str) -> None:
    """The control: the same measure on codecs that round m and v apart finds moves of a hundred lr and more."""
    move, _ = largest_moves(Page, Reference, Apart(RULE.states), VANISHING[case])
    assert move > 100


def test_lora_start(Page: type, Reference: type) -> None:
    """B = 0 at the start and A's gradient 0 until B has moved: no jump when it comes."""
    for codec in ("log", "softsign"):
        grads = [torch.zeros(640)] * 5 + [random(640, seed=t) * 1e-5 for t in range(30)]
        move, error = largest_moves(Page, Reference, codec, grads)
        assert move < 8  # fp64 moves by up to 7.3 where the first gradient comes after five zeros
        assert error < (0.03 if codec == "log" else 0.3)
