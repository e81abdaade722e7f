"""The busiest moments of a step: what lies on the GPU beside weights and state."""

from __future__ import annotations

from .activations import Activations
from .setup import ZERO, Setup, Span
from .shapes import ModelShape
from .states import StatePlan
from .weights import Weights


def gradients(weights: Weights, setup: Setup) -> tuple[Span, Span, Span, Span]:
    """Gradients while (the head, the last layer, the first layer) goes backward, and at the optimizer's step."""
    whole, table = weights.gradients, weights.head // 2
    head = Span(weights.head, weights.head + table) if setup.fused_head else Span.exact(table)
    tied = table if weights.tied else 0
    if setup.releases:
        # pages are complete when their last gradient is; a tied embedding's gradient grows until the end
        shards, layer = setup.shards, weights.layer_gradients
        busy = Span((tied + layer // 2) // shards, (table + 2 * layer) // shards)
        return head, busy, busy, Span(weights.largest_gradient // shards, (weights.largest_gradient + layer) // shards)
    if setup.ranks > 1 and not setup.fsdp:
        all_there = Span.exact(2 * whole)  # the buckets of DDP are a copy
        return all_there + head, all_there, all_there, all_there
    if setup.accumulation > 1 and not setup.offload:
        all_there = Span.exact(whole)
        return all_there + head, all_there, all_there, all_there
    if setup.offload:
        return head, ZERO, ZERO, ZERO
    first = Span(max(0, whole - weights.layer_gradients - table + tied), whole)
    return head, Span(0, min(whole, weights.layer_gradients + table)), first, Span.exact(whole)


def gathered(weights: Weights, setup: Setup) -> tuple[Span, Span]:
    """What FSDP2 holds whole beside the shards, while (the head, a layer) is at work: the layer, the next one, what was reduced last."""
    if not setup.fsdp:
        return ZERO, ZERO
    embedding, layer, tail = (unit.frozen + unit.trained for unit in weights.units)
    reduced = weights.units[1].trained
    return Span(tail, tail + max(layer, embedding)), Span(layer + reduced, 2 * layer + 2 * reduced + tail)


def moments(shape: ModelShape, weights: Weights, state: StatePlan, acts: Activations, setup: Setup) -> dict[str, Span]:
    """GPU memory beside weights and state at the busiest moments of a step."""
    at_head, at_last, at_first, at_step = gradients(weights, setup)
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
        found["optimizer step"] = at_step + Span(*state.transient)
    return found
