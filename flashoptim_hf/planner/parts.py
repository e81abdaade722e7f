"""The parts of a run's memory, line by line, for tables."""

from __future__ import annotations

from collections.abc import Iterator

from .activations import Activations
from .assumptions import CONTEXT, FRAGMENTATION, PROCESS
from .moments import gathered, gradients
from .setup import ZERO, Line, Setup, Span, largest
from .states import StatePlan
from .weights import Weights


def parts(weights: Weights, state: StatePlan, acts: Activations, setup: Setup) -> tuple[Line, ...]:
    """Every part, on the GPU or on the host of one process. They do not add up to the peak: not all are there at once."""
    return (*_weights(weights, setup), *_state(state, setup), *_passing(weights, acts, setup), *_assumed(weights))


def _placed(name: str, nbytes: int | Span, on_host: bool, note: str = "") -> Line:
    span = nbytes if isinstance(nbytes, Span) else Span.exact(nbytes)
    return Line(name, ZERO, span, note) if on_host else Line(name, span, ZERO, note)


def _weights(weights: Weights, setup: Setup) -> Iterator[Line]:
    if setup.load_in_4bit:
        yield _placed("weights in NF4", weights.quantized, setup.offload, "linear layers, half a byte each")
        yield _placed("constants of NF4", weights.constants, False, "double quantization" if setup.double_quant else "fp32 maxima")
    rest = "buffers" if setup.full else "norms, embeddings, head" if setup.load_in_4bit else "weights, frozen"
    yield _placed(rest, weights.plain, setup.offload)
    count = f"{sum(tensor.numel for tensor in weights.trained):,} parameters"
    yield _placed("weights, trained" if setup.full else f"adapters, r={setup.lora_r}", weights.trained_bytes, setup.offload, count)
    if setup.releases:
        yield _placed("gradients", largest(*gradients(weights, setup)[1:]), setup.offload, "freed during backward")
    else:
        yield _placed("gradients", weights.gradients, setup.offload)


def _state(state: StatePlan, setup: Setup) -> Iterator[Line]:
    on_host = state.host > 0 and not state.unified
    for name, nbytes in state.planes.items():
        yield _placed(f"state: {name}", nbytes, on_host, "in unified memory, in part" if state.unified else "")
    if setup.ours:
        yield _placed("state: alignment, pinning", (state.host if on_host else state.device) - state.used, on_host, state.remark)
    if on_host and state.device:
        yield Line("state that stays on the GPU", Span.exact(state.device))
    if state.staging:
        yield Line("pages in flight", Span.exact(state.staging), ZERO, f"there are {state.pages} pages")


def _passing(weights: Weights, acts: Activations, setup: Setup) -> Iterator[Line]:
    yield Line("activations kept", acts.kept, ZERO, "layers' inputs alone" if setup.checkpointing else "no checkpointing")
    again = acts.layer if setup.checkpointing else ZERO
    yield Line(
        "one layer in backward", again + acts.backward, ZERO, "computed again, and gradients" if setup.checkpointing else "gradients"
    )
    if weights.largest_linear:
        yield Line("a decoded 4-bit matrix", Span.exact(weights.largest_linear))
    head = Span.exact(weights.head) if setup.fused_head else ZERO
    yield Line("output layer and loss", acts.head + head, ZERO, "in tiles" if setup.fused_head else "all logits, in fp32")
    if setup.fsdp:
        yield Line("gathered by FSDP2", largest(*gathered(weights, setup)))


def _assumed(weights: Weights) -> Iterator[Line]:
    low, high = FRAGMENTATION
    yield Line("CUDA context, rounding", CONTEXT + Span.exact(weights.rounding), ZERO, f"and {low} to {high} % of what passes")
    yield Line("process", ZERO, PROCESS, "Python, torch, CUDA libraries")
