"""The fused kernel for rules with one momentum or none: in Triton's interpreter, and compiled ahead of time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.interpreted import run_interpreted

CASES = Path(__file__).with_name("momentum_interpreted.py")


def test_the_fused_kernel_equals_the_eager_path() -> None:
    run_interpreted(CASES)


# (instructions, of them on the special-function pipe) per parameter; AdamW takes 85 and 67 on sm_90
LIMITS = {(torch.bfloat16, 24): (68, 2), (torch.float32, 0): (52, 2)}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets, so it compiles nothing")
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", ["lion", "sgd"])
@pytest.mark.parametrize(("param", "bits"), LIMITS)
def test_compiled_it_is_shorter_than_adamw(name: str, param: torch.dtype, bits: int, arch: int) -> None:
    from flashoptim_hf.bench import kernels, sass
    from flashoptim_hf.kernels import fused

    elements = fused.TILE // (32 * fused.NUM_WARPS)
    variant = kernels.Variant(kernels.rules()[name], "square", param, bits)
    binary = kernels.compile_variant(variant, arch)
    assert binary.stack_bytes == 0
    assert binary.registers <= 168  # 12 warps on a processor
    loaded, stored = (elements * nbytes for nbytes in variant.element_bytes)
    assert min(binary.narrowest("LDG", loaded), binary.narrowest("STG", stored)) >= 64
    instructions, special = LIMITS[param, bits]
    assert len(binary.instructions) / elements <= instructions
    assert sass.special(binary.instructions) / elements <= special
    assert not any(instruction.opcode == "RET" for instruction in binary.instructions)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets, so it compiles nothing")
def test_without_states_it_compiles_too() -> None:
    from flashoptim_hf.bench import kernels
    from flashoptim_hf.optim.sgd import RULE

    variant = kernels.Variant(RULE.serving({"momentum": 0.0}), "square", torch.bfloat16, 24)
    binary = kernels.compile_variant(variant, 90)
    assert binary.stack_bytes == 0
    assert len(binary.instructions) / 16 < 60
