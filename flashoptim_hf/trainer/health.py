"""Numerical health: does the optimizer's arithmetic hold what it is asked to? A warning with advice, once for each cause.

from flashoptim_hf import HealthCallback

Trainer(..., callbacks=[HealthCallback()])
"""

# ruff: noqa: ARG002  (the signatures of the events are those of transformers)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments
from transformers.utils import logging

from ..errors import ConfigurationError
from .callbacks import flash_optimizer

if TYPE_CHECKING:
    from ..optim.health import Finding

logger = logging.get_logger(__name__)

SWALLOWED = 0.25
"""Share of a tensor's updates that leave no trace, above which there is a warning; `master_bits="auto"` acts at the same share."""
SATURATED = 0.05
"""Share of a tensor's states that are cut off at the end of their group's range."""
CODEC_ERROR = 0.25
"""Rounding error of a tensor's step, relative to the step. `log` and `joint` usually have 0.01 to 0.03."""
MATTERS = 0.05
"""Rounding error above which such states are worth a warning: what is cut off may be noise that moves nothing (as the gradients of
attention's key biases are)."""
SKIPPED, FEWEST_SKIPPED = 0.1, 3
"""Share of the steps since the last look that were skipped, and how many there must be."""
NAMED = 3
"""Tensors that a warning names."""


class HealthCallback(TrainerCallback):
    """Looks closely at one step in `every`, adds what it finds to the logs, and warns once for each cause.

    The numbers are of this process alone: where parameters are sharded, of its shards; under DDP they are the same in each. They appear in
    the first log after the step behind the one that was looked at, so that nobody waits for the device, and in no other:

        optim_health_swallowed         share of all updates looked at that left weight and correction as they were
        optim_health_swallowed_worst   the same of the tensor with most
        optim_health_saturated, ..._worst        share of states that are cut off at the end of their group's range
        optim_health_codec_error, ..._worst      what rounding the states changes in the next step, relative to it
        optim_health_skipped           share of steps since the last look that were skipped, since a gradient was not finite

    Of several processes the one that logs warns. Where parameters are sharded each warns of what it finds in its shards, with its rank,
    since nobody else sees them. Processes do not wait for each other, and need not all have the callback.

    Does nothing for other packages' optimizers. `FlashOptimCallback`, which is in every Trainer, is what writes the numbers.

    Args:
        every: steps from one look to the next. Default 50; a look costs about as much as a step over hundreds of small tensors.
        groups: groups of 64 elements that are looked at in each tensor (in each page of it). Default 8.

    Raises:
        ConfigurationError: a number below 1.
    """

    def __init__(self, every: int = 50, groups: int = 8) -> None:
        for name, value in (("every", every), ("groups", groups)):
            if value < 1:
                raise ConfigurationError(f"{name}={value} must be at least 1.")
        self.every, self.groups = every, groups
        self._asked = False
        self._skipped_before = 0
        self._step_before = 0
        self._warned: set[str] = set()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        flash = flash_optimizer(kwargs.get("optimizer"))
        if flash is not None:
            self._asked = False
            self._skipped_before, self._step_before = flash.memory_report().skipped_steps, state.global_step

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        flash = flash_optimizer(kwargs.get("optimizer"))
        if flash is not None and not self._asked and state.global_step % self.every == 0:
            flash.examine(self.groups)
            self._asked = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        flash = flash_optimizer(kwargs.get("optimizer"))
        if flash is None or not self._asked:
            return
        # a step behind the one that was looked at, which is the next one where that one was skipped: it has long been on its way
        findings = flash.findings(wait=False)
        if findings is None:
            return
        self._asked = False
        skipped = flash.memory_report().skipped_steps
        count, steps = skipped - self._skipped_before, state.global_step - self._step_before
        self._skipped_before, self._step_before = skipped, state.global_step
        flash.notes = {**numbers(findings), "optim_health_skipped": count / steps}
        self._judge(args, findings, names_of(kwargs.get("model")))
        if skipped_too_often(count, steps):
            self._say("skipped", args.should_log, _about_skipped(count, steps))

    def _judge(self, args: TrainingArguments, findings: Sequence[Finding], names: dict[int, str]) -> None:
        from ..optim.sharded import is_sharded

        for cause, limit, sentence in _CAUSES:
            found = [finding for finding in findings if getattr(finding, cause) > limit and finding.codec_error > _matters(cause)]
            if found and cause not in self._warned:
                found.sort(key=lambda finding: -getattr(finding, cause))
                said = sentence(found, f"{_named(found, names)}: {_share(getattr(found[0], cause))}")
                alone = args.world_size > 1 and any(is_sharded(finding.param) for finding in found)
                self._say(cause, alone or args.should_log, f"Rank {args.process_index} of {args.world_size}: {said}" if alone else said)

    def _say(self, cause: str, aloud: bool, sentence: str) -> None:
        """Warn of a cause once, unless another process does."""
        if cause not in self._warned and aloud:
            logger.warning(sentence)
        self._warned.add(cause)


