"""Companded 8-bit optimizer states, paged into host RAM, for Hugging Face Trainer and Accelerate.

Importing this package makes its optimizers known to transformers, under names such as `flashoptim_paged_adamw`. It imports neither torch
nor transformers nor Triton: the classes below are loaded when they are first asked for, the names appear when transformers is loaded.
"""

from __future__ import annotations

import importlib
from typing import Any

from .trainer.register import algorithms, optimizer_class, register
from .trainer.register import unregister as unregister

__version__ = "0.1.0"

_LAZY = {
    "FlashOptimCallback": "callbacks",
    "HealthCallback": "health",
    "last_complete_checkpoint": "complete",
    "GradientCapture": "capture",
}
"""Public name -> the module of `trainer/` that has it."""


def __getattr__(name: str) -> Any:
    """`FlashOptimCallback`, `last_complete_checkpoint`, and the class of each algorithm in `optim/`."""
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.trainer.{_LAZY[name]}"), name)
    for stem, cls in algorithms().items() if name.startswith("Flash") else ():
        if cls == name:
            return optimizer_class(stem)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({"__version__", "register", "unregister", *_LAZY, *algorithms().values()})


register()
