"""When is a checkpoint complete? A mark, written last, names every file with its size and checksum; without one, files are looked into.

The Trainer's checkpoints get their mark by themselves. A loop of one's own calls `seal` after `accelerator.save_state`.

    flashoptim_complete.json
        format            1
        step              the Trainer's step
        optimizer_step    the largest step count in the optimizer's state: smaller than `step` where steps were skipped; null if unknown
        files             path in the folder -> {"bytes", "crc32"}
        crc32             of the four entries above, as compact JSON with sorted keys

A CRC-32 of all bytes costs less than writing them (2.4 GiB/s on one core of a server) and finds each flipped bit. It protects against
accidents, not against forgery.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

MARK = "flashoptim_complete.json"
STAGE = ".flashoptim_partial"
"""Folder in a checkpoint where files lie until they are whole."""

JIT_NOTE = "checkpoint-is-incomplete.txt"
"""What transformers leaves in a checkpoint while it saves on SIGTERM (`enable_jit_checkpoint`), and deletes after the mark is written."""

FORMAT = 1
TRAINER_STATE = "trainer_state.json"

_BLOCK = 1 << 24
_FOLDER = re.compile(r"checkpoint-(\d+)")


# ---------------------------------------------------------------------- the mark


def seal(folder: str | Path, step: int, optimizer_step: int | None = None) -> None:
    """Mark a checkpoint as complete: all its files reach the disk, and the mark, which comes last, appears whole or not at all.

    Args:
        folder: the checkpoint, with every file in place.
        step: the Trainer's step.
        optimizer_step: the largest step count in the optimizer's state, None if unknown.

    Raises:
        OSError: a file cannot be read or written. There is no mark then.
    """
    folder = Path(folder)
    unseal(folder)
    files = {name: {"bytes": (folder / name).stat().st_size, "crc32": _crc32(folder / name, flush=True)} for name in _files(folder)}
    body = {"format": FORMAT, "step": step, "optimizer_step": optimizer_step, "files": files}
    part = folder / f"{MARK}.partial"
    with part.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps({**body, "crc32": _body_crc32(body)}, indent=1))
        _flush(stream.fileno())
    os.replace(part, folder / MARK)
    for path in (folder, folder.parent):
        _flush_folder(path)


def unseal(folder: str | Path) -> None:
    """Take the mark away, before any file of the checkpoint is changed."""
    Path(folder, MARK).unlink(missing_ok=True)


def read_mark(folder: str | Path) -> dict[str, Any] | None:
    """The mark of a checkpoint; None where there is none.

    Raises:
        CheckpointError: the mark is damaged, or a newer version wrote it.
    """
    path = Path(folder, MARK)
    try:
        mark = json.loads(path.read_text(encoding="utf-8"))
        body = {name: mark[name] for name in ("format", "step", "optimizer_step", "files")}
        whole = mark["crc32"] == _body_crc32(body)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path} is corrupt: it does not read as it was written, so nothing vouches for the files beside it.")
    if body["format"] > FORMAT:
        raise CheckpointError(f"{path} has format {body['format']}, and this version reads {FORMAT}. Install a newer flashoptim-hf.")
    return body


def _files(folder: Path) -> list[str]:
    """Every file below `folder` that belongs to the checkpoint, by its path in it with "/" between."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(path.as_posix() for path in paths if path.parts[0] != STAGE and path.name not in (MARK, f"{MARK}.partial", JIT_NOTE))


