"""Preference training (DPO, arXiv 2305.18290) of a QLoRA adapter with trl's DPOTrainer: nothing in it knows of this package but `optim`.

    accelerate launch --config_file configs/accelerate/single_gpu.yaml recipes/qlora_dpo.py \\
        --model_name_or_path .demo/model --dataset preferences.jsonl --output_dir .demo/dpo

Samples have `prompt`, `chosen` and `rejected`: text, or lists of messages. The reference is the base model without the adapter, so it takes
no memory of its own. Every key of a YAML file is also a flag: trl's `DPOConfig` and `ModelConfig`, and `DpoConfig` below.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import qlora_sft
import sft_checks
import sft_data
import sft_entry
import sft_options
import sft_run
import sft_train
from datasets import Dataset
from transformers import set_seed
from trl import DPOConfig, DPOTrainer, TrlParser

from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.report.callback import ReportCallback

DEFAULTS = {**qlora_sft.DEFAULTS, "learning_rate": 5e-6}
COLUMNS = ("prompt", "chosen", "rejected")


@dataclass
class DpoConfig:
    """What this recipe adds to trl's options."""

    dataset: str = field(metadata={"help": "A .jsonl, .json, .csv or .parquet file, or a hub id (org/name or org/name:split)."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Held-out samples, given like dataset; default: a part of it."})
    eval_fraction: float = field(default=0.05, metadata={"help": "Share held out where there is no eval_dataset; 0: no evaluation."})
    auto_resume: bool = field(default=False, metadata={"help": "The same command goes on from the last complete checkpoint, or starts."})


class PreferenceTrainer(sft_run.Steady, DPOTrainer):
    """`DPOTrainer` whose adapter keeps its dtype on resuming."""

    perplexities = False  # the loss compares two answers


def make_parser() -> TrlParser:
    """The parser of the command line and of the YAML files in configs/ that name this recipe."""
    return sft_options.make_parser(DpoConfig, DPOConfig, DEFAULTS)


def check_columns(data: Dataset, name: str) -> Dataset:
    """The data set with the three columns alone.

    Raises:
        ConfigurationError: one is missing.
    """
    missing = [column for column in COLUMNS if column not in data.column_names]
    if missing:
        raise ConfigurationError(
            f"the {name} samples have the columns {', '.join(sorted(data.column_names))}, and preference training needs "
            f"{', '.join(COLUMNS)}: {' and '.join(missing)} missing. Rename the columns in the file; samples without a rejected answer are "
            "for recipes/qlora_sft.py."
        )
    return data.select_columns(list(COLUMNS))


def main() -> None:
    """Read the options, train on preferences, and report."""
    environ = dict(os.environ)  # what the launcher set, before the options below add to it
    config, args, model_args = sft_options.read(make_parser())
    sft_run.check_launch(args, environ)
    sft_options.hide_token(args)
    sft_checks.precision(args, model_args)
    resumed = sft_run.resumption(args, config.auto_resume)
    args.gradient_checkpointing_kwargs = args.gradient_checkpointing_kwargs or {"use_reentrant": False}

    tokenizer = sft_options.load_tokenizer(model_args, args)
    train, held_out = sft_data.load_splits(config.dataset, config.eval_dataset, config.eval_fraction, args.seed)
    model = qlora_sft.load_base(model_args, args)
    adapter = qlora_sft.make_adapter(model_args, model)
    sft_checks.tokenizer_fits(model, tokenizer, str(model_args.model_name_or_path))
    set_seed(args.seed)  # the adapter starts from random numbers
    watch = sft_run.Watch(resumed)
    trainer = PreferenceTrainer(
        model=model,
        args=args,
        train_dataset=check_columns(train, "training"),
        eval_dataset=None if held_out is None else check_columns(held_out, "held-out"),
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=[watch],
    )
    sft_checks.trainable(trainer.model)
    sft_run.lift_fp16(trainer.model, scaled=args.fp16)
    report = ReportCallback()
    trainer.add_callback(report)
    sft_train.train(trainer, resumed)
    if held_out is not None:
        trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=config.dataset)
    if trainer.is_world_process_zero():
        trainer.create_model_card(dataset_name=config.dataset)
        sft_run.report_end(trainer, watch, "", {}, report.path)
    sft_train.leave(trainer)


if __name__ == "__main__":
    sft_entry.run(main)
