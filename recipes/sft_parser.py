"""The command line and the YAML file: trl's parser, with mistakes answered in one sentence that names the nearest that there is."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from trl import TrlParser

from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.trainer import register

EXAMPLE = "configs/qlora/smollm2-135m_demo.yaml"
ARGUMENT = re.compile(r"argument --(\w+)(?:/\S+)?: ")  # the second name is the first with hyphens
CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from")


class RecipeParser(TrlParser):
    """trl's parser, whose errors are sentences: a key, a flag, a value or a file that is not there, and the nearest that is."""

    def parse_args_and_config(self, args: Iterable[str] | None = None, **options: Any) -> Any:
        """As trl's, from `sys.argv` where `args` is None.

        Raises:
            ConfigurationError: a mistake on the command line or in the file, whoever finds it.
        """
        words = [part for word in (sys.argv[1:] if args is None else args) for part in _split(word)]
        self._has_config = "--config" in words
        if self._has_config:
            check_config(words[words.index("--config") + 1 :][:1])
        try:
            return super().parse_args_and_config(words, **options)
        except ConfigurationError:
            raise
        except ValueError as error:  # what transformers and trl find, in options that contradict each other
            raise ConfigurationError(str(error)) from error

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        unknown = [key for key in settings if key not in self._options()]
        if unknown:
            raise ConfigurationError("; ".join(f"the config file has the key {self._hint(key, '')}" for key in unknown) + ".")
        return super().set_defaults_with_config(**settings)

    def parse_args_into_dataclasses(self, args: Any = None, return_remaining_strings: bool = False, **options: Any) -> Any:
        *found, rest = super().parse_args_into_dataclasses(args, return_remaining_strings=True, **options)
        unknown = [word.partition("=")[0].removeprefix("--") for word in rest if word.startswith("--")]
        if rest and not return_remaining_strings:
            said = [f"the command line has the flag {self._hint(word, '--')}" for word in unknown] or [
                f"{' '.join(rest)!r} on the command line has no flag"
            ]
            raise ConfigurationError("; ".join(said) + ".")
        return (*found, rest) if return_remaining_strings else tuple(found)

    def error(self, message: str) -> NoReturn:
        """What argparse finds, without the pages of usage that it prints before it."""
        flag, choice = ARGUMENT.match(message), CHOICE.search(message)
        if flag is not None and choice is not None:
            message = f"{flag[1]}={choice[1]!r} is not known; {self._choices(flag[1], choice[1])}"
        elif flag is not None:
            message = f"--{flag[1]}: {message[flag.end() :]}"
        elif "arguments are required" in message and not getattr(self, "_has_config", False):
            message += f". Usually they come from a config file: --config {EXAMPLE}, or one of your own (docs/getting-started.md)"
        raise ConfigurationError(f"{message}." if message[-1] not in ".)?" else message)

    def _options(self) -> set[str]:
        return {action.dest for action in self._actions} - {"help"}

    def _hint(self, key: str, dashes: str) -> str:
        near = difflib.get_close_matches(key, self._options(), n=1, cutoff=0.5)
        said = f"; did you mean {dashes}{near[0]}?" if near else " (--help lists all)"
        return f"{dashes}{key}, which this recipe does not know{said}"

    def _choices(self, name: str, value: str) -> str:
        choices = [str(choice) for action in self._actions if action.dest == name for choice in action.choices or ()]
        near = difflib.get_close_matches(value, choices, n=1)
        if near:
            return f"did you mean {near[0]}?"
        ours = [choice for choice in choices if choice in register.handlers()]
        return f"choose one of {', '.join(ours or choices)}{', or a name of transformers (--help)' if ours else ''}"


def _split(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--config=") else [word]  # trl knows the two words alone


def check_config(paths: list[str]) -> None:
    """The config file is there, and YAML.

    Raises:
        ConfigurationError: names the nearest file in its folder, or the line that is no YAML.
    """
    if not paths:
        raise ConfigurationError(f"--config has no file after it; for example --config {EXAMPLE}.")
    path = Path(paths[0])
    if not path.is_file():
        there = sorted(other.name for other in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else f"a recipe's config is, for example, {EXAMPLE}."
        raise ConfigurationError(f"--config {path}: no such file (from {os.getcwd()}); {hint}")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--config {path} is no YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"--config {path}: a config is lines of 'key: value', and this is a {type(settings).__name__}.")


def check_model(name: str | None) -> None:
    """A model that is named as a folder is one.

    Raises:
        ConfigurationError: it is not there; a library would take it for a hub id, and say so in its own words.
    """
    if not name:
        raise ConfigurationError("model_name_or_path is not set: a folder, or a hub id such as Qwen/Qwen3-0.6B.")
    if Path(name).is_dir() or not (name.startswith((".", "/", "~")) or name.count("/") > 1):
        return
    hint = "'~' is not expanded here, write the path out." if name.startswith("~") else "Correct the path, or give a hub id (org/name)."
    if ".demo" in Path(name).parts:
        hint = "`make demo-assets`, or `python recipes/demo_assets.py`, makes the demo's model in .demo/model."
    raise ConfigurationError(f"model_name_or_path={name!r}: no such folder (from {os.getcwd()}). {hint}")


def check_optimizer(args: Any) -> None:
    """The options in `optim_args` are those of an optimizer of this package, by making one of a single weight.

    Args:
        args: `TrainingArguments`; with another package's optimizer nothing is checked.

    Raises:
        ConfigurationError: see `parse_optim_args` and the optimizer.
    """
    handler = register.handlers().get(str(getattr(args.optim, "value", args.optim)))
    if handler is None:
        return
    given = handler.given(args)
    for option in ("offload_dir", "offload_keep"):
        given.pop(option, None)  # files are made, and the disk's room is counted, when the model is there
    register.optimizer_class(handler.stem)([torch.nn.Parameter(torch.zeros(1))], **{"paged": handler.paged, **given})
