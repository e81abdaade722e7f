"""Runs `fused_interpreted.py` in Triton's interpreter, and the compiled kernel in a model of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.interpreted import run_interpreted

pytest.importorskip("triton")

from flashoptim_hf.bench import kernels
from tests.kernels import fused_interpreted as cases
from tests.kernels.ptx import compiled

CASES = Path(__file__).with_name("fused_interpreted.py")


def test_the_fused_kernel_equals_the_eager_path() -> None:
    run_interpreted(CASES)


@pytest.mark.parametrize(
    ("param", "bits", "codec", "dither"),
    [
        (torch.bfloat16, 24, "log", True),
        (torch.bfloat16, 24, "log", False),
        (torch.float32, 0, "log", True),
        (torch.bfloat16, 24, "joint", True),
    ],
)
def test_what_is_compiled_equals_the_eager_path(param: torch.dtype, bits: int, codec: str, dither: bool) -> None:
    """What Triton's interpreter does not know: instructions of four elements at a time, and entries that several threads write."""
    launcher = compiled(kernels.Variant(kernels.rules()["adamw"], codec, param, bits, dither))
    start = cases.page((33, 512, 577), dtype=param, bits=bits, codec=codec, dither=dither)
    fast, slow = launcher.beside_eager(start)
    assert launcher.programs == 4
    cases.assert_same_weights(fast, slow, start)
    cases.assert_untouched(start, fast)
    if codec == "log":
        cases.assert_same_log_states(fast, slow)
