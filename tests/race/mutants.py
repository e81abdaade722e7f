"""`python -m tests.race.mutants`: the pager with one thing wrong, again and again, and whether random schedules notice. For `make mutants`.

A mutant replaces a piece of source text in one function, which has to be there exactly once: code that changes has to change it here too.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flashoptim_hf.optim.layout import Layout
from flashoptim_hf.paging.bounce import Bounce
from flashoptim_hf.paging.engine import Engine
from flashoptim_hf.paging.resident import Residents
from flashoptim_hf.paging.slots import Mover
from flashoptim_hf.paging.staging import Staging
from tests.race.run import compare, race


@dataclass(frozen=True)
class Mutant:
    """One fault: in `owner.name`, `text` becomes `instead`."""

    what: str
    owner: type
    name: str
    text: str
    instead: str = "pass"


MUTANTS = [
    Mutant("a slot is reused before its page has left", Mover, "fetch", 'self.backend.wait("in", slot.free)'),
    Mutant("a page is fetched before its last write-back is home", Mover, "fetch", 'self.backend.wait("in", page.written)'),
    Mutant("a kernel does not wait for its copy in", Mover, "arrive", 'self.backend.wait("compute", slot.ready)'),
    Mutant("a copy out does not wait for its kernel", Mover, "write_back", 'self.backend.wait("out", self.backend.record("compute"))'),
    Mutant("a page sent back does not wait for its copy in", Mover, "write_back", 'self.backend.wait("out", self.backend.record("in"))'),
    Mutant("memory is used before its last owner is done", Mover, "slot", 'free=self.backend.record("compute")', "free=None"),
    Mutant("a write-back is skipped", Staging, "write_back", "self._mover.write_back(page, slot, arriving=arriving)"),
    Mutant("a dirty page is dropped when it is evicted", Residents, "leave", "if slot.dirty:", "if False:"),
    Mutant("saving skips pages that stay", Residents, "write_home", "if slot.dirty:", "if False:"),
    Mutant("what was written home is not noticed", Residents, "_check_home", "_version(page) != version", "False"),
    Mutant("the host reads home too early", Engine, "_wait_for_home", "self.backend.wait_host(event)"),
    Mutant("a kernel in place does not wait for a page on its way home", Engine, "_bring", 'self.backend.wait("compute", page.written)'),
    Mutant("pages are left where they are after a failure", Engine, "_recover", "self._staging.send_all_back()"),
    Mutant("an update is counted as clean", Residents, "begin", "slot.begun = slot.dirty = True", "slot.begun = True"),
    Mutant("a buffer between files and the device is used too early", Bounce, "_wait", "self._backend.wait_host", "(lambda _: None)"),
    Mutant("a page is read from its file before it is home", Bounce, "load", "self._land_page(page)"),
    Mutant("a parameter changes its format while its state is away", Layout, "ensure", "self.synchronize()"),
]


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The mutant is in force inside."""
    original: Any = inspect.getattr_static(mutant.owner, mutant.name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(mutant.text) == 1, f"{mutant.owner.__name__}.{mutant.name} has no {mutant.text!r} any more: say where it is now"
    scope: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + source.replace(mutant.text, mutant.instead), f"<{mutant.what}>", "exec")
    exec(code, original.__globals__, scope)
    setattr(mutant.owner, mutant.name, scope[mutant.name])
    try:
        yield
    finally:
        setattr(mutant.owner, mutant.name, original)


def caught(mutant: Mutant, folder: str, schedules: int = 400) -> tuple[int, str] | None:
    """How many schedules it took to notice the mutant, and how it showed; None where none did."""
    with applied(mutant), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(schedules):
            try:
                race(seed, folder)
                if seed % 4 == 3:
                    compare(seed, 2, folder)
            except Exception as error:
                return seed + 1, str(error).partition("\n")[0][:60] or type(error).__name__
    return None


def main() -> int:
    torch.set_num_threads(1)
    folder, missed = tempfile.mkdtemp(), 0
    try:
        for mutant in MUTANTS:
            found = caught(mutant, folder)
            missed += found is None
            print(f"{'MISSED' if found is None else f'schedule {found[0]:3}'}  {mutant.what}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} caught")
    return missed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
