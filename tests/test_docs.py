"""Every command, snippet, flag and link in README and docs: classified, read by the parser that will read it, or executed."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from tests.docs import commands, snippets
from tests.docs.blocks import CLASSES, PAGES, ROOT, Page, anchor, read
from tests.docs.session import Failed, Session, tiny_model

IDS = [str(path.relative_to(ROOT)) for path in PAGES]


def unclassified(page: Page) -> list[str]:
    """Blocks of which nobody has said what is to be done with them."""
    return [
        f"{block.name}: {block.language or 'no language'!r} is not classified; languages and their classes: {CLASSES}"
        for block in page.blocks
        if not block.kind
    ]


def faults(page: Page, folder: Path) -> list[str]:
    """What is wrong with the blocks and the running text of a page, without executing anything."""
    found = []
    for block in page.blocks:
        try:
            if block.language == "bash":
                commands.check_block(block.text)
            elif block.language == "python":
                snippets.check_python(block.text)
            elif block.language == "yaml":
                snippets.check_yaml(block, folder)
            elif block.language in ("json", "jsonl"):
                snippets.check_json(block.text, block.language)
        except (commands.Wrong, ImportError) as error:
            found.append(f"{block.name}: {error}")
    for line, span in page.spans:
        try:
            commands.check_span(span)
        except (commands.Wrong, ValueError) as error:
            found.append(f"{page.file}:{line}: `{span}`: {error}")
    return found


def broken_links(page: Page) -> list[str]:
    """Links to files that are not there, and to headings that no page has."""
    found = []
    for line, link in page.links:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (ROOT / page.file).parent / name if name else ROOT / page.file
        if not target.exists():
            found.append(f"{page.file}:{line}: there is no {link}")
        elif fragment and fragment not in {anchor(heading) for heading in read(target.resolve()).headings}:
            found.append(f"{page.file}:{line}: {name or page.file} has no heading {fragment!r}")
    return found


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_every_block_is_classified(path: Path) -> None:
    assert not unclassified(read(path))


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_commands_snippets_and_flags_exist(path: Path, tmp_path: Path) -> None:
    assert not faults(read(path), tmp_path)


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links(path: Path) -> None:
    assert not broken_links(read(path))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("docs") / "model")


RUN = [path for path in PAGES if any(block.kind == "run" for block in read(path).blocks)]


@pytest.mark.parametrize("path", RUN, ids=[str(path.relative_to(ROOT)) for path in RUN])
def test_blocks_run(path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(tmp_path, model, monkeypatch)
    for block in read(path).blocks:
        if block.kind == "run":
            try:
                session.run(block)
            except Failed as error:
                pytest.fail(f"{block.name}: {error}")


def test_keys_of_the_recipes() -> None:
    fields = {
        field.name
        for config in (commands.recipe_module("sft_options").RecipeConfig, commands.recipe_module("qlora_sft").QLoraConfig)
        for field in dataclasses.fields(config)
    }
    told = {key for row in read(ROOT / "docs/recipes.md").tables for key in re.findall(r"`(\w+)`", row[0])}
    assert fields - {"dataset"} <= told


def test_navigation_names_pages_that_are_there() -> None:
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    made = {"index.md", "contributing.md", "changelog.md"}  # of the files at the top, by docs/site_links.py
    assert len(listed) > len(made)
    assert set(listed) - made <= {path.name for path in (ROOT / "docs").glob("*.md")}


def messages() -> list[str]:
    """Every string of the package and the recipes, with a zero byte where a value is put in."""
    found = []
    for path in [*(ROOT / "flashoptim_hf").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def invented(page: Page, known: list[str]) -> list[str]:
    """Messages in the first column of a page's tables that nothing here says. Those of others carry their package's name in brackets."""
    quoted = [match[1] for row in page.tables if (match := re.fullmatch(r"`([^`]+)`", row[0].strip()))]
    assert quoted
    patterns = [re.compile(".*?".join(re.escape(part.strip()) for part in text.split("...")), re.DOTALL) for text in quoted]
    return [text for text, pattern in zip(quoted, patterns, strict=True) if not any(pattern.search(message) for message in known)]


def test_troubleshooting_quotes_what_is_really_said() -> None:
    assert not invented(read(ROOT / "docs/troubleshooting.md"), messages())


def test_public_names_are_told() -> None:
    import torch

    import flashoptim_hf
    from flashoptim_hf import errors

    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    own = {name for name in vars(flashoptim_hf.FlashAdamW.__mro__[1]) if name not in dir(torch.optim.Optimizer) and name[0] != "_"}
    raised = {name for name, value in vars(errors).items() if isinstance(value, type)}
    told = set(re.findall(r"`(?:optimizer\.)?(\w+)", text))
    assert (set(dir(flashoptim_hf)) | own | raised) - {"rule", "check_group"} <= told


def test_commands_are_told() -> None:
    from flashoptim_hf import cli

    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert not [name for name in cli.COMMANDS if f"flashoptim-hf {name}" not in text]
