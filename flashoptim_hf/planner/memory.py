"""The plan of a run: what lies where, the busiest moments of each phase, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..paging.plan import format_bytes
from .activations import Activations, activations
from .assumptions import CONTEXT, FRAGMENTATION, GIB, PROCESS
from .moments import moments
from .parts import parts
from .setup import PEERS, ZERO, Line, Setup, Span, largest
from .shapes import ModelShape
from .states import StatePlan, ours, peer, rule_of
from .traffic import Traffic, traffic
from .weights import Weights, count, loading

LITTLE = 0.03
"""Below this share of GPU memory paging is not worth its traffic."""

FITS, TIGHT, FAILS = "fits", "may fit", "does not fit"


@dataclass(frozen=True)
class Plan:
    """What one run takes.

    Attributes:
        lines: the parts.
        phases: the most at once in each phase: load, step, save, resume.
        device, host: the most of all phases, of one process.
        traffic: what a step moves.
        saved: GPU memory that paging saves against the same state on the GPU.
    """

    setup: Setup
    shape: ModelShape
    weights: Weights
    state: StatePlan
    activations: Activations
    lines: tuple[Line, ...]
    phases: tuple[Line, ...]
    traffic: Traffic
    saved: int

    @property
    def device(self) -> Span:
        return largest(*(phase.device for phase in self.phases))

    @property
    def host(self) -> Span:
        return largest(*(phase.host for phase in self.phases))

    @property
    def host_total(self) -> Span:
        """Of all processes on one host."""
        return self.host.times(self.setup.ranks_per_host)

    @property
    def device_verdict(self) -> str | None:
        return verdict(self.device, self.setup.gpu_bytes)

    @property
    def host_verdict(self) -> str | None:
        return verdict(self.host_total, self.setup.ram_bytes)

    @property
    def fits(self) -> bool:
        """Whether nothing that was given is exceeded, by the upper bounds."""
        return all(word in (None, FITS) for word in (self.device_verdict, self.host_verdict))

    @property
    def needs(self) -> str:
        """One sentence for the head of a config."""
        by_name = {phase.name: phase.host.times(self.setup.ranks_per_host) for phase in self.phases}
        step = by_name["step"]
        most = self.host_total.high
        more = [name for name, span in by_name.items() if span.high > max(step.high, most - GIB) + GIB // 2]
        each = f" on each of {self.setup.ranks}" if self.setup.ranks > 1 else ""
        shared = f" for {self.setup.ranks_per_host} processes" if self.setup.ranks_per_host > 1 else ""
        then = f", up to {most / GIB:.1f} GiB ({', '.join(more)})" if more else ""
        return f"GPU {gib(self.device)} GiB{each}, host {gib(step)} GiB{shared}{then}"


def gib(span: Span) -> str:
    """A span in GiB with one decimal."""
    return f"{span.low / GIB:.1f} to {span.high / GIB:.1f}"


def verdict(need: Span, room: int | None) -> str | None:
    """Whether it fits: surely, perhaps (the room lies between the bounds), or not; None without a room."""
    if room is None:
        return None
    return FITS if need.high <= room else TIGHT if need.low <= room else FAILS


def plan(shape: ModelShape, setup: Setup) -> Plan:
    """Plan a run.

    Raises:
        ConfigurationError: an unknown optimizer, codec or link, or a page that is too small.
    """
    weights = count(shape, setup)
    state = _state(weights, setup)
    acts = activations(shape, setup)
    lines = parts(weights, state, acts, setup)
    moved = traffic(state.travels, state.travels, setup.link)
    saved = 0
    if setup.ours and setup.options["paged"] and not setup.offload:
        resident = ours(weights.trained, rule_of(setup.optimizer), {**setup.options, "paged": False})
        saved = resident.device - state.device - state.staging
    return Plan(setup, shape, weights, state, acts, lines, _phases(shape, weights, state, acts, setup), moved, saved)


def beside(shape: ModelShape, setup: Setup) -> list[tuple[str, Plan]]:
    """The same run with each of the other optimizers; for full fine-tuning also with fp32 weights, which 16-bit weights replace."""
    plain = {key: value for key, value in setup.options.items() if key != "gradient_release"}
    found = [(name, plan(shape, replace(setup, optimizer=name, options=plain))) for name in PEERS if name != setup.optimizer]
    if setup.full and setup.dtype != torch.float32:
        wide = replace(shape, weights=tuple(replace(weight, dtype=torch.float32) for weight in shape.weights))
        found.insert(1, ("adamw_torch, fp32 weights", plan(wide, replace(setup, optimizer="adamw_torch", options=plain))))
    return found


def _state(weights: Weights, setup: Setup) -> StatePlan:
    if setup.ours:
        return ours(weights.trained, rule_of(setup.optimizer), setup.options, gpu=not setup.offload)
    return peer(setup.optimizer, weights.trained, offload=setup.offload)


def _static(weights: Weights, setup: Setup) -> tuple[Span, Span]:
    """Weights on the GPU and on the host."""
    if not setup.offload:
        return Span.exact(weights.base + weights.trained_bytes + weights.rounding), ZERO
    # FSDP2 leaves the constants of 4-bit weights whole on the GPU, and brings all else from pinned host memory
    moved = weights.quantized + weights.plain + weights.trained_bytes
    return Span.exact(weights.constants), Span(moved, max(moved, weights.pinned))


def _phases(shape: ModelShape, weights: Weights, state: StatePlan, acts: Activations, setup: Setup) -> tuple[Line, ...]:
    """The most at once of each phase."""
    static, offloaded = _static(weights, setup)
    held = Span.exact(state.device + state.staging)
    found = moments(shape, weights, state, acts, setup)
    name = max(found, key=lambda moment: found[moment].high)
    most = largest(*found.values())
    lost = Span(most.low * FRAGMENTATION[0] // 100, most.high * FRAGMENTATION[1] // 100)
    whole = Span.exact(weights.whole)
    if setup.fsdp:
        # each process reads the whole model on the host, and brings one unit after the other to the GPU to cut it
        unit = max(unit.frozen + unit.trained for unit in weights.units)
        begin = Line("load", CONTEXT + static + Span(unit, 2 * unit), PROCESS + offloaded + Span(whole.low, whole.high), "read on the host")
    else:
        begin = Line("load", CONTEXT + static + loading(shape, setup), PROCESS, "files are mapped; their cache is not counted")
    home = PROCESS + offloaded + Span.exact(state.host)
    if setup.offload:
        home += Span.exact(weights.gradients)
    copies = Span(0, max(state.used, weights.trained_bytes))
    on_device = state.used if setup.ranks > 1 and not setup.fsdp else 0
    return (
        begin,
        Line("step", CONTEXT + static + held + most + lost, home, f"most at the {name}" if "step" in name else f"most in the {name}"),
        Line("save", CONTEXT + static + held, home + copies, "at most one copy of the state, or of what is trained"),
        Line(
            "resume",
            CONTEXT + static + Span.exact(state.device + on_device),
            home + Span(state.used, state.used),
            "the file's state beside its own",
        ),
    )


def paging_pays(found: Plan) -> str | None:
    """What paging saves and costs, in a sentence; None where nothing is paged."""
    if not (found.setup.ours and found.setup.options["paged"]) or found.setup.offload:
        return None
    share = found.saved / max(found.device.high + found.saved, 1)
    plain = found.setup.optimizer.replace("paged_", "")
    if found.saved <= 0:
        return (
            f"Paging does not pay here: all state is {format_bytes(found.state.used)}, no more than the pages in flight. Use optim={plain}."
        )
    fast, slow = (f"{seconds * 1e3:.0f}" for seconds in found.traffic.seconds)
    text = (
        f"Paging saves {format_bytes(found.saved)} of GPU memory, {share:.1%} of what the run would take there, and moves "
        f"{format_bytes(found.state.travels)} each way per step: {fast} to {slow} ms over {found.setup.link}, hidden behind kernels or not."
    )
    return text if share >= LITTLE else f"{text} That is little: with optim={plain} nothing travels."
