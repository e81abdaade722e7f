"""How other packages hold the state of one parameter: read into fp32 numbers, and written from them.

    torch          "exp_avg", "exp_avg_sq" or "momentum_buffer": floats in the parameter's dtype, or fp32
    bitsandbytes   "state1", "state2": fp32, or codes (uint8) into a table of 256 numbers ("qmap1"), times the largest magnitude of each 256
                   elements ("absmax1"). Since 0.49 these lie in a dictionary of their own, "__bnb_optimizer_quant_state__"
    flashoptim     "exp_avg::quantized" and "exp_avg::scales": the planes of codec "softsign", scales of bf16 parameters as the bytes of
                   their fp16 numbers under the dtype bf16; "error_bits": the correction, in the parameter's dtype
    torchao        tensors of its own classes (`OptimState8bit` and others), which decode themselves

Sources: block-wise 8-bit states and the dynamic map, arXiv 2110.02861, sections 2.1 and 2.2; softsign and weight splitting, arXiv
2602.23349, section 3; the state dicts of bitsandbytes 0.50.2, flashoptim 0.1.4 and torchao 0.18.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..codecs.base import grouped
from ..errors import CheckpointError

BNB_NESTED = "__bnb_optimizer_quant_state__"
BNB_BLOCK = 256
BNB_SMALLEST = 4096
"""Elements below which bitsandbytes keeps fp32 states unless told otherwise."""

QUANTIZED, SCALES, ERROR_BITS = "::quantized", "::scales", "error_bits"
MASTER_BYTES = {24: 3, 32: 4, None: 0}
"""`master_bits` to flashoptim's `master_bytewidth`."""
_AT_ONCE = 1 << 22


def dynamic_map(signed: bool) -> Tensor:
    """The 256 numbers of bitsandbytes' dynamic map, ascending, fp32: 0, 1, and in each of seven decades twice as many as in the one below.

    A decade's interval from a tenth to the whole is cut evenly; the numbers are the middles of the pieces. The top decade has 64 pieces for
    signed numbers and 128 for others.
    """
    numbers = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        pieces = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1, pieces + 1)
        middles = 10.0 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        numbers += [middles, -middles] if signed else [middles]
    return torch.cat(numbers).sort().values


def unnested(values: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's values with bitsandbytes' inner dictionary, if there is one, taken apart."""
    inner = values.get(BNB_NESTED)
    rest = {name: value for name, value in values.items() if name != BNB_NESTED}
    return {**rest, **inner} if isinstance(inner, Mapping) else rest


def is_torchao(value: Any) -> bool:
    """Whether a value is a state tensor of torchao's low-bit optimizers."""
    return type(value).__name__.startswith("OptimState") and hasattr(value, "dequantize")


def check_plain(value: Any, name: str) -> None:
    """Refuse parts of sharded tensors, whose blocks cannot be put together here.

    Raises:
        CheckpointError: says how to get a whole state.
    """
    if hasattr(value, "_local_tensor"):
        raise CheckpointError(
            f"{name} is sharded over several processes, and this state has to be decoded before it can be converted. Gather it first: "
            "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))."
        )


# ---------------------------------------------------------------------- bitsandbytes


def read_bitsandbytes(values: Mapping[str, Any], number: int) -> Tensor:
    """State `number` (1 or 2), fp32 in the parameter's shape.

    Raises:
        CheckpointError: codes without their table or their constants, or not as many as the codes need.
    """
    name = f"state{number}"
    state = values[name]
    check_plain(state, name)
    if state.dtype != torch.uint8:
        return state.detach().cpu().float()
    absmax, table = values.get(f"absmax{number}"), values.get(f"qmap{number}")
    blocks = -(-state.numel() // BNB_BLOCK)
    if absmax is None or table is None or absmax.numel() != blocks or table.numel() != 256:
        raise CheckpointError(
            f"a bitsandbytes state of shape {tuple(state.shape)} has {name} in 8 bits, which needs absmax{number} with {blocks} numbers "
            f"and qmap{number} with 256; it has {', '.join(sorted(values))}. The file is damaged, or of an older block-free format."
        )
    codes, absmax, table = state.detach().cpu().flatten(), absmax.cpu().float(), table.cpu().float()
    decoded = torch.empty(codes.numel())
    for start in range(0, codes.numel(), _AT_ONCE):
        part = grouped(table[codes[start : start + _AT_ONCE].int()], BNB_BLOCK)
        first = start // BNB_BLOCK
        part = part * absmax[first : first + len(part), None]
        decoded[start : start + _AT_ONCE] = part.flatten()[: decoded.numel() - start]
    return decoded.view(state.shape)


def write_bitsandbytes(states: tuple[Tensor, ...], step: int, bits: int) -> dict[str, Any]:
    """fp32 states in the parameter's shape as bitsandbytes' state dict has them: fp32 (bits 32, and small tensors), or 8-bit blocks."""
    inner: dict[str, Any] = {}
    for number, state in enumerate(states, 1):
        if bits == 32 or state.numel() < BNB_SMALLEST:
            inner[f"state{number}"] = state
            continue
        table = dynamic_map(signed=number == 1)
        borders = (table[1:] + table[:-1]) / 2
        flat = state.flatten()
        codes = torch.empty(flat.numel(), dtype=torch.uint8)
        absmax = torch.empty(-(-flat.numel() // BNB_BLOCK))
        for start in range(0, flat.numel(), _AT_ONCE):
            part = grouped(flat[start : start + _AT_ONCE], BNB_BLOCK)
            largest = part.abs().amax(1)
            absmax[start // BNB_BLOCK :][: len(part)] = largest
            nearest = torch.bucketize(part / torch.where(largest > 0, largest, 1)[:, None], borders, out_int32=True)
            codes[start : start + _AT_ONCE] = nearest.flatten()[: flat.numel() - start].to(torch.uint8)
        inner |= {f"state{number}": codes.view(state.shape), f"qmap{number}": table, f"absmax{number}": absmax}
    return {"step": step, BNB_NESTED: inner}


# ---------------------------------------------------------------------- flashoptim


def read_softsign(values: Mapping[str, Any], name: str) -> tuple[Tensor, Tensor]:
    """(codes in the parameter's shape, fp16 scales) of one of flashoptim's states, bit for bit."""
    codes, scales = values[name + QUANTIZED], values[name + SCALES]
    for value in (codes, scales):
        check_plain(value, name)
    scales = scales.detach().cpu().contiguous()
    # fp16 numbers under the name of bf16, so that a cast to the parameter's dtype leaves the bytes alone
    return codes.detach().cpu(), scales.view(torch.float16) if scales.dtype == torch.bfloat16 else scales.to(torch.float16)


def read_error_bits(values: Mapping[str, Any], master_bytes: Any) -> tuple[Tensor | None, torch.dtype | None]:
    """(correction in int8 or int16, dtype of the weight if it can be told) of one parameter of flashoptim."""
    bits = values.get(ERROR_BITS)
    if bits is None:
        return None, None
    check_plain(bits, ERROR_BITS)
    bits = bits.detach().cpu().contiguous()
    if not bits.is_floating_point():
        return bits, None
    # one byte more is stored as a number, two as bytes: neither changes when torch casts them to the parameter's dtype
    return (bits.to(torch.int8) if master_bytes == 3 else bits.view(torch.int16)), bits.dtype


def write_error_bits(correction: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse of `read_error_bits` for a weight of `dtype`."""
    return correction.to(dtype) if correction.dtype == torch.int8 else correction.contiguous().view(dtype)
