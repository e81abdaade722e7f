"""Writes `report.html` when a run ends, also when it ends early, and `report.json` beside it, from which it can be made again."""

# ruff: noqa: ARG002  (the signatures of the events are those of transformers)

from __future__ import annotations

import atexit
import logging
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments
from transformers.utils import logging as transformers_logging

from ..errors import CheckpointError
from . import facts, history, page, planned

logger = transformers_logging.get_logger(__name__)

LOGGERS = ("flashoptim_hf", "transformers", "accelerate", "peft", "trl", "datasets")
MOST_WARNINGS = 50


class _Listener(logging.Handler):
    """Keeps warnings of the loggers that it is added to, and of `warnings.warn`, each once."""

    def __init__(self, kept: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.kept = kept
        self._show: Any = None
        self._shown: Any = None

    def emit(self, record: logging.LogRecord) -> None:
        self.keep(record.getMessage())

    def keep(self, text: str) -> None:
        if text not in self.kept and len(self.kept) < MOST_WARNINGS:
            self.kept.append(text)

    def start(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self)
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
            if self._show is show:
                self.keep(str(message))
            shown(message, category, *rest, **named)

        self._show, self._shown = show, shown
        warnings.showwarning = show

    def stop(self) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self)
        if warnings.showwarning is self._show:
            warnings.showwarning = self._shown
        self._show = self._shown = None  # where others have put theirs on top, ours stays below it and hands on what it is shown


class ReportCallback(TrainerCallback):
    """Add it to any Trainer: `Trainer(..., callbacks=[ReportCallback()])`. It writes on the first process of a job alone.

    The files are `report.html` and `report.json` in the output folder. With `push_to_hub` they begin with an underscore, which the Trainer
    does not upload: a report holds samples. They are written at every checkpoint too, so that a run that is killed leaves them, and at
    the end of the program where an exception ended the training.
    """

    def __init__(self) -> None:
        self.run = history.Run()
        self.path: Path | None = None  # of the page, once training has begun on the first process
        self._listener = _Listener(self.run.warnings)
        self._seconds: list[float] = []
        self._began = 0.0
        self._plan: Any = None
        self._peaks: dict[str, int] = {}
        self._state: TrainerState | None = None

    # ------------------------------------------------------------------ events

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir or ".")
        mark = "_" if args.push_to_hub else ""
        self.path = folder / f"{mark}{history.PAGE}"
        shown = self.run.samples  # of before the training
        self.run = history.Run(name=folder.resolve().name, max_steps=state.max_steps, step=state.global_step, samples=shown)
        self._listener.kept = self.run.warnings
        if state.global_step > 0:
            self._go_on(folder / f"{mark}{history.RECORD}", state.global_step)
        model, optimizer = kwargs.get("model"), kwargs.get("optimizer")
        self.run.facts = facts.gather(args, model, optimizer)
        self.run.facts["run"].append(("began", _now()))
        try:
            self._plan = planned.plan_of(args, model, optimizer)
            self.run.plan_remark = planned.remark(self._plan)
        except Exception as error:  # whatever model it is: a report must not end a training, and says why it has no plan
            self._plan, self.run.plan_remark = None, f"The planner does not know such a run: {type(error).__name__}: {error}"
        self._listener.stop()
        self._listener.start()
        self._state = state
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._seconds.append(time.perf_counter() - self._began)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.path is None or not self._seconds:
            return
        row: history.Row = {"step": state.global_step, "host_rss_bytes": psutil.Process().memory_info().rss, **_device(args.device)}
        row["step_seconds"] = sum(self._seconds) / len(self._seconds)
        self._seconds.clear()
        self.run.records.append(row)
        for key, name in (("host_rss_bytes", "host"), ("device_peak_bytes", "device")):
            if key in row:
                self._peaks[name] = max(self._peaks.get(name, 0), row[key])
        if self._plan is not None:
            try:
                self.run.planned = planned.rows(self._plan, kwargs.get("model"), kwargs.get("optimizer"), self._peaks)
            except Exception as error:  # as above
                self._plan, self.run.plan_remark = None, f"What was planned could not be measured: {type(error).__name__}: {error}"

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._finish(f"not at its end when this was written, at step {state.global_step} of {state.max_steps}", state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        atexit.unregister(self._at_exit)
        self._listener.stop()
        early = state.global_step < state.max_steps
        how = f"stopped early, after step {state.global_step} of {state.max_steps}" if early else f"finished, {state.global_step} steps"
        self._finish(f"{how}; {_now()}", state)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._state is not None and self.run.ended.startswith(("finished", "stopped early")):
            self._finish(self.run.ended, state)  # evaluations after the training belong to it

    # ------------------------------------------------------------------ beside the events

    def add_sample(self, label: str, prompt: str, answer: str) -> None:
        """Add an answer of the model to the report; `write` puts it there."""
        self.run.samples.append({"label": label, "prompt": prompt, "answer": answer})

    def write(self) -> None:
        """Write both files as things stand; nothing on other processes than the first, and before training has begun."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.run.save(self.path.with_suffix(".json"))
            page.write(self.run, self.path)

    def _finish(self, how: str, state: TrainerState) -> None:
        if self.path is None:
            return
        self.run.ended, self.run.step, self.run.max_steps = how, state.global_step, state.max_steps
        self.run.log = state.log_history
        try:
            self.write()
        except Exception as error:  # a full disk, say, or a log that holds what nobody expects: the training is worth more than its report
            logger.warning(f"{self.path} could not be written: {type(error).__name__}: {error}")

    def _at_exit(self) -> None:
        """The program ends, and the training has not come to its end: an exception left it."""
        error = getattr(sys, "last_value", None)
        cause = f" by {type(error).__name__}: {facts.short(error)}" if error is not None else ""
        if self._state is not None:
            self._finish(f"ended{cause} after step {self._state.global_step} of {self._state.max_steps}; {_now()}", self._state)

    def _go_on(self, record: Path, step: int) -> None:
        """Keep what an earlier part of the run has measured up to the step that this one begins at."""
        if not record.is_file():
            return
        try:
            before = history.read(record.parent)
        except CheckpointError as error:
            self._listener.keep(f"what earlier parts of the run measured is not in this report: {error}")
            return
        self.run.records = [row for row in before.records if row.get("step", 0) <= step]
        self.run.warnings += before.warnings


def _device(device: torch.device) -> dict[str, int]:
    """Memory of a device that torch has allocated, now and at most; nothing for the CPU."""
    if device.type == "cpu":
        return {}
    module = torch.get_device_module(device)
    names = {"device_allocated_bytes": "memory_allocated", "device_peak_bytes": "max_memory_allocated"}
    return {key: int(getattr(module, name)(device)) for key, name in names.items() if hasattr(module, name)}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
