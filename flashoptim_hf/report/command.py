"""`flashoptim-hf report`: the report of a run that is over, from what it left in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigurationError
from . import history, page


def run(
    folder: Annotated[Path, typer.Argument(help="The output_dir of a run, or one of its checkpoints.")],
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Where to write the page; default: report.html in the folder.")] = None,
) -> None:
    """Make report.html, one self-contained file, from the trainer_state.json of any run; more is in it where the run kept report.json."""
    if not folder.is_dir():
        raise ConfigurationError(f"{folder}: no such folder. Name the output_dir of a run, or one of its checkpoints.")
    found = history.read(folder)
    target = out or folder / history.PAGE
    page.write(found, target)
    typer.echo(f"{target}: {len(found.log)} rows of the log, {found.ended}")
