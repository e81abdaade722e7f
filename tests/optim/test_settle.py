"""AdamW's feedback of rounding errors: where the momentum leads in the end, and how far a single step may go."""

from __future__ import annotations

import pytest
import torch

from flashoptim_hf.optim.adamw import REACH, RULE, SLACK, adamw_eager, settle

LR = 1e-3


def hyper(step: int, beta1: float, eps: float = 1e-8) -> tuple[float, ...]:
    return (LR, *RULE.scalars({"betas": (beta1, 0.999), "eps": eps, "weight_decay": 0.0}, step))


@pytest.mark.parametrize("beta1", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("step", [1, 2, 5, 20, 100, 5000])
def test_an_error_of_m_is_made_up_for(beta1: float, step: int) -> None:
    """After 3000 steps of stationary gradients the weight is where it would have been, but for a seventh of what the error did."""
    second = 0.04
    v = torch.tensor([second * (1 - 0.999**step)], dtype=torch.float64)
    m, lost = torch.tensor([0.1], dtype=torch.float64), torch.tensor([2e-4], dtype=torch.float64)

    def coast(m: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The rest of the way without gradients in m, and with a second moment that stays."""
        for t in range(step + 1, step + 3001):
            before = torch.tensor([second * (1 - 0.999**t) / 0.999], dtype=torch.float64)
            (m, _), weight = adamw_eager((m, before), weight, torch.zeros(1, dtype=torch.float64), hyper(t, beta1))
        return weight

    start = torch.zeros(1, dtype=torch.float64)
    wanted = coast(m, start)
    off = coast(m - lost, start) - wanted
    settled = coast(m - lost, settle((m, v), lost, start, hyper(step, beta1), step)) - wanted
    assert off.abs() > 1e-7
    assert settled.abs() < 0.15 * off.abs()


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_a_step_goes_hardly_farther(eps: float) -> None:
    """However large the error: at most 1.25 times as far and 0.02 lr, in its direction or back; and nothing comes of nothing."""
    generator = torch.Generator().manual_seed(0)
    v = torch.exp(4 * torch.randn(4096, generator=generator, dtype=torch.float64) - 20)
    m = v.sqrt() * torch.randn(4096, generator=generator, dtype=torch.float64)
    lost = v.sqrt() * torch.randn(4096, generator=generator, dtype=torch.float64) * torch.logspace(-4, 3, 4096, dtype=torch.float64)
    m[:8], v[:4], lost[:4] = 0, 0, 0
    for step in (1, 10, 1000):
        scalars = hyper(step, 0.9, eps)
        rate, scaled_eps = scalars[6:]
        share = torch.where(v.sqrt() + scaled_eps > 0, rate / (v.sqrt() + scaled_eps), 0)
        move = -LR * m * share
        total = move + settle((m, v), lost, torch.zeros_like(m), scalars, step)
        assert total.isfinite().all()
        assert (total.abs() <= REACH * move.abs() + SLACK * LR + 1e-12).all()
        assert (total[4:8].abs() > 0).all()
        assert not total[:4].any()
        assert torch.equal(settle((m, v), torch.zeros_like(m), m, scalars, step), m)
