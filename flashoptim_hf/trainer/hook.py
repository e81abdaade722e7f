"""Run an action right after a module has been imported, whoever imports it and whenever.

transformers' argument and trainer modules take seconds to import and bring Triton along, so this package must not import them only to
be known there. Where such a module is loaded already, the action runs at once; where it is not, a finder in `sys.meta_path` waits for it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], object]


class _ThenLoader(Loader):
    """Executes a module with its own loader, then runs the action. The module never sees this loader: it is taken off first."""

    def __init__(self, loader: Any, action: Action) -> None:
        self.loader = loader
        self.action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self.loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)  # get_source, get_filename, is_package: whatever the real loader offers


class AfterImport(MetaPathFinder):
    """A finder that finds nothing itself; it passes on what the finders behind it find, with an action attached.

    It stays in place after its modules are loaded, so that a reloaded module gets its action again.

    Args:
        actions: module name -> what to do once that module has been executed.
    """

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self.actions = dict(actions)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.actions:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        for finder in behind:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _ThenLoader(spec.loader, self.actions[fullname])
                return spec
        return None


def installed() -> AfterImport | None:
    """The finder that `install` put in place, if there is one."""
    return next((finder for finder in sys.meta_path if isinstance(finder, AfterImport)), None)


def install(actions: Mapping[str, Action]) -> None:
    """Run each action now if its module is loaded, and whenever its module is loaded from here on. Actions must bear being repeated."""
    if installed() is None:
        sys.meta_path.insert(0, AfterImport(actions))
    for name, action in actions.items():
        if sys.modules.get(name) is not None:
            action(importlib.import_module(name))  # waits until another thread has finished importing it


def remove() -> None:
    """Take the finder out again. What actions have done stays done."""
    finder = installed()
    if finder is not None:
        sys.meta_path.remove(finder)
