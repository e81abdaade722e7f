"""Numbers that nothing in a model's config says, and that were not measured here: the ranges that every plan contains."""

from __future__ import annotations

from .setup import Span

GIB = 2**30
CONTEXT = Span(int(0.3 * GIB), int(0.6 * GIB))
"""GPU memory of the driver's context with its kernels and cuBLAS workspaces. An assumption: it depends on GPU, driver and versions."""
FRAGMENTATION = (1, 5)
"""Per cent of what comes and goes that torch's caching allocator loses. An assumption, for steady sizes or expandable segments."""
PROCESS = Span(int(1.5 * GIB), 3 * GIB)
"""Host memory of one process with Python, torch and CUDA libraries. An assumption; the data set is not in it."""
