"""The busiest moments of a step: what lies on the GPU beside weights and state."""

from __future__ import annotations

from .activations import Activations
from .setup import ZERO, Setup, Span, largest
from .shapes import ModelShape
from .states import StatePlan
from .weights import Weights


def gradients(weights: Weights, setup: Setup) -> tuple[Span, Span, Span]:
    """Gradients while (the head, the last layer, the first layer) goes backward."""
    whole = Span.exact(weights.gradients)
    head = Span(weights.head, weights.head + weights.head // 2) if setup.fused_head else Span.exact(weights.head // 2)
    tied = weights.head // 2 if weights.tied else 0
    if setup.releases:
        busy = Span(tied + weights.layer_gradients // 2, tied + 2 * weights.layer_gradients + weights.head // 2 * (not tied))
        return head, busy, largest(busy, Span(weights.largest_gradient, weights.largest_gradient + weights.layer_gradients))
    if setup.ranks > 1 and not setup.fsdp:
        whole = whole.times(2)  # the buckets of DDP are a copy
    if setup.accumulation > 1 or (setup.ranks > 1 and not setup.fsdp):
        return whole + head, whole, whole
    if setup.offload:
        return head, ZERO, ZERO
    return head, Span.exact(min(whole.high, weights.layer_gradients + weights.head // 2)), whole


def gathered(weights: Weights, setup: Setup) -> tuple[Span, Span]:
    """What FSDP2 holds whole beside the shards, while (the head, a layer) is at work: the layer, the next one, what was reduced last."""
    if not setup.fsdp:
        return ZERO, ZERO
    embedding, layer, tail = (unit.frozen + unit.trained for unit in weights.units)
    reduced = weights.units[1].trained
    return Span(tail, tail + max(layer, embedding)), Span(layer + reduced, 2 * layer + 2 * reduced + tail)


def moments(shape: ModelShape, weights: Weights, state: StatePlan, acts: Activations, setup: Setup) -> dict[str, Span]:
    """GPU memory beside weights and state at the busiest moments of a step."""
    at_head, at_last, at_first = gradients(weights, setup)
    head, layer = gathered(weights, setup)
    again = acts.layer if setup.checkpointing else ZERO
    busy = again + acts.backward + Span.exact(weights.largest_linear) + layer
    one = Span(acts.kept.low // max(shape.layers, 1), acts.kept.high // max(shape.layers, 1))
    found = {
        "loss": acts.kept + acts.head + at_head + head,
        "backward of the last layer": acts.kept + busy + at_last,
        "backward of the first layer": one + busy + at_first,
    }
    if not setup.offload:
        found["optimizer step"] = at_first + Span(*state.transient)
    return found
