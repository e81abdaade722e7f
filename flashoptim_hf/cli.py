"""`flashoptim-hf`: the command line.

A command is a module of this package that defines `run`, whose signature gives the options. `COMMANDS` says where each one lies; a folder
there becomes a group, whose commands are the files in it that define `run`. Nothing is imported before its command is called: names and
help come from the source text, so that `--help`, `--version` and completion do not wait for torch.
"""

from __future__ import annotations

import ast
import difflib
import importlib
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from . import __version__
from .errors import FlashOptimError

PACKAGE = Path(__file__).resolve().parent
COMMANDS = {
    "bench": "bench",
    "convert": "cli_convert",
    "doctor": "cli_doctor",
    "eval": "after/evaluate",
    "inspect": "cli_inspect",
    "merge": "after/merge",
    "plan": "cli_plan",
    "report": "report/command",
    "sample": "after/sample",
}
"""Command to the module or folder that holds it, relative to the package, with "/" and without ".py"."""


def run_help(file: Path) -> str | None:
    """The docstring of `run` in a source file, "" where it has none, None where the file does not define `run`."""
    for node in ast.parse(file.read_bytes(), filename=str(file)).body:
        if isinstance(node, ast.FunctionDef) and node.name == "run":
            return ast.get_docstring(node) or ""
    return None


class LazyCommand(TyperCommand):
    """A command whose module is imported when it is called. `module` is relative to the package, with "/"."""

    def __init__(self, name: str, module: str, doc: str) -> None:
        super().__init__(name, help=doc)
        self.module = module

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments with the real command, which then is the context's command."""
        module = importlib.import_module("." + self.module.replace("/", "."), __package__)
        single = typer.Typer(add_completion=False)
        single.command(self.name, help=self.help)(module.run)
        command = get_command(single)
        for parameter in command.params:
            if parameter.param_type_name == "argument" and parameter.nargs == 1 and parameter.metavar is None:
                name = str(parameter.name).upper()
                parameter.metavar = name
                usage = name if parameter.required else f"[{name}]"
                setattr(parameter, "get_usage_pieces", partial(_pieces, usage))  # noqa: B010 (no assignment: it is a method)
        return command.make_context(info_name, args, parent, **extra)


def _pieces(usage: str, ctx: Any) -> list[str]:  # noqa: ARG001
    return [usage]


class NamingGroup(TyperGroup):
    """A group that names the nearest of its commands where there is no such one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            there = self.list_commands(ctx)
            near = difflib.get_close_matches(name, there)
            ctx.fail(f"No such command {name!r}. " + (f"Is {' or '.join(near)} meant?" if near else f"There are {', '.join(there)}."))
        return super().resolve_command(ctx, args)


class FolderGroup(NamingGroup):
    """The commands that lie in one folder: `cpu_step.py`, if it defines `run`, is the command `cpu-step`."""

    def __init__(self, name: str, folder: str) -> None:
        super().__init__(
            name=name, no_args_is_help=True, help=ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_bytes()))
        )
        self.folder = folder

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return sorted(file.stem.replace("_", "-") for file in (PACKAGE / self.folder).glob("[!_]*.py") if run_help(file) is not None)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = f"{self.folder}/{cmd_name.replace('-', '_')}"
        return LazyCommand(cmd_name, module, run_help(PACKAGE / f"{module}.py") or "")


class Commands(NamingGroup):
    """The top level: the entries of `COMMANDS`. Errors that users can act on end the program with their message, without a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return sorted(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        if (PACKAGE / place).is_dir():
            return FolderGroup(cmd_name, place)
        return LazyCommand(cmd_name, place, run_help(PACKAGE / f"{place}.py") or "")

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlashOptimError as error:
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(2) from error


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashoptim-hf {__version__}")
        raise typer.Exit


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_show_locals=False)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Companded 8-bit optimizer states, paged into host RAM: measure, plan and look inside."""
