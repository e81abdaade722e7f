"""Python, YAML and JSON in the documentation: looked at, and executed on a tiny model."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
from pathlib import Path
from typing import Any

import yaml

from . import commands
from .blocks import Block
from .commands import Wrong


def check_python(text: str) -> None:
    """It compiles, and what it imports is there.

    Raises:
        Wrong: says which name is missing.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Wrong(f"line {error.lineno}: {error.msg}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    raise Wrong(f"{node.module} has no {alias.name}")


def check_json(text: str, language: str) -> None:
    """JSON, or one JSON value a line."""
    for part in text.splitlines() if language == "jsonl" else [text]:
        try:
            json.loads(part)
        except ValueError as error:
            raise Wrong(f"{part[:60]}: {error}") from error


def check_yaml(block: Block, folder: Path) -> None:
    """Read by the parser of the program that will read it. `folder`: for a file of it.

    Raises:
        Wrong: the parser's own words.
    """
    try:
        values = yaml.safe_load(block.text)
    except yaml.YAMLError as error:
        raise Wrong(str(error)) from error
    recipe = block.options.get("recipe", "qlora_sft")
    file = folder / "block.yaml"
    file.write_text(block.text, encoding="utf-8")
    if recipe == "axolotl":
        return _axolotl(values)
    try:
        if recipe == "accelerate":
            from accelerate.commands.config.config_args import load_config_from_file

            load_config_from_file(str(file))
            return None
        given = [word for key in ("dataset", "model_name_or_path") if key not in values for word in (f"--{key}", "x")]
        parser = commands.recipe_module(recipe).make_parser()
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            parser.parse_args_and_config(["--config", str(file), *given, "--use_cpu", "true"])
        commands.optim_args(values.get("optim"), values.get("optim_args"))
    except ValueError as error:
        raise Wrong(str(error)) from error
    except SystemExit as error:
        raise Wrong(said.getvalue().strip().splitlines()[-1]) from error
    return None


def _axolotl(values: dict[str, Any]) -> None:
    for path in values["plugins"]:
        module, _, name = path.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            raise Wrong(f"there is no plugin {path}")
    source = Path(importlib.import_module("flashoptim_hf.axolotl").__file__).read_text(encoding="utf-8")
    for key in values:
        if key.startswith("flashoptim") and f"{key}:" not in source:
            raise Wrong(f"the plugin has no key {key}")
    commands.optimizer(values["flashoptim"])
    commands.optim_args(values["flashoptim"], values.get("flashoptim_args"))


def names(model_folder: Path) -> dict[str, Any]:
    """What every Python block may take for granted: a model, its tokenizer, batches, a tokenized data set, and one parameter."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    ids = torch.randint(5, 260, (4, 16))
    rows = {"input_ids": ids.tolist(), "labels": ids.tolist()}
    return {
        "model": model,
        "tokenizer": AutoTokenizer.from_pretrained(model_folder),
        "batches": [{"input_ids": ids, "labels": ids}] * 2,
        "dataset": datasets.Dataset.from_dict(rows),
        "p": next(model.parameters()),
        "Path": Path,
    }
