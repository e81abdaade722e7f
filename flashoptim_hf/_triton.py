"""The only place that imports Triton.

Importing this module never fails. Where Triton is absent, `jit` leaves a function as it is and `require()` raises the one sentence
that says what is missing. Device functions are written as usual, with `@jit` and `tl`, next to the eager code that they mirror.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .errors import UnsupportedError

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
    _REASON = ""
except ImportError as error:  # not installed, or switched off with sys.modules["triton"] = None
    triton = None
    tl = SimpleNamespace(constexpr=lambda value: value)
    HAS_TRITON = False
    _REASON = str(error)


def jit(function: Any = None, **options: Any) -> Any:
    """`triton.jit`, bare or with its options, where Triton is installed; else the plain function, which nothing will call."""
    if not HAS_TRITON:
        return function if function is not None else lambda inner: inner
    return triton.jit(function, **options)


def require() -> None:
    """Raise unless Triton can be used.

    Raises:
        UnsupportedError: Triton is not installed; the message names the package and the kernel that works without it.
    """
    if not HAS_TRITON:
        raise UnsupportedError(
            f"the fused kernel needs Triton, which cannot be imported ({_REASON}). Install it (pip install triton), "
            "or pass kernel='eager', which runs everywhere."
        )


INTERPRET = HAS_TRITON and not isinstance(jit(require), triton.runtime.JITFunction)
"""Whether Triton runs functions in its interpreter, decided where it decides: when it was imported."""

LAUNCH = {"enable_fp_fusion": True, "num_stages": 1}
"""Launch options on which results and speed rest. Products and sums may be fused, which Triton's own default decides by version and by an
environment variable; loops are not pipelined, since several programs share a processor anyway."""

__all__ = ["HAS_TRITON", "INTERPRET", "LAUNCH", "jit", "require", "tl", "triton"]
