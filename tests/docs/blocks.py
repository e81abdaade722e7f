"""What stands in the documentation that can be wrong: code blocks, commands in running text, links, headings.

A fenced block is classified by its language, and by a comment on the line before it, which no viewer shows:

    <!-- check: CLASS [key=value ...] -->

    bash    parse (default: every command is read by its own parser), run (also executed), slow (executed by `make docs-check` alone)
    python  run (default: executed on a tiny model), parse (compiled, and its imports looked up)
    yaml    parse (default: read by a recipe's parser; recipe=NAME, default qlora_sft, or recipe=accelerate, axolotl),
            run (also written to the file named by file=NAME, for the blocks that follow)
    json    parse (every line, or the whole)
    text    output (default, unless it looks like commands: what a program prints),
            formula (indented blocks with mathematical signs are formulas by themselves)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {
    "bash": ("parse", "run", "slow"),
    "python": ("run", "parse"),
    "yaml": ("parse", "run"),
    "json": ("parse",),
    "jsonl": ("parse",),
    "text": ("output", "formula"),
}
"""Language -> the classes that it may have; the first one is meant where no comment says otherwise."""

COMMAND = re.compile(r"^\s*(\$ )?(accelerate|flashoptim-hf|make|pip|python3?|torchrun|import|from) ", re.MULTILINE)
"""What a block of text looks like that would better be checked."""

MARKER = re.compile(r"<!--\s*check:\s*(\w+)((?:\s+\w+=\S+)*)\s*-->")
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))


@dataclass(frozen=True)
class Block:
    """A code block: where it stands, and what is to be done with it. `kind` is "" where nobody has said."""

    file: str
    line: int
    language: str
    kind: str
    text: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Page:
    """A page, taken apart. Spans, links and headings are (line, text)."""

    file: str
    blocks: list[Block]
    spans: list[tuple[int, str]]
    links: list[tuple[int, str]]
    headings: list[str]
    tables: list[list[str]]
    """Each row's cells, as they are written."""


def read(path: Path) -> Page:
    """A page of the repository."""
    return parse(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))


def parse(text: str, file: str) -> Page:
    """Take a page apart."""
    page = Page(file, [], [], [], [], [])
    said: re.Match[str] | None = None
    row: list[str] = []
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for i, token in enumerate(tokens):
        line = token.map[0] + 1 if token.map else 0
        if token.type in ("fence", "code_block"):
            page.blocks.append(_block(file, line, token, said))
        elif token.type == "inline":
            if tokens[i - 1].type == "heading_open":
                page.headings.append("".join(child.content for child in token.children or () if child.type in ("text", "code_inline")))
            if tokens[i - 1].type == "td_open":
                row.append(token.content)
            _inline(page, line, token)
        elif token.type == "tr_open":
            row = []
        elif token.type == "tr_close" and row:
            page.tables.append(row)
        said = MARKER.search(token.content) if token.type == "html_block" else None
    return page


def _block(file: str, line: int, token: Any, said: re.Match[str] | None) -> Block:
    language = token.info.strip().split()[0] if token.info.strip() else ""
    if token.type == "code_block" and re.search("[≤≥←≈√Σ·]", token.content):
        return Block(file, line, "text", "formula", token.content)
    language = language or "bash"  # other blocks that say nothing hold commands, or the parser of commands refuses them
    classes = CLASSES.get(language, ())
    options = dict(pair.split("=", 1) for pair in said[2].split()) if said else {}
    kind = said[1] if said else next(iter(classes), "")
    known = kind in classes and (said is not None or language != "text" or not COMMAND.search(token.content))
    return Block(file, line, language, kind if known else "", token.content, options)


def _inline(page: Page, line: int, token: Any) -> None:
    for child in token.children or ():
        if child.type == "code_inline":
            page.spans.append((line, child.content))
        elif child.type in ("link_open", "image"):
            page.links.append((line, child.attrs.get("href") or child.attrs.get("src") or ""))


def anchor(heading: str) -> str:
    """A heading's anchor, as both GitHub and python-markdown make it of plain words."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
