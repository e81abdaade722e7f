"""SIGKILL at any moment of a run with state in files and checkpoints: what the next one makes of it.

The run is a plain loop that saves every other step as the Trainer does, weights, optimizer and its own state, and seals the checkpoint.
It resumes from the last complete checkpoint, or says that there is none.

`python -m tests.race.kills FOLDER KILLS` starts, kills and resumes it; a process of its own with one thread, since it forks.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.utils import logging

from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.trainer import complete

STEPS, EVERY, KEPT = 40, 2, 2


def make() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((64, 64), (300,), (129, 7))]


def gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def digest(params: list[nn.Parameter], state: dict[int, dict[str, Tensor]]) -> str:
    """The bits of weights and state."""
    tensors = [*(param.detach() for param in params), *(value for values in state.values() for _, value in sorted(values.items()))]
    return sha256(b"".join(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)).hexdigest()


def save(folder: Path, step: int, params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """A checkpoint as the Trainer leaves it: the mark comes last, and older ones go after that."""
    place = folder / f"checkpoint-{step}"
    complete.unseal(place)
    stage = place / complete.STAGE
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    torch.save([param.detach() for param in params], place / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), stage / "optimizer.pt")
    torch.save({}, stage / "scheduler.pt")
    complete.move_into_place(stage, place)
    torch.save(torch.get_rng_state(), place / "rng_state.pth")
    (place / complete.TRAINER_STATE).write_text(json.dumps({"global_step": step}))
    complete.seal(place, step, step)
    for old in complete.checkpoints(folder)[KEPT:]:
        shutil.rmtree(old)


def train(folder: Path, say: Callable[[str], None]) -> None:
    """Resume, and go on to the end; each line that is said is true by then."""
    params = make()
    optimizer = FlashAdamW(params, paged=True, page_bytes=4096, simulate=1, device_budget_bytes=0.3, offload_dir=str(folder / "scratch"))
    found, first = complete.last_complete_checkpoint(folder), 0
    if found is None:
        say("there is no complete checkpoint: starting at step 0")
    else:
        first = int(found.rpartition("-")[2])
        for param, value in zip(params, torch.load(Path(found, "pytorch_model.bin"), weights_only=True), strict=True):
            param.data.copy_(value)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.load_state_dict(torch.load(Path(found, "optimizer.pt"), weights_only=True))
        for _ in caught:
            say("scratch found and deleted")
        say(f"resumed from {Path(found).name} {digest(params, optimizer.state_dict()['state'])}")
    for step in range(first + 1, STEPS + 1):
        gradients(params, step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        for _ in caught:
            say("scratch found and deleted")
        if step % EVERY == 0:
            save(folder, step, params, optimizer)
            say(f"sealed {step}")
    say(f"finished {digest(params, optimizer.state_dict()['state'])}")


# ---------------------------------------------------------------------- who kills


def reference() -> dict[int, str]:
    """Digest after each step that is saved, of a run in plain memory that nobody kills."""
    params, digests = make(), {}
    optimizer = FlashAdamW(params)
    for step in range(1, STEPS + 1):
        gradients(params, step)
        optimizer.step()
        if step % EVERY == 0:
            digests[step] = digest(params, optimizer.state_dict()["state"])
    return digests


class Killer:
    """Kills a run again and again and resumes it each time; when it has come to its end, another one begins.

    Attributes:
        seen: what the restarts did, counted.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.rng, self.digests = folder, random.Random(seed), reference()
        self.seen: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """A new run in a folder of its own, of which no checkpoint is known to be sealed."""
        self.place, self.sealed = self.folder / f"run-{self.seen['finished']}", 0
        self.place.mkdir(parents=True)

    def kill(self) -> None:
        """Start, kill, and judge what was said.

        Raises:
            AssertionError: it resumed from something else than the last complete checkpoint, or with other bits, or did not say so.
        """
        lines = run_and_kill(self.place, self.rng.random() ** 2 * 0.6, after_a_word=self.rng.random() < 0.8)
        self.seen["scratch"] += lines.count("scratch found and deleted")
        lines = [line for line in lines if not line.startswith("scratch")]
        assert not any("Traceback" in line for line in lines), lines
        if not lines:
            self.seen["wordless"] += 1
            return
        if lines[0] == "there is no complete checkpoint: starting at step 0":
            assert not self.sealed, f"{lines[0]}, although step {self.sealed} was sealed"
            self.seen["afresh"] += 1
        else:
            name, bits = lines[0].removeprefix("resumed from ").split()
            step = int(name.removeprefix("checkpoint-"))
            # one that was sealed and could not be told of any more is right too
            assert step in (self.sealed, self.sealed + EVERY), f"{lines[0]} after step {self.sealed} was sealed"
            assert bits == self.digests[step], f"{lines[0]} has other bits than step {step}"
            self.seen["resumed"] += 1
            self.sealed = step
        for line in lines[1:]:
            word, rest = line.split()
            if word == "sealed":
                self.sealed = int(rest)
            else:
                assert (word, rest) == ("finished", self.digests[STEPS]), "the end is not that of a run that nobody killed"
                self.seen["finished"] += 1
                self.begin()

    def __str__(self) -> str:
        seen = self.seen
        return (
            f"{seen['resumed']} restarts resumed from the last complete checkpoint, {seen['afresh']} said that there is none, "
            f"{seen['wordless']} were killed before they could say a word; {seen['scratch']} found scratch and deleted it; "
            f"{seen['finished']} runs came to their end, with the bits of a run that nobody killed"
        )


def run_and_kill(place: Path, seconds: float, after_a_word: bool) -> list[str]:
    """One process, killed so many seconds after its first word, or after its begin. Returns the lines that it said."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            train(place, lambda line: os.write(writer, f"{line}\n".encode()) and None)
        except BaseException:
            os.write(writer, f"Traceback {traceback.format_exc()!r}\n".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as stream:
        if after_a_word:
            select.select([stream], [], [], 100)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return [line.strip() for line in stream if line.endswith("\n")]


def main(folder: str, kills: str) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # of checkpoints that are passed over
    killer = Killer(Path(folder))
    for _ in range(int(kills)):
        killer.kill()
    print(f"{kills} kills: {killer}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
