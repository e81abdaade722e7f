"""What is planned: the way of training, the optimizer, the machine. Plain values, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..codecs.learned import CODEC as LEARNED
from ..errors import ConfigurationError
from ..paging.plan import format_bytes

PREFIX = "flashoptim_"
PEERS = ("adamw_torch", "adamw_8bit", "paged_adamw_8bit", "adafactor")
"""Optimizers of others that are planned beside ours, under the names that transformers knows."""

ALIASES = {
    "adamw_torch_fused": "adamw_torch",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit_bnb": "paged_adamw_8bit",
}
"""Other names of the same."""

ATTENTIONS = ("sdpa", "flash_attention_2", "flash_attention_3", "eager")


@dataclass(frozen=True)
class Span:
    """Bytes between two bounds; both are the same where the count is exact."""

    low: int
    high: int

    @classmethod
    def exact(cls, nbytes: int) -> Span:
        return cls(nbytes, nbytes)

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)

    def times(self, factor: int) -> Span:
        return Span(self.low * factor, self.high * factor)

    def __str__(self) -> str:
        low, high = format_bytes(self.low), format_bytes(self.high)
        return low if low == high else f"{low} to {high}"


ZERO = Span(0, 0)


def largest(*spans: Span) -> Span:
    """The bounds of the largest of some quantities."""
    return Span(max(span.low for span in spans), max(span.high for span in spans))


@dataclass(frozen=True)
class Line:
    """One part: bytes on the GPU and on the host, of one process."""

    name: str
    device: Span
    host: Span = ZERO
    note: str = ""


@dataclass(frozen=True)
class Setup:
    """One run.

    Attributes:
        full: every weight is trained; else LoRA adapters alone.
        load_in_4bit: NF4 weights (QLoRA). Only without `full`.
        double_quant: the constants of NF4 are quantized too.
        dtype: of weights that are not quantized.
        lora_r: rank of the adapters.
        lora_targets: "all-linear", or the ends of the names of the modules that get an adapter.
        lora_dropout: above 0, each adapter keeps a mask and a copy of its input.
        batch: samples per process and micro batch.
        seq_len: tokens per sample.
        accumulation: micro batches per step.
        checkpointing: activations of a layer are computed again in backward.
        attention: as transformers names its implementations.
        fused_head: logits are made tile by tile, as trl's trainers do; False: transformers' own loss, with all logits in fp32.
        optimizer: `flashoptim_...`, or one of `PEERS`.
        options: of our optimizer, complete; see `optim/options.py`.
        ranks: processes, each with a GPU.
        ranks_per_host: how many of them share a machine.
        fsdp: FSDP2 shards weights, gradients and state over the ranks; False with several ranks: DDP.
        offload: FSDP2 keeps weights and gradients in host memory (`fsdp_offload_params`), and the optimizer steps there.
        gpu_bytes: memory of one GPU; None: no verdict about it.
        ram_bytes: memory of one host; None: no verdict about it.
        link: how host and GPU are connected; see `traffic.LINKS`.

    Raises:
        ConfigurationError: values that contradict each other.
    """

    full: bool = False
    load_in_4bit: bool = True
    double_quant: bool = True
    dtype: torch.dtype = torch.bfloat16
    lora_r: int = 16
    lora_targets: str | tuple[str, ...] = "all-linear"
    lora_dropout: float = 0.0
    batch: int = 1
    seq_len: int = 2048
    accumulation: int = 1
    checkpointing: bool = True
    attention: str = "sdpa"
    fused_head: bool = True
    optimizer: str = "flashoptim_paged_adamw"
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1
    ranks_per_host: int = 1
    fsdp: bool = False
    offload: bool = False
    gpu_bytes: int | None = None
    ram_bytes: int | None = None
    link: str = "pcie4"

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len", "accumulation", "ranks", "ranks_per_host", "lora_r"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.full and self.load_in_4bit:
            raise ConfigurationError("full fine-tuning of 4-bit weights does not exist: choose --full, or LoRA with --load-in-4bit.")
        if self.attention not in ATTENTIONS:
            raise ConfigurationError(f"attention={self.attention!r} is not known; choose one of {', '.join(ATTENTIONS)}.")
        if self.offload and not self.fsdp:
            raise ConfigurationError("offloaded weights need FSDP2: pass --fsdp2 too.")
        if self.ranks % self.ranks_per_host:
            raise ConfigurationError(f"{self.ranks} processes cannot be {self.ranks_per_host} on each host: choose a divisor.")
        if self.releases and ((self.ranks > 1 and not self.fsdp) or self.accumulation > 1):
            raise ConfigurationError(
                "gradient_release=True updates during backward: it needs gradient_accumulation_steps=1, and one process or FSDP2, not "
                f"{self.accumulation} and DDP over {self.ranks}."
            )
        if self.learns and (self.releases or self.fsdp):
            raise ConfigurationError(
                f"codec={LEARNED.name!r} learns from whole parameters after each step, and goes neither with gradient_release=True nor "
                "with FSDP2: use codec='joint', which it is made of."
            )

    @property
    def tokens(self) -> int:
        """Tokens of one micro batch on one process."""
        return self.batch * self.seq_len

    @property
    def ours(self) -> bool:
        """Whether the optimizer is one of this package."""
        return self.optimizer.startswith(PREFIX)

    @property
    def releases(self) -> bool:
        """Whether gradients are freed during backward."""
        return self.ours and bool(self.options.get("gradient_release"))

    @property
    def learns(self) -> bool:
        """Whether states are stored with curves that are learned."""
        return self.ours and self.options.get("codec") == LEARNED.name

    @property
    def shards(self) -> int:
        """Into how many parts weights, gradients and state are cut."""
        return self.ranks if self.fsdp else 1

    @property
    def adapter_dtype(self) -> torch.dtype:
        """Of adapters: trl turns those on 4-bit weights into bf16, and PEFT those on 16-bit weights into fp32."""
        return torch.bfloat16 if self.load_in_4bit else torch.float32
