"""Gradient release: a page is updated during backward as soon as its last gradient is final, and the gradients are freed.

    optimizer = FlashAdamW(model.parameters(), gradient_release=True)
    loss.backward()     # updates pages, frees gradients
    optimizer.step()    # updates what is left, counts the step

Hooks on the parameters (`register_post_accumulate_grad_hook`, which FSDP2 honours when it has reduced a gradient) say when a gradient is
final. They hold nothing: when the optimizer goes, so do they. A parameter has the hook of one optimizer, the one that was made last.

It excludes whatever needs all gradients at once or changes them after backward: accumulation, clipping, gradient scaling, DDP's averaging.

Sources: layer-wise updates in backward, LOMO, arXiv 2306.09782, section 3; with 8-bit states, FlashOptim, arXiv 2602.23349.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..errors import UnsupportedError
from . import sharded
from .backward_pass import BackwardPass, Schedule
from .gradients import Gradients
from .layout import local

if TYPE_CHECKING:
    from .base import FlashOptimizer

ACCUMULATION = (
    "gradient_release=True updates weights during backward, so gradients cannot be accumulated over several backward passes: set "
    "gradient_accumulation_steps=1 (a larger batch gives the same mean), or leave gradient_release out."
)
SCALER = (
    "gradient_release=True updates weights during backward, when GradScaler (fp16 mixed precision) has neither unscaled nor checked the "
    "gradients: train in bf16 (bf16=True, no scaler), or leave gradient_release out."
)
DDP = (
    "gradient_release=True does not work with DDP: gradients are averaged over the processes after hooks have seen them, and every "
    "process would go its own way. Shard with FSDP2 (fully_shard, fsdp_version: 2), which is served, use one process, or leave "
    "gradient_release out."
)
CLIPPING = (
    "gradient_release=True frees gradients during backward, before their norm over the whole model is known, so they cannot be clipped: "
    "set max_grad_norm=0, or leave gradient_release out."
)


class _Hook:
    """What hangs on a parameter. It keeps nothing alive."""

    def __init__(self, release: GradientRelease) -> None:
        self.release = weakref.ref(release)

    def __call__(self, param: Tensor) -> None:
        release = self.release()
        if release is not None:
            release.receive(param)


def _hooks(param: Tensor) -> dict[int, Any]:
    hooks: dict[int, Any] | None = getattr(param, "_post_accumulate_grad_hooks", None)
    return {} if hooks is None else hooks


def detach(params: Iterable[Tensor], keep: GradientRelease | None = None) -> int:
    """Take the hooks of all optimizers but one off these parameters, so that an earlier one does not go on updating them.

    Returns:
        how many there were.
    """
    count = 0
    for param in params:
        hooks = _hooks(param)
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook) and (keep is None or hook.release() is not keep)]:
            del hooks[key]
            count += 1
    return count


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


class _Trainable(Gradients):
    """The parameters that can get a gradient in this pass, without gradients so far."""

    def __init__(self, param_groups: Sequence[dict[str, Any]]) -> None:
        found = {
            param: number
            for number, group in reversed(list(enumerate(param_groups)))
            for param in reversed(group["params"])
            if param.requires_grad or param.grad is not None
        }
        self.params, self.grads = list(reversed(found)), []
        self.groups = [found[param] for param in self.params]
        self.known = None

    def learn(self) -> None:
        """There are no gradients to learn from."""


class GradientRelease:
    """Hooks, and the pass that is open: from the first gradient to `step()`.

    Args:
        optimizer: whose parameters; it owns this object.
    """

    def __init__(self, optimizer: FlashOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        # backward runs in a thread of its own for each device
        self._lock = threading.RLock()
        self._handles: list[RemovableHandle] = []
        self._schedule: Schedule | None = None
        self._numbers: dict[Tensor, int] = {}
        self._pass: BackwardPass | None = None
        self._warned = False
        self.active = True
        weakref.finalize(self, _remove, self._handles)

    # ------------------------------------------------------------------ hooks

    def attach(self, params: Iterable[Tensor], *, take: bool = True) -> None:
        """Put hooks on parameters that require a gradient and have none.

        Args:
            take: the hooks of other optimizers go. False: parameters that have one are left to it.
        """
        params = [param for param in params if param.requires_grad and param.is_leaf]
        if take:
            detach(params, keep=self)
        for param in params:
            owners = [hook.release() for hook in _hooks(param).values() if isinstance(hook, _Hook)]
            if not any(owner is not None for owner in owners):
                self._handles.append(param.register_post_accumulate_grad_hook(_Hook(self)))

    def open(self) -> None:
        """Put hooks on all parameters as they are now, and take those of other optimizers off."""
        self.active = True
        self.attach(self._parameters())

    def close(self) -> None:
        """Take all hooks off, and end an open pass; what it was waiting with is left to `step()`."""
        self.active = False
        _remove(self._handles)
        self._end_pass(self._owner(), finish=False)

    def _owner(self) -> FlashOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "this object belongs to its optimizer"
        return optimizer

    def _parameters(self) -> list[Tensor]:
        return list(dict.fromkeys(param for group in self._owner().param_groups for param in group["params"]))

    # ------------------------------------------------------------------ a pass

    @torch._disable_dynamo
    @torch.no_grad()
    def receive(self, param: Tensor) -> None:
        """A parameter's gradient is final: called by its hook."""
        with self._lock:
            optimizer = self._optimizer()
            grad = param.grad
            if optimizer is None or not self.active or grad is None:
                return
            current = self._pass or self._open_pass(optimizer)
            number = self._numbers.get(param)
            if number is None:
                return  # it came into a group after the first gradient of this pass, or left it: `step` sees to it
            if current.arrived[number]:
                if not current.left[number]:
                    param.grad = None  # `step` may still be called for what came before
                raise UnsupportedError(
                    f"a second gradient came for a parameter of shape {tuple(param.shape)} before optimizer.step(), and the first one has "
                    f"been used already. {ACCUMULATION} Call optimizer.step() after every backward. Inside one backward, reentrant "
                    "checkpointing (use_reentrant=True) does this to a parameter that several checkpointed blocks share: pass "
                    "use_reentrant=False."
                )
            current.arrive(number, local(grad))

    def step(self) -> None:
        """Update what backward left: pages that did not become complete, and gradients that came in another way. Counts the step.

        Raises:
            UnsupportedError: a gradient scaler, or gradients that came again after their parameter was updated.
        """
        with self._lock:
            optimizer = self._owner()
            if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
                raise UnsupportedError(f"{SCALER} Scaled gradients have been used in this backward: start again from a checkpoint.")
            left = [param for param in self._parameters() if param.grad is not None]
            if self._pass is None and left:
                self._open_pass(optimizer)
            late = self._take_rest(left)
            self._end_pass(optimizer, finish=True)
            if late:
                self._open_pass(optimizer)
                self._take_rest(late)
                self._end_pass(optimizer, finish=True)
            # parameters that were replaced (FSDP2), unfrozen, or whose hooks another optimizer had
            self.attach(self._parameters(), take=False)

    def _take_rest(self, left: list[Tensor]) -> list[Tensor]:
        """Bring gradients into the open pass that no hook has brought; returns the parameters that it does not know."""
        current = self._pass
        if current is None:
            return left
        late = []
        for param in left:
            number, grad = self._numbers.get(param), param.grad
            if number is None or grad is None:
                late.append(param)
            elif not current.arrived[number]:
                current.arrive(number, local(grad))
            elif not current.left[number]:
                raise UnsupportedError(
                    f"a gradient of a parameter of shape {tuple(param.shape)} came again after the parameter had been updated in this "
                    f"backward. DDP writes averaged gradients back in this way. {DDP}"
                )
            elif current.plan.flat.grads[number].data_ptr() != local(grad).data_ptr():
                current.retake(number, local(grad))
        for param, number in self._numbers.items():
            if current.arrived[number] and current.left[number] and param.grad is None:
                current.drop(number)  # the user took the gradient back
        return late

    def discard(self) -> None:
        """`zero_grad()`: gradients that wait are dropped, and the pass is over."""
        with self._lock:
            if self._pass is None:
                return
            updated = self._pass.updated
            self._end_pass(self._owner(), finish=False)
            if updated and not self._warned:
                self._warned = True
                warnings.warn(
                    "zero_grad() before step(): gradient_release=True has used a part of these gradients during backward already. The "
                    "parameters in question were stepped, the others were not.",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def _open_pass(self, optimizer: FlashOptimizer) -> BackwardPass:
        """The first gradient of a step is there: everything that can refuse or fail does so before a weight has changed."""
        optimizer._guard.settle()
        gradients = _Trainable(optimizer.param_groups)
        refuse(gradients.params)
        plan = optimizer._plan_for(gradients)
        if self._schedule is None or self._schedule.plan is not plan:
            self._schedule = Schedule(plan)
            self._numbers = {param: number for number, param in enumerate(plan.params)}
        plan.number(optimizer.param_groups, optimizer.rule)
        current = BackwardPass(self._schedule, optimizer._layout, optimizer._guard, optimizer._health, optimizer.defaults["kernel"])
        current.reserve()
        optimizer._auto.before(plan, optimizer.param_groups, optimizer._layout)
        optimizer._health.begin(plan, optimizer._layout)
        self._pass = current
        return current

    @torch.no_grad()
    def _end_pass(self, optimizer: FlashOptimizer, *, finish: bool) -> None:
        """Update what waits, or drop it. After an exception the pass is open as before, and this can be repeated."""
        current = self._pass
        if current is None:
            return
        try:
            if finish:
                current.finish()
            else:
                current.abandon()
        finally:
            current.end()
        self._pass = None
        optimizer._health.end(optimizer._layout)
        skipped = current.conclude()
        if skipped:
            optimizer._guard.count_one()
        stepped = [param for param, arrived in zip(current.plan.params, current.arrived, strict=True) if arrived]
        optimizer._conclude(current.plan, skipped=skipped, stepped=stepped)


def refuse(params: Sequence[Tensor]) -> None:
    """Refuse what would use gradients that are not final, before the first of them is used.

    Raises:
        UnsupportedError: DDP, accumulation, fp16 mixed precision, as far as they show.
    """
    if sharded.several_ranks() and not all(sharded.is_sharded(param) for param in params):
        raise UnsupportedError(
            f"{DDP} (This is a job of {torch.distributed.get_world_size()} processes, and there are parameters that are not sharded.)"
        )
    state = sys.modules.get("accelerate.state")
    if state is not None:
        # inside Accelerator.accumulate(), in a batch that is not the last of a step
        if not state.GradientState._shared_state.get("sync_gradients", True):
            raise UnsupportedError(ACCUMULATION)
        if state.AcceleratorState._shared_state.get("_mixed_precision") == "fp16":
            raise UnsupportedError(SCALER)
