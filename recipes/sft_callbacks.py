"""What happens beside the training steps: answers after evaluations, and a stop on SIGTERM that loses nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import torch
from sft_run import sample
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.report import history


def samples_file(args: TrainingArguments) -> Path:
    """Where answers are kept. The Trainer pushes all of the output folder but names with an underscore, and answers may be private."""
    return Path(args.output_dir, "_samples.jsonl" if args.push_to_hub else "samples.jsonl")


def read_samples(args: TrainingArguments) -> list[dict[str, Any]]:
    """The answers of the run so far, for its report."""
    return history.samples(samples_file(args).parent)


class Samples(TrainerCallback):
    """Prints an answer after every `every`-th evaluation, and keeps it in `samples.jsonl` in the output folder.

    Args:
        trainer: whose model answers.
        prompt: token ids.
        tokens: longest answer.
        every: evaluations between two answers.
    """

    def __init__(self, trainer: Trainer, prompt: list[int], tokens: int, every: int) -> None:
        self.trainer, self.prompt, self.tokens, self.every = trainer, prompt, tokens, every
        self.evaluations = 0

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        if state.global_step == 0:  # there is an answer from before training already
            return
        self.evaluations += 1
        if self.evaluations % self.every:
            return
        answer = sample(self.trainer, self.prompt, self.tokens, f"Sample at step {state.global_step}")
        if not state.is_world_process_zero or not answer:
            return
        print(f"answer at step {state.global_step}: {answer.strip()}", flush=True)
        line = {"step": state.global_step, "prompt": self.trainer.processing_class.decode(self.prompt), "answer": answer}
        path = samples_file(args)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")


class StopOnSignal(TrainerCallback):
    """On SIGTERM: finish the step, save an ordinary checkpoint, stop. Resuming from it is exact.

    It serves `enable_jit_checkpoint` in place of transformers' own callback, which waits three seconds, may save between the backward pass
    and the step, and by-passes the callbacks of a save. Processes agree in each step, so that none waits for one that has stopped.
    """

    def __init__(self) -> None:
        self.asked = False  # this process got the signal
        self.stopped = False  # the run was stopped by it
        self._previous: Any = None

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._previous = signal.signal(signal.SIGTERM, self._ask)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        asked = self.asked
        if args.world_size > 1:
            flag = torch.tensor([int(asked)], device=args.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            asked = bool(flag.item())
        if asked and state.global_step < state.max_steps:  # at the last step the run ends by itself
            self.stopped = control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None


def attach(trainer: Trainer, config: Any, prompt: list[int]) -> StopOnSignal:
    """Add to the trainer what the recipe's options ask for. Returns the callback that knows whether a signal stopped the run.

    Raises:
        ConfigurationError: early stopping, or answers during training, without evaluations.
    """
    args, stop = trainer.args, StopOnSignal()
    for option in ("early_stopping_patience", "sample_every_evals"):
        if getattr(config, option) > 0 and (args.eval_strategy == "no" or trainer.eval_dataset is None):
            raise ConfigurationError(
                f"{option}={getattr(config, option)} needs evaluations during training: set eval_strategy (steps or epoch) and eval_steps, "
                f"and give an eval_dataset or an eval_fraction above 0; or set {option} to 0."
            )
    if args.enable_jit_checkpoint:
        theirs = trainer.pop_callback(JITCheckpointCallback)
        signal.signal(signal.SIGTERM, theirs.jit_manager._original_sigterm_handler)  # it stays in force without its callback
        trainer.add_callback(stop)
    if config.early_stopping_patience > 0:
        args.metric_for_best_model = args.metric_for_best_model or "loss"
        args.greater_is_better = bool(args.greater_is_better)
        trainer.add_callback(EarlyStoppingCallback(config.early_stopping_patience, config.early_stopping_threshold))
    if config.sample_every_evals > 0 and config.sample_tokens > 0:
        trainer.add_callback(Samples(trainer, prompt, config.sample_tokens, config.sample_every_evals))
    return stop
