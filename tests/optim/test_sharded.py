"""State saved from some ranks and loaded on others, through `torch.distributed.checkpoint`: sharded, whole, and flattened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def torchrun(ranks: int, *args: str) -> str:
    script = str(Path(__file__).with_name("reshard.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), script, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


CASES = {
    (2, "sharded"): [(2, "sharded"), (4, "sharded"), (1, "sharded"), (1, "plain")],
    (1, "plain"): [(2, "sharded")],
    (4, "sharded"): [(2, "sharded")],
}


@pytest.mark.parametrize("saved", CASES, ids=[f"{ranks}-{kind}" for ranks, kind in CASES])
def test_reshard(saved: tuple[int, str], tmp_path: Path) -> None:
    """The same cut: every bit, also of what follows. Another cut: exact where groups lie as before, else within the codec's bound.

    The script asserts these; here, that exact is what is exact. Rows of 64, 16 or 8 elements in multiples of a group keep their groups.
    """
    torchrun(saved[0], "save", str(tmp_path), saved[1])
    for ranks, kind in CASES[saved]:
        output = torchrun(ranks, "load", str(tmp_path), kind)
        lines = [line.split() for line in output.splitlines() if line.startswith("RESULT")]
        # what is stored anew is said, and nothing else is
        assert ("groups begin elsewhere" in output) == any(line[-1] == "exact=False" for line in lines)
        assert {line[1] for line in lines} == {"dcp", "full", "flat"}
        for _, way, _, name, codes, octaves, exact in lines:
            print(f"{way:5}{saved[0]} {saved[1]} -> {ranks} {kind}: {name:10}{codes} {octaves} {exact}")
            if name in ("square", "lora_a", "lora_b", "lora_b16", "one_row") or ranks == saved[0]:
                assert exact == "exact=True", (way, name)
