"""States of other packages into sharded parameters: two processes on one machine, through `torchrun` and gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_states_of_others_go_into_sharded_parameters() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("convert_ranks.py")
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 agrees" in done.stdout
    assert "rank 1 agrees" in done.stdout
