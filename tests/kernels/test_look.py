"""The look at gradients: in Triton's interpreter (`look_interpreted.py`), and compiled ahead of time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("look_interpreted.py")


def test_the_look_finds_what_is_not_finite() -> None:
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets, so it compiles nothing")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiled_it_reads_wide_words_and_spills_nothing(dtype: torch.dtype, arch: int) -> None:
    pytest.importorskip("triton")
    from flashoptim_hf.bench import sass
    from flashoptim_hf.kernels import look
    from flashoptim_hf.kernels.rule import DTYPE_CODE

    signature = {"table_ptr": "*fp32:16", "blocks_at": "i32", "block": "i32"}
    binary = sass.compile_for(look.look_kernel, signature, look.specialize(DTYPE_CODE[dtype]), arch)
    assert binary.stack_bytes == 0
    assert not any(instruction.opcode in ("LDL", "STL") for instruction in binary.instructions)
    per_thread = look.TILE // (32 * look.NUM_WARPS)
    wide = [instruction for instruction in binary.hot if instruction.opcode == "LDG"]
    assert {instruction.global_bits for instruction in wide} == {128}
    assert sum(instruction.global_bits for instruction in wide) % (per_thread * dtype.itemsize * 8) == 0
