"""The fused kernel compiled ahead of time, without a GPU: what ran in the interpreter compiles, fits into registers, and is short."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets, so it compiles nothing", allow_module_level=True)

from flashoptim_hf.bench import kernels, sass
from flashoptim_hf.codecs.base import known_codecs
from flashoptim_hf.kernels import fused

ELEMENTS = fused.TILE // (32 * fused.NUM_WARPS)
HEADLINE = {variant.name: variant for variant in kernels.headline()}
EVERY = {variant.name: variant for variant in kernels.variants()}

# (instructions, of them on the special-function pipe) per parameter, for a program with one full tile on sm_90
TARGETS = {"adamw/log/bf16+24": (85, 7), "adamw/log/fp32": (70, 7)}
# each function that a kernel is put together from, once
OTHERS = ["adamw/log/bf16+32", "adamw/log/fp16+24", "adamw/log/bf16/nearest", "adamw/none/fp32", "adamw/softsign/bf16+24"]


def assert_sound(binary: sass.Binary, variant: kernels.Variant) -> None:
    assert binary.stack_bytes == 0
    assert not any(instruction.opcode in ("LDL", "STL") for instruction in binary.instructions)
    assert binary.registers <= 168  # 12 warps on a processor
    loaded, stored = (ELEMENTS * nbytes for nbytes in variant.element_bytes)
    assert binary.narrowest("LDG", loaded) >= 64
    assert binary.narrowest("STG", stored) >= 64


@pytest.mark.parametrize("name", HEADLINE)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_targets_are_met(name: str, arch: int) -> None:
    binary = kernels.compile_variant(HEADLINE[name], arch)
    assert_sound(binary, HEADLINE[name])
    slack = 1.0 if arch == 90 else 1.1
    instructions, special = TARGETS[name]
    assert len(binary.path) / ELEMENTS <= instructions * slack
    assert sass.special(binary.path) / ELEMENTS <= special * slack
    # no subroutines, so that one trip through the loop is all that a tile runs
    assert not any(instruction.opcode == "RET" for instruction in binary.instructions)
    # the rounding and saturation that the arithmetic rests on
    names = [instruction.name for instruction in binary.hot]
    assert names.count("FADD.RM") == ELEMENTS
    assert names.count("FFMA.SAT") + names.count("FADD.SAT") == ELEMENTS
    assert names.count("FMNMX.NAN") == ELEMENTS
    assert not any(".FTZ" in name and not name.startswith(("MUFU", "FRND")) for name in names), "subnormal floats carry codes"


@pytest.mark.parametrize("name", OTHERS)
def test_other_variants_compile(name: str) -> None:
    assert_sound(kernels.compile_variant(EVERY[name], 90, scaled=True, skipping=False), EVERY[name])


def test_the_variants_above_cover_every_codec_and_weight_format() -> None:
    compiled = [*HEADLINE, *OTHERS]
    assert {name.split("/")[1] for name in compiled} >= {codec for codec in known_codecs() if any(f"/{codec}/" in name for name in EVERY)}
    assert {(EVERY[name].param, EVERY[name].master_bits) for name in compiled} >= {
        (torch.bfloat16, 24),
        (torch.bfloat16, 32),
        (torch.bfloat16, 0),
        (torch.float16, 24),
        (torch.float32, 0),
    }