def numbers(findings: Sequence[Finding]) -> dict[str, float]:
    """What goes into the logs: of each cause the mean over elements, and the worst tensor. Nothing where nothing was looked at."""
    total = sum(finding.looked_at for finding in findings)
    found: dict[str, float] = {}
    for cause, _, _ in _CAUSES if total else ():
        values = [(getattr(finding, cause), finding.looked_at) for finding in findings]
        found[f"optim_health_{cause}"] = sum(value * weight for value, weight in values) / total
        found[f"optim_health_{cause}_worst"] = max(value for value, _ in values)
    return found


def names_of(model: Any) -> dict[int, str]:
    """The names of a model's parameters, by identity."""
    return {} if model is None else {id(param): name for name, param in model.named_parameters()}


def _matters(cause: str) -> float:
    return MATTERS if cause == "saturated" else -1.0


def _named(found: Sequence[Finding], names: dict[int, str]) -> str:
    """The worst tensors by name, and how many more there are."""
    listed = [names.get(id(finding.param), f"a tensor of shape {tuple(finding.param.shape)}") for finding in found[:NAMED]]
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(listed) + more


def _share(value: float) -> str:
    return f"{100 * value:.3g} %"


def skipped_too_often(count: int, steps: int) -> bool:
    """Whether so many skipped ones of so many steps are worth a warning. Processes that share a step skip it together."""
    return count >= FEWEST_SKIPPED and count > SKIPPED * steps


def _about_skipped(count: int, steps: int) -> str:
    return (
        f"{count} of the last {steps} steps were skipped: a gradient was not finite. Lower the learning rate, warm up longer, or look at "
        "the data; in fp16, train in bf16 (bf16=True) where the device has it."
    )


def _about_swallowed(found: Sequence[Finding], where: str) -> str:
    bits = found[0].master_bits
    if bits == 24:
        advice = 'Set master_bits=32 (one byte more per parameter), or master_bits="auto", which does so where it is needed'
    elif bits == 32 or found[0].param.element_size() == 4:
        advice = "The weights have all the bits that there are: the learning rate is too small for them to move"
    else:
        advice = "Set master_bits=24 (one byte more per parameter) or 32: without a correction, a 16-bit weight swallows small updates"
    return f"Updates are too small to move the weights of {where} of them left no trace at all. {advice}."


def _about_saturated(found: Sequence[Finding], where: str) -> str:
    return (
        f"The range of codec={found[0].codec!r} is too small for the optimizer states of {where} of them are cut off. {_other_codec(found)}"
    )


def _about_codec_error(found: Sequence[Finding], where: str) -> str:
    return (
        f"Rounding the optimizer states with codec={found[0].codec!r} changes the steps of {where} of the step is error. "
        f"{_other_codec(found)}"
    )


def _other_codec(found: Sequence[Finding]) -> str:
    better = 'codec="none" (fp32)' if found[0].codec in ("log", "joint", "learned", "square") else 'codec="log" or "none" (fp32)'
    return f"Put these tensors into a parameter group with {better}."


_CAUSES: tuple[tuple[str, float, Callable[[Sequence[Finding], str], str]], ...] = (
    ("swallowed", SWALLOWED, _about_swallowed),
    ("saturated", SATURATED, _about_saturated),
    ("codec_error", CODEC_ERROR, _about_codec_error),
)
