"""A file of samples that a library could not read: which line it is, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def fault(path: str | Path) -> str | None:
    """What is wrong with a .jsonl or .json file, with the line's number (the first is 1); None where nothing is found."""
    text = Path(path).read_bytes().decode("utf-8-sig", errors="surrogateescape")
    if text.lstrip()[:1] == "[":  # one list of samples
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            return f"{path}, line {error.lineno}: no JSON, {error.msg.lower()} (column {error.colno})"
        return None
    kinds: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            return f"{path}, line {number}: no JSON, {error.msg.lower()} (column {error.colno}): {_short(line)}"
        if not isinstance(row, dict):
            return f"{path}, line {number}: a sample is a JSON object, {{...}}, and this is {_kind(row)}: {_short(line)}"
        for key, value in row.items():
            kind = _kind(value)
            first, where = kinds.setdefault(key, (kind, number)) if value is not None else (kind, number)
            if first != kind:
                return f"{path}, line {number}: {key!r} is {kind}, and in line {where} it is {first}"
    return None


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a truth value"
    names = {str: "text", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _short(line: str) -> str:
    """The beginning of a line, as it can be printed."""
    line = line.strip().encode("utf-8", errors="replace").decode()
    return line if len(line) <= 60 else f"{line[:60]} ..."
