"""How much host memory there is: what the machine, its control group and its limits allow, and a refusal before too much is taken.

A process that takes more than a container's limit is ended without a word, and page-locked memory cannot be swapped out, so this is
looked at before anything is allocated. All numbers are per host: every process of a distributed run on it takes its part.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..errors import HostMemoryError
from .plan import format_bytes

UNLIMITED = 2**60
"""Bytes: limits from here on mean that there is none; control groups of version 1 write it as a huge number."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one host.

    Attributes:
        available: what can be taken now without swapping.
        total: what there is for all processes of this job together.
        source: what sets the limit, for messages.
    """

    available: int
    total: int
    source: str


def host_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """What is there now: the machine's memory, or what the tightest control group leaves of it."""
    machine = psutil.virtual_memory()
    found = HostMemory(machine.available, machine.total, "RAM")
    for group in _memory_groups(proc, groups):
        limit, used = _limit_and_use(group)
        if limit is not None:
            available = max(0, limit - used)
            if limit < found.total or available < found.available:
                source = "the control group's (container's) memory limit"
                found = HostMemory(min(available, found.available), min(limit, found.total), source)
    return found


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Processes of this job on this host, as torchrun and accelerate launch tell them."""
    text = environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) > 0 else 1


def locked_limit() -> int | None:
    """Bytes that this process may lock in memory (`ulimit -l`); None: no limit, or none that is known."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or soft >= UNLIMITED else soft


def locked_text() -> str:
    """The limit on locked memory, for messages."""
    limit = locked_limit()
    return f"ulimit -l is {'unlimited' if limit is None else format_bytes(limit)}"


def refuse_if_short(needed: int, *, ranks: int, memory: HostMemory, together: bool) -> None:
    """Raise before memory is taken that is not there.

    Args:
        needed: bytes that this process is going to take.
        ranks: processes on this host that take about the same.
        memory: what there is.
        together: no process has taken its part yet, so what is available has to do for all of them. False: others may have theirs
            already, so all have to fit into the total, and this one into what is left.

    Raises:
        HostMemoryError: names what is needed and what is available per host, and the ways out.
    """
    whole = needed * ranks
    available = memory.available if together or ranks == 1 else memory.total
    if whole <= available and needed <= memory.available:
        return
    if whole <= available:
        whole, available, ranks = needed, memory.available, 1
    processes = f" ({ranks} processes of {format_bytes(needed)})" if ranks > 1 else ""
    raise HostMemoryError(
        f"optimizer state needs {format_bytes(whole)} of host memory on this host{processes}, and {format_bytes(available)} are available "
        f"(limited by {memory.source}; {format_bytes(memory.total)} in all). Nothing was allocated. Free host memory or raise the limit, "
        "train fewer parameters (for example LoRA adapters), use fewer processes per host, or shard the state over more hosts (FSDP2)."
    )


def _memory_groups(proc: Path, groups: Path) -> list[Path]:
    """Folders of the control groups that limit this process's memory, innermost first."""
    text = _read(proc / "self" / "cgroup") or ""
    found: list[Path] = []
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root = groups
        elif "memory" in controllers.split(","):
            root = groups / "memory"
        else:
            continue
        folder = root / path.lstrip("/")
        # inside a container the path may be the host's, and only the root is mounted
        while folder != root and root in folder.parents:
            found.append(folder)
            folder = folder.parent
        found.append(root)
    return found


def _limit_and_use(group: Path) -> tuple[int | None, int]:
    """(limit in bytes, or None; bytes in use that cannot be given back)."""
    limit = _number(group / "memory.max")
    used, statistics = _number(group / "memory.current"), "inactive_file"
    if limit is None:
        limit = _number(group / "memory.limit_in_bytes")
        used, statistics = _number(group / "memory.usage_in_bytes"), "total_inactive_file"
    if limit is None or limit >= UNLIMITED:
        return None, 0
    cached = 0
    for line in (_read(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == statistics and value.isdecimal():
            cached = int(value)  # files that were read: the kernel lets them go when memory is asked for
    return limit, max(0, (used or 0) - cached)


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
