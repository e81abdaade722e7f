"""The layers: every import of the package, those inside functions too, goes to its own folder, to a lower rank, or to rank 0."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "flashoptim_hf"
ROOT = Path(__file__).resolve().parents[1] / PACKAGE
SOURCES = sorted(ROOT.rglob("*.py"))

# A step flows down the ranks. Folders of one rank are siblings and never import each other; files at the top have their own ranks.
RANKS = {
    "errors": 0,
    "_triton": 0,
    "places": 0,
    "codecs": 1,
    "kernels": 2,
    "paging": 3,
    "optim": 4,
    "trainer": 5,
    "planner": 5,
    "bench": 5,
    "after": 5,
    "axolotl": 6,
    "cli": 6,
    "cli_convert": 6,
    "cli_doctor": 6,
    "cli_inspect": 6,
    "cli_plan": 6,
    "report": 6,
    "run": 6,
    "": 6,  # the package's own __init__: it may use everything, and nothing below may use it
}
TRITON_FILE = "_triton.py"
DEVICE_FILE = "paging/streams.py"
DEVICE_APIS = ("cuda", "xpu", "accelerator", "hip", "mps")
MAX_LINES = 400


def _module(file: str) -> tuple[str, ...]:
    """`paging/plan.py` -> (flashoptim_hf, paging, plan); an `__init__.py` is its folder."""
    parts = (PACKAGE, *Path(file).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def _absolute(file: str, node: ast.ImportFrom) -> tuple[str, ...]:
    """The module that a `from ... import` names, relative ones resolved."""
    named = tuple((node.module or "").split(".")) if node.module else ()
    if node.level == 0:
        return named
    package = _module(file) if file.endswith("__init__.py") else _module(file)[:-1]
    return package[: len(package) - (node.level - 1)] + named


def imports(file: str, source: str) -> list[tuple[int, tuple[str, ...]]]:
    """(line, module path) of every import in a source, wherever it stands, also `import_module("...")` with a plain string."""
    found: list[tuple[int, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, tuple(alias.name.split("."))) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(file, node)
            found += [(node.lineno, (*module, alias.name)) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
            if isinstance(name, str) and name and not name.startswith("."):
                found.append((node.lineno, tuple(name.split("."))))
    return found


def _top(module: tuple[str, ...]) -> str:
    """The folder or top-level file that a module of the package belongs to; "" for the package itself or a name in it."""
    return module[1] if len(module) > 1 and module[1] in RANKS else ""


def violations(file: str, source: str) -> list[str]:
    """What a source of the package breaks, as sentences. `file` is relative to the package's folder."""
    problems = []
    own = _top(_module(file))
    for line, module in imports(file, source):
        if module[0] == "triton" and file != TRITON_FILE:
            problems.append(f"{file}:{line}: imports triton; only {TRITON_FILE} may")
        if module[:1] == ("torch",) and module[1:2] and module[1] in DEVICE_APIS and file != DEVICE_FILE:
            problems.append(f"{file}:{line}: imports torch.{module[1]}; only {DEVICE_FILE} names a device API")
        if module[0] != PACKAGE:
            continue
        target = _top(module)
        if target == "" and RANKS[own] == RANKS[""]:  # the top files may use the package as a user does
            continue
        if RANKS[target] != 0 and target != own and RANKS[target] >= RANKS[own]:
            problems.append(f"{file}:{line}: rank {RANKS[own]} imports {'.'.join(module)}, rank {RANKS[target]}")
    for node in ast.walk(ast.parse(source)):
        names_device = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
        if names_device and node.attr in DEVICE_APIS and file != DEVICE_FILE:
            problems.append(f"{file}:{node.lineno}: names torch.{node.attr}; only {DEVICE_FILE} names a device API")
    if len(source.splitlines()) >= MAX_LINES:
        problems.append(f"{file}: {len(source.splitlines())} lines, the limit is {MAX_LINES - 1}")
    return problems


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_keeps_to_its_layer(path: Path) -> None:
    assert violations(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) == []


def test_every_file_of_the_package_has_a_rank() -> None:
    unknown = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in SOURCES} - set(RANKS) - {"__init__"}
    assert SOURCES
    assert not unknown, f"{sorted(unknown)} have no rank: DESIGN's table and RANKS say where a file belongs"


FORBIDDEN = {
    "upward": ("codecs/log.py", "from ..kernels import rule"),
    "upward absolute": ("codecs/log.py", "import flashoptim_hf.optim.base"),
    "upward from": ("kernels/eager.py", "from flashoptim_hf.paging.plan import Plan"),
    "inside a function": ("paging/plan.py", "def f():\n    from ..optim import base\n"),
    "for types only": ("kernels/rule.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..optim.base import X\n"),
    "import_module": ("codecs/base.py", "import importlib\nimportlib.import_module('flashoptim_hf.trainer.register')"),
    "sibling": ("trainer/register.py", "from ..planner import report"),
    "sibling absolute": ("bench/paging.py", "from flashoptim_hf.trainer import callbacks"),
    "from the package": ("optim/base.py", "from .. import __version__"),
    "from the package, absolute": ("bench/run.py", "from flashoptim_hf import FlashAdamW"),
    "folder through the package": ("paging/engine.py", "from .. import optim"),
    "an __init__ upward": ("optim/__init__.py", "from ..trainer import register"),
    "two top files": ("cli.py", "from .run import main"),
    "triton": ("kernels/fused.py", "import triton"),
    "triton.language": ("kernels/fused.py", "import triton.language as tl"),
    "from triton": ("kernels/fused.py", "def f():\n    from triton import jit\n"),
    "torch.cuda": ("paging/engine.py", "import torch\ntorch.cuda.synchronize()"),
    "torch.accelerator": ("optim/base.py", "import torch\nx = torch.accelerator.is_available()"),
    "from torch import": ("paging/arena.py", "from torch import xpu"),
    "import torch.cuda": ("paging/simulated.py", "import torch.cuda"),
    "too long": ("optim/base.py", "x = 1\n" * MAX_LINES),
}
ALLOWED = {
    "down": ("optim/base.py", "from ..codecs.base import get_codec\nfrom ..paging import engine"),
    "own folder": ("paging/engine.py", "from .plan import Plan\nfrom . import arena\nfrom flashoptim_hf.paging import residency"),
    "rank 0": ("codecs/log.py", "from ..errors import ConfigurationError\nfrom .. import _triton\nfrom .._triton import tl"),
    "rank 0 to rank 0": ("_triton.py", "import triton\nfrom .errors import UnsupportedError"),
    "the top, the package": ("cli.py", "from . import __version__"),
    "the top": ("cli.py", "def f():\n    from .bench import kernels\n    import flashoptim_hf.planner.report\n"),
    "the package itself": ("__init__.py", "def f():\n    from .trainer.register import register\n"),
    "devices": ("paging/streams.py", "import torch\ntorch.cuda.Stream()\ntorch.accelerator.current_accelerator()"),
    "another cuda": ("kernels/fused.py", "def f(weight):\n    return weight.is_cuda or weight.device.type == 'cuda'\n"),
    "long enough": ("optim/base.py", "x = 1\n" * (MAX_LINES - 1)),
}


@pytest.mark.parametrize(("file", "source"), FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_the_check_fails_on(file: str, source: str) -> None:
    assert len(violations(file, source)) == 1


@pytest.mark.parametrize(("file", "source"), ALLOWED.values(), ids=ALLOWED.keys())
def test_the_check_passes(file: str, source: str) -> None:
    assert violations(file, source) == []
