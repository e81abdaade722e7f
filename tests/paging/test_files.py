"""State in files: the bits of memory, a folder that goes, a disk that is full, and what killed runs leave."""

import contextlib
import errno
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import warnings

import pytest
import torch

from flashoptim_hf.errors import OffloadError
from flashoptim_hf.paging import files as module
from flashoptim_hf.paging.bounce import BUFFERS, Bounce
from flashoptim_hf.paging.files import KEPT, NOTE, PREFIX, OffloadFiles
from flashoptim_hf.paging.residency import FixedSet
from flashoptim_hf.paging.simulated import SimulatedBackend
from flashoptim_hf.paging.store import Page
from flashoptim_hf.paging.streams import HostBackend
from tests.paging.world import World

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="file locks and reserved blocks as on Linux")


@pytest.fixture(scope="module")
def expected():
    return World(HostBackend()).train()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("budget", [0, 0.4, 1.0])
def test_files_give_the_bits_of_memory(tmp_path, budget, expected):
    files = OffloadFiles(tmp_path)
    assert torch.equal(World(HostBackend(), files=files).train(), expected)
    for seed in range(15):
        world = World(SimulatedBackend(seed), residency=FixedSet(budget), files=files)
        assert world.store.bytes_of("file") == world.store.allocated_bytes
        assert torch.equal(world.train(), expected), f"seed {seed}"


@pytest.mark.parametrize("careless", ["_wait", "_land_page", "land"])
def test_a_bounce_buffer_is_waited_for(tmp_path, monkeypatch, careless, expected):
    """Each wait of the host around the buffers is needed: without it some order of copies shows another result."""
    files = OffloadFiles(tmp_path)
    monkeypatch.setattr(Bounce, careless, lambda *_: None)
    assert not all(torch.equal(World(SimulatedBackend(seed), files=files).train(), expected) for seed in range(40))


@pytest.mark.parametrize("where", ["copy", "record", "wait", "host_copy", "launch"])
def test_after_a_failure_home_is_whole(tmp_path, where):
    """Every page was updated once or not at all, and what was in a bounce buffer comes home."""
    files, rng = OffloadFiles(tmp_path), random.Random(where)
    for seed in range(30):
        backend, ran = SimulatedBackend(seed), []
        world = World(backend, files=files, residency=FixedSet(rng.choice([0, 0.5])))

        def update(page, planes, world=world, ran=ran):
            kernel = World.update(page, planes)
            return lambda: (ran.append(world.store.pages.index(page)), kernel())

        plain, calls, at = getattr(backend, where), [], rng.randrange(1, 40)

        def failing(*args, plain=plain, calls=calls, at=at, **options):
            calls.append(None)
            if len(calls) == at:
                raise ZeroDivisionError
            return plain(*args, **options)

        setattr(backend, where, failing)
        for _ in range(4):
            with contextlib.suppress(ZeroDivisionError):
                world.engine.run(world.store.pages, update)
        setattr(backend, where, plain)
        world.engine.synchronize()
        reference = World(HostBackend())
        for number in ran:
            reference.engine.run([reference.store.pages[number]], reference.update)
        assert torch.equal(world.content(), reference.content()), f"seed {seed}"


def test_bounce_buffers_do_not_grow_with_the_model(tmp_path):
    sizes = set()
    for count in (4, 40):
        world = World(SimulatedBackend(0), [128] * count, files=OffloadFiles(tmp_path))
        world.engine.run(world.store.pages, world.update)
        sizes.add(world.engine.bounce_bytes)
    assert sizes == {2 * BUFFERS * world.store.pages[0].slot_bytes}
    world.engine.trim()
    assert world.engine.bounce_bytes == 0


def test_freed_pages_take_their_files_with_them(tmp_path):
    """A buffer that a page has passed through does not keep it."""
    files = OffloadFiles(tmp_path)
    for seed in range(4):
        world = World(SimulatedBackend(seed), [128] * 8, files=files, residency=FixedSet(0.5))
        world.engine.run(world.store.pages, world.update)
        for block in world.blocks:
            world.store.free(block)
        world.engine.offer([])
        world.engine.synchronize()
        files._behind.wait()
        gc.collect()
        assert list(tmp_path.rglob("*.bin")) == []
        assert world.engine.resident_bytes == 0


