"""Telemetry: what the optimizer holds and moves, as plain numbers beside the loss."""

# ruff: noqa: ARG002  (the signatures of the events are those of transformers)

from __future__ import annotations

import sys
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments
from transformers.utils import logging

from . import checks, processes, release
from .register import handler_of, settle

logger = logging.get_logger(__name__)

PREFIX = "optim_"

_REPORTED = (
    "state_bytes",
    "host_bytes",
    "device_bytes",
    "staging_bytes",
    "resident_bytes",
    "page_in_bytes",
    "page_out_bytes",
    "skipped_steps",
)
_DEVICE = ("device_bytes", "staging_bytes", "resident_bytes")


def flash_optimizer(optimizer: Any) -> Any | None:
    """The optimizer of this package inside `optimizer`, which Accelerate or DeepSpeed may have wrapped; None if it is another one."""
    base = sys.modules.get(f"{__package__.rpartition('.')[0]}.optim.base")
    if base is None:  # not imported, so nobody can have made one; importing it for other optimizers' runs would cost them time
        return None
    while optimizer is not None and not isinstance(optimizer, base.FlashOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def telemetry(optimizer: Any) -> dict[str, float]:
    """The numbers to log, or nothing for an optimizer of another package.

    Returns:
        `optim_state_bytes` (all planes), `optim_host_bytes` and `optim_device_bytes` (memory allocated for them), `optim_staging_bytes`
        (device memory for pages in flight), `optim_resident_bytes` (paged state that stays on the device), `optim_page_in_bytes` and
        `optim_page_out_bytes` (moved by the last step), and `optim_skipped_steps`. Device numbers are left out where there is no device.
        What others have noted on the optimizer (`HealthCallback`) comes with them. All are of this process alone.
    """
    optimizer = flash_optimizer(optimizer)
    if optimizer is None:
        return {}
    report = optimizer.memory_report().to_dict()
    hidden = _DEVICE if report["device_bytes"] is None else ()
    return {PREFIX + key: int(report[key]) for key in _REPORTED if key not in hidden} | optimizer.notes


class FlashOptimCallback(TrainerCallback):
    """Checks `optim_args` and the way of distributing when a Trainer is made, and adds the optimizer's numbers to each log of the training.

    It is in every Trainer's default callbacks and does nothing for other optimizers. Default callbacks come before reporters and the
    progress bar, so what it adds to `logs` reaches all of them; `log_history` holds a copy, which gets the numbers too. Evaluation logs
    are left alone, because they are the metrics that `evaluate` returns and a hyper-parameter search sums up.
    """

    def __init__(self) -> None:
        self._evaluating = False
        self._introduced = False

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Raise `ConfigurationError` for `optim_args` that cannot work, unless the Trainer was given an optimizer and will not read it.

        Raise `UnsupportedError` where processes are to work together in a way that is not served (FSDP1, DeepSpeed). What excludes
        `gradient_release` raises too.
        """
        given = kwargs.get("optimizer")
        if given is None:
            settle(args)
        flash, handler = flash_optimizer(given), handler_of(args)
        if flash is not None or (given is None and handler is not None):
            processes.check(args)
            options = flash.defaults if flash is not None else handler.given(args) if handler is not None else {}
            if options.get("gradient_release"):
                release.check(args)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say what the optimizer state will take; refuse what `on_init_end` could not see (`optimizer_cls_and_kwargs`).

        Raise `HostMemoryError` where the machine has no host memory for it, and `ConfigurationError` for what `checks.py` finds.
        """
        flash = flash_optimizer(kwargs.get("optimizer"))
        if flash is not None:
            processes.check(args)
            checks.check(args, flash)
            if flash.defaults["gradient_release"]:
                release.check(args)
            processes.announce(args, flash)
            flash.check_host_memory()
        release.start(flash, kwargs.get("model"))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        release.stop(flash_optimizer(kwargs.get("optimizer")))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._evaluating = False  # an evaluation that raised never reached on_evaluate

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._evaluating = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._evaluating = False

    def on_predict(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any) -> None:
        self._evaluating = False

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs.get("logs")
        if logs is None or self._evaluating:
            return
        numbers = telemetry(kwargs.get("optimizer"))
        if not numbers:
            return
        flash = flash_optimizer(kwargs.get("optimizer"))
        released, flash.notes = flash.defaults["gradient_release"], {}  # type: ignore[union-attr]
        entry = state.log_history[-1] if state.log_history else {}
        # a Trainer that logs in its own way may not have appended this log: then the last entry is another one
        if entry.get("step") == state.global_step and all(entry.get(key) is value for key, value in logs.items()):
            entry.update(numbers)
            if released:
                release.strip(entry)
        logs.update(numbers)
        if released:
            release.strip(logs)
        self._introduce(kwargs.get("optimizer"), state)

    def _introduce(self, optimizer: Any, state: TrainerState) -> None:
        """Say once, at level info, how many bytes the state takes and what it would take in fp32."""
        flash = flash_optimizer(optimizer)
        if flash is None or self._introduced or not state.is_world_process_zero:
            return
        report = flash.memory_report()
        if not report.num_params:
            return
        self._introduced = True
        device = "" if report.device_bytes is None else f", device memory {report.device_bytes:,}"
        logger.info(
            f"Optimizer state of {report.num_params:,} parameters: {report.state_bytes:,} bytes, "
            f"{report.state_bytes / report.num_params:.3f} per parameter (in fp32, without master weights: {4 * len(flash.rule.states)}). "
            f"Host memory {report.host_bytes:,}{device}."
        )
