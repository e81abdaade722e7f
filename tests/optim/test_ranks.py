"""Two processes on one machine, through `torchrun` and gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(mode: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(Path(__file__).with_name("ranks.py")), mode),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 agrees" in done.stdout
    assert "rank 1 agrees" in done.stdout
