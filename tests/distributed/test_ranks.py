"""Two ranks on one machine (gloo): every check of `ranks.py`, run once in forked processes, is a test here."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import resume

ROOT = Path(__file__).resolve().parents[2]


def checks() -> list[str]:
    """Names of the checks, from the source: importing them would bring the ranks' machinery into this process."""
    tree = ast.parse(Path(__file__).with_name("ranks.py").read_text(encoding="utf-8"))
    marked = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    whole_runs = [f"resume {mode} {case}" for mode in resume.MODES_OF_RANKS for case in resume.CASES]
    return [*whole_runs, *(name.replace("_", " ") for name in marked)]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.distributed.ranks", str(folder)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT, env=environ)
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), done.stderr[-3000:]
    found = [json.loads(file.read_text()) for file in files]
    assert done.returncode == 0, done.stderr[-3000:]
    return found


@pytest.mark.parametrize("name", checks())
def test_check(name: str, outcome: list[dict[str, str]]) -> None:
    for rank, found in enumerate(outcome):
        assert found.get(name) == "ok", f"rank {rank}: {found.get(name)}"


def test_every_check_is_a_test(outcome: list[dict[str, str]]) -> None:
    assert set(outcome[0]) == set(outcome[1]) == set(checks())
