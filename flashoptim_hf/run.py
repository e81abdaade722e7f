"""Run an unmodified training program with this package's optimizer names known to transformers.

    python -m flashoptim_hf.run script.py --optim flashoptim_paged_adamw ...
    python -m flashoptim_hf.run -m trl.scripts.sft --optim flashoptim_paged_adamw ...
    accelerate launch [its options] -m flashoptim_hf.run script.py ...

The program sees what it would see if Python ran it: its own name and arguments, `__name__ == "__main__"`, and its folder (with -m, the
current one) first among the places where modules are looked for. A program that starts others does not hand the registration on to
them, so that `trl sft`, which starts `accelerate launch` itself, is run as the module `trl.scripts.sft` under a launcher of one's own.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

USAGE = "usage: python -m flashoptim_hf.run [-m MODULE | SCRIPT.py] [its arguments]"


def main(words: list[str]) -> None:
    """Register the names, then run a script or module as the main program.

    Args:
        words: `-m MODULE` or a script's path, and the program's arguments.

    Raises:
        SystemExit: no program is named, or there is no such script; 2, with a sentence.
    """
    import flashoptim_hf

    flashoptim_hf.register()
    module = words[:1] == ["-m"]
    if words[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__}")
        return
    program = words[1:2] if module else words[:1]
    if not program or (program[0].startswith("-") and not module):
        _stop(f"{USAGE}\nno program is named{f' before {program[0]}' if program else ''}.")
    sys.argv = [program[0], *words[2 if module else 1 :]]
    if module:
        sys.path.insert(0, "")
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    script = Path(program[0])
    if not script.is_file():
        _stop(
            f"{program[0]}: no such file (from {Path.cwd()}). Name a Python script, or -m and a module: trl sft is -m trl.scripts.sft here."
        )
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def _stop(sentence: str) -> None:
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
