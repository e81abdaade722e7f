"""Bytes of weights, adapters and gradients of one process: exact, from the shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import ConfigurationError
from ..paging.plan import power_of_two
from .setup import Setup, Span
from .shapes import ModelShape, Weight
from .states import Trainable

BLOCK = 64
"""Elements of NF4 that share a maximum (arXiv 2305.14314, section 3)."""
NESTED_BLOCK = 256
"""Maxima that share one of their own, with double quantization."""
TABLE, NESTED_TABLE, OFFSET = 16 * 4, 256 * 4, 4
"""Bytes that bitsandbytes keeps with every layer: the values of NF4, those of 8-bit maxima, and the maxima's mean."""
ALLOCATION = 512
"""Bytes: CUDA blocks of torch's allocator are multiples of it."""


def packed_bytes(numel: int) -> int:
    """NF4 codes: half a byte each."""
    return -(-numel // 2)


def constants_bytes(numel: int, double_quant: bool = True) -> list[int]:
    """What bitsandbytes keeps beside the codes of one layer, tensor by tensor.

    With double quantization one byte per 64 elements, one fp32 number per 256 of these, two tables and an offset; else one fp32 number per
    64 elements and a table.
    """
    blocks = -(-numel // BLOCK)
    if not double_quant:
        return [4 * blocks, TABLE]
    return [blocks, 4 * -(-blocks // NESTED_BLOCK), TABLE, NESTED_TABLE, OFFSET]


EXPERTS = {"all-linear", "gate", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"}
"""Names that PEFT turns into adapters on experts, where a model has experts."""


@dataclass(frozen=True)
class Unit:
    """Weights that FSDP2 gathers together, whole, in bytes: frozen and trained ones."""

    frozen: int
    trained: int


@dataclass(frozen=True)
class Weights:
    """Bytes of one process.

    Attributes:
        quantized: NF4 codes; `constants` what belongs to them, which FSDP2 leaves whole.
        plain: weights in their dtype that are not trained, and buffers.
        trained: tensors that are trained: adapters, or all of the model, in the optimizer's order.
        whole: bytes of all weights before sharding.
        largest_linear: the largest matrix in the compute dtype, which a 4-bit layer decodes for a moment.
        units: what FSDP2 gathers: (embedding, largest layer, head).
        head: bytes of the output layer's fp32 gradient, where it is trained.
        rounding: what torch's CUDA allocator adds by rounding small tensors up.
        pinned: weights with every tensor rounded up to a power of two, as pinned memory takes it; only constants are left out.
        tied: embedding and output layer share their weight.
        layer_gradients: gradients of the largest layer.
        largest_gradient: that of the largest tensor.
    """

    quantized: int
    constants: int
    plain: int
    trained: tuple[Trainable, ...]
    whole: int
    largest_linear: int
    units: tuple[Unit, Unit, Unit]
    head: int
    rounding: int
    pinned: int
    tied: bool
    layer_gradients: int
    largest_gradient: int

    @property
    def base(self) -> int:
        """All that is not trained."""
        return self.quantized + self.constants + self.plain

    @property
    def trained_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.trained)

    @property
    def gradients(self) -> int:
        """One gradient of each trained tensor, in its dtype."""
        return self.trained_bytes


def local_rows(rows: int, shards: int) -> int:
    """Rows of the first rank, which has the most: FSDP2 cuts along the first dimension."""
    return -(-rows // shards)


def local_shape(shape: Sequence[int], shards: int) -> tuple[int, ...]:
    """The first rank's part."""
    return (local_rows(shape[0], shards), *shape[1:]) if shape else ()


def adapters(shape: ModelShape, setup: Setup) -> list[tuple[Weight, Trainable]]:
    """LoRA's A (r, in) and B (out, r) for each adapted layer (arXiv 2106.09685, section 4.1), whole, in PEFT's order.

    Raises:
        ConfigurationError: adapters on experts, whose shapes are PEFT's own affair.
    """
    found = []
    targets = {setup.lora_targets} if isinstance(setup.lora_targets, str) else {name.rpartition(".")[2] for name in setup.lora_targets}
    if shape.expert_bytes and targets & EXPERTS:
        raise ConfigurationError(
            f"lora_target_modules={setup.lora_targets!r} puts adapters on experts, which are not planned. Name the others, for example "
            "q_proj, k_proj, v_proj and o_proj."
        )
    for weight in shape.weights:
        if shape.adapted(weight, setup.lora_targets):
            module, (outputs, inputs) = weight.name.removesuffix(".weight"), weight.shape
            for name, size in (("lora_A", (setup.lora_r, inputs)), ("lora_B", (outputs, setup.lora_r))):
                found.append((weight, Trainable(f"{module}.{name}", size, setup.adapter_dtype)))
    return found


def count(shape: ModelShape, setup: Setup) -> Weights:
    """Bytes of one process, for every way of training."""
    shards = setup.shards
    quantized = constants = rounding = largest_linear = pinned = 0
    plain = shape.buffer_bytes
    for weight in shape.weights:
        if setup.load_in_4bit and shape.quantized(weight):
            packed = packed_bytes(weight.numel)
            # sharded codes are stored in pairs of bytes, as bf16
            codes = packed if shards == 1 else 2 * local_rows(-(-packed // 2), shards)
            quantized += codes
            pinned += power_of_two(codes)
            parts = constants_bytes(weight.numel, setup.double_quant)
            constants += sum(parts)
            rounding += sum(-part % ALLOCATION for part in parts)
            largest_linear = max(largest_linear, weight.numel * setup.dtype.itemsize)
        elif not setup.full:
            nbytes = Trainable(weight.name, local_shape(weight.shape, shards), weight.dtype).nbytes
            plain += nbytes
            pinned += power_of_two(nbytes)
    pairs = adapters(shape, setup) if not setup.full else []
    tensors = [Trainable(w.name, w.shape, w.dtype) for w in shape.weights] if setup.full else [tensor for _, tensor in pairs]
    # the Trainer's groups: weights that decay, then biases and norms
    tensors = [t for t in tensors if len(t.shape) > 1] + [t for t in tensors if len(t.shape) < 2]
    trained = tuple(Trainable(t.name, local_shape(t.shape, shards), t.dtype) for t in tensors)
    rounding += sum(-tensor.nbytes % ALLOCATION for tensor in trained) * 2
    head = next(w for w in shape.weights if w.name == shape.head)
    return Weights(
        quantized=quantized,
        constants=constants,
        plain=plain,
        trained=trained,
        whole=_whole(shape, setup) + sum(t.nbytes for t in tensors if not setup.full),
        largest_linear=largest_linear,
        units=_units(shape, setup, pairs),
        head=head.numel * 4 if setup.full else 0,
        rounding=rounding,
        pinned=pinned + sum(power_of_two(tensor.nbytes) for tensor in trained),
        tied=shape.tied,
        layer_gradients=_largest_layer(shape, setup, pairs).trained,
        largest_gradient=max((tensor.nbytes for tensor in tensors), default=0),
    )


def loaded_bytes(weight: Weight, shape: ModelShape, setup: Setup) -> int:
    """One weight as it is loaded, whole."""
    if setup.load_in_4bit and shape.quantized(weight):
        return packed_bytes(weight.numel) + sum(constants_bytes(weight.numel, setup.double_quant))
    return weight.nbytes


def loading(shape: ModelShape, setup: Setup) -> Span:
    """What loading takes beside the weights: one tensor, or what transformers' four threads bring at once, before it is quantized."""
    sizes = sorted((w.numel * setup.dtype.itemsize for w in shape.weights if setup.load_in_4bit and shape.quantized(w)), reverse=True)
    return Span(sum(sizes[:1]), sum(sizes[:5]))


def _whole(shape: ModelShape, setup: Setup) -> int:
    return sum(loaded_bytes(weight, shape, setup) for weight in shape.weights) + shape.buffer_bytes


def _units(shape: ModelShape, setup: Setup, pairs: Sequence[tuple[Weight, Trainable]]) -> tuple[Unit, Unit, Unit]:
    """Accelerate's units: the input embedding, each decoder layer, the output layer with what is left (one with the embedding if tied)."""

    def unit(name: str) -> Unit:
        nbytes = next(weight.nbytes for weight in shape.weights if weight.name == name)
        return Unit(0, nbytes) if setup.full else Unit(nbytes, 0)

    embedding = Unit(0, 0) if shape.tied else unit(shape.embedding)
    return embedding, _largest_layer(shape, setup, pairs), unit(shape.head)


def _largest_layer(shape: ModelShape, setup: Setup, pairs: Sequence[tuple[Weight, Trainable]]) -> Unit:
    frozen: dict[int, int] = {}
    trained: dict[int, int] = {}
    for weight in shape.weights:
        if weight.layer is not None:
            kind = trained if setup.full else frozen
            packed = setup.load_in_4bit and shape.quantized(weight)
            kind[weight.layer] = kind.get(weight.layer, 0) + (packed_bytes(weight.numel) if packed else weight.nbytes)
    for weight, tensor in pairs:
        if weight.layer is not None:
            trained[weight.layer] = trained.get(weight.layer, 0) + tensor.nbytes
    layers = {*frozen, *trained}
    largest = max(layers, key=lambda n: frozen.get(n, 0) + trained.get(n, 0), default=None)
    return Unit(0, 0) if largest is None else Unit(frozen.get(largest, 0), trained.get(largest, 0))


def dtype_of(name: str) -> torch.dtype:
    """A dtype by its name, "auto" being bf16."""
    found = getattr(torch, "bfloat16" if name in ("auto", "None") else name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigurationError(f"dtype={name!r} is not known; choose bfloat16, float16 or float32.")
    return found
