"""`make docs-check`: every block of README and docs that is marked `run` or `slow`, as it stands, with the demo's model.

    python -m tests.docs.real [PAGE ...]

Each page gets a folder of its own in which recipes, configs and the demo's files lie as in the repository. Blocks run in order, with
`bash -euo pipefail` or a Python of their own. The first that fails ends its page.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .blocks import PAGES, ROOT, Block, read

SHARED = ("recipes", "configs", "constraints.txt", "benchmarks", "flashoptim_hf", "pyproject.toml", "Makefile")


def wanted(block: Block) -> bool:
    """Blocks that run by themselves. Python needs names of the reader's own, except where its page has made them in a file."""
    return block.kind in ("run", "slow") and (block.language != "python" or "runs/" in block.text)


def run(block: Block, folder: Path) -> int:
    """Run one block; its output goes to this process's. Returns the exit status."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    if block.language == "yaml":
        (folder / block.options["file"]).write_text(block.text, encoding="utf-8")
        return 0
    words = ["python", "-c", block.text] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", block.text]
    return subprocess.run(words, cwd=folder, env=environ, stdin=subprocess.DEVNULL).returncode


def check(path: Path) -> list[str]:
    """The blocks of one page that failed."""
    blocks = [block for block in read(path).blocks if wanted(block)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shared in SHARED:
            (folder / shared).symlink_to(ROOT / shared)
        (folder / ".demo").mkdir()
        for made in (ROOT / ".demo").glob("*"):
            if made.name != "run":
                (folder / ".demo" / made.name).symlink_to(made)
        for block in blocks:
            print(f"==> {block.name} {block.language}, {block.kind}", flush=True)
            start = time.monotonic()
            status = run(block, folder)
            print(f"==> {block.name}: {'ok' if status == 0 else f'FAILED ({status})'}, {time.monotonic() - start:.0f} s", flush=True)
            if status:
                return [block.name]
    return []


def main(names: list[str]) -> int:
    pages = [path for path in PAGES if not names or path.name in names or str(path.relative_to(ROOT)) in names]
    failed = [name for path in pages for name in check(path)]
    print(f"==> {len(pages)} pages, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
