"""The file of `bench convergence` when several processes fill it at the same time: each adds its runs to those that are there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..errors import UnsupportedError
from . import convergence_records
from .convergence_records import Record
from .report import Report

Records = dict[tuple[str, str, int], Record]


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other processes away from `path` while it is read and written anew; waits for the one that does so now.

    The lock is on a file of its own beside it, since `path` is replaced by each write. That file is there only while it is held.

    Raises:
        UnsupportedError: the system or the folder's file system has no locks.
    """
    lock = path.with_name(path.name + ".lock")
    held = _hold(lock)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        held.close()


def _hold(lock: Path) -> IO[str]:
    """The lock's file, open and locked."""
    while True:
        file = lock.open("a", encoding="utf-8")
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
            # Whoever held it before has deleted it, and a third one may have made it anew: only the file that has the name counts.
            if os.fstat(file.fileno()).st_ino == lock.stat().st_ino:
                return file
        except FileNotFoundError:
            pass
        except (ImportError, OSError) as error:
            file.close()
            raise UnsupportedError(
                f"--json {lock.with_suffix('')} cannot be locked ({error}), without which two commands on one file would overwrite each "
                "other's runs. Name a file on a local disk of a POSIX system, or leave --json out."
            ) from error
        file.close()


def add(path: Path, record: Record, settle: Callable[[Records], Report]) -> Records:
    """Put a record into `path` beside those that it holds by now; one of the same task, optimizer and seed gives way.

    Args:
        settle: refuses what does not go together, and makes the report of all.

    Returns:
        All that the file holds now.

    Raises:
        ConfigurationError: `path` has become something else meanwhile, or `settle` refuses.
        UnsupportedError: see `alone`.
    """
    with alone(path):
        records = convergence_records.read(path) | {record.key: record}
        convergence_records.write(path, records, settle(records))
    return records
