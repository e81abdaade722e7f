"""Pages read back as XML, with Python's own parser, and the numbers that are in them."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

SPACE = "{http://www.w3.org/1999/xhtml}"


class Page:
    """A page, parsed; not being well-formed XML is an error."""

    def __init__(self, text: str) -> None:
        self.source = text
        self.root = ET.fromstring(text)

    def all(self, tag: str, kind: str | None = None) -> list[ET.Element]:
        return [node for node in self.root.iter(SPACE + tag) if kind is None or node.get("class") == kind]

    def text(self, node: ET.Element | None = None) -> str:
        return "".join((self.root if node is None else node).itertext())

    def log(self) -> list[dict[str, float]]:
        """The table with all numbers."""
        (table,) = [node for node in self.all("details") if node.get("id") == "log"]
        head, *rows = [[self.text(cell) for cell in row] for row in table.iter(f"{SPACE}tr")]
        return [{key: float(value) for key, value in zip(head, row, strict=True) if value} for row in rows]

    def marks(self, title: str) -> list[str]:
        """What a chart's points say when they are pointed at."""
        (figure,) = [node for node in self.all("figure") if self.text(node[0]) == title]
        return [self.text(mark) for mark in figure.iter(f"{SPACE}title")]

    def titles(self) -> list[str]:
        return [self.text(node) for node in self.all("figcaption")]


@pytest.fixture
def read() -> Any:
    return lambda source: Page(source.read_text(encoding="utf-8") if isinstance(source, Path) else source)


def numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float) and not isinstance(value, bool)}


def same(shown: list[dict[str, float]], log: list[dict[str, Any]]) -> bool:
    """Every number of the log, and nothing else."""
    expected = [numbers(row) for row in log]
    if len(shown) != len(expected):
        return False
    return all(
        one.keys() == other.keys() and all(one[key] == other[key] or (math.isnan(one[key]) and math.isnan(other[key])) for key in one)
        for one, other in zip(shown, expected, strict=True)
    )


@pytest.fixture
def agrees() -> Any:
    return same
