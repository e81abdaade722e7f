"""What a host has: the machine, control groups of both versions, and the refusal in numbers per host."""

from types import SimpleNamespace

import psutil
import pytest

from flashoptim_hf.errors import HostMemoryError
from flashoptim_hf.paging import host_limits
from flashoptim_hf.paging.host_limits import HostMemory, host_memory, local_ranks, locked_limit, locked_text, refuse_if_short

GB = 2**30


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=50 * GB, total=64 * GB))


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return {"proc": root / "proc", "groups": root / "groups"}


V2 = "0::/job/step\n"
V1 = "5:cpu,cpuacct:/job\n4:memory:/job\n"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("files", "available", "total"),
    [
        ({}, 50, 64),
        ({"proc/self/cgroup": V2, "groups/job/step/memory.max": "max", "groups/job/step/memory.current": 5 * GB}, 50, 64),
        ({"proc/self/cgroup": V2, "groups/job/step/memory.max": 20 * GB, "groups/job/step/memory.current": 5 * GB}, 15, 20),
        # what is cached can be given back
        (
            {
                "proc/self/cgroup": V2,
                "groups/job/step/memory.max": 20 * GB,
                "groups/job/step/memory.current": 15 * GB,
                "groups/job/step/memory.stat": f"anon 1\ninactive_file {12 * GB}\nactive_file 7\n",
            },
            17,
            20,
        ),
        # the tightest of nested groups counts
        (
            {
                "proc/self/cgroup": V2,
                "groups/job/step/memory.max": 30 * GB,
                "groups/job/step/memory.current": 1 * GB,
                "groups/job/memory.max": 10 * GB,
                "groups/job/memory.current": 2 * GB,
            },
            8,
            10,
        ),
        # inside a container only the root is there
        ({"proc/self/cgroup": V2, "groups/memory.max": 12 * GB, "groups/memory.current": 2 * GB}, 10, 12),
        (
            {"proc/self/cgroup": V1, "groups/memory/job/memory.limit_in_bytes": 8 * GB, "groups/memory/job/memory.usage_in_bytes": 3 * GB},
            5,
            8,
        ),
        ({"proc/self/cgroup": V1, "groups/memory/job/memory.limit_in_bytes": 9223372036854771712}, 50, 64),
        # a limit above what the machine has changes nothing
        ({"proc/self/cgroup": V2, "groups/job/memory.max": 900 * GB, "groups/job/memory.current": 0}, 50, 64),
        # over its limit: nothing is left, not less than nothing
        ({"proc/self/cgroup": V2, "groups/job/memory.max": 4 * GB, "groups/job/memory.current": 5 * GB}, 0, 4),
    ],
)
def test_the_tightest_limit_counts(tmp_path, files, available, total):
    found = host_memory(**tree(tmp_path, files))
    assert (found.available, found.total) == (available * GB, total * GB)
    assert ("container" in found.source) == (total != 64)


def test_this_machine_has_some():
    found = host_memory()
    assert 0 < found.available <= found.total <= psutil.virtual_memory().total


@pytest.mark.parametrize(("environ", "ranks"), [({}, 1), ({"LOCAL_WORLD_SIZE": "8"}, 8), ({"LOCAL_WORLD_SIZE": "x"}, 1)])
def test_local_ranks_are_what_the_launcher_says(environ, ranks):
    assert local_ranks(environ) == ranks


def test_the_limit_on_locked_memory_is_told(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 * 1024, 64 * 1024))
    assert locked_limit() == 65536
    assert locked_text() == "ulimit -l is 64 KiB"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert locked_limit() is None
    assert locked_text() == "ulimit -l is unlimited"
    monkeypatch.setattr(host_limits.sys, "platform", "win32")
    assert locked_limit() is None


@pytest.mark.parametrize(
    ("needed", "ranks", "together", "message"),
    [
        (10, 1, True, None),
        (11, 1, True, "needs 11 GiB of host memory on this host, and 10 GiB are available"),
        (11, 1, False, "needs 11 GiB of host memory on this host, and 10 GiB are available"),
        (5, 2, True, None),
        (5, 3, True, r"needs 15 GiB of host memory on this host \(3 processes of 5 GiB\), and 10 GiB are available"),
        # the others may have theirs already
        (5, 3, False, None),
        (5, 7, False, r"needs 35 GiB of host memory on this host \(7 processes of 5 GiB\), and 32 GiB are available"),
        (11, 2, False, "needs 11 GiB of host memory on this host, and 10 GiB are available"),
    ],
)
def test_what_does_not_fit_is_refused_in_numbers(needed, ranks, together, message):
    memory = HostMemory(available=10 * GB, total=32 * GB, source="RAM")
    if message is None:
        refuse_if_short(needed * GB, ranks=ranks, memory=memory, together=together)
    else:
        with pytest.raises(HostMemoryError, match=rf"{message}.*limited by RAM; 32 GiB in all.*FSDP2"):
            refuse_if_short(needed * GB, ranks=ranks, memory=memory, together=together)
