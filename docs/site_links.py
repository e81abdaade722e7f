"""Makes a site of pages whose links are written for the repository: a hook of mkdocs, which calls the functions below.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages of the site. A linked file of the repository that is no page (a recipe, a config,
a result) becomes a page that shows it, or is copied if it is an image; a linked folder becomes a list of what is in it. So every link works
where the files are looked at, and in the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".txt": "text"}
IMAGES = (".png", ".svg")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def target(link: str, folder: str) -> str | None:
    """The path in the repository that a relative link in a page of `folder` ("" or "docs") means; None for links elsewhere."""
    if re.match(r"[a-z]+:|/", link):
        return None
    return posixpath.normpath(posixpath.join(folder, link))


def place(path: str) -> str:
    """Where a file or folder of the repository is in the site, from its root."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if Path(path).suffix in IMAGES:
        return f"files/{path}"
    return f"files/{path}/index.md" if (ROOT / path).is_dir() else f"files/{path}.md"


def rewrite(text: str, folder: str, here: str) -> str:
    """A page's links as the site needs them. `here`: the page's own place in the site."""

    def changed(match: re.Match[str]) -> str:
        path = target(match[2], folder)
        if path is None or not (ROOT / path).exists():
            return match[0]  # mkdocs says so if it is wrong
        there = posixpath.relpath(place(path), posixpath.dirname(here) or ".")
        return f"{match[1]}{there}{match[3] or ''}{match[4]}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)  # no links in code
    return "".join(part if part.startswith("```") else LINK.sub(changed, part) for part in parts)


def shown(path: str) -> str:
    """The page that shows a file or a folder of the repository."""
    full = ROOT / path
    if full.is_dir():
        names = sorted(file.name for file in full.iterdir() if file.suffix in LANGUAGES)
        return f"# {path}\n\n" + "".join(f"- [{name}]({posixpath.relpath(place(f'{path}/{name}'), f'files/{path}')})\n" for name in names)
    return f"# {path}\n\n```{LANGUAGES.get(full.suffix, 'text')}\n{full.read_text(encoding='utf-8').rstrip()}\n```\n"


def linked(text: str, folder: str) -> set[str]:
    """The files and folders of the repository, outside docs/, that a page links to, and what is in the folders."""
    paths = {path for match in LINK.finditer(text) if (path := target(match[2], folder)) is not None}
    paths = {path for path in paths if (ROOT / path).exists() and not path.startswith("docs") and path not in PAGES}
    inside = {f"{path}/{file.name}" for path in paths if (ROOT / path).is_dir() for file in (ROOT / path).iterdir()}
    return paths | {path for path in inside if Path(path).suffix in LANGUAGES}


def on_config(config: Any) -> Any:
    """Called by mkdocs when it has read mkdocs.yml: pages that the navigation there does not have come at its end, under "More"."""
    listed = set(re.findall(r"[\w-]+\.md", str(config.nav)))
    rest = sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name not in listed)
    if rest:
        config.nav.append({"More": rest})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs when it has read docs/: adds the pages that come from elsewhere."""
    wanted: set[str] = set()
    for name, here in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        wanted |= linked(text, "")
        files.append(File.generated(config, here, content=rewrite(text, "", here)))
    for page in (ROOT / "docs").glob("*.md"):
        wanted |= linked(page.read_text(encoding="utf-8"), "docs")
    for path in sorted(wanted):
        if Path(path).suffix in IMAGES:
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
        else:
            generated = File.generated(config, place(path), content=shown(path))
            generated.inclusion = generated.inclusion.NOT_IN_NAV
            files.append(generated)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page: links out of docs/ are led to the pages that show their files."""
    if page.file.generated_by:
        return markdown
    return rewrite(markdown, "docs", page.file.src_uri)
