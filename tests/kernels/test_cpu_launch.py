"""What the compiled CPU path prepares before it runs."""

from __future__ import annotations

import gc

import pytest
import torch

from flashoptim_hf.codecs.base import get_codec
from flashoptim_hf.errors import UnsupportedError
from flashoptim_hf.kernels import cpu
from flashoptim_hf.kernels.rule import Format, Segments
from flashoptim_hf.optim.adamw import RULE
from tests.kernels.test_cpu import Page, fmt

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the compiled library was not built: no C compiler")


def contents(page: Page) -> list[torch.Tensor]:
    return [x.clone() for x in page.planes + page.params]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(some, others, strict=True))


def test_a_prepared_launch_changes_nothing_before_it_is_called_and_reads_skip_then():
    a, b = (Page(fmt(24), torch.bfloat16, torch.bfloat16) for _ in range(2))
    before, skip = contents(a), torch.tensor(1.0)
    launch = cpu.launch(a.planes, Segments.of(a.segments()), a.fmt, skip=skip)
    launch()
    assert same(contents(a), before)
    skip.zero_()
    gc.collect()  # the launch keeps what it needs: nobody else has the tables or the gradients
    _ = [torch.full((4096,), -1.0) for _ in range(64)]
    launch()
    cpu.update_page(b.planes, b.segments(), b.fmt)
    assert same(contents(a), contents(b))
    assert not same(contents(a), before)


def test_what_cannot_be_launched_is_said_before():
    with pytest.raises(UnsupportedError, match="codec='none'"):
        cpu.launch([], [], Format(RULE, get_codec("none", RULE.states), 0))
    cpu.launch([], [], fmt())()  # nothing to do
