"""What happens to a step whose gradients are not all finite.

One NaN that enters a moving average stays, and with group constants it spoils its neighbours too. So the whole step is dropped: no weight,
no state and no step count changes, as if the batch had not been there.

On a CPU this is known before the step. On a device nobody waits: the kernels get a flag and write nothing where it is set, and the host
reads the flag before the next step, when it has long been there, and takes the step counts back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import cpu, select
from ..kernels.rule import LIMIT
from .gradients import Gradients, Spans
from .layout import Layout, local
from .work import StepPlan


@dataclass
class Verdict:
    """`skip`: the host knows that this step must not happen. `flags`: one fp32 0-dim tensor per device that kernels must obey."""

    skip: bool = False
    flags: dict[torch.device, Tensor] = field(default_factory=dict)


SKIPPED = (
    "a gradient held NaN or infinity: this step was skipped, and weights and optimizer state are as before it. Further skipped steps are "
    "counted in memory_report().skipped_steps and not reported one by one. If they go on, lower the learning rate or look at the data."
)


def known_at_once(device: torch.device) -> bool:
    """Whether the host may read from the device without holding it up."""
    return device.type == "cpu"


class Guard:
    """Applies one of the policies "skip", "raise" and "off", and counts the steps that were skipped.

    Args:
        policy: one of the three.
        notice: what is said when the first step is skipped.
        kernel: the optimizer's, which decides how gradients on a device are looked at.
    """

    def __init__(self, policy: str, notice: str = SKIPPED, kernel: str = "auto") -> None:
        self.policy = policy
        self.notice = notice
        self.kernel = kernel
        self.skipped = 0
        self._pending: Callable[[], bool] | None = None
        # flags that were read, by device: the next one goes to the same place
        self._landings: dict[torch.device, Tensor] = {}

    def check(self, gradients: Gradients, found_inf: Tensor | None) -> Verdict:
        """Look at all gradients of a step.

        Args:
            gradients: of all parameters; where these are DTensors, the ranks of their mesh decide together.
            found_inf: what `GradScaler` found, or None.

        Raises:
            FloatingPointError: policy "raise" and a gradient that is not finite.
        """
        parts = gradients.by_device() if self.policy != "off" else []
        if len(parts) == 1 and found_inf is None and not gradients.roster.sharded:
            device, spans = parts[0]
            if known_at_once(device) and self._in_c(device):
                return self._decide(_any_too_large(spans))  # no tensor is made for what is known here
        flags = self._flags(parts)
        if found_inf is not None:
            home = found_inf.device
            flags[home] = flags.get(home, torch.zeros((), device=home)) + found_inf.reshape(()).float()
        if self.policy != "off" and gradients.roster.sharded:
            flags = _agree(flags, gradients.roster.listed)
        if not flags:
            return Verdict()
        if len(flags) == 1 and self.policy == "skip" and not known_at_once(*flags):
            return Verdict(flags=flags)  # the usual case
        if len(flags) > 1:
            flags = {device: torch.stack([flag.to(device, non_blocking=True) for flag in flags.values()]).amax() for device in flags}
        if self.policy == "raise" or all(known_at_once(device) for device in flags):
            return self._decide(any(bool(flag) for flag in flags.values()))
        return Verdict(flags=flags)

    def _decide(self, found: bool) -> Verdict:
        """What follows where the host knows whether a gradient is too large."""
        if not found:
            return Verdict()
        if self.policy == "raise":
            raise FloatingPointError(
                "a gradient holds NaN, infinity or a number above 4e18; weights and optimizer state are unchanged. With "
                "nonfinite='skip' such steps are left out."
            )
        self.count_one()
        return Verdict(skip=True)

    def defer(self, flags: dict[torch.device, Tensor], plan: StepPlan, layout: Layout) -> None:
        """Remember a step whose flags only the device knows; `settle` finishes it."""
        if flags:
            device, flag = next(iter(flags.items()))
            read = layout.engine(device).backend.read_later(flag, self._landings.pop(device, None))

            def outcome() -> bool:
                landed = self._landings[device] = read()
                skipped = bool(landed)
                if skipped:
                    plan.count(-1)
                return skipped

            self.postpone(outcome)

    def postpone(self, outcome: Callable[[], bool]) -> None:
        """Remember a step that is still open: `outcome` reads what became of it, and says whether (a part of) it was skipped."""
        self._pending = outcome

    def settle(self) -> bool:
        """Read the flag of the last step, if it is still open, and take back the step counts of a step that was skipped.

        Returns:
            Whether it was skipped.
        """
        if self._pending is None:
            return False
        outcome, self._pending = self._pending, None
        skipped = outcome()
        if skipped:
            self.count_one()
        return skipped

    def look(self, spans: Spans) -> dict[torch.device, Tensor]:
        """For each device where there are gradients: 1 if one of them is not finite, else 0, fp32, 0-dim, there."""
        return self._flags(spans.by_device())

    def _flags(self, parts: Sequence[tuple[torch.device, Spans]]) -> dict[torch.device, Tensor]:
        flags = {}
        for device, mine in parts:
            look = select.look_for(device, self.kernel)
            if look is not None:
                flags[device] = look(mine.addresses, mine.numels, mine.codes, device)
            elif self._in_c(device):
                flags[device] = torch.tensor(float(_any_too_large(mine)), device="cpu")
            else:
                # written so that NaN counts as too large
                flags[device] = (~(_probe(mine.grads, device) < LIMIT)).float()
        return flags

    def _in_c(self, device: torch.device) -> bool:
        """Whether the compiled CPU path looks at the gradients there."""
        return device.type == "cpu" and cpu.library() is not None and select.look_for(device, self.kernel) is None

    def count_one(self) -> None:
        """Count a step that was skipped, and say so the first time."""
        self.skipped += 1
        if self.skipped == 1:
            warnings.warn(self.notice, RuntimeWarning, stacklevel=4)


def _any_too_large(spans: Spans) -> bool:
    rows = np.empty((len(spans.grads), 3), dtype=np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = spans.addresses, spans.numels, spans.codes
    return cpu.spans_too_large(rows)


def _probe(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A number below `LIMIT` exactly if the magnitude of every element of every tensor is; 0-dim, on `device`."""
    if device.type == "cpu":
        # sums are many times faster here than norms; a large one may also come from many elements, so then look closely
        total = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors]).abs().amax()
        if bool(total < LIMIT):
            return total
    # the largest magnitude is finite exactly if every element is; NaN wins every comparison in this norm
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    largest = [torch.stack(torch._foreach_norm(same, float("inf"))).amax().float() for same in by_dtype.values()]
    return largest[0] if len(largest) == 1 else torch.stack(largest).amax()


def _agree(flags: dict[torch.device, Tensor], params: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """Where parameters are sharded, every rank of their meshes gets the largest flag, so that all skip or none does."""
    meshes = {param.device_mesh: param for param in params if local(param) is not param}  # type: ignore[attr-defined]
    for mesh, param in meshes.items():
        device = local(param).device
        flag = flags.get(device, torch.zeros((), device=device))
        for group in mesh.get_all_groups():
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
        flags[device] = flag
    return flags


def mesh_groups(params: Iterable[Tensor]) -> list[Any]:
    """The process groups over which parameters are sharded or replicated as DTensors, each once, in the same order on every rank."""
    meshes = dict.fromkeys(param.device_mesh for param in params if local(param) is not param)  # type: ignore[attr-defined]
    return [group for mesh in meshes for group in mesh.get_all_groups()]
