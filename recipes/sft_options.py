"""From the command line and the YAML file to a tokenizer and tokenized data: what the supervised recipes share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sft_data
import sft_formats
import sft_look
import sft_parser
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import ModelConfig, SFTConfig, TrlParser

import flashoptim_hf
from flashoptim_hf.errors import ConfigurationError

AUTO_RESUME = "auto"


@dataclass
class RecipeConfig:
    """What the recipes add to trl's options."""

    dataset: str = field(metadata={"help": "A .jsonl, .json, .csv, .parquet or .txt file, or a hub id (org/name or org/name:split)."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Held-out samples, given like dataset; default: a part of it."})
    eval_fraction: float = field(default=0.05, metadata={"help": "Share held out where there is no eval_dataset; 0: no evaluation."})
    dataset_format: str = field(
        default="auto", metadata={"help": "auto (by the columns), messages, prompt_completion, alpaca or text (dataset_text_field)."}
    )
    text_as_chat: bool = field(
        default=True, metadata={"help": "Text in prompt and completion becomes two turns of the chat template; false: it stays text."}
    )
    added_tokens: list[str] | None = field(
        default=None, metadata={"help": "Tokens that the tokenizer gets; the model gets their rows, and learns them."}
    )
    first_look: int = field(default=3, metadata={"help": "Training samples shown before the first step, trained tokens marked; 0: none."})
    sample_tokens: int = field(default=64, metadata={"help": "Longest answer shown before and after training, in tokens; 0: none."})
    sample_every_evals: int = field(default=0, metadata={"help": "Also an answer after every so many evaluations; 0: none."})
    early_stopping_patience: int = field(default=0, metadata={"help": "Stop after so many evaluations without a lower loss; 0: never."})
    early_stopping_threshold: float = field(default=0.0, metadata={"help": "A loss lower by less than this is not lower."})
    auto_resume: bool = field(default=False, metadata={"help": "The same command goes on from the last complete checkpoint, or starts."})


def make_parser(config: type, training: type, defaults: dict[str, Any]) -> TrlParser:
    """A recipe's parser: its own options, trl's training and model options, and the recipe's defaults."""
    flashoptim_hf.register()  # idempotent; without it the parser would not know the optimizer's name
    types: Iterable[Any] = (config, training, ModelConfig)
    parser = sft_parser.RecipeParser(types, allow_abbrev=False)
    parser.set_defaults(**defaults, use_cpu=not torch.accelerator.is_available())
    return parser


def read(parser: TrlParser) -> Any:
    """The recipe's options from the command line, after a look at what would otherwise be found wrong when the model is there.

    Returns:
        the recipe's config, the training arguments and trl's `ModelConfig`.

    Raises:
        ConfigurationError: a mistake in them, a model's folder that is not there, or bad `optim_args`.
    """
    config, args, model_args = parser.parse_args_and_config()
    sft_parser.check_model(model_args.model_name_or_path)
    sft_parser.check_optimizer(args)
    return config, args, model_args


def hide_token(args: Any) -> None:
    """Hand the hub's token on through the environment: the Trainer pickles `args` into training_args.bin, and uploads that."""
    for name in ("hub_token", "push_to_hub_token"):
        if getattr(args, name, None):
            os.environ["HF_TOKEN"] = getattr(args, name)
            setattr(args, name, None)


def load_tokenizer(model_args: ModelConfig, args: Any, added: Sequence[str] | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the EOS token, the chat template and the `added` tokens that the options name."""
    source = model_args.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=model_args.model_revision, trust_remote_code=args.trust_remote_code)
    except OSError as error:  # no such hub id, no access, no network, a folder without a tokenizer
        raise ConfigurationError(f"model_name_or_path={source!r} cannot be loaded: {' '.join(str(error).split())}") from error
    if getattr(args, "eos_token", None) is not None:
        tokenizer.eos_token = args.eos_token
    if getattr(args, "chat_template_path", None) is not None:
        if not Path(args.chat_template_path).is_file():
            raise ConfigurationError(f"chat_template_path={args.chat_template_path!r}: no such file (from {os.getcwd()}).")
        tokenizer.chat_template = Path(args.chat_template_path).read_text(encoding="utf-8")
        args.chat_template_path = None  # done; trl would otherwise take it for a model to copy from if it is no .jinja file
    if added:
        tokenizer.add_tokens(list(added))
    return tokenizer


def make_data(config: RecipeConfig, args: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, Dataset | None], list[int]]:
    """The training and held-out samples as token ids and labels, after a first look at them, and the prompt of the sample that is shown."""
    train, held_out = sft_data.load_splits(config.dataset, config.eval_dataset, config.eval_fraction, args.seed)
    # Packing that keeps the overflow needs whole samples; everything else is cut here, where it can be counted.
    limit = None if args.packing and args.packing_strategy != "bfd" else args.max_length
    named, as_chat = config.dataset_format, config.text_as_chat
    plan = sft_data.Plan(limit, args.assistant_only_loss, args.completion_only_loss, args.dataset_text_field, named, as_chat)
    form = sft_formats.recognise(train.column_names, config.dataset_format, args.dataset_text_field)
    plan, said = plan.settled(train, tokenizer)
    rows: dict[str, Dataset | None] = {"train": None, "eval": None}
    counts = {}
    with args.main_process_first(desc="tokenizing"):
        for name, split in (("train", train), ("eval", held_out)):
            if split is not None:
                rows[name], counts[name] = sft_data.prepare(split, tokenizer, plan, name, args.dataset_num_proc)
    args.assistant_only_loss = False  # the labels say it already, and trl accepts the switch for raw conversations only
    state = PartialState()
    if state.is_main_process:
        sft_look.show(rows, counts, form, tokenizer, config.first_look)
    if said:
        state.print(said)
    for name, count in counts.items():
        state.print(f"{name}: {count}")
    eos, bos, pad = tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token
    state.print(f"EOS {eos!r} ends every sample that is not cut off, and is learned; BOS {bos!r}; padding {pad!r} is not learned")
    return rows, sft_data.prompt_ids((train if held_out is None else held_out)[0], tokenizer, plan)
