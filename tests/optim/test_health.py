"""The close look at a step: it finds what is wrong, finds nothing where nothing is, changes nothing, and waits for nobody."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.optim import finite
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.optim.base import FlashOptimizer
from flashoptim_hf.optim.health import Finding
from flashoptim_hf.optim.lion import FlashLion
from flashoptim_hf.optim.sgd import FlashSGD

SHAPES = ((100, 64), (1000,), (7,), ())
BF16, FP32 = torch.bfloat16, torch.float32
HEALTHY = (0.02, 0.0, 0.05)  # most that is swallowed, saturated, and wrong by rounding, where nothing is wrong


def weights(dtype: torch.dtype = BF16) -> list[nn.Parameter]:
    gen = torch.Generator().manual_seed(0)
    return [nn.Parameter((torch.randn(shape, generator=gen) * 0.02).to(dtype)) for shape in SHAPES]


def run(
    cls: type[FlashOptimizer] = FlashAdamW,
    dtype: torch.dtype = BF16,
    steps: int = 12,
    scale: float = 1e-2,
    spread: float = 1.0,
    look: bool = True,
    **options: Any,
) -> tuple[FlashOptimizer, list[nn.Parameter]]:
    """Steps with gradients of lognormal scale; the last one is looked at, if any."""
    params = weights(dtype)
    optimizer = cls(params, **options)
    gen = torch.Generator().manual_seed(1)
    scales = [torch.exp(spread * torch.randn(p.shape, generator=gen)) * scale for p in params]
    for step in range(steps):
        if look and step == steps - 1:
            optimizer.examine(8)
        for p, s in zip(params, scales, strict=True):
            grad = ((torch.randn(p.shape, generator=gen) + 0.3) * s).to(dtype)
            if options.get("gradient_release"):
                (p * grad).sum().backward()
            else:
                p.grad = grad
        optimizer.step()
    return optimizer, params


def worst(findings: list[Finding] | None) -> tuple[float, float, float]:
    assert findings
    return tuple(max(getattr(one, cause) for one in findings) for cause in ("swallowed", "saturated", "codec_error"))


WELL: dict[str, dict[str, Any]] = {
    "adamw": {},
    "joint": {"codec": "joint"},
    "learned": {"codec": "learned"},
    "learned, wide range": {"codec": "learned", "spread": 3.0, "steps": 17},
    "fp32 weights": {"dtype": FP32},
    "fp16 weights": {"dtype": torch.float16},
    "32 bits": {"master_bits": 32, "lr": 1e-6},
    "wide range": {"spread": 3.0},
    "fp32 states": {"codec": "none"},
    "lion": {"cls": FlashLion},
    "sgd": {"cls": FlashSGD, "momentum": 0.9, "lr": 0.1},
    "sgd without states": {"cls": FlashSGD, "lr": 0.1},
    "paged": {"paged": True},
    "small pages": {"paged": True, "page_bytes": 4096},
    "simulated device": {"paged": True, "page_bytes": 4096, "simulate": 3},
    "some stay": {"paged": True, "page_bytes": 4096, "simulate": 5, "device_budget_bytes": 0.5},
    "zero copy": {"paged": True, "page_bytes": 4096, "simulate": 7, "transport": "zero_copy"},
    "plain torch": {"kernel": "eager"},
    "released": {"gradient_release": True},
    "released, simulated": {"gradient_release": True, "paged": True, "page_bytes": 4096, "simulate": 2},
    "lr in a tensor": {"lr": torch.tensor(1e-3)},
}


@pytest.mark.parametrize("name", WELL)
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    optimizer, params = run(**WELL[name])
    findings = optimizer.findings()
    assert {id(one.param) for one in findings} == {id(p) for p in params}
    assert all(one.looked_at >= min(one.param.numel(), 512) for one in findings)
    assert all(found <= limit for found, limit in zip(worst(findings), HEALTHY, strict=True)), worst(findings)
    assert optimizer.findings() is None  # once


@pytest.mark.parametrize("name", WELL)
def test_looking_changes_nothing(name: str, as_bits: Callable) -> None:
    looked, plain = (run(**WELL[name], look=look)[0] for look in (True, False))
    assert as_bits(looked.state_dict()["state"]) == as_bits(plain.state_dict()["state"])
    for a, b in zip(looked.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)
    assert looked.memory_report().page_out_bytes == plain.memory_report().page_out_bytes
    assert looked.memory_report().page_in_bytes == plain.memory_report().page_in_bytes


ILL: dict[str, tuple[dict[str, Any], int]] = {
    "24 bits swallow": ({"lr": 1e-7}, 0),
    "no correction": ({"lr": 3e-6, "master_bits": None}, 0),
    "fp32 weights at a tiny rate": ({"lr": 1e-11, "dtype": FP32}, 0),
    "square roots below a 255th of their group's largest": ({"codec": "softsign", "spread": 3.0}, 1),
    "more octaves than there are": ({"spread": 12.0, "dtype": FP32, "steps": 3}, 1),
    "fp16 constants underflow": ({"codec": "softsign", "scale": 1e-12, "dtype": FP32}, 1),
    "steps from codes of 0": ({"codec": "softsign", "spread": 3.0}, 2),
}


@pytest.mark.parametrize("placed", [{}, {"paged": True, "page_bytes": 8192, "simulate": 4}])
@pytest.mark.parametrize("name", ILL)
def test_what_is_wrong_is_found(name: str, placed: dict[str, Any]) -> None:
    options, cause = ILL[name]
    found = worst(run(**options, **placed)[0].findings())
    assert found[cause] > (0.25, 0.05, 0.25)[cause], found


def test_swallowed_updates_are_those_that_leave_no_trace() -> None:
    """Counted by hand, on all elements of a parameter."""
    p = nn.Parameter(torch.linspace(0.01, 1, 256).bfloat16())
    optimizer = FlashAdamW([p], lr=2e-6, weight_decay=0.0)
    p.grad = torch.ones_like(p)
    for _ in range(3):
        optimizer.step()
    before = optimizer.decoded_state(p)["master_weight"]
    optimizer.examine(4)
    optimizer.step()
    (found,) = optimizer.findings()
    still = (optimizer.decoded_state(p)["master_weight"] == before).float().mean().item()
    assert 0.1 < still < 0.9
    assert found.swallowed == pytest.approx(still)
    assert (found.looked_at, found.master_bits, found.codec) == (256, 24, "log")


def test_updates_of_nothing_are_not_swallowed() -> None:
    p, q = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))
    optimizer = FlashAdamW([{"params": [p]}, {"params": [q], "lr": 0.0}])
    p.grad, q.grad = torch.zeros(64), torch.ones(64)
    optimizer.examine()
    optimizer.step()
    assert [one.swallowed for one in optimizer.findings()] == [0, 0]


def test_every_part_of_a_tensor_has_its_turn() -> None:
    """One group of 64 is spoiled: some look finds it, others do not."""
    p = nn.Parameter(torch.ones(64 * 10))
    optimizer = FlashAdamW([p], lr=1e-3, weight_decay=0.0)
    seen = []
    for _ in range(12):
        p.grad = torch.ones_like(p)
        optimizer.step()
        with torch.no_grad():
            p[320:384] = 1e9  # no update of 1e-3 shows there
        optimizer.examine(1)
        optimizer.step()
        (found,) = optimizer.findings()
        seen.append(found.swallowed)
        assert found.looked_at == 64
    assert 0 < sum(share > 0.9 for share in seen) < len(seen)


def test_more_groups_than_there_are_take_no_more_memory() -> None:
    """Every element is looked at, and tables are no wider than tensors are: this many groups would be 2^61 bytes for each tensor."""
    optimizer, params = run(steps=2, look=False)
    optimizer.examine(2**53)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    found = optimizer.findings()
    assert found is not None
    assert [finding.looked_at for finding in found] == [p.numel() for p in params]
    with pytest.raises(ConfigurationError, match="groups=-1"):
        optimizer.examine(-1)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_that_was_skipped_says_nothing(deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if deferred:
        monkeypatch.setattr(finite, "known_at_once", lambda _: False)
    p = nn.Parameter(torch.ones(64, dtype=BF16))
    optimizer = FlashAdamW([p])
    for bad in (False, True, False):
        p.grad = torch.full_like(p, float("nan") if bad else 1.0)
        optimizer.examine()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        found = optimizer.findings()
        if not bad:
            assert [one.looked_at for one in found] == [64]
            assert worst(found) <= HEALTHY
        else:
            assert not found  # the host knows: another step is looked at; only the device knows: nothing was looked at


def test_gradient_scale_is_taken_off() -> None:
    found = []
    for scale in (1.0, 1024.0):
        p = nn.Parameter(torch.ones(256))
        optimizer = FlashAdamW([p])
        if scale != 1:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
        for step in range(3):
            p.grad = torch.randn(256, generator=torch.Generator().manual_seed(step)) * scale
            optimizer.examine()
            optimizer.step()
        found.append(worst(optimizer.findings()))
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0][2] > 0


def test_parameters_without_elements_or_gradient_are_left_out() -> None:
    params = [nn.Parameter(torch.ones(n)) for n in (0, 5, 70)]
    optimizer = FlashAdamW(params)
    params[0].grad, params[1].grad = torch.ones(0), torch.ones(5)
    optimizer.examine()
    optimizer.step()
    assert [one.param is params[1] for one in optimizer.findings()] == [True]


def test_nobody_has_to_wait() -> None:
    p = nn.Parameter(torch.ones(64))
    optimizer = FlashAdamW([p])
    p.grad = torch.ones(64)
    optimizer.examine()
    optimizer.step()
    assert optimizer.findings(wait=False) is None
    optimizer.step()
    assert optimizer.findings(wait=False)
    assert optimizer.findings(wait=False) is None


def test_without_being_asked_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashoptim_hf.optim import health

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("looked")

    monkeypatch.setattr(health._Sample, "take", refuse)
    optimizer, _ = run(look=False, steps=2)
    assert optimizer.findings() is None
    with pytest.raises(AssertionError, match="looked"):
        run(steps=2)
