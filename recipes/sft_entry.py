"""How a recipe ends. What its user can mend is said in one sentence, and so is a stop by Ctrl-C; everything else keeps its traceback."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from flashoptim_hf.errors import ConfigurationError, FlashOptimError
from flashoptim_hf.trainer import complete

WAIT = 10.0  # seconds


def run(main: Callable[[], None]) -> None:
    """Run a recipe's `main`.

    Raises:
        SystemExit: 1 after an error of this package, 130 after Ctrl-C, both without a traceback.
    """
    # the name that every version of transformers knows; the newest warns about it
    warnings.filterwarnings("ignore", r".*gradient_checkpointing` is deprecated", FutureWarning)
    try:
        main()
    except FlashOptimError as error:
        _leave(error, f"error: {error}", 1)
    except KeyboardInterrupt as stop:
        _leave(stop, str(stop) or "stopped by Ctrl-C, outside of the training steps", 128 + signal.SIGINT)


def _leave(error: BaseException, sentence: str, status: int) -> NoReturn:
    sys.last_value = error  # as Python sets it with a traceback: the report names what ended the run
    sys.stdout.flush()
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank != "0" and isinstance(error, ConfigurationError):
        # A wrong option is wrong in each process, and the first one says it: the launcher ends the others then, and ends the first one
        # before it has said it if another is faster. Who is still there after the wait has a mistake of its own.
        time.sleep(WAIT)
    if rank == "0" or not isinstance(error, KeyboardInterrupt):
        print(f"\n{'' if rank == '0' else f'[local rank {rank}] '}{sentence}", file=sys.stderr, flush=True)
    raise SystemExit(status)


@contextmanager
def stoppable(step: Callable[[], int], output_dir: str | Path, option: str) -> Iterator[None]:
    """Training steps, after which Ctrl-C is told where they can be gone on from.

    Args:
        step: gives the last step that was finished.
        output_dir: of the checkpoints. The newest that is marked complete is named; its bytes are looked at when it is resumed from.
        option: what resumes.
    """
    try:
        yield
    except KeyboardInterrupt:
        last = next((folder for folder in complete.checkpoints(output_dir) if (folder / complete.MARK).is_file()), None)
        said = (
            f"{output_dir} has no complete checkpoint yet: the same command begins anew"
            if last is None
            else f"the last complete checkpoint is {last}: go on with the same command and {option}"
        )
        raise KeyboardInterrupt(f"stopped by Ctrl-C after step {step()}; {said}") from None
