"""What the compiled update does to weights is what joining, moving and splitting do one after the other, for every weight."""

from __future__ import annotations

import pytest
import torch

from flashoptim_hf.codecs import weight_split
from flashoptim_hf.kernels import cpu
from flashoptim_hf.kernels.rule import Segment
from flashoptim_hf.optim.adamw import RULE
from tests.kernels.test_cpu import ISAS, LIBRARY, fmt

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the compiled library was not built: no C compiler")

DECAY = 0.9375
CORRECTIONS = (-127, -126, -64, -63, -1, 0, 1, 2, 63, 100, 127)


def through_library(p: torch.Tensor, c: torch.Tensor, isa: int) -> tuple[torch.Tensor, torch.Tensor]:
    w, new_p, new_c = torch.empty(p.numel()), torch.empty_like(p), torch.empty_like(c)
    LIBRARY.flashoptim_join(p.data_ptr(), c.data_ptr(), w.data_ptr(), p.numel(), 24, isa)
    w *= DECAY
    LIBRARY.flashoptim_split(w.data_ptr(), new_p.data_ptr(), new_c.data_ptr(), w.numel(), 24, isa)
    return new_p, new_c


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("turn", [0, 64])
def test_every_weight_moves_as_by_its_parts(turn, isa):
    """`turn`: weights stand in another group of a tile."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).roll(turn)
    form, hyper = fmt(24), (0.5, *RULE.scalars({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.125}, 1))
    for value in CORRECTIONS:
        p, c = every.clone(), torch.full((every.numel(),), value, dtype=weight_split.CORRECTION_DTYPE[24])
        expected_p, expected_c = through_library(p, c, isa)
        planes = [torch.zeros(plane.entries(p.numel()), dtype=plane.dtype) for plane in form.codec.planes]
        segment = Segment(p, torch.zeros_like(p), start=0, index=0, step=1, hyper=hyper)
        cpu.update_page([*planes, c], [segment], form, isa=isa)
        assert torch.equal(p.view(torch.int16), expected_p.view(torch.int16))
        assert torch.equal(c, expected_c)
