"""Bytes of activations: what forward keeps for backward, and what the busiest moments need beside it. Ranges, since kernels differ.

Per token and layer, in 16-bit numbers (2 bytes), hidden size h, q = heads x head_dim, k = kv_heads x head_dim, feed-forward width i. The
approach is that of arXiv 2205.05198, section 4.1 (activations of a transformer layer), for layers with RMS norms, rotary positions and a
gated feed-forward part; which tensors autograd keeps was read off transformers' modeling code and is held to measurements by
tests/planner/test_activations.py.

    each norm       4h: 16-bit input and output, in fused kernels; 8h: fp32 copy of the input, 16-bit results before and after the weight
    attention       2 (2q + 2k): q, k, v and the output; 2 (6q + 2k): keys and values repeated for every head, contiguous copies
    q and k norms   6 (q + k), where the model has them and no kernel fuses them
    feed-forward    2 (3i): gate, up, product, in fused kernels; 2 (5i): with the gate's activation and a copy

With checkpointing (arXiv 1604.06174) every layer keeps its input alone, 2h, and one layer at a time is computed again. FlashAttention and
the memory-efficient kernels keep no scores (arXiv 2205.14135); `eager`, and soft-capped attention without FlashAttention, keep them for
every head, 16-bit and fp32, 4 to 14 bytes times heads times seq_len per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from .setup import Setup, Span
from .shapes import ModelShape

HALF, FULL = 2, 4
"""Bytes of a 16-bit and of an fp32 number."""
TILE_TOKENS, TILE_VOCAB = 4096, 32768
"""trl's fused output layer works on tiles of so many tokens and words (trl 1.16)."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one process for one micro batch.

    Attributes:
        kept: what all layers keep for backward.
        layer: what one layer keeps (with checkpointing: what is computed again).
        backward: gradients of activations while one layer goes backward.
        head: output layer and loss, for a moment; without the fp32 gradient of its weight.
    """

    kept: Span
    layer: Span
    backward: Span
    head: Span


def layer_bytes_per_token(shape: ModelShape, setup: Setup) -> Span:
    """What one layer keeps for backward, without checkpointing."""
    h, q, k, i = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate
    size = setup.dtype.itemsize
    norms = Span(shape.norms * 2 * size * h, shape.norms * (2 * size * h + FULL * h))
    normed = 2 * (size + FULL) * (q + k) if shape.qk_norm else 0
    attention = Span(size * (2 * q + 2 * k), size * (6 * q + 2 * k) + FULL * shape.heads + normed)
    forward = Span(size * 3 * i, size * 5 * i)
    total = norms + attention + forward
    if shape.expert_bytes:
        total += Span(0, total.high // 4)  # tokens are sorted by expert, and their parts added up
    if keeps_scores(shape, setup):
        scores = shape.heads * setup.seq_len
        total += Span(scores * 2 * size, scores * (FULL + 5 * size))
    if not setup.full:
        total += Span(0, _adapter_bytes(shape, setup))
    return total


def keeps_scores(shape: ModelShape, setup: Setup) -> bool:
    """Whether attention keeps its scores for every pair of tokens."""
    return setup.attention == "eager" or (shape.softcapped and setup.attention == "sdpa")


def _adapter_bytes(shape: ModelShape, setup: Setup) -> int:
    """What adapters keep per token and layer: A's output; and copies of the input where it is cast, or dropped from."""
    adapted = [w for w in shape.weights if shape.adapted(w, setup.lora_targets) and w.layer is not None]
    inputs = sum(weight.shape[1] for weight in adapted)
    each = len(adapted) * setup.lora_r * setup.adapter_dtype.itemsize
    if setup.adapter_dtype.itemsize > HALF:
        each += inputs * FULL
    if setup.lora_dropout > 0:
        each += inputs * (setup.adapter_dtype.itemsize + 1)
    return each // max(shape.layers, 1)


def activations(shape: ModelShape, setup: Setup) -> Activations:
    """Bytes for one micro batch of `setup.tokens` tokens."""
    tokens, size, h = setup.tokens, setup.dtype.itemsize, shape.hidden
    layer = layer_bytes_per_token(shape, setup).times(tokens)
    # embeddings' output (an fp32 copy in some models), the last norm, positions
    ends = Span(size * h * tokens, (2 * size * h + 2 * FULL * h + 4 * shape.head_dim * size) * tokens)
    if setup.checkpointing:
        kept = Span(size * h * tokens * shape.layers, (size * h + 16) * tokens * shape.layers) + ends
    else:
        kept = layer.times(shape.layers) + ends
    i, q = shape.intermediate, shape.heads * shape.head_dim
    backward = Span(size * max(2 * i, 2 * h), size * (5 * i + 4 * q + 4 * h) + FULL * 2 * h).times(tokens)
    if keeps_scores(shape, setup):
        backward += Span(0, shape.heads * setup.seq_len * (2 * FULL) * tokens)
    return Activations(kept, layer, backward, head_bytes(shape, setup))


def head_bytes(shape: ModelShape, setup: Setup) -> Span:
    """Output layer and loss.

    Fused (trl): one tile of logits, the fp32 gradient of the hidden states and its 16-bit form. Else transformers' own: logits in 16 bits
    and in fp32, log-softmax and two fp32 gradients of it: 14 bytes per token and word, and up to 20 where an fp32 copy is handed out.
    """
    tokens, size = setup.tokens, setup.dtype.itemsize
    if setup.fused_head:
        tile = min(tokens, TILE_TOKENS) * min(shape.vocab, TILE_VOCAB) * size
        hidden = tokens * shape.hidden * (FULL + size)
        return Span(tile + hidden, 2 * tile + 2 * hidden)
    return Span(tokens * shape.vocab * (size + 3 * FULL), tokens * shape.vocab * (size + 4 * FULL + size))
