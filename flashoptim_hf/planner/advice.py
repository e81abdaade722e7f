"""What to change when a run does not fit: changes in the order in which they cost least, each on top of those before, until it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..paging.plan import format_bytes
from .memory import Plan, plan
from .setup import PREFIX, Setup
from .shapes import ModelShape

WORTH = 0.02
"""A change that takes less than this share off what is too much is left out."""


SHORTEST = 256
"""Tokens: shorter samples are not proposed."""


@dataclass(frozen=True)
class Change:
    """One change, in words, and the plan with it and all before it."""

    what: str
    plan: Plan


def advise(shape: ModelShape, setup: Setup, defaults: dict[str, Any]) -> list[Change]:
    """Changes until the run fits by its upper bounds; all that help where it never does.

    Args:
        defaults: options of `flashoptim_paged_adamw`, for runs with another optimizer.
    """
    found: list[Change] = []
    now = plan(shape, setup)
    while not now.fits:
        for what, changed in _changes(now.setup, defaults):
            then = plan(shape, changed)
            if _excess(then) < (1 - WORTH) * _excess(now):
                found.append(Change(what, then))
                now = then
                break
        else:
            return found
    # what a later change has made unnecessary is taken out again, or made smaller
    for what in [change.what for change in found]:
        for instead in ([], *([other] for other, _ in _changes(setup, defaults) if _longer(other, what))):
            names = [change.what for change in found]
            place = names.index(what)
            trial = _replayed(shape, setup, [*names[:place], *instead, *names[place + 1 :]], defaults)
            if trial and trial[-1].plan.fits:
                found = trial
                break
    return found


def _longer(one: str, other: str) -> bool:
    """Whether both shorten samples, and the first one less."""
    lengths = [int(what.split()[1]) if what.startswith("max_length") else 0 for what in (one, other)]
    return lengths[0] > lengths[1] > 0


def _replayed(shape: ModelShape, setup: Setup, wanted: list[str], defaults: dict[str, Any]) -> list[Change]:
    """These changes in this order from the beginning; none if one of them cannot be made."""
    found: list[Change] = []
    for what in wanted:
        changed = dict(_changes(setup, defaults)).get(what)
        if changed is None:
            return []
        setup = changed
        found.append(Change(what, plan(shape, setup)))
    return found


def _excess(found: Plan) -> int:
    """Bytes by which a plan exceeds what there is, GPU and host together."""
    device = max(0, found.device.high - found.setup.gpu_bytes) if found.setup.gpu_bytes is not None else 0
    host = max(0, found.host_total.high - found.setup.ram_bytes) if found.setup.ram_bytes is not None else 0
    return device + host


def _changes(setup: Setup, defaults: dict[str, Any]) -> Iterator[tuple[str, Setup]]:
    """Every change that is left, cheapest first."""
    if not setup.checkpointing:
        yield "gradient_checkpointing: true (a third more computing)", replace(setup, checkpointing=True)
    if setup.attention == "eager":
        yield "attn_implementation: sdpa (no scores in memory, faster)", replace(setup, attention="sdpa")
    if not setup.fused_head:
        yield "fused loss: train with trl, which makes no logits of the whole batch", replace(setup, fused_head=True)
    if setup.batch > 1:
        # the samples of a step stay; where gradients are released there is no accumulation
        steps = 1 if setup.releases else setup.accumulation * setup.batch
        what = "per_device_train_batch_size: 1" + ("" if setup.releases else f", with gradient_accumulation_steps: {steps}")
        yield what, replace(setup, batch=1, accumulation=steps)
    length = setup.seq_len // 2
    while length >= SHORTEST:
        yield f"max_length: {length} (shorter samples)", replace(setup, seq_len=length)
        length //= 2
    yield from _of_state(setup, defaults)
    if setup.full and not setup.releases and setup.ours and (setup.ranks == 1 or setup.fsdp):
        options = {**_unlearned(setup), "gradient_release": True}
        what = "gradient_release: true in optim_args, with max_grad_norm: 0 and no accumulation" + (
            ", codec: joint" if setup.learns else ""
        )
        yield what, replace(setup, options=options, accumulation=1)
    if not setup.full and setup.lora_r > 8:
        yield "lora_r: 8 (learns less)", replace(setup, lora_r=8)
    if not setup.full and not setup.load_in_4bit:
        yield "load_in_4bit: true (QLoRA)", replace(setup, load_in_4bit=True)
    if setup.full:
        options = {**setup.options, "gradient_release": False}
        yield "QLoRA: adapters on a 4-bit model instead of all weights", replace(setup, full=False, load_in_4bit=True, options=options)
    if setup.ranks > 1 and not setup.fsdp:
        what = "FSDP2: configs/accelerate/fsdp2_qlora.yaml or fsdp2_full.yaml" + (", codec: joint" if setup.learns else "")
        yield what, replace(setup, fsdp=True, options=_unlearned(setup))
    if setup.fsdp and not setup.offload:
        yield "fsdp_offload_params: true (weights in host memory, much slower)", replace(setup, offload=True)


def _unlearned(setup: Setup) -> dict[str, Any]:
    """The optimizer's options, with a codec that need not see whole parameters."""
    return {**setup.options, "codec": "joint"} if setup.learns else dict(setup.options)


def _of_state(setup: Setup, defaults: dict[str, Any]) -> Iterator[tuple[str, Setup]]:
    """Changes of the optimizer."""
    if not setup.ours:
        yield f"optim: {PREFIX}paged_adamw", replace(setup, optimizer=f"{PREFIX}paged_adamw", options=defaults)
        return
    options = setup.options
    if options["codec"] == "none":
        yield "codec: log (one byte for each moment)", replace(setup, options={**options, "codec": "log"})
    if not options["paged"]:
        name = f"{PREFIX}paged_{setup.optimizer.removeprefix(PREFIX)}"
        yield f"optim: {name}", replace(setup, optimizer=name, options={**options, "paged": True})
        return
    if options["device_budget_bytes"] not in (0, "auto") or options["transport"] == "resident":
        changed = {**options, "device_budget_bytes": 0, "transport": "staged"}
        yield "device_budget_bytes: 0 (more travels)", replace(setup, options=changed)
    if options["page_bytes"] not in ("8MiB", 8 * 2**20):
        yield "page_bytes: 8MiB (smaller pages in flight)", replace(setup, options={**options, "page_bytes": "8MiB"})


def sentence(change: Change) -> str:
    """A change and what the run then takes."""
    found = change.plan
    host = f", host {found.host_total}" if found.setup.ram_bytes is not None else ""
    room = format_bytes(found.setup.gpu_bytes) if found.setup.gpu_bytes is not None else "?"
    return f"{change.what} -> GPU {found.device} of {room}{host}: {'fits' if found.fits else 'not yet'}"
