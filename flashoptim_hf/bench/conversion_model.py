"""A tiny model and the optimizers that train it, for the bench of conversions. `python -m flashoptim_hf.bench.conversion_model IN OUT` is
flashoptim's own optimizer on a CPU.

That package refuses a machine without CUDA. With TRITON_INTERPRET=1 from the start its kernels run in Triton's interpreter; what only a GPU
has (`libdevice.pow`, `libdevice.copysign`, rounding to bf16, the number of multiprocessors) is supplied, and its checks for CUDA are told
that all is well.
IN and OUT are files of `torch.save`: a list of `Job`s as dictionaries, and a list of outcomes.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from .._triton import tl, triton
from ..errors import UnsupportedError
from ..optim.adamw import FlashAdamW
from ..optim.lion import FlashLion
from ..optim.sgd import FlashSGD

VOCABULARY, WIDTH = 64, 64
RATES = MappingProxyType({"adamw": 3e-3, "lion": 3e-4, "sgd": 0.1})
OPTIONS = MappingProxyType({"adamw": {"weight_decay": 0.01}, "lion": {"weight_decay": 0.1}, "sgd": {"momentum": 0.9}})
_OURS = MappingProxyType({"adamw": FlashAdamW, "lion": FlashLion, "sgd": FlashSGD})
_PEER_CLASSES = MappingProxyType({"adamw": "AdamW", "lion": "Lion", "sgd": "SGD"})


@dataclass(frozen=True)
class Job:
    """Some steps of one optimizer.

    Attributes:
        algorithm: "adamw", "lion" or "sgd".
        weights: the model's state dict; {} for the first one.
        state: the optimizer's state dict; None starts afresh.
        first, steps: number of the first batch, and how many.
        dtype: of the weights, "float32" or "bfloat16".
    """

    algorithm: str
    weights: dict[str, Tensor]
    state: dict[str, Any] | None
    first: int
    steps: int
    dtype: str = "float32"


@dataclass(frozen=True)
class Outcome:
    """What a job leaves: the loss of each step, the weights and the optimizer's state."""

    losses: list[float]
    weights: dict[str, Tensor]
    state: dict[str, Any]


def model(job: Job) -> nn.Module:
    """Predicts the next token from the last one: an embedding and two layers, three of its tensors larger than 4096 elements."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, VOCABULARY))
    net = net.to(getattr(torch, job.dtype))
    if job.weights:
        net.load_state_dict(job.weights)
    return net


def loss_of(net: nn.Module, batch: int) -> Tensor:
    """A batch of 256 pairs: the next token is three times the last one plus 1, and every fourth is noise."""
    generator = torch.Generator().manual_seed(batch)
    last = torch.randint(VOCABULARY, (256,), generator=generator)
    noise = torch.randint(VOCABULARY, (256,), generator=generator)
    following = torch.where(torch.rand(256, generator=generator) < 0.25, noise, (3 * last + 1) % VOCABULARY)
    return F.cross_entropy(net(last).float(), following)


def copied(state: Any) -> Any:
    """A state dict through a file in memory, as a checkpoint would bring it; torchao's tensors know no other way to be copied."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(make: Callable[[Sequence[nn.Parameter]], Optimizer], job: Job) -> Outcome:
    """Do a job; `make` builds the optimizer."""
    net = model(job)
    optimizer = make(list(net.parameters()))
    if job.state is not None:
        optimizer.load_state_dict(copied(job.state))  # torch's own would go on in the given tensors
    losses = []
    with torch.compiler.set_stance("force_eager"):  # torchao would compile its step
        for batch in range(job.first, job.first + job.steps):
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return Outcome(losses, {name: value.clone() for name, value in net.state_dict().items()}, optimizer.state_dict())


def ours(algorithm: str, codec: str) -> Callable[[Sequence[nn.Parameter]], Optimizer]:
    """An optimizer of this package."""
    return partial(_OURS[algorithm], lr=RATES[algorithm], codec=codec, **OPTIONS[algorithm])


def torch_optimizer(algorithm: str) -> Callable[[Sequence[nn.Parameter]], Optimizer]:
    """torch's own; there is no Lion."""
    cls = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[algorithm]
    return partial(cls, lr=RATES[algorithm], **OPTIONS[algorithm])


def bitsandbytes(algorithm: str, bits: int) -> Callable[[Sequence[nn.Parameter]], Optimizer]:
    """bitsandbytes'; tensors of fewer than 4096 elements are fp32 in any case."""
    from bitsandbytes import optim

    return partial(getattr(optim, f"{_PEER_CLASSES[algorithm]}{bits}bit"), lr=RATES[algorithm], **OPTIONS[algorithm])


