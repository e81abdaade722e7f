"""Runs `joint_interpreted.py` in Triton's interpreter, and compiles the kernel for machines that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.interpreted import run_interpreted

CASES = Path(__file__).with_name("joint_interpreted.py")


def test_the_fused_kernel_equals_the_eager_path() -> None:
    run_interpreted(CASES)


@pytest.mark.parametrize(("param", "bits", "limit"), [(torch.bfloat16, 24, 135), (torch.float32, 0, 118)])
def test_it_compiles_without_spills(param: torch.dtype, bits: int, limit: int) -> None:
    """Measured for sm_90: 130 and 113 instructions per parameter, in words of 128 bits."""
    pytest.importorskip("triton")
    from flashoptim_hf.bench import kernels

    variant = kernels.Variant(kernels.rules()["adamw"], "joint", param, bits)
    values = {row.metric: row.value for row in kernels.measure([90], [variant], peers=False).rows}
    assert values["spill_bytes"] == 0
    assert values["min_access_bits"] == 128
    assert values["instructions_per_param"] <= limit
