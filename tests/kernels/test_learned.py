"""Runs `learned_interpreted.py` in Triton's interpreter and the compiled kernel in a model of a GPU, and reads its machine code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.interpreted import run_interpreted

pytest.importorskip("triton")

from flashoptim_hf.bench import kernels, sass
from flashoptim_hf.kernels import fused
from tests.kernels import learned_interpreted as cases
from tests.kernels.ptx import compiled

CASES = Path(__file__).with_name("learned_interpreted.py")


def test_the_fused_kernel_equals_the_eager_path() -> None:
    run_interpreted(CASES)


@pytest.mark.parametrize("dither", [True, False], ids=["dither", "nearest"])
def test_what_is_compiled_equals_the_eager_path(dither: bool) -> None:
    """Tables in the registers of a warp are what Triton's interpreter does not know."""
    launcher = compiled(kernels.Variant(kernels.rules()["adamw"], "learned", torch.bfloat16, 24, dither))
    start = cases.taught((33, 512, 577), dtype=torch.bfloat16, bits=24, dither=dither)
    fast, slow = launcher.beside_eager(start)
    assert launcher.programs == 4
    cases.assert_same_states(fast, slow)
    cases.assert_untouched(start, fast)
    cases.assert_same_weights(fast, slow, start)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("param", "bits", "limit"), [(torch.bfloat16, 24, 168), (torch.float32, 0, 151)])
def test_it_compiles_without_spills(param: torch.dtype, bits: int, limit: int, arch: int) -> None:
    """Measured for sm_90: 167 and 149 instructions per parameter, of which 9 are special functions."""
    variants = [kernels.Variant(kernels.rules()["adamw"], codec, param, bits) for codec in ("learned", "joint")]
    binary, joint = (kernels.compile_variant(variant, arch) for variant in variants)
    elements = fused.TILE // (32 * fused.NUM_WARPS)
    assert binary.stack_bytes == 0
    assert binary.registers <= 184
    assert len(binary.instructions) <= limit * elements
    assert sass.special(binary.instructions) <= 9.5 * elements
    loaded, stored = (elements * nbytes for nbytes in variants[0].element_bytes)
    assert binary.narrowest("LDG", loaded) == binary.narrowest("STG", stored) == 128
    # two for a place of either curve, three and two for the inverse; the tree's root is looked up once
    looked_up = sum(i.name == "SHFL.IDX" for i in binary.hot) - sum(i.name == "SHFL.IDX" for i in joint.hot)
    assert looked_up == (2 + 2 * 2 + 3 + 2) * elements
    # no branch of its own, in which some threads might be missing where others read their registers
    branches, expected = ([i.opcode for i in made.instructions].count("BRA") for made in (binary, joint))
    assert branches == expected
