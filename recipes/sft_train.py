"""One run from a trainer that stands ready to the closing table: resumption, answers, a stop by signal, the model card, the hub."""

from __future__ import annotations

import signal
from typing import Any

import sft_callbacks
import sft_checks
import sft_entry
import sft_run
from accelerate import PartialState
from transformers import Trainer

import flashoptim_hf
from flashoptim_hf.report.callback import ReportCallback


def fine_tune(trainer: Trainer, config: Any, watch: sft_run.Watch, prompt: list[int], model_name: str) -> None:
    """Check what can be checked, train, evaluate, save, and report; `config` is a `RecipeConfig`, `prompt` token ids.

    Raises:
        ConfigurationError: the run could not do what it is asked to; before the first step.
        SystemExit: 143, as of a program ended by SIGTERM, after a stop that `enable_jit_checkpoint` has made safe.
    """
    args, tokenizer = trainer.args, trainer.processing_class
    sft_checks.tokenizer_fits(trainer.model, tokenizer, model_name)
    sft_checks.trainable(trainer.model)
    stop = sft_callbacks.attach(trainer, config, prompt)
    report = ReportCallback()
    trainer.add_callback(report)
    report_start(trainer)
    # The base model's answer, on resumption too: the checkpoint is loaded later, when training begins.
    answers = {"before": sft_run.sample(trainer, prompt, config.sample_tokens, "Sample before")}
    shown = tokenizer.decode(prompt)
    if answers["before"]:
        report.add_sample("before training", shown, answers["before"])
    train(trainer, watch.resumed)
    step = trainer.state.global_step
    if stop.stopped:
        trainer.accelerator.print(
            f"stopped by SIGTERM after step {step} of {trainer.state.max_steps}; checkpoint-{step} in {args.output_dir} is complete. To go "
            "on: the same command with --resume_from_checkpoint auto (or with auto_resume: true, the same command as it is)."
        )
        leave(trainer)
        raise SystemExit(128 + signal.SIGTERM)
    if trainer.eval_dataset is not None and not any("eval_loss" in row and row["step"] == step for row in trainer.state.log_history):
        trainer.evaluate()
    trainer.save_model()
    answers["after"] = sft_run.sample(trainer, prompt, config.sample_tokens, "Sample after")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=config.dataset)
    if trainer.is_world_process_zero():
        trainer.create_model_card(dataset_name=config.dataset)
        for row in [
            *sft_callbacks.read_samples(args),
            *([{"label": "after training", "answer": answers["after"]}] if answers["after"] else []),
        ]:
            report.add_sample(row["label"], row.get("prompt", shown), row["answer"])
        report.write()
        sft_run.report_end(trainer, watch, shown, answers, report.path)
    leave(trainer)


def train(trainer: Trainer, resumed: str | None) -> None:
    """The training steps. What is over already, and Ctrl-C, is told what there is."""
    try:
        with sft_entry.stoppable(lambda: trainer.state.global_step, trainer.args.output_dir, "--resume_from_checkpoint true"):
            trainer.train(resume_from_checkpoint=resumed)
    except sft_run.TrainedAlready:
        trainer.accelerator.print(f"{resumed} is the end of this run ({trainer.state.global_step} steps): nothing is left to train.")


def leave(trainer: Trainer) -> None:
    """Leave the process group, after the wrapped model has gone.

    DDP's own reference to the group would otherwise be the last one, and letting go of that can hang (torch 2.13, gloo): Python waits for
    the group's thread, and that thread for Python.
    """
    trainer.model_wrapped = trainer.model
    trainer.accelerator.free_memory()
    PartialState().destroy_process_group()


def report_start(trainer: Trainer) -> None:
    """Say what is really in force, as opposed to what was asked for."""
    args = trainer.args
    trainable = {str(weight.dtype).removeprefix("torch.") for weight in trainer.model.parameters() if weight.requires_grad}
    PartialState().print(
        f"in force: {PartialState().num_processes} process(es), {args.device}, mixed precision {args.mixed_precision}, "
        f"trainable weights in {', '.join(sorted(trainable))}, optimizer {sft_run.optimizer_name(args)}, "
        f"flashoptim-hf {flashoptim_hf.__version__}"
    )
