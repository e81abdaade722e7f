"""Runs `joint_interpreted.py` in Triton's interpreter, and compiles the kernel for machines that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("joint_interpreted.py")


def test_the_fused_kernel_equals_the_eager_path() -> None:
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


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
