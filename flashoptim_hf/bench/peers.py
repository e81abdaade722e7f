"""Other packages' 8-bit optimizers, each run with its own code on an fp32 parameter of zeros, whose gradient is set at every step.

Peers are optional. On a CPU two of them need help, which changes how they are run and not what they compute: torchao's step is not
compiled, and flashoptim's Triton kernel runs in Triton's interpreter, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from ..errors import ConfigurationError, UnsupportedError
from .streams import Problem
from .subjects import LION_BETAS, MOMENTUM, Outcome, Subject

TORCHAO_BLOCK = 256
TORCHAO_MIN = 4096
"""torchao leaves tensors in fp32 that are smaller, or no multiple of its block."""


def bitsandbytes_adamw(problems: Sequence[Problem]) -> Iterator[Outcome]:
    """`bitsandbytes.optim.AdamW8bit`: block-wise dynamic map, blocks of 256."""
    from bitsandbytes.optim import AdamW8bit

    for problem in problems:
        numel = problem.grads.shape[1]
        param = torch.nn.Parameter(torch.zeros(numel))
        # min_8bit_size: by default small tensors stay in fp32
        optimizer = AdamW8bit([param], lr=problem.lr, betas=problem.betas, eps=problem.eps, weight_decay=0.0, min_8bit_size=1)
        weights = _steps(optimizer, param, problem.grads)
        state = optimizer.state[param]
        yield Outcome(weights, _nbytes(state[key] for key in ("state1", "state2", "absmax1", "absmax2")) / numel)


def torchao_adamw(problems: Sequence[Problem]) -> Iterator[Outcome]:
    """`torchao.optim.AdamW8bit`: dynamic map, blocks of 256.

    The stream is padded with zeros to a multiple of the block and repeated until it is long enough to be quantized at all; blocks do not
    influence each other, so that the first copy moves as it would in a large tensor.
    """
    from torchao.optim import AdamW8bit

    for problem in problems:
        numel = problem.grads.shape[1]
        grads = pad(problem.grads, (0, -numel % TORCHAO_BLOCK))
        grads = grads.repeat(1, -(-TORCHAO_MIN // grads.shape[1]))
        param = torch.nn.Parameter(torch.zeros(grads.shape[1]))
        optimizer = AdamW8bit([param], lr=problem.lr, betas=problem.betas, eps=problem.eps, weight_decay=0.0)
        with torch.compiler.set_stance("force_eager"):
            weights = _steps(optimizer, param, grads)[:, :numel]
        states = [optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq")]
        yield Outcome(weights, _nbytes(part for state in states for part in (state.codes, state.scale)) / grads.shape[1])


def _steps(optimizer: torch.optim.Optimizer, param: Tensor, grads: Tensor) -> Tensor:
    """One step for each row of `grads`; the weights after each, fp64 [steps, elements]."""
    weights = torch.empty(grads.shape, dtype=torch.float64)
    for t, grad in enumerate(grads):
        param.grad = grad.clone()
        optimizer.step()
        weights[t] = param.detach()
    return weights


def _nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def flashoptim_kernel(problems: Sequence[Problem], algorithm: str = "adamw") -> Iterator[Outcome]:
    """The kernel behind flashoptim's optimizer classes: softsign and square root, groups of 32; see `flashoptim_peer.py`.

    Raises:
        UnsupportedError: its process failed; the message ends with its last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.safetensors"), Path(folder, "out.safetensors")
        options = [
            {
                "adamw": {"lr": p.lr, "betas": p.betas, "eps": p.eps},
                "lion": {"lr": p.lr, "betas": LION_BETAS},
                "sgd": {"lr": p.lr, "momentum": MOMENTUM},
            }[algorithm]
            for p in problems
        ]
        # cloned, since safetensors refuses tensors that share memory, as those of two problems may
        save_file(
            {str(k): p.grads.clone(memory_format=torch.contiguous_format) for k, p in enumerate(problems)},
            source,
            {"options": json.dumps(options)},
        )
        command = [sys.executable, "-m", f"{__package__}.flashoptim_peer", str(source), str(target)]
        # Triton reads the variable when it is imported, hence the process of its own
        done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnsupportedError(
                f"flashoptim's kernel could not be run in Triton's interpreter (exit status {done.returncode}); "
                f"leave it out with --peers. Its last words:\n{done.stderr[-1500:]}"
            )
        with safe_open(target, "pt") as file:
            bytes_per_param = float(file.metadata()["bytes_per_param"])
            for k in range(len(problems)):
                yield Outcome(file.get_tensor(str(k)).double(), bytes_per_param)


PEERS: Mapping[str, Callable[[Sequence[Problem]], Iterator[Outcome]]] = {
    "flashoptim": flashoptim_kernel,
    "bitsandbytes": bitsandbytes_adamw,
    "torchao": torchao_adamw,
}
"""Peer, named as its package, to the function that runs its AdamW."""

MOMENTUM_PEERS = ("flashoptim",)
"""Peers whose Lion and SGD are run too."""


def installed(name: str) -> bool:
    """Whether the peer's package is there; nothing is imported."""
    return importlib.util.find_spec(name) is not None


def choose(names: str, algorithm: str = "adamw") -> tuple[list[Subject], list[str]]:
    """The peers to run and the known ones that are not installed.

    Args:
        names: "installed", "none", or names from `PEERS` with commas between.
        algorithm: "adamw" (default), "lion" or "sgd".

    Raises:
        ConfigurationError: an unknown peer, or one that this algorithm is not run with.
        UnsupportedError: a peer that is asked for by name is not installed.
    """
    if names == "none":
        return [], []
    peers = PEERS if algorithm == "adamw" else {name: partial(flashoptim_kernel, algorithm=algorithm) for name in MOMENTUM_PEERS}
    missing = [name for name in peers if not installed(name)]
    if names == "installed":
        return [Subject(name, solve) for name, solve in peers.items() if name not in missing], missing
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in peers:
            raise ConfigurationError(
                f"--peers: {name!r} is not known for {algorithm}; choose from {', '.join(peers)}, or give 'installed' or 'none'."
            )
        if name in missing:
            raise UnsupportedError(f"--peers: {name} is not installed (pip install {name}); --peers installed takes those that are there.")
    return [Subject(name, peers[name]) for name in wanted], []
