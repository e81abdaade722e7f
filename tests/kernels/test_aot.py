"""The fused kernel compiled ahead of time, without a GPU: what ran in the interpreter compiles, fits into registers, and is short."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets, so it compiles nothing", allow_module_level=True)

from flashoptim_hf._triton import jit, triton
from flashoptim_hf.bench import kernels, sass
from flashoptim_hf.kernels import fused
from flashoptim_hf.kernels.rule import Segment

ELEMENTS = fused.TILE // (32 * fused.NUM_WARPS)
HEADLINE = {variant.name: variant for variant in kernels.headline()}

# (instructions, of them on the special-function pipe) per parameter on sm_90: everything in the binary
TARGETS = {"adamw/log/bf16+24": (75, 6), "adamw/log/fp32": (60, 6)}


def others() -> list[kernels.Variant]:
    """Few variants with every rule, codec, weight format and rounding in one of them, found greedily."""

    def parts(variant: kernels.Variant) -> set[object]:
        return {variant.rule.name, variant.codec, (variant.param, variant.master_bits), (variant.codec, variant.dither)}

    missing = set().union(*map(parts, kernels.variants())) - set().union(*map(parts, kernels.headline()))
    chosen = []
    while missing:
        best = max(kernels.variants(), key=lambda variant: len(parts(variant) & missing))
        chosen.append(best)
        missing -= parts(best)
    return chosen


OTHERS = {variant.name: variant for variant in others()}


def assert_sound(binary: sass.Binary, variant: kernels.Variant) -> None:
    assert binary.stack_bytes == 0
    assert not any(instruction.opcode in ("LDL", "STL") for instruction in binary.instructions)
    assert binary.registers <= (200 if variant.format.codec.feeds_back else 168)  # 10 or 12 warps on a processor
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
    assert len(binary.instructions) / ELEMENTS <= instructions * slack
    assert sass.special(binary.instructions) / ELEMENTS <= special * slack
    # no subroutines, so that one trip through the loop is all that a tile runs
    assert not any(instruction.opcode == "RET" for instruction in binary.instructions)
    # the rounding and saturation that the arithmetic rests on
    names = [instruction.name for instruction in binary.hot]
    assert names.count("FADD.RM") == ELEMENTS
    assert names.count("FFMA.SAT") + names.count("FADD.SAT") == ELEMENTS
    assert names.count("FMNMX.NAN") == ELEMENTS
    assert not any(".FTZ" in name and not name.startswith(("MUFU", "FRND")) for name in names), "subnormal floats carry codes"


@pytest.mark.parametrize("name", HEADLINE)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_scratch_memory_is_read_behind_barriers(name: str, arch: int) -> None:
    """Threads exchange weights and gradients through it: wide words are loaded behind one barrier and stored before the other."""
    binary = kernels.compile_variant(HEADLINE[name], arch)
    filled, *_, done = (i for i, instruction in enumerate(binary.instructions) if instruction.opcode == "BAR")
    wide = [i for i, instruction in enumerate(binary.instructions) if instruction.global_bits == 128]
    assert wide
    assert filled < min(wide) < max(wide) < done
    # the loops that fill and empty it come before and behind, and none was unrolled
    assert [i.opcode for i in binary.instructions[:filled] if i.opcode == "STG"] == ["STG", "STG"]
    assert [i.opcode for i in binary.instructions[done:] if i.global_bits] == ["LDG", "STG"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_variants_compile(name: str) -> None:
    assert_sound(kernels.compile_variant(OTHERS[name], 90, scaled=True, skipping=False), OTHERS[name])


def test_a_rule_without_states_compiles() -> None:
    """SGD without momentum, where there is such a rule: no planes, and only weights to update."""
    rule = replace(kernels.rules()["adamw"], states=(), device=_plain)
    variant = kernels.Variant(rule, "none", torch.bfloat16, 24)
    binary = kernels.compile_variant(variant, 90)
    assert_sound(binary, variant)


@jit
def _plain(states, weight, grad, hyper):  # type: ignore[no-untyped-def]
    return states, weight - hyper[0] * grad


class _Driver:
    """As much of a Triton driver as compiling needs: one device, sm_90."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0

    def get_current_target(self) -> object:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)


class _Warmup:
    """The kernel, of which every launch only compiles. `launched`: grid and result of each."""

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel
        self.launched: list[tuple[tuple[int, ...], object]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return lambda *args, **options: self.launched.append((grid, self.kernel.warmup(*args, grid=grid, **options)))


@pytest.mark.parametrize("name", [*HEADLINE, "adamw/learned/bf16+24"])
def test_what_is_launched_is_what_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`update_page`, up to the launch: hundreds of tensors, one kernel, whose code is bit for bit that of the report."""
    variant, count, numel = {variant.name: variant for variant in kernels.variants()}[name], 300, 4096
    table = (*variant.format.codec.fresh_tables(), None)[0]
    planes = [torch.zeros(plane.entries(count * numel), dtype=plane.dtype) for plane in variant.format.codec.planes]
    if variant.master_bits:
        planes.append(torch.zeros(count * numel, dtype=torch.int8))
    hyper = (1e-3, *variant.rule.scalars({"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}, 1))
    weights = torch.zeros(2, count, numel, dtype=variant.param)
    segments = [Segment(*weights[:, i], start=i * numel, index=0, step=1, hyper=hyper, table=table) for i in range(count)]

    kernel, warmup = fused.page_kernel, _Warmup(fused.page_kernel)
    with monkeypatch.context() as patch:
        patch.setattr(fused, "page_kernel", warmup)
        patch.setattr(triton.runtime.driver, "_active", _Driver())
        fused.update_page(planes, segments, variant.format, skip=torch.zeros(()))
    kernel.device_caches.clear()  # a real device must not find what was made for this one
    ((grid, compiled),) = warmup.launched
    assert grid == (count * numel // fused.TILE,)
    assert sass.disassemble(compiled.asm["cubin"]) == kernels.compile_variant(variant, 90)
