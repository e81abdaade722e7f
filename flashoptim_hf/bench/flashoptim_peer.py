"""Runs flashoptim's own kernels on a CPU, as a program: `python -m flashoptim_hf.bench.flashoptim_peer IN OUT`.

Needs TRITON_INTERPRET=1 from the start. IN and OUT are safetensors files whose tensors "0", "1", ... are [steps, elements]: gradients in
IN, the weights after each step in OUT. IN's metadata has "options", a JSON list of {"lr", "betas", "eps"} for AdamW, {"lr", "betas"} for
Lion or {"lr", "momentum"} for SGD; OUT's has "bytes_per_param".

The optimizer class refuses a machine without CUDA, so its kernel is launched directly, on the planes that the class would allocate. Two
things are supplied that only a GPU has: `libdevice.pow`, rounded to fp32, and a launch grid.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from .._triton import tl, triton

GROUP = 32
MAX_BLOCK = 1 << 16
"""Elements that one program works on: large, since the interpreter's time goes by programs. Groups do not depend on it."""


def power(base: Any, exponent: Any) -> float:
    """`libdevice.pow` for two scalars of the interpreter."""
    base, exponent = (float(x.handle.data.item()) if hasattr(x, "handle") else float(x) for x in (base, exponent))
    return float(np.float32(float(np.float32(base)) ** exponent))


def solve(grads: Tensor, options: dict[str, Any]) -> tuple[Tensor, float]:
    """Weights after each step, fp32 [steps, elements], and bytes of state per element; elements a multiple of 32."""
    import flashoptim.optimizers as peer

    if "eps" not in options:
        return solve_momentum(grads, options, peer._triton_momentum_kernel)
    peer.libdevice.pow = power
    steps, numel = grads.shape
    param = torch.zeros(numel)
    # What flashoptim's quantize() makes of zeros: codes 0, and a scale of 1e-12, which is 0 in fp16
    mom, var = torch.zeros(numel, dtype=torch.int8), torch.zeros(numel, dtype=torch.uint8)
    mom_scales, var_scales = torch.zeros(2, numel // GROUP, dtype=torch.float16)
    block = min(triton.next_power_of_2(numel), MAX_BLOCK)
    lr, (beta1, beta2), eps = options["lr"], options["betas"], options["eps"]
    weights = torch.empty(steps, numel)
    for t, grad in enumerate(grads.contiguous(), start=1):
        peer._triton_adam_kernel[(triton.cdiv(numel, block),)](
            *(mom, mom_scales, var, var_scales, param, grad),
            param,  # the corrections' place, which an fp32 parameter leaves unused
            *(numel, lr, beta1, beta2, eps, 0.0, t),
            GROUP_SIZE=GROUP,
            DECOUPLED_WEIGHT_DECAY=True,
            PARAM_DTYPE=tl.float32,
            USE_ECC=False,
            QUANTIZE_OPTIM_STATES=True,
            SIGNED_ERROR_T=tl.int8,
            NUM_MANTISSA_BITS=23,
            SIGNED_MAX_VAL=127.0,
            BLOCK_SIZE_N=block,
        )
        weights[t - 1] = param
    return weights, sum(plane.nbytes for plane in (mom, mom_scales, var, var_scales)) / numel


def solve_momentum(grads: Tensor, options: dict[str, Any], kernel: Any) -> tuple[Tensor, float]:
    """`solve` for Lion and SGD, which share one kernel: its coefficients are beta2 and beta1, or the momentum and 1."""
    steps, numel = grads.shape
    param, mom = torch.zeros(numel), torch.zeros(numel, dtype=torch.int8)
    scales = torch.zeros(numel // GROUP, dtype=torch.float16)
    block = min(triton.next_power_of_2(numel), MAX_BLOCK)
    beta1, beta2 = options["betas"] if "betas" in options else (1.0, options["momentum"])
    weights = torch.empty(steps, numel)
    for t, grad in enumerate(grads.contiguous()):
        kernel[(triton.cdiv(numel, block),)](
            *(mom, scales, param, grad),
            param,  # the corrections' place, which an fp32 parameter leaves unused
            *(numel, options["lr"], beta2, beta1, 0.0),
            GROUP_SIZE=GROUP,
            DO_LION="betas" in options,
            NESTEROV=False,
            DECOUPLED_WEIGHT_DECAY=False,
            PARAM_DTYPE=tl.float32,
            USE_ECC=False,
            QUANTIZE_OPTIM_STATES=True,
            SIGNED_ERROR_T=tl.int8,
            NUM_MANTISSA_BITS=23,
            SIGNED_MAX_VAL=127.0,
            BLOCK_SIZE_N=block,
        )
        weights[t] = param
    return weights, (mom.nbytes + scales.nbytes) / numel


def main(source: str, target: str) -> None:
    """Solve IN's problems. Those with equal steps and options go side by side in one tensor, each padded to whole groups."""
    with safe_open(source, "pt") as file:
        options = json.loads(file.metadata()["options"])
        grads = [file.get_tensor(str(k)) for k in range(len(options))]
    batches: dict[str, list[int]] = defaultdict(list)
    for k, (grad, option) in enumerate(zip(grads, options, strict=True)):
        batches[json.dumps([grad.shape[0], option])].append(k)

    weights, bytes_per_param = {}, 0.0
    for members in batches.values():
        padded = [pad(grads[k], (0, -grads[k].shape[1] % GROUP)) for k in members]
        solved, bytes_per_param = solve(torch.cat(padded, dim=1), options[members[0]])
        for k, part in zip(members, solved.split([p.shape[1] for p in padded], dim=1), strict=True):
            weights[str(k)] = part[:, : grads[k].shape[1]].contiguous()
    save_file(weights, target, {"bytes_per_param": str(bytes_per_param)})


if __name__ == "__main__":
    np.seterr(all="ignore")  # overflow to infinity in fp16 is part of the peer's format
    main(*sys.argv[1:])
