"""Commands in the documentation, each read by the parser of the program that it calls. Nothing is executed."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import yaml

from .blocks import ROOT

SHELL = ("cat", "cd", "cp", "echo", "export", "git", "hf", "ls", "mkdir", "source", "tail")
"""Commands of others that a page may use; only the shell's own syntax check reads them."""

RECIPES = {path.stem: path for path in (ROOT / "recipes").glob("*.py") if "def make_parser()" in path.read_text(encoding="utf-8")}


class Wrong(Exception):
    """A command that would not work. The message is the parser's."""


class Unfinished(Wrong):
    """A command that lacks something, as a name in running text does."""


def lines(text: str) -> Iterator[list[str]]:
    """The words of each command of a block: continued lines joined, comments and here-documents left out."""
    text = re.sub(r"<<\s*'?(\w+)'?\n.*?\n\1(?=\n|$)", "", text, flags=re.DOTALL)
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        for command in re.split(r"\s(?:&&|\|)\s", line):
            words = shlex.split(command, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words[-1:] == ["..."] and not words[-2:][0].startswith("--"):
                words.pop()  # and so on
            if words:
                yield words


def check_block(text: str) -> None:
    """Every command of a bash block.

    Raises:
        Wrong: says which command, and what its parser said.
    """
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise Wrong(done.stderr.strip())
    for words in lines(text):
        check(words)


def check(words: list[str]) -> None:
    """One command. Raises `Wrong`."""
    known: dict[str, Callable[[list[str]], None]] = {
        "accelerate": accelerate,
        "bash": lambda rest: _exists(rest[0]),
        "flashoptim-hf": flashoptim_hf,
        "make": make,
        "pip": pip,
        "python": python,
        "python3": python,
        "torchrun": torchrun,
    }
    program, rest = words[0], words[1:]
    if program in SHELL:
        return
    if program not in known:
        raise Wrong(f"{shlex.join(words)}: the command {program!r} is not one that this check knows")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            known[program](rest)
    except SystemExit as error:
        if error.code not in (0, None):
            kind = Unfinished if "arguments are required" in said.getvalue() else Wrong
            raise kind(f"{shlex.join(words)}: {said.getvalue().strip() or error}") from error
    except Wrong as error:
        raise type(error)(f"{shlex.join(words)}: {error}") from None
    except (ValueError, LookupError) as error:
        raise Wrong(f"{shlex.join(words)}: {error!r}") from error


def _exists(name: str) -> None:
    # capitals stand for what the reader puts in: FILE.yaml, ADAPTER, N
    if not re.fullmatch(r"[A-Z]+(_[A-Z]+)*(\.\w+)?", name) and not (ROOT / name).exists():
        raise Wrong(f"{name} is not in the repository")


def accelerate(rest: list[str]) -> None:
    """`accelerate launch`: its own parser, and what it launches."""
    from accelerate.commands.launch import launch_command_parser

    if rest[:1] != ["launch"]:
        raise Wrong("only accelerate launch is known")
    args = launch_command_parser().parse_args(rest[1:])
    if args.config_file:
        _exists(args.config_file)
    if args.module:
        python(["-m", args.training_script, *args.training_script_args])
    else:
        script(args.training_script, args.training_script_args)


def torchrun(rest: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(rest)
    script(args.training_script, args.training_script_args)


def python(rest: list[str]) -> None:
    """A script of the repository, or a module that can be found. Modules after `-m flashoptim_hf.run` too."""
    if rest[:1] == ["-c"]:
        compile(rest[1], "-c", "exec")
    elif rest[:1] == ["-m"]:
        if not rest[1].startswith("flashoptim_hf") and rest[1] in ("venv", "pip"):
            return
        if importlib.util.find_spec(rest[1]) is None:
            raise Wrong(f"there is no module {rest[1]}")
        if rest[1] == "flashoptim_hf.run":
            _runner(rest[2:])
        else:
            training_arguments(rest[2:])
    else:
        script(rest[0], rest[1:])


def _runner(rest: list[str]) -> None:
    """What follows `-m flashoptim_hf.run`: its own options, then a script, a module or a command that an installed package brings."""
    while rest[:1] and rest[0] in ("--adamw", "--adamw_args"):
        optimizer(rest[1]) if rest[0] == "--adamw" else optim_args("adamw", rest[1])
        rest = rest[2:]
    if not rest:
        raise Unfinished("no program is named after flashoptim_hf.run")
    if rest[0] == "-m" or rest[0].endswith(".py"):
        python(rest)
    elif next(iter(entry_points(group="console_scripts", name=rest[0])), None) is None:
        raise Wrong(f"no installed package has the command {rest[0]}")
    else:
        training_arguments(rest[1:])


def script(name: str, options: list[str]) -> None:
    """A script and its options; a recipe's are read by its parser, those of a reader's own script by transformers'."""
    if "/" not in name:  # the reader's own
        return training_arguments(options)
    _exists(name)
    stem = name.removeprefix("recipes/").removesuffix(".py")
    if stem in RECIPES and name.startswith("recipes/"):
        return recipe(stem, options)
    if name == "recipes/accelerate_loop.py":
        return read_options(_loop_parser(), options)
    if options:
        source = (ROOT / name).read_text(encoding="utf-8")
        for flag in _flags(options):
            if f'"{flag}"' not in source:
                raise Wrong(f"{name} has no {flag}")
    return None


def training_arguments(options: list[str]) -> None:
    """`--optim`, `--optim_args` and whatever else transformers' arguments have; other flags are the script's own."""
    from transformers import HfArgumentParser, TrainingArguments

    import flashoptim_hf as package

    package.register()
    parser = HfArgumentParser(TrainingArguments)
    _relax(parser)
    parsed, _ = parser.parse_known_args(options)
    optim_args(parsed.optim, parsed.optim_args)


def optim_args(name: Any, text: str | None) -> None:
    """The value of optim_args, by the types of the optimizer that `name` stands for."""
    from flashoptim_hf.trainer.options import option_types, parse_optim_args
    from flashoptim_hf.trainer.register import algorithms, optimizer_class

    stem = str(getattr(name, "value", name) or "").removeprefix("flashoptim_").removeprefix("paged_")
    cls = optimizer_class(stem if stem in algorithms() else "adamw")
    parse_optim_args(text, option_types(cls), cls.__name__)


@cache
def recipe_module(stem: str) -> Any:
    folder = str(ROOT / "recipes")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(stem)


def _loop_parser() -> Any:
    from trl import TrlParser

    return TrlParser((recipe_module("accelerate_loop").LoopConfig,))


def recipe(stem: str, options: list[str]) -> None:
    """A recipe's options: every flag exists, every value is of its type, and so for the config file, where it is in the repository."""
    read_options(recipe_module(stem).make_parser(), options)


def read_options(parser: Any, options: list[str]) -> None:
    options, config = list(options), None
    if "--config" in options:
        at = options.index("--config")
        config = options[at + 1]
        del options[at : at + 2]
        _exists(config) if "/" in config else None
    if config and (ROOT / config).is_file():
        parser.set_defaults_with_config(**yaml.safe_load((ROOT / config).read_text(encoding="utf-8")))
    _relax(parser)
    found, rest = parser.parse_known_args(options)
    if rest:
        raise Wrong(f"not known: {' '.join(rest)}")
    optim_args(getattr(found, "optim", None), getattr(found, "optim_args", None))


def _relax(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        action.required = False


def _command(words: list[str]) -> tuple[Any, str, list[str]]:
    """The click command that a line of `flashoptim-hf` calls, its name, and the rest of the line."""
    import typer
    from typer.main import get_command

    from flashoptim_hf import cli

    command, name, rest = get_command(cli.app), "flashoptim-hf", list(words)
    while hasattr(command, "list_commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        command = command.get_command(None, name)
        if command is None:
            raise Wrong(f"there is no command {name!r}")
    if hasattr(command, "module"):
        run = importlib.import_module("flashoptim_hf." + command.module.replace("/", ".")).run
        single = typer.Typer(add_completion=False)
        single.command(name)(run)
        command = get_command(single)
    return command, name, rest


@contextlib.contextmanager
def _absent_files(command: Any) -> Iterator[None]:
    """Paths on the command's line need not exist in here. typer keeps that wish with the function's annotations, which are everybody's."""
    held = [getattr(getattr(parameter, "type_descriptor", None), "parameter_info", None) for parameter in command.params]
    strict = [info for info in held if getattr(info, "exists", False)]
    for info in strict:
        info.exists = False
    try:
        yield
    finally:
        for info in strict:
            info.exists = True


def flashoptim_hf(rest: list[str]) -> None:
    """A line of this package's command line, with its parser; a config in the repository has to be there."""
    command, name, words = _command(rest)
    try:
        with _absent_files(command):
            context = command.make_context(name, words)
    except Exception as error:
        # click's usage errors; typer may bring a click of its own, so their class is not asked for
        kind = Unfinished if type(error).__name__ == "MissingParameter" else Wrong
        raise kind(error.format_message() if hasattr(error, "format_message") else repr(error)) from error
    config = context.params.get("config")
    if config is not None and "/" in str(config):
        _exists(str(config))
    if "optim_args" in context.params:
        optim_args(context.params.get("optim"), context.params["optim_args"])


def make(rest: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for word in rest:
        if "=" not in word and word not in targets:
            raise Wrong(f"the Makefile has no target {word}")


def pip(rest: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    parser = argparse.ArgumentParser(prog="pip")
    parser.add_argument("command", choices=["install"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("-c", type=_exists)
    parser.add_argument("-e")
    parser.add_argument("--no-deps", action="store_true")
    args = parser.parse_intermixed_args(rest)
    for extra in (args.e or "").removeprefix(".").strip("[]").split(","):
        if extra and extra not in extras:
            raise Wrong(f"pyproject.toml has no extra {extra}")


def _flags(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


@cache
def known_flags() -> frozenset[str]:
    """Every flag of every program of this repository, and of the launcher."""
    from accelerate.commands.launch import launch_command_parser
    from typer.main import get_command

    from flashoptim_hf import cli

    parsers = [launch_command_parser(), _loop_parser(), *(recipe_module(stem).make_parser() for stem in RECIPES)]
    found = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    groups = [(get_command(cli.app), [])]
    while groups:
        group, path = groups.pop()
        for name in group.list_commands(None):
            command = group.get_command(None, name)
            if hasattr(command, "list_commands"):
                groups.append((command, [*path, name]))
                continue
            found |= {flag for parameter in _command([*path, name])[0].params for flag in (*parameter.opts, *parameter.secondary_opts)}
    runner = importlib.import_module("flashoptim_hf.run").OPTIONS
    return frozenset(found | {"--help", "--version", *runner})


COMMANDS = re.compile(r"(accelerate launch|flashoptim-hf|torchrun|make|pip install|python3?) \S")


def check_span(text: str) -> None:
    """Commands, flags and options of the optimizer in running text. Raises `Wrong`."""
    if COMMANDS.match(text):
        for words in lines(text):
            with contextlib.suppress(Unfinished):
                check(words)
    elif text.startswith("--"):
        for flag in _flags(shlex.split(text)):
            if flag not in known_flags() and flag != "--":
                raise Wrong(f"no program here has the flag {flag}")
    for name in re.findall(r'\boptim="(\w+)"', text):
        if name.startswith("flashoptim"):
            optimizer(name)
    for value in re.findall(r'\boptim_args="([^"]*)"', text):
        try:
            optim_args("sgd" if "momentum" in value else "adamw", value)
        except ValueError as error:
            raise Wrong(str(error)) from error


def optimizer(name: str) -> None:
    from flashoptim_hf.trainer.register import algorithms

    if name.removeprefix("flashoptim_").removeprefix("paged_") not in algorithms():
        raise Wrong(f"no optimizer is called {name}")
