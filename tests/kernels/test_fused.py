"""Runs `fused_interpreted.py` in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from tests.interpreted import run_interpreted

CASES = Path(__file__).with_name("fused_interpreted.py")


def test_the_fused_kernel_equals_the_eager_path() -> None:
    run_interpreted(CASES)
