"""Run an unmodified training program with this package's optimizer names known to transformers.

    python -m flashoptim_hf.run script.py --optim flashoptim_paged_adamw ...
    python -m flashoptim_hf.run trl sft --optim flashoptim_paged_adamw ...
    python -m flashoptim_hf.run -m trl.scripts.sft --optim flashoptim_paged_adamw ...
    python -m flashoptim_hf.run --adamw flashoptim_paged_adamw script_that_makes_its_own_AdamW.py ...
    accelerate launch [its options] -m flashoptim_hf.run ... (any of these)

The program sees what it would see if Python ran it: its own name and arguments, `__name__ == "__main__"`, and its folder (with -m, the
current one) first among the places where modules are looked for. A command's name is looked up among those that installed packages bring.
A program that starts others does not hand the registration on to them. `trl sft` would: it starts `accelerate launch` by itself, so that
the script that it would launch, `trl.scripts.sft`, is run in its place, under a launcher of one's own.

Options, before the program's name:
    --adamw NAME        where the program calls torch.optim.AdamW, it gets the optimizer of this name, flashoptim_adamw or
                        flashoptim_paged_adamw: for loops with Accelerate or plain torch, which do not know of names
    --adamw_args TEXT   its options, as in optim_args: "page_bytes=32MiB"
"""

from __future__ import annotations

import difflib
import os
import runpy
import sys
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

USAGE = "usage: python -m flashoptim_hf.run [--adamw NAME [--adamw_args TEXT]] [-m MODULE | SCRIPT.py | COMMAND] [its arguments]"
OPTIONS = ("--adamw", "--adamw_args")
LAUNCHERS = ("torchrun", "accelerate launch", "accelerate-launch", "deepspeed", "torch.distributed.run", "accelerate.commands.launch")
"""Commands and modules that start the program in other processes."""


def main(words: list[str]) -> None:
    """Register the names, then run a script, a module or an installed command as the main program.

    Args:
        words: this program's options, then `-m MODULE`, a script's path or a command's name, and the program's arguments.

    Raises:
        SystemExit: no program is named, there is no such one, it is a launcher, or an option is wrong; 2, with a sentence.
    """
    import flashoptim_hf

    flashoptim_hf.register()
    if words[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__}")
        return
    options, words = _options(words)
    module = words[:1] == ["-m"]
    program = words[1:2] if module else words[:1]
    if not program or (program[0].startswith("-") and not module):
        _stop(f"{USAGE}\nno program is named{f' before {program[0]}' if program else ''}.")
    launcher = next((launcher for launcher in LAUNCHERS if launcher in (program[0], " ".join(words[:2]))), None)
    if launcher is not None:
        _stop(
            f"{launcher} starts the program in other processes, where nothing would be registered. Turn them round: "
            f"{'python -m ' if module else ''}{launcher} [its options] -m flashoptim_hf.run ..."
        )
    if options:
        _stand_in(options)
    name, rest = program[0], words[2 if module else 1 :]
    if module:
        _run_module(name, rest)
    elif Path(name).is_file():
        sys.argv = [name, *rest]
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, run_name="__main__")
    else:
        _run_command(name, rest)


def _options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """This program's own options, `--key value` or `--key=value`, and what follows them."""
    found: dict[str, str] = {}
    while words and words[0].partition("=")[0] in OPTIONS:
        key, equals, value = words[0].partition("=")
        if not equals:
            if not words[1:]:
                _stop(f"{USAGE}\n{key} needs a value.")
            value = words[1]
        found[key], words = value, words[1 if equals else 2 :]
    if "--adamw_args" in found and "--adamw" not in found:
        _stop(f"{USAGE}\n--adamw_args goes with --adamw; for a program that uses the Trainer give it --optim and --optim_args.")
    return found, words


def _stand_in(options: dict[str, str]) -> None:
    """Let the program's AdamW be ours. Says so at the first one, on the first process."""
    from .errors import ConfigurationError
    from .trainer import stand_in

    said: list[str] = []

    def made(optimizer: Any) -> None:
        if not said and os.environ.get("RANK", "0") == "0":
            said.append(f"the program's torch.optim.AdamW is {type(optimizer).__name__}, paged={optimizer.defaults['paged']}")
            print(f"flashoptim_hf.run: {said[0]}", file=sys.stderr, flush=True)

    try:
        stand_in.install(options["--adamw"], options.get("--adamw_args"), made)
    except ConfigurationError as error:
        _stop(str(error))


def _run_module(name: str, rest: list[str]) -> None:
    sys.argv = [name, *rest]
    sys.path.insert(0, "")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_command(name: str, rest: list[str]) -> None:
    """A command of an installed package. Where the package has `scripts/<first argument>.py`, that is what the command would launch."""
    point = _command(name)
    if point is None:
        near = difflib.get_close_matches(name, entry_points(group="console_scripts").names, n=1)
        _stop(
            f"{name}: no such file (from {Path.cwd()}), and no installed package has such a command"
            f"{f'; did you mean {near[0]}?' if near else '.'} Name a Python script, -m and a module, or a command."
        )
    scripts = f"{point.module.partition('.')[0]}.scripts"
    if rest and rest[0].isidentifier() and find_spec(scripts) is not None and find_spec(f"{scripts}.{rest[0]}") is not None:
        _run_module(f"{scripts}.{rest[0]}", rest[1:])
        return
    sys.argv = [name, *rest]
    raise SystemExit(point.load()())


def _command(name: str) -> EntryPoint | Any:
    return next(iter(entry_points(group="console_scripts", name=name)), None)


def _stop(sentence: str) -> Any:
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
