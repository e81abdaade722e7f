"""From the command line and the YAML file to a tokenizer and tokenized data: what the supervised recipes share."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sft_data
import sft_formats
import sft_look
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


class RecipeParser(TrlParser):
    """trl's parser, whose error for an unknown key or flag names the nearest that there is."""

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        unknown = [key for key in settings if key not in self._options()]
        if unknown:
            raise ConfigurationError("; ".join(f"the config file has the key {self._hint(key)}" for key in unknown) + ".")
        return super().set_defaults_with_config(**settings)

    def parse_args_into_dataclasses(self, args: Any = None, return_remaining_strings: bool = False, **options: Any) -> Any:
        *found, rest = super().parse_args_into_dataclasses(args, return_remaining_strings=True, **options)
        unknown = [word.partition("=")[0].removeprefix("--") for word in rest if word.startswith("--")]
        if rest and not return_remaining_strings:
            said = [f"the command line has the flag --{self._hint(word)}" for word in unknown] or [
                f"{rest} on the command line has no flag"
            ]
            raise ConfigurationError("; ".join(said) + ".")
        return (*found, rest) if return_remaining_strings else tuple(found)

    def _options(self) -> set[str]:
        return {action.dest for action in self._actions} - {"help"}

    def _hint(self, key: str) -> str:
        near = difflib.get_close_matches(key, self._options(), n=1, cutoff=0.5)
        return f"{key!r}, which this recipe does not know" + (f"; did you mean {near[0]}?" if near else " (--help lists all)")


def make_parser(config: type, training: type, defaults: dict[str, Any]) -> RecipeParser:
    """A recipe's parser: its own options, trl's training and model options, and the recipe's defaults."""
    flashoptim_hf.register()  # idempotent; without it the parser would not know the optimizer's name
    types: Iterable[Any] = (config, training, ModelConfig)
    parser = RecipeParser(types, allow_abbrev=False)
    parser.set_defaults(**defaults, use_cpu=not torch.accelerator.is_available())
    return parser


def hide_token(args: Any) -> None:
    """Hand the hub's token on through the environment: the Trainer pickles `args` into training_args.bin, and uploads that."""
    for name in ("hub_token", "push_to_hub_token"):
        if getattr(args, name, None):
            os.environ["HF_TOKEN"] = getattr(args, name)
            setattr(args, name, None)


def load_tokenizer(model_args: ModelConfig, args: Any, added: Sequence[str] | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the EOS token, the chat template and the `added` tokens that the options name."""
    source = model_args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(source, revision=model_args.model_revision, trust_remote_code=args.trust_remote_code)
    if getattr(args, "eos_token", None) is not None:
        tokenizer.eos_token = args.eos_token
    if getattr(args, "chat_template_path", None) is not None:
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
