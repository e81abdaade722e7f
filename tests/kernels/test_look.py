"""The look at gradients: in Triton's interpreter (`look_interpreted.py`), and compiled ahead of time."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.interpreted import run_interpreted

CASES = Path(__file__).with_name("look_interpreted.py")


def test_the_look_finds_what_is_not_finite() -> None:
    run_interpreted(CASES)


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


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets, so it compiles nothing")
def test_one_binary_for_any_number_of_tensors_of_any_size() -> None:
    """Triton compiles anew for a number that 16 divides, unless it is told not to."""
    pytest.importorskip("triton")
    from flashoptim_hf.bench import host_overhead
    from flashoptim_hf.kernels import look
    from flashoptim_hf.kernels.rule import DTYPE_CODE

    host = torch.device("cpu")
    launches = host_overhead.Launches(looks=host_overhead.Launches())
    found = []
    with patch.object(look._triton.triton.runtime.driver, "_active", host_overhead.PretendDriver(launches)):
        for count, numel in ((3, 100), (7, 100), (8, 100), (7, 4096), (1, 40_000_000)):
            grads = [torch.empty(numel, dtype=torch.bfloat16)] * count
            look.too_large(np.array([grad.data_ptr() for grad in grads]), np.full(count, numel), DTYPE_CODE[torch.bfloat16], host)
            found.append(len(look.look_kernel.device_caches[host_overhead.PretendDriver.DEVICE][0]))
    assert launches.looks.count == 5
    assert len(set(found)) == 1
