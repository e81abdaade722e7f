"""What surrounds a step in torch: hooks, a range for profilers, no gradients of its own, and no tracing by `torch.compile`.

Each costs little, and together they cost as much as the tables of a step. So what nobody asked for is looked at and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer, optimizer

P = ParamSpec("P")
R = TypeVar("R")


def untraced(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step` without gradients, and not traced by `torch.compile`: numbers that change at each step would otherwise be compiled in."""
    disabled = torch._disable_dynamo(torch.no_grad()(step))

    @wraps(step)
    def outer(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # the break in the graph
            return disabled(self, closure)
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return step(self, closure)
        finally:
            torch._C._set_grad_enabled(before)

    return outer


def hooked(func: Callable[P, R]) -> Callable[P, R]:
    """`Optimizer.profile_hook_step`, which torch puts around a step (`func`): hooks and a range for profilers, where there are any.

    Asked when the step begins: a hook that its closure adds counts from the next step on. An `ExecutionTraceObserver` without a profiler
    beside it sees no range: torch does not say that it is there.
    """
    full = Optimizer.profile_hook_step(func)
    disabled = torch._disable_dynamo(full)

    @wraps(func)
    def outer(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return disabled(*args, **kwargs)  # one break in the graph, and not another one at each question below
        self: Any = args[0]
        asked_for = (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or optimizer._global_optimizer_pre_hooks
            or optimizer._global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()
        )
        return (full if asked_for else func)(*args, **kwargs)

    return outer
