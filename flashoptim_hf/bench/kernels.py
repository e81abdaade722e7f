"""Kernels: what the fused update costs on a GPU, read from its machine code on a machine without one.

    flashoptim-hf bench kernels --json kernels.json

The kernel that runs is compiled for each architecture, and so is the AdamW kernel of flashoptim, where that package is installed. All
counts are instructions of one thread over the elements that a thread works on in one tile.

instructions_per_param          Everything in the binary, padding and what a full tile never runs included.
loop_instructions_per_param     One trip through the loop over tiles, with what the ragged end of a segment takes. In long segments a
                                parameter costs this plus an eighth of the difference.
special_pipe_per_param          Those of `instructions_per_param` that go through the special-function pipe: MUFU, I2F, F2I, FRND.
min_access_bits                 The narrowest load or store of codes, parameters, gradients and corrections by one thread; the widest that
                                there is has 128 bits.
registers, spill_bytes          Registers of a thread, and bytes that did not fit into them.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

import torch
import typer

from .. import _triton, optim
from ..codecs.base import get_codec, known_codecs
from ..codecs.weight_split import CORRECTION_DTYPE
from ..errors import ConfigurationError
from ..kernels import fused
from ..kernels.rule import Format, UpdateRule
from . import sass
from .report import JsonOption, Panel, PlotOption, Report, Row, check_outputs, draw, show, table

TYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.int8: "i8",
        torch.uint8: "u8",
        torch.int16: "i16",
        torch.float16: "fp16",
        torch.bfloat16: "bf16",
        torch.float32: "fp32",
    }
)
"""Triton's names of element types."""

DEVICE = "none: compiled for {}, not run"
METRICS = (
    "instructions_per_param",
    "loop_instructions_per_param",
    "special_pipe_per_param",
    "min_access_bits",
    "registers",
    "spill_bytes",
)
UNITS = MappingProxyType({"min_access_bits": "bit", "spill_bytes": "B"})


@dataclass(frozen=True)
class Variant:
    """One kernel: a rule, a codec, and how weights are stored; gradients have the weights' dtype."""

    rule: UpdateRule
    codec: str
    param: torch.dtype
    master_bits: int
    dither: bool = True

    @property
    def name(self) -> str:
        """For example "adamw/log/bf16+24", "adamw/log/fp32", "adamw/log/bf16+24/nearest"."""
        weights = TYPES[self.param] + (f"+{self.master_bits}" if self.master_bits else "")
        return f"{self.rule.name}/{self.codec}/{weights}" + ("" if self.dither else "/nearest")

    @property
    def element_bytes(self) -> tuple[int, int]:
        """Bytes that one element takes to load and to store, group constants left out."""
        codes = sum(plane.dtype.itemsize for plane in self.format.codec.planes if plane.group == 1)
        stored = codes + self.param.itemsize + (CORRECTION_DTYPE[self.master_bits].itemsize if self.master_bits else 0)
        return stored + self.param.itemsize, stored

    @property
    def format(self) -> Format:
        return Format(self.rule, get_codec(self.codec, self.rule.states, self.dither), self.master_bits)


def run(
    archs: Annotated[str, typer.Option(help="Compute capabilities times ten, with commas between.")] = "80,90,100",
    every: Annotated[bool, typer.Option(help="Every rule, codec and weight format, instead of AdamW with log.")] = False,
    peers: Annotated[bool, typer.Option(help="Compile flashoptim's AdamW kernel too, where it is installed.")] = True,
    json_file: JsonOption = None,
    plot_file: PlotOption = None,
) -> None:
    """Instructions per parameter of the fused kernel, compiled ahead of time for several GPUs; needs no GPU.

    Prints one table per metric. What is counted, and over what, is at the head of `bench/kernels.py`.
    """
    check_outputs(json_file, plot_file)
    report = measure(parse_archs(archs), list(variants()) if every else headline(), peers=peers)
    show(*(table([row for row in report.rows if row.metric == metric], metric) for metric in METRICS))
    if json_file is not None:
        report.write_json(json_file)
    if plot_file is not None:
        title = "Instructions per parameter"
        draw([Panel(title, "SASS instructions", [row for row in report.rows if row.metric == METRICS[0]])], plot_file)


def parse_archs(text: str) -> list[int]:
    """Architectures with commas between.

    Raises:
        ConfigurationError: an item that is not one.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items or not all(item.isdigit() and int(item) >= 80 for item in items):
        raise ConfigurationError(f"--archs {text!r}: give compute capabilities times ten, 80 or more, for example 80,90,100.")
    return [int(item) for item in items]


def rules() -> dict[str, UpdateRule]:
    """The rules of all optimizers, by name: every file in `optim/` that defines `RULE`."""
    modules = (importlib.import_module(f"{optim.__name__}.{found.name}") for found in pkgutil.iter_modules(optim.__path__))
    found = [module.RULE for module in modules if hasattr(module, "RULE")]
    return {rule.name: rule for rule in found}


def headline() -> list[Variant]:
    """AdamW with the default codec, in the two weight formats that have targets."""
    adamw = rules()["adamw"]
    return [Variant(adamw, "log", torch.bfloat16, 24), Variant(adamw, "log", torch.float32, 0)]


def variants() -> Iterator[Variant]:
    """Every kernel that a user can reach with gradients of the weights' dtype."""
    weights = [(torch.float32, 0), *itertools.product((torch.bfloat16, torch.float16), (0, 24, 32))]
    for rule, codec in itertools.product(rules().values(), known_codecs()):
        try:
            get_codec(codec, rule.states)
        except ConfigurationError:  # this codec does not hold this rule's states
            continue
        for (param, bits), dither in itertools.product(weights, (True, False)):
            if dither or codec == "log":  # the others have nothing to dither
                yield Variant(rule, codec, param, bits, dither)


