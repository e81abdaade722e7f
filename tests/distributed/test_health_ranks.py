"""`HealthCallback` in two processes (gloo), DDP and FSDP2: every check of `health.py`, run once in forked processes, is a test here."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER_ALONE = "folder"


def checks() -> list[str]:
    """Names of the checks, from the source: functions that are given a folder and nothing else."""
    tree = ast.parse(Path(__file__).with_name("health.py").read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and [arg.arg for arg in node.args.args] == [FOLDER_ALONE]]
    return [node.name.replace("_", " ") for node in found if node.name != "main"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What became of the checks, by rank. A hang ends here: gloo gives up after two minutes."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.distributed.health", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), done.stderr[-3000:]
    found = [json.loads(file.read_text()) for file in files]
    if all(value == "ok" for rank in found for value in rank.values()):
        assert done.returncode == 0, done.stderr[-3000:]
    return found


@pytest.mark.parametrize("name", checks())
def test_check(name: str, outcome: list[dict[str, str]]) -> None:
    for rank, found in enumerate(outcome):
        assert found.get(name) == "ok", f"rank {rank}: {found.get(name)}"


def test_every_check_is_a_test(outcome: list[dict[str, str]]) -> None:
    assert set(outcome[0]) == set(outcome[1]) == set(checks())
    assert len(checks()) == 8