def test_pages_are_read_ahead_and_written_behind(tmp_path, monkeypatch):
    """On the host and on a device: a page is announced before it is used, and passed to the disk once it is home."""
    for backend in (HostBackend(), SimulatedBackend(0)):
        world = World(backend, [128] * 8, files=OffloadFiles(tmp_path))
        seen = []
        monkeypatch.setattr(Page, "read_ahead", lambda page, world=world, seen=seen: seen.append(("ahead", world.store.pages.index(page))))
        monkeypatch.setattr(Page, "write_behind", lambda page, world=world, seen=seen: seen.append(("home", world.store.pages.index(page))))

        def update(page, planes, world=world, seen=seen):
            seen.append(("use", world.store.pages.index(page)))
            return World.update(page, planes)

        world.engine.run(world.store.pages, update)
        world.engine.synchronize()
        for kind in ("ahead", "use", "home"):
            assert [number for what, number in seen if what == kind] == list(range(8))
        assert all(seen.index(("ahead", i)) < seen.index(("use", i)) < seen.index(("home", i)) for i in range(8))
        assert seen.index(("ahead", 5)) < seen.index(("use", 4))


@linux
def test_the_system_is_told_which_bytes(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("flashoptim_hf.paging.write_behind._sync_function", lambda: lambda *part: told.append(part))
    files = OffloadFiles(tmp_path)
    buffer = files.allocate(100_000)
    files.read_ahead(buffer[5000:70_000])
    files.write_behind(buffer.view(torch.int16)[10:30])
    files.write_behind(torch.zeros(4))  # somebody else's
    files._behind.wait()
    assert [part[1:] for part in told] == [(20, 40, 2)]


def test_other_memory_is_left_alone(tmp_path):
    files = OffloadFiles(tmp_path)
    files.read_ahead(torch.zeros(4))
    files.write_behind(torch.zeros(0))
    assert files.allocate(0).shape == (0,)
    assert names(tmp_path) == []


# ---------------------------------------------------------------------- files


def test_files_are_as_large_as_asked_and_go_with_the_memory(tmp_path):
    files = OffloadFiles(tmp_path / "new")
    buffers = [files.allocate(nbytes) for nbytes in (1, 5000, 123_457)]
    assert not any(buffer.any() for buffer in buffers)
    found = sorted(files.folder.glob("*.bin"))
    assert [path.stat().st_size for path in found] == [1, 5000, 123_457]
    buffers[1].fill_(7)
    assert found[1].read_bytes() == b"\7" * 5000
    buffers[0] = buffers[2] = None
    gc.collect()
    assert sorted(files.folder.glob("*.bin")) == found[1:2]
    folder = files.folder
    assert "no checkpoint" in (folder / NOTE).read_text()
    del files
    gc.collect()
    assert not folder.exists()
    assert int(buffers[1].sum()) == 35_000, "memory outlives its file"


def test_files_are_kept_when_asked(tmp_path):
    files = OffloadFiles(tmp_path, keep=True)
    files.allocate(10).fill_(3)
    del files
    gc.collect()
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(KEPT)
    assert (folder / "000000.bin").read_bytes() == b"\3" * 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OffloadFiles(tmp_path).allocate(1)
    assert folder.is_dir()


def test_too_little_room_is_refused_in_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 0, 4096))
    files = OffloadFiles(tmp_path)
    files.check(4096)
    files.check(1024, ranks=4)
    with pytest.raises(OffloadError, match=r"needs 4\.001 KiB of disk.*4 KiB are available.*Nothing was allocated"):
        files.check(4097)
    with pytest.raises(OffloadError, match=r"needs 8 KiB.*4 processes of 2 KiB") as caught:
        files.check(2048, ranks=4)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path)


