"""Names of models that are meant as folders: what is there instead, said before a hub is asked for them."""

from __future__ import annotations

import difflib
from pathlib import Path

from .errors import ConfigurationError

DEMO = ".demo/model"
NAMED = 5


def check(name: str, kind: str = "model") -> None:
    """Refuse a name that can only be a folder's, where there is none: a hub would be asked for it in vain, for about a minute.

    Only a folder begins with `.`, `~` or `/`, has more than one slash, a backslash or one at its end, or lies in a folder that is there.

    Args:
        name: a folder, or a hub id such as "org/name", which passes.
        kind: what is looked for, for the message.

    Raises:
        ConfigurationError: names folders that are there.
    """
    path = Path(name)
    if path.exists():
        return
    inside = name.count("/") == 1 and path.parent.is_dir()
    if not (name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name or name.endswith("/") or inside):
        return
    if name.startswith("~") and path.expanduser().exists():
        raise ConfigurationError(f"there is no folder {name!r}: the shell has not replaced ~. Write {str(path.expanduser())!r}.")
    way = "`make demo-assets` makes it, in the folder that holds the Makefile." if path == Path(DEMO) else instead(path)
    raise ConfigurationError(f"there is no folder {name!r} (from {Path.cwd()}) for a {kind}. {way}")


def instead(path: Path) -> str:
    """A sentence about what the nearest folder holds that is there: names like the one that is not, else the first few."""
    missing = path
    while not missing.parent.is_dir():
        missing = missing.parent
    folder = missing.parent
    place = "the current folder" if folder == Path() else str(folder)
    try:
        found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("__"))
    except OSError as error:
        return f"{place} cannot be read: {error}."
    if not found:
        return f"{place} holds no folders."
    near = difflib.get_close_matches(missing.name, found, n=NAMED)
    if near:
        return f"{place} holds {', '.join(near)}: is one of them meant?"
    open_ones = [entry for entry in found if not entry.startswith(".")] or found
    more = f" and {len(open_ones) - NAMED} more" if len(open_ones) > NAMED else ""
    return f"{place} holds the folders {', '.join(open_ones[:NAMED])}{more}."