def torchao(algorithm: str) -> Callable[[Sequence[nn.Parameter]], Optimizer]:
    """torchao's AdamW8bit."""
    from torchao.optim import AdamW8bit

    return partial(AdamW8bit, lr=RATES[algorithm], **OPTIONS[algorithm])


# ---------------------------------------------------------------------- flashoptim, in a process of its own


def run_flashoptim(jobs: Sequence[Job]) -> list[Outcome]:
    """Do jobs with flashoptim's own optimizer classes and kernels, in Triton's interpreter.

    Raises:
        UnsupportedError: its process failed; the message ends with its last words.
    """
    if not jobs:
        return []
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.pt"), Path(folder, "out.pt")
        torch.save([asdict(job) for job in jobs], source)
        # Triton reads the variable when it is imported, hence the process of its own
        command = ["env", "TRITON_INTERPRET=1", sys.executable, "-m", __name__, str(source), str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnsupportedError(
                f"flashoptim could not be run in Triton's interpreter (exit status {done.returncode}); leave it out with --packages. Its "
                f"last words:\n{done.stderr[-1500:]}"
            )
        return [Outcome(**outcome) for outcome in torch.load(target, weights_only=True)]


def power(base: Any, exponent: Any) -> float:
    """`libdevice.pow` for two scalars of the interpreter."""
    base, exponent = (float(x.handle.data.item()) if hasattr(x, "handle") else float(x) for x in (base, exponent))
    return float(np.float32(float(np.float32(base)) ** exponent))


def copysign(size: Any, sign: Any) -> Any:
    """`libdevice.copysign` for two tiles of the interpreter."""
    return tl.where(sign < 0, -size, size)


def to_nearest(convert: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's conversion of floats, with fp32 to bf16 rounded to nearest as on a GPU: cut off, masters would lag behind."""

    def converted(value: Any, source: Any, target: Any, mode: Any) -> Any:
        if (str(source), str(target)) != ("fp32", "bf16"):
            return convert(value, source, target, mode)
        bits = torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32)).bfloat16().view(torch.int16)
        return bits.numpy().view(np.uint16).reshape(np.shape(value))

    return converted


class OneBlock:
    """A kernel of flashoptim that works on a whole tensor at once: the interpreter's time goes by blocks. Groups do not depend on it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            numel = max(value.numel() for value in arguments if isinstance(value, Tensor))
            return self.kernel[(1,)](*arguments, **{**options, "BLOCK_SIZE_N": max(32, triton.next_power_of_2(numel))})

        return launch


def zeroed(optimizer: Any) -> dict[str, Any]:
    """The state dict of an optimizer of flashoptim before its first step: it would quantize zeros on a GPU to get there."""
    saved = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for key, param in enumerate(params):
        values: dict[str, Any] = {"step": torch.tensor(0)} if "exp_avg_sq" in optimizer.quantized_state_spec else {}
        for name, spec in optimizer.quantized_state_spec.items():
            scales = torch.zeros(-(-param.numel() // 32), dtype=torch.float16)
            values[f"{name}::quantized"] = torch.zeros(param.shape, dtype=torch.int8 if spec.signed else torch.uint8)
            values[f"{name}::scales"] = scales.view(torch.bfloat16) if param.dtype == torch.bfloat16 else scales
        if param.dtype != torch.float32:
            values["error_bits"] = torch.zeros_like(param)
        saved["state"][key] = values
    return saved


def main(source: str, target: str) -> None:
    """Do the jobs in the file `source`."""
    from flashoptim import optimizers as peer

    peer.libdevice.pow, peer.libdevice.copysign = power, copysign
    peer._get_sm_count = lambda: 1
    interpreter: Any = sys.modules[type(peer._triton_adam_kernel).__module__]
    interpreter._convert_float = to_nearest(interpreter._convert_float)
    peer._triton_adam_kernel, peer._triton_momentum_kernel = OneBlock(peer._triton_adam_kernel), OneBlock(peer._triton_momentum_kernel)
    outcomes = []
    with mock.patch("torch.cuda.is_available", return_value=True):
        for job in (Job(**entry) for entry in torch.load(source, weights_only=True)):
            cls = getattr(peer, f"Flash{_PEER_CLASSES[job.algorithm]}")
            bits = None if job.dtype == "float32" else 24
            make = partial(cls, lr=RATES[job.algorithm], master_weight_bits=bits, **OPTIONS[job.algorithm])
            if job.state is None:
                job = Job(**{**asdict(job), "state": zeroed(make(list(model(job).parameters())))})
            outcomes.append(asdict(train(make, job)))
    torch.save(outcomes, target)


if __name__ == "__main__":
    np.seterr(all="ignore")  # overflow to infinity in fp16 is part of the peer's format
    main(*sys.argv[1:])
