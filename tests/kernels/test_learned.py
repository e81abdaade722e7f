"""Runs `learned_interpreted.py` in Triton's interpreter, and compiles the kernel for machines that are not there."""

from __future__ import annotations

from pathlib import Path

from tests.interpreted import run_interpreted

CASES = Path(__file__).with_name("learned_interpreted.py")


def test_the_fused_kernel_equals_the_eager_path() -> None:
    run_interpreted(CASES)
