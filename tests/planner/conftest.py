"""What the planner's tests share: the recipes' folder and this one on the path, and the options of FlashAdamW."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from flashoptim_hf.optim.adamw import FlashAdamW

ROOT = Path(__file__).resolve().parents[2]
# The recipes' folder as Python itself puts it there for `python recipes/qlora_sft.py`, and this one for small_models.
sys.path[:0] = [str(ROOT / "recipes"), str(Path(__file__).parent)]


@pytest.fixture(scope="session")
def options() -> dict[str, Any]:
    """All options of FlashAdamW, paged."""
    found = {name: parameter.default for name, parameter in inspect.signature(FlashAdamW).parameters.items() if name != "params"}
    return {**found, "paged": True}