def measure(archs: list[int], kernels: list[Variant], *, peers: bool) -> Report:
    """Compile and count.

    Args:
        archs: 80, 90, 100, ...
        kernels: ours.
        peers: whether to compile flashoptim's AdamW kernel beside those of `headline`, where they are among `kernels`.

    Raises:
        UnsupportedError: Triton is missing, or is set to interpret.
    """
    _triton.require()
    report = Report("kernels", DEVICE.format(", ".join(f"sm_{arch}" for arch in archs)))
    with_peer = peers and importlib.util.find_spec("flashoptim") is not None
    for variant in kernels:
        for arch in archs:
            case = f"{variant.name}/sm_{arch}"
            add_rows(report, case, "ours", compile_variant(variant, arch), fused.TILE // (32 * fused.NUM_WARPS), variant.element_bytes)
            if with_peer and variant in headline():
                codes = 3 if variant.master_bits else 2
                moved = (2 * variant.param.itemsize + codes, variant.param.itemsize + codes)
                add_rows(report, case, "flashoptim", compile_peer(variant, arch), PEER_BLOCK // (32 * PEER_WARPS), moved)
    return report


def add_rows(report: Report, case: str, subject: str, binary: sass.Binary, elements: int, element_bytes: tuple[int, int]) -> None:
    """The rows of one binary.

    Args:
        elements: how many elements a thread works on in one trip through the hot loop.
        element_bytes: bytes that one element takes to load and to store.
    """
    loaded, stored = (elements * nbytes for nbytes in element_bytes)
    values = {
        "instructions_per_param": len(binary.instructions) / elements,
        "loop_instructions_per_param": len(binary.hot) / elements,
        "special_pipe_per_param": sass.special(binary.instructions) / elements,
        "min_access_bits": min(binary.narrowest("LDG", loaded), binary.narrowest("STG", stored)),
        "registers": binary.registers,
        "spill_bytes": binary.stack_bytes,
    }
    report.rows += [Row(case, subject, metric, float(values[metric]), UNITS.get(metric, "1")) for metric in METRICS]


def compile_variant(variant: Variant, arch: int, *, scaled: bool = False, skipping: bool = True) -> sass.Binary:
    """Our kernel for one architecture, with the arguments of a launch.

    Args:
        scaled: with `inv_scale`. Default False.
        skipping: with `skip`, as in every step whose gradients are checked on the device. Default True.
    """
    constants = fused.specialize(variant.format, variant.param, variant.param)
    signature: dict[str, Any] = {
        "planes": tuple(f"*{TYPES[plane.dtype]}:16" for plane in variant.format.codec.planes),
        "correction_ptr": f"*{TYPES[CORRECTION_DTYPE[variant.master_bits]]}:16" if variant.master_bits else None,
        "segments_ptr": "*i64:16",
        "hyper_ptr": "*fp32:16",
        "blocks_ptr": "*i32:16",
        "tables_ptr": "*i64:16" if variant.format.codec.tables else None,
        "block": "i32",
        "scratch_ptr": "*u8:16",
        "inv_scale_ptr": "*fp32" if scaled else None,
        "skip_ptr": "*fp32" if skipping else None,
    }
    return sass.compile_for(fused.page_kernel, signature, constants, arch)


PEER_BLOCK = 1024
PEER_WARPS = 4
"""What flashoptim 0.1.4 launches its AdamW kernel with; Triton's own defaults for the rest."""


def compile_peer(variant: Variant, arch: int) -> sass.Binary:
    """flashoptim's AdamW kernel for the same weights: its own 8-bit states, and an 8-bit correction where ours has one.

    Compiled as for a tensor of a multiple of 16 elements, for which it is fastest.
    """
    kernel = importlib.import_module("flashoptim.optimizers")._triton_adam_kernel
    while not hasattr(kernel, "arg_names"):  # under a heuristic or an autotuner
        kernel = kernel.fn
    tl = _triton.tl
    weights = f"*{TYPES[variant.param]}:16"
    signature = dict.fromkeys(("mom_scales_f16_ptr", "var_scales_f16_ptr"), "*fp16:16") | {
        "mom_ptr": "*i8:16",
        "var_ptr": "*u8:16",
        "param_ptr": weights,
        "grad_ptr": weights,
        "ecc_ptr": "*i8:16" if variant.master_bits else None,
        "N": "i32:16",
        "step": "i32",
        **dict.fromkeys(("lr", "beta1", "beta2", "eps", "weight_decay"), "fp32"),
    }
    constants = {
        "GROUP_SIZE": 32,
        "DECOUPLED_WEIGHT_DECAY": True,
        "PARAM_DTYPE": {"bf16": tl.bfloat16, "fp32": tl.float32}[TYPES[variant.param]],
        "USE_ECC": bool(variant.master_bits),
        "QUANTIZE_OPTIM_STATES": True,
        "SIGNED_ERROR_T": tl.int8 if variant.master_bits else None,
        "NUM_MANTISSA_BITS": {"bf16": 7, "fp32": 23}[TYPES[variant.param]],
        "SIGNED_MAX_VAL": 127 if variant.master_bits else None,
        "BLOCK_SIZE_N": PEER_BLOCK,
        "num_warps": PEER_WARPS,
        "enable_fp_fusion": True,
    }
    return sass.compile_for(kernel, signature, constants, arch)
