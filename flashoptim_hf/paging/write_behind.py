"""A thread that asks the system to write changed parts of mapped files to the disk, so that the training thread never waits for it."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache

WAITING = 64
"""Parts that may wait for the thread. More are dropped: the system writes them by itself when it needs the memory."""

Part = tuple[mmap.mmap, int, int, int]
"""Mapping, file descriptor, first byte, bytes."""

WRITE = 2
"""`SYNC_FILE_RANGE_WRITE` in Linux: start to write what has changed, do not wait until it is written."""


class WriteBehind:
    """The thread is started with the first part. What it is told is a hint: nothing depends on it, and what it cannot do is left out."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Part | None] = queue.Queue(WAITING)
        self._pid = 0

    def add(self, mapping: mmap.mmap, descriptor: int, start: int, nbytes: int) -> None:
        """Bytes `start` to `start + nbytes` of the file were changed. Never waits. `mapping` is kept until the part is done."""
        sync = _sync_function()
        if sync is None:
            return
        if self._pid != os.getpid():  # threads do not come along into a forked child
            self._pid = os.getpid()
            threading.Thread(target=_work, args=(self._queue, sync), name="flashoptim-write-behind", daemon=True).start()
            weakref.finalize(self, _stop, self._queue)
        with suppress(queue.Full):
            self._queue.put_nowait((mapping, descriptor, start, nbytes))

    def wait(self) -> None:
        """Until all parts so far were passed on to the system; for tests."""
        self._queue.join()


def _work(parts: queue.Queue[Part | None], sync: Callable[[int, int, int, int], int]) -> None:
    while (part := parts.get()) is not None:
        sync(part[1], part[2], part[3], WRITE)
        del part  # the mapping may go
        parts.task_done()


def _stop(parts: queue.Queue[Part | None]) -> None:
    with suppress(queue.Full):
        parts.put_nowait(None)


@cache
def _sync_function() -> Callable[[int, int, int, int], int] | None:
    """(file descriptor, start, bytes, flags) -> 0; None where the system has no such call. ctypes lets other threads run meanwhile."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function
