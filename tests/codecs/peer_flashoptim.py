"""Runs flashoptim's own kernels on a CPU: `python peer_flashoptim.py IN OUT`, a script for a process of its own.

Triton reads TRITON_INTERPRET when it is imported, and the kernels need three things that only a GPU has: `libdevice.pow`,
`libdevice.copysign` and a count of multiprocessors. They get CPU forms here; the arithmetic of the kernels is untouched.

IN holds {"quantize": {name: (values, signed)}, "adamw": {name: {...}}, "correct": {name: (fp32 weights, 16-bit weights, bytes)}}, OUT the
kernels' results under the same names.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from flashoptim import optimizers as peer

BLOCK = 1024


def scalar_pow(base: Any, exponent: Any) -> float:
    """`libdevice.pow` of two scalars of the launch."""
    base, exponent = (np.float64(getattr(x, "handle", x).data.item() if hasattr(x, "handle") else x) for x in (base, exponent))
    return float(np.float32(base**exponent))


def copysign(magnitude: Any, sign: Any) -> Any:
    return tl.where(sign < 0, -magnitude, magnitude)


def quantize(values: torch.Tensor, signed: bool) -> dict[str, torch.Tensor]:
    """Codes, scales and what they decode to, by the kernels behind `flashoptim.optimizers.quantize` and `dequantize`."""
    n = values.numel()
    codes = torch.zeros(n, dtype=torch.int8 if signed else torch.uint8)
    scales = torch.zeros(-(-n // 32), dtype=torch.float16)
    grid = (-(-n // BLOCK),)
    limit, code_type = (127.0, tl.int8) if signed else (255.0, tl.uint8)
    peer._triton_quantize_kernel.fn[grid](values, codes, scales, n, limit, code_type, 32, not signed, signed, BLOCK_SIZE_N=BLOCK)
    decoded = torch.zeros(n)
    peer._triton_dequantize_kernel.fn[grid](codes, scales, decoded, n, limit, 32, not signed, signed, BLOCK_SIZE_N=BLOCK)
    return {"codes": codes, "scales": scales, "decoded": decoded}


def adamw(case: dict[str, Any]) -> dict[str, Any]:
    """Steps of the fused AdamW kernel from zero states: states and weights after each."""
    param, n = case["param"].clone(), case["param"].numel()
    state = {
        "mom": torch.zeros(n, dtype=torch.int8),
        "mom_scales_f16": torch.zeros(-(-n // 32), dtype=torch.float16),
        "var": torch.zeros(n, dtype=torch.uint8),
        "var_scales_f16": torch.zeros(-(-n // 32), dtype=torch.float16),
    }
    errors = None if param.dtype == torch.float32 else torch.zeros(n, dtype=torch.int8)
    history = []
    for step, grad in enumerate(case["grads"], 1):
        peer._fused_adam_step(
            **state,
            param=param,
            grad=grad,
            errors=errors,
            lr=case["lr"],
            beta1=case["beta1"],
            beta2=case["beta2"],
            eps=case["eps"],
            weight_decay=case["lr"] * case["weight_decay"],
            decoupled=True,
            step=step,
        )
        history.append(
            {**{k: v.clone() for k, v in state.items()}, "param": param.clone(), "errors": None if errors is None else errors.clone()}
        )
    return {"history": history}


def correct(w: torch.Tensor, p: torch.Tensor, correction_bytes: int) -> dict[str, torch.Tensor]:
    """Error correction bits of weights, and the fp32 weights that they give back."""
    bits = peer.compute_ecc_bits(w, p, master_bytewidth=2 + correction_bytes)
    return {"correction": bits, "joined": peer.reconstruct_fp32_param(p, bits)}


def main(source: str, target: str) -> None:
    peer.libdevice.pow = scalar_pow
    peer.libdevice.copysign = copysign
    peer._get_sm_count = lambda: 1
    inputs = torch.load(source)
    results = {
        "quantize": {name: quantize(*case) for name, case in inputs["quantize"].items()},
        "adamw": {name: adamw(case) for name, case in inputs["adamw"].items()},
        "correct": {name: correct(*case) for name, case in inputs["correct"].items()},
    }
    torch.save(results, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
