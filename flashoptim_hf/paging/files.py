"""Home memory mapped from files on a disk, for state that host RAM has no room for.

The files are scratch. They hold state in the middle of steps, belong to one process, and are never read by another one: only a checkpoint
is state. Their folder is removed at exit; what a killed process leaves is recognised by its lock, named in a warning, and deleted.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import secrets
import shutil
import socket
import warnings
import weakref
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..errors import OffloadError
from .plan import format_bytes
from .write_behind import WriteBehind

PREFIX = "flashoptim-offload-"
KEPT = "flashoptim-kept-"
"""What the folders are called: while a process uses them, and when they were kept on request."""
NOTE = "README.txt"
"""The file whose lock says that the process lives."""
TEXT = """Scratch of flashoptim-hf: optimizer state that did not fit into RAM, in the middle of steps.

This is no checkpoint, and nothing ever reads it again. It goes away when the process ends; if it is still here and the process is not,
the next run that uses this folder deletes it, or you may.
"""


class OffloadFiles:
    """Files in a folder of their own, mapped into memory.

    Nothing is made before the first `allocate` or `check`. The disk's blocks are reserved when a file is made: a mapped file that met a
    full disk only when it was written to would end the process without a word.

    Args:
        parent: where the folder is made. `parent` itself is made if it is missing, the folder that holds it is not.
        keep: leave the files when the process ends.

    Attributes:
        folder: where the files are, None before the first.
    """

    def __init__(self, parent: str | os.PathLike[str], *, keep: bool = False) -> None:
        self.parent = Path(os.path.expanduser(parent))
        self.keep = keep
        self.folder: Path | None = None
        self._behind = WriteBehind()
        self._mapped: dict[int, tuple[weakref.ref[mmap.mmap], int]] = {}
        self._numbers = itertools.count()

    # ------------------------------------------------------------------ memory

    def check(self, needed: int, *, ranks: int = 1) -> None:
        """Look whether the disk has room.

        Args:
            needed: bytes that this process is going to take.
            ranks: processes on this host that take about the same, none of which has taken it yet.

        Raises:
            OffloadError: the folder cannot be used, or there is no room; says what is needed and what is available.
        """
        self._open()
        free = shutil.disk_usage(self.parent).free
        if needed * ranks > free:
            processes = f" ({ranks} processes of {format_bytes(needed)})" if ranks > 1 else ""
            raise OffloadError(
                errno.ENOSPC,
                f"optimizer state needs {format_bytes(needed * ranks)} of disk in offload_dir{processes}, and {format_bytes(free)} are "
                "available there. Nothing was allocated. Make room, choose another offload_dir, or train fewer parameters",
                str(self.parent),
            )

    def allocate(self, nbytes: int) -> Tensor:
        """Zeros that are mapped from a new file, uint8 of shape (nbytes,). The file goes when nothing refers to the memory any more.

        Raises:
            OffloadError: the disk is full, or the folder is not there.
        """
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        path = self._open() / f"{next(self._numbers):06}.bin"
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(descriptor, nbytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, nbytes)
            mapping = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError) as error:
            if descriptor >= 0:
                os.close(descriptor)
                path.unlink(missing_ok=True)
            raise self._failure(error, nbytes) from error
        buffer = torch.frombuffer(mapping, dtype=torch.uint8)
        self._mapped[buffer.data_ptr()] = weakref.ref(mapping), descriptor
        # the tensor keeps the mapping, and this what belongs to it
        weakref.finalize(mapping, _let_go, self._mapped, buffer.data_ptr(), descriptor, None if self.keep else path, os.getpid())
        return buffer

    # ------------------------------------------------------------------ hints

    def read_ahead(self, view: Tensor) -> None:
        """A part of mapped memory is going to be used soon: the system may read it from the disk now. Does not wait."""
        found = self._find(view)
        if found is not None and hasattr(mmap, "MADV_WILLNEED"):
            mapping, _, start, nbytes = found
            begin = start // mmap.PAGESIZE * mmap.PAGESIZE
            mapping.madvise(mmap.MADV_WILLNEED, begin, start + nbytes - begin)

    def write_behind(self, view: Tensor) -> None:
        """A part of mapped memory was changed: it is written to the disk in the background, so that its RAM can be given away sooner."""
        found = self._find(view)
        if found is not None:
            self._behind.add(*found)

    def _find(self, view: Tensor) -> tuple[mmap.mmap, int, int, int] | None:
        """(mapping, file descriptor, first byte, bytes) of a view; None where it is not mapped by this object, or empty."""
        base = view.untyped_storage().data_ptr() if view.numel() else 0
        reference, descriptor = self._mapped.get(base, (None, -1))
        mapping = reference() if reference is not None else None
        return None if mapping is None else (mapping, descriptor, view.data_ptr() - base, view.numel() * view.itemsize)

    # ------------------------------------------------------------------ the folder

    def _open(self) -> Path:
        """The folder, made at the first call, after what killed processes have left there was deleted."""
        if self.folder is not None:
            return self.folder
        name = f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self.parent.mkdir(exist_ok=True)
            delete_leftovers(self.parent)
            # under its name it appears with its lock held
            new, folder = self.parent / f".{name}", self.parent / name
            new.mkdir()
            note = (new / NOTE).open("w", encoding="utf-8")
            note.write(TEXT)
            note.flush()
            _lock(note)
            new.rename(folder)
        except OSError as error:
            raise self._failure(error, 0) from error
        kept = self.parent / f"{KEPT}{name.removeprefix(PREFIX)}" if self.keep else None
        weakref.finalize(self, _close_folder, folder, note, kept, os.getpid())
        self.folder = folder
        return folder

    def _failure(self, error: Exception, nbytes: int) -> OffloadError:
        number = getattr(error, "errno", None) or errno.EIO
        what = f"{format_bytes(nbytes)} of optimizer state cannot be put there" if nbytes else "no files can be made there"
        reason = os.strerror(number).lower() if isinstance(error, OSError) else str(error)
        if number == errno.ENOENT:
            hint = "The folder, or the one that holds it, is not there (removed, or a disk that is not mounted)"
        elif number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            with contextlib.suppress(OSError):
                reason += f", {format_bytes(shutil.disk_usage(self.parent).free)} are free"
            hint = "Make room, or choose another offload_dir"
        else:
            hint = "Choose a folder on a local disk that this process may write to"
        return OffloadError(number, f"offload_dir: {what} ({reason}). {hint}", str(self.parent))


def delete_leftovers(parent: Path) -> None:
    """Delete what killed processes of this host have left in a folder, with one warning for each. What is in use stays."""
    for folder in sorted(parent.glob(f"{PREFIX}{socket.gethostname()}-*")):
        try:
            with (folder / NOTE).open("r+", encoding="utf-8") as note:
                if not _lock(note):
                    continue
                nbytes = sum(path.stat().st_size for path in folder.glob("*.bin"))
                shutil.rmtree(folder)
        except OSError:
            continue  # somebody else deletes it just now, or it is not ours to delete
        warnings.warn(
            f"{folder} was left by a run that was killed ({format_bytes(nbytes)}). It was scratch, state in the middle of a step, and was "
            "deleted unread: only checkpoints are state. To go on with that run, resume from its last complete checkpoint.",
            RuntimeWarning,
            stacklevel=4,
        )


def _lock(file: IO[Any]) -> bool:
    """Lock a file for this process; False where another one holds it, or the system has no such locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _let_go(mapped: dict[int, Any], address: int, descriptor: int, path: Path | None, pid: int) -> None:
    """Nothing refers to a mapping any more. A forked child leaves the file to its parent."""
    mapped.pop(address, None)
    os.close(descriptor)
    if path is not None and pid == os.getpid():
        path.unlink(missing_ok=True)


def _close_folder(folder: Path, note: IO[Any], kept: Path | None, pid: int) -> None:
    if pid == os.getpid():
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                folder.rename(kept)
    note.close()