@linux
@pytest.mark.parametrize(
    ("number", "text"), [(errno.ENOSPC, "no space left.*are free.*Make room"), (errno.EIO, "input/output error.*local")]
)
def test_a_disk_that_refuses_leaves_the_store_as_it_was(tmp_path, monkeypatch, number, text):
    world = World(HostBackend(), files=OffloadFiles(tmp_path))
    before, calls, plain = world.content(), [], os.posix_fallocate

    def refuse(*args):
        calls.append(None)
        if len(calls) == 3:
            raise OSError(number, os.strerror(number))
        plain(*args)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OffloadError, match=text) as caught:
        world.grow([1000])
    assert caught.value.errno == number
    assert torch.equal(world.content(), before)
    gc.collect()
    assert len(list(tmp_path.rglob("*.bin"))) == 4
    world.grow([1000])
    assert len(world.blocks) == 7


@linux
def test_a_file_may_not_be_larger_than_the_limit(tmp_path):
    """A real refusal by the system: `ulimit -f`."""
    code = f"""
import resource
from flashoptim_hf.errors import OffloadError
from flashoptim_hf.paging.files import OffloadFiles
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
files = OffloadFiles({str(tmp_path)!r})
files.allocate(100_000)
try:
    files.allocate(100_001)
except OffloadError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "97.66 KiB of optimizer state cannot be put there (file too large" in done.stdout
    assert names(tmp_path) == []


@linux
def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(tmp_path):
    """A file with holes would be mapped without complaint, and the first write behind the end of the disk would kill the process."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        files = OffloadFiles(tmp_path)
        buffers = [files.allocate(700_000)]
        with pytest.raises(OffloadError, match=r"683\.6 KiB.*no space left on device, 3\d\d.* KiB are free"):
            buffers.append(files.allocate(700_000))
        buffers[0].fill_(1)
        del files, buffers
        gc.collect()
        assert names(tmp_path) == []
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OffloadError, match=r"no such file.*not mounted.*'.*missing/scratch'"):
        OffloadFiles(tmp_path / "missing" / "scratch").check(1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OffloadError, match=r"file exists.*folder on a local disk"):
        OffloadFiles(tmp_path / "file").check(1)


def test_a_folder_that_was_removed_is_named_and_memory_goes_on(tmp_path):
    files = OffloadFiles(tmp_path / "scratch")
    world = World(HostBackend(), files=files)
    shutil.rmtree(tmp_path / "scratch")
    with pytest.raises(OffloadError, match="removed, or a disk that is not mounted") as caught:
        world.grow([100])
    assert caught.value.errno == errno.ENOENT
    assert torch.equal(world.train(), World(HostBackend()).train())


# ---------------------------------------------------------------------- the end


RUN = """
import sys, time
from flashoptim_hf.paging.files import OffloadFiles
files = OffloadFiles(sys.argv[1])
buffer = files.allocate(5000)
buffer.fill_(9)
print("ready", flush=True)
time.sleep(float(sys.argv[2]))
"""


def started(tmp_path, seconds):
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path), str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@linux
def test_what_a_killed_run_leaves_is_named_and_deleted_unread(tmp_path):
    started(tmp_path, 0).wait()
    assert names(tmp_path) == [], "an orderly end"
    living, killed = started(tmp_path, 100), started(tmp_path, 100)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    (left,) = tmp_path.glob(f"{PREFIX}*-{killed.pid}-*")
    (used,) = tmp_path.glob(f"{PREFIX}*-{living.pid}-*")
    try:
        with pytest.warns(RuntimeWarning, match=rf"{left.name} was left.*killed \(4\.883 KiB\).*only checkpoints are state") as caught:
            buffer = OffloadFiles(tmp_path).allocate(5000)
        assert len(caught) == 1
        assert not buffer.any(), "nothing of the old state comes back"
        assert not left.exists()
        assert used.is_dir()
    finally:
        living.kill()
        living.wait()


def test_another_hosts_files_are_left_alone(tmp_path):
    (tmp_path / f"{PREFIX}elsewhere-1-00").mkdir()
    (tmp_path / f"{PREFIX}elsewhere-1-00" / NOTE).write_text("")
    module.delete_leftovers(tmp_path)
    assert len(names(tmp_path)) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_takes_nothing_away(tmp_path):
    """Data loaders fork: what they let go of is their parent's."""
    files = OffloadFiles(tmp_path)
    buffer = files.allocate(10)
    child = os.fork()
    if not child:
        try:
            del buffer, files
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(files.folder.glob("*.bin"))) == 1