def _crc32(path: Path, *, flush: bool = False) -> int:
    """CRC-32 of a file's bytes. `flush`: see to it that they reach the disk first (a full disk may say so only then)."""
    value = 0
    with path.open("rb") as stream:
        if flush:
            _flush(stream.fileno())
        while block := stream.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def _body_crc32(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _flush(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # file systems and modes of opening that have no such thing
            raise


def _flush_folder(folder: Path) -> None:
    """A new name in a folder is safe only when the folder itself is on the disk. Systems that cannot open folders have no such call."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        _flush(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------- is it whole?


def defect(folder: str | Path) -> str | None:
    """What keeps a run from being resumed from a checkpoint, as a sentence that names the file; None where nothing does.

    A checkpoint with a mark must hold every file that the mark names, byte for byte. One without must have all the parts that the Trainer
    would pass over in silence, and each of them must be whole as far as its format tells.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return f"{folder} is not there, or is no folder."
    try:
        mark = read_mark(folder)
    except CheckpointError as error:
        return str(error)
    faults = _missing_parts(folder) if mark is None else _differences(folder, mark)
    return next(faults, None)


def _differences(folder: Path, mark: dict[str, Any]) -> Iterator[str]:
    for name, saved in mark["files"].items():
        path = folder / name
        if not path.is_file():
            yield f"{path} is missing."
        elif path.stat().st_size != saved["bytes"]:
            yield f"{path} is corrupt: it has {path.stat().st_size} bytes, and {saved['bytes']} were saved."
        elif _crc32(path) != saved["crc32"]:
            yield f"{path} is corrupt: it has the right size but other contents than were saved at step {mark['step']}."
    yield from _missing_parts(folder, look_inside=False)


def _missing_parts(folder: Path, look_inside: bool = True) -> Iterator[str]:
    names = _files(folder)
    accelerates = TRAINER_STATE not in names and any(name.startswith("random_states_") for name in names)
    if not accelerates and TRAINER_STATE not in names:
        yield f"{folder / TRAINER_STATE} is missing: the checkpoint was not saved to the end, or this is no checkpoint."
    if not any(name.split("/")[0].startswith("optimizer") for name in names):
        name = "optimizer.bin" if accelerates else "optimizer.pt"
        yield (
            f"{folder / name} is missing: there are weights without the state of their optimizer (as save_only_model=True leaves them), "
            "and training would go on with an empty one."
        )
    # `Accelerator.save_state` writes a scheduler only where there is one, and random states last
    for name, others in () if accelerates else (("scheduler.pt", "scheduler.pt"), ("rng_state.pth", "rng_state")):
        if not any(other.startswith(others) for other in names):
            yield f"{folder / name} is missing: the checkpoint was not saved to the end."
    for name in names if look_inside else ():
        fault = _fault_inside(folder / name)
        if fault is not None:
            yield f"{folder / name} is corrupt: {fault}."


def _fault_inside(path: Path) -> str | None:
    """What a file's own format says of damage to it; None where it says nothing."""
    if not path.stat().st_size:
        return "it is empty"
    if path.suffix == ".safetensors":
        return _fault_in_safetensors(path)
    if path.name == TRAINER_STATE:
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            return f"it is not JSON ({error})"
    with path.open("rb") as stream:
        archive = stream.read(4) == b"PK\x03\x04"  # what torch.save writes
    return _fault_in_zip(path) if archive else None


def _fault_in_zip(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()  # torch.load does not look at the checksums
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        return f"it was cut off or damaged ({error})"
    return None if bad is None else f"the checksum of {bad} in it is wrong"


def _fault_in_safetensors(path: Path) -> str | None:
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            return f"its header should have {length} bytes, and the whole file has {size}"
        try:
            header = json.loads(stream.read(length))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return "its header is damaged"
    return None if 8 + length + end == size else f"it has {size} bytes, and its header says {8 + length + end}"


# ---------------------------------------------------------------------- which one to resume from


def checkpoints(output_dir: str | Path) -> list[Path]:
    """The folders `checkpoint-<step>` in `output_dir`, highest step first; none where there is no such folder."""
    found = [(int(match[1]), path) for path in Path(output_dir).glob("*") if (match := _FOLDER.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint that was saved to the end and is whole: its mark is there, and every file is as the mark says.

    Each newer one that is passed over is named in a warning with what is wrong with it. All bytes of the checkpoints looked at are read.

    Args:
        output_dir: the folder that holds `checkpoint-<step>` folders; it need not exist.

    Returns:
        the checkpoint's path, None where there is none.
    """
    from transformers.utils import logging

    for folder in checkpoints(output_dir):
        fault = defect(folder)
        if fault is None and not Path(folder, MARK).is_file():
            fault = f"{folder / MARK} is missing: it was not saved to the end, or by another optimizer."
        if fault is None:
            return str(folder)
        logging.get_logger(__name__).warning(f"{folder} is passed over: {fault}")
    return None


def require(folder: str | Path) -> None:
    """Refuse a checkpoint that a run cannot be resumed from.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    fault = defect(folder)
    if fault is None:
        return
    other = next((path for path in checkpoints(Path(folder).parent) if path != Path(folder) and Path(path, MARK).is_file()), None)
    raise CheckpointError(
        f"cannot resume from {folder}: {fault} "
        + ("Resume from another checkpoint" + (f" ({other} has a mark)" if other else ""))
        + ", or start a new run from weights that you load into the model. "
        f"If you changed files on purpose, delete {MARK}: they are then checked by their formats alone."
    )


def check_steps(folder: str | Path, steps: list[int], step: int, skips: bool) -> None:
    """Check that the optimizer's state, as loaded, belongs to the step that the Trainer is at.

    Args:
        folder: the checkpoint that was loaded.
        steps: the step counts in the optimizer's state; empty where it has no state.
        step: the Trainer's step.
        skips: whether steps may have been skipped (loss scaling), so that fewer are right too. A mark knows the number.

    Raises:
        CheckpointError: they are of two different steps.
    """
    mark = read_mark(folder) or {"optimizer_step": None}
    found, known = max(steps, default=None), mark["optimizer_step"]
    if known is not None:
        wrong = found != known or mark["step"] != step
    elif found is None:
        wrong = False
    else:
        wrong = found > step or (found < step and not skips)
    if wrong:
        raise CheckpointError(
            f"the optimizer is at step {found}, the weights and the Trainer are at step {step} ({folder}): they were not saved together."
        )


# ---------------------------------------------------------------------- writing without leaving halves behind


def move_into_place(stage: Path, folder: Path) -> None:
    """Give everything in `stage` its final name in `folder`, by renaming; then `stage` is gone."""
    for source in sorted(stage.iterdir()):
        target = folder / source.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        elif target.exists() and not target.is_file():
            # a link to a device or the like: what it stands for is meant, and cannot be renamed over
            with source.open("rb") as whole, target.open("wb") as device:
                shutil.copyfileobj(whole, device, _BLOCK)
            source.unlink()
            continue
        os.replace(source, target)
    stage.rmdir()


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Path in the folder -> (time of the last change in ns, bytes) of every file; empty where there is no folder."""
    return {name: ((info := (folder / name).stat()).st_mtime_ns, info.st_size) for name in _files(folder)} if folder.is_dir() else {}


def discard_since(folder: Path, before: dict[str, tuple[int, int]]) -> None:
    """Delete the files that are new or changed since `before`, and the folders that are empty without them."""
    shutil.rmtree(folder / STAGE, ignore_errors=True)
    for name, state in snapshot(folder).items():
        if before.get(name) != state:
            (folder / name).unlink(missing_ok=True)
    folders = (path for path in [folder, *folder.rglob("*")] if path.is_dir() and not path.is_symlink())
    for path in sorted(folders, reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
