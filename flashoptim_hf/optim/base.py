"""`FlashOptimizer`: the contract of `torch.optim` over planes and pages. It knows neither the codec nor whether state is paged."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..codecs import weight_split
from ..errors import ConfigurationError, UnsupportedError
from ..kernels import select
from ..kernels.rule import UpdateRule
from ..paging.engine import Engine
from ..paging.plan import parse_bytes
from ..paging.store import Page
from . import around_step, checkpoint, gradient_release, learning, modes, options, sharded
from .auto_master import AutoMaster
from .backward_pass import NOT_FINITE
from .finite import SKIPPED, Guard
from .gradients import Gradients, Roster
from .health import Finding, Health
from .layout import CORRECTION, Layout, codec_views, local
from .report import MemoryReport, build_report, planned_bytes
from .work import StepPlan

ParamsT: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class FlashOptimizer(Optimizer):
    """Base of all algorithms here. A subclass sets `rule` and checks its own group options.

    Options, all keyword-only and all in `defaults`, so that `type(opt)(params, **opt.defaults)` gives the same configuration:

    Args:
        codec: how states are stored: "log" (AdamW's default), "square" (Lion's and SGD's), "softsign", "none", ... One name per file in
            `codecs/`.
        master_bits: 24 (default) or 32: bf16 and fp16 weights carry an 8- or 16-bit correction, and the two together are a 24- or 32-bit
            master weight. "auto": 24, and 32 for tensors where 24 swallow more than a quarter of the updates. None: no correction. Has no
            effect on fp32 weights.
        paged: keep state in host memory and bring it to the device page by page. Default False: state lives on the parameter's device.
        page_bytes: size of a page over all planes, in bytes or as "32MiB" (default).
        device_budget_bytes: how much of paged state stays on the device, so that a step moves only the rest: bytes or "2GiB", a share of
            the state (0.25, "25%"), or "auto" (what is free after the first full step, less a sixteenth of the device). Default 0.
        transport: of paged state. "staged" (default): pages are copied to the device and back. "zero_copy": kernels read and write pinned
            host memory in place. "resident": all of it stays on the device (a budget of 1.0) as long as there is room.
        offload_dir: a folder on a fast disk: paged state lives in files there, mapped into memory, instead of in RAM. Default None.
        offload_keep: do not delete these files at the end. They are scratch all the same. Default False.
        gradient_release: update each page during backward, as soon as its gradients are final, and free them. Not with accumulation,
            clipping, `GradScaler` and DDP. Default False.
        nonfinite: what a NaN, an infinity or a number above 4e18 in any gradient does: "skip" (default) leaves weights, state and step
            counts of that step untouched and warns once, "raise" raises `FloatingPointError` (and waits for the device at each step), "off"
            does not look.
        dither: deterministic dither when states are rounded (default True), instead of rounding to nearest.
        kernel: "auto" (default), "fused" (Triton), "cpu" (compiled C), or "eager" (plain torch).
        simulate: seed of the simulated device, for tests; None (default) uses the parameter's own device.

    Raises:
        ConfigurationError: a value out of range, or a parameter that cannot be stepped.
        UnsupportedError: the parameters are FSDP1's or DeepSpeed's, or sharded along another dimension than 0.
    """

    rule: ClassVar[UpdateRule]

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        options.check_defaults(defaults)
        modes.check_accelerate()
        entries: list[Any] = list(params)
        for i, entry in enumerate(entries):
            if isinstance(entry, dict) and not isinstance(entry["params"], Tensor | set):
                entries[i] = {**entry, "params": list(entry["params"])}  # it may be a generator, which can be read only once
        if all(isinstance(entry, dict) and not len(entry["params"]) for entry in entries):
            raise ConfigurationError(
                "the optimizer was given no parameters. If a PEFT adapter was loaded, load it with is_trainable=True; "
                "otherwise check that the parameters you want to train have requires_grad=True."
            )
        self._start(defaults)
        super().__init__(entries, defaults)

    def _start(self, defaults: dict[str, Any]) -> None:
        """Make what is not part of the optimizer's state: pools, engines, counters."""
        self._layout = Layout(self.rule, defaults)
        released = defaults["gradient_release"]
        self._guard = Guard(defaults["nonfinite"], NOT_FINITE if released else SKIPPED, kernel=defaults["kernel"])
        self._release = gradient_release.GradientRelease(self) if released else None
        self._auto = AutoMaster()
        self._health, self._learning = Health(), learning.Learning()
        self.notes: dict[str, float] = {}  # numbers for the next log; whoever writes it takes them
        self._checked = False
        self._plan: StepPlan | None = None
        self._roster: Roster | None = None
        self._warned_orphans = False

    # ------------------------------------------------------------------ the contract of torch.optim

    @classmethod
    def check_group(cls, group: dict[str, Any]) -> None:
        """Check the algorithm's own group options."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters get state when they are first stepped, and existing state is not touched."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            options.check_group(group, self.defaults)
            options.check_codec(group["codec"], self.rule.states, type(self).__name__)
            self.check_group(group)
            names = group.get("param_names", [f"#{i} of group {len(self.param_groups) - 1}" for i in range(len(group["params"]))])
            for name, param in zip(names, group["params"], strict=True):
                sharded.check(param)
                learning.check(param, group, self.rule, self.defaults["gradient_release"])
                options.check_param(local(param), name)
            for name in options.PLACEMENT:
                group.pop(name, None)  # where and how hold for the whole optimizer, and are no part of a checkpoint
            if self._release is None:
                gradient_release.detach(group["params"])
            else:
                self._release.attach(group["params"])
        except (ConfigurationError, UnsupportedError):
            self.param_groups.pop()
            raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `GradScaler` may leave unscaling and skipping to `step`.

        Not under Accelerate, which learns of a skipped step only by its own patched `step` not being called.
        """
        patched = self.__dict__.get("step")
        return not getattr(patched, "__module__", "").startswith("accelerate")

    profile_hook_step = staticmethod(around_step.hooked)

    @around_step.untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._release is not None and self._release.active:
            self._release.step()
            return loss
        self._guard.settle()
        gradients = Gradients(self.param_groups, self._roster, None if self._plan is None else self._plan.known)
        self._roster = gradients.roster
        plan = self._plan_serving(gradients)
        verdict = self._guard.check(gradients, getattr(self, "found_inf", None))
        if gradients.params and not verdict.skip:
            self._plan = plan or self._make_plan(gradients)
            self._update(self._plan, gradients, verdict.flags)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients. With `gradient_release` there is usually nothing left; what waits for `step` is dropped, with a warning."""
        super().zero_grad(set_to_none)
        if self._release is not None:
            self._release.discard()

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of the state: copies on the host, which later steps do not change. See `optim/checkpoint.py` for the format."""
        return checkpoint.save(self, super().state_dict)

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the optimizer keeps its own placement (paged or not, page size, kernel) and its own codec.

        Raises:
            CheckpointError: the state does not fit; nothing has been changed.
            HostMemoryError: there is no host memory for it; nothing has been changed.
        """
        if self._release is not None:
            self._release.discard()
        checkpoint.load(self, state_dict)
        # what held on to state that was replaced lets go of it
        self._plan = None
        self._layout.offer()

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        checkpoint.store_as_groups_say(self)
        # copies: pickle would write the whole pool for each view of it
        state = {param: checkpoint.copied(values) for param, values in self.state.items()}
        return {"defaults": self.defaults, "state": state, "param_groups": self.param_groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values = state.pop("state")
        state["state"] = defaultdict(dict)
        self._start(state["defaults"])
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it here; it is no option of this class
        checkpoint.adopt(self, values)
        self.reopen()

    # ------------------------------------------------------------------ beyond torch.optim

    def synchronize(self) -> None:
        """Wait until the host copies of the state are current; a step that the device skipped is counted as skipped from here on."""
        self._guard.settle()
        self._layout.synchronize()

    def decoded_state(self, param: Tensor) -> dict[str, Tensor]:
        """The parameter's state as fp32 tensors of the (local) parameter's shape, on the CPU when paged, else on its device.

        Returns:
            One tensor per state ("exp_avg", "exp_avg_sq", or "momentum_buffer"), and "master_weight".

        Raises:
            KeyError: the parameter has not been stepped yet.
        """
        record = self._layout.records.get(param)
        if record is None or param not in self.state:
            raise KeyError("this parameter has no state: it has not been stepped, or it does not belong to this optimizer.")
        self.synchronize()
        values = record.pool.fmt.codec.decode(codec_views(record), record.block.numel)
        decoded = {state.name: value.view(record.shape) for state, value in zip(record.pool.fmt.rule.states, values, strict=True)}
        weight = local(param).detach()
        if CORRECTION in record.views and weight.dtype == record.pool.key.dtype:
            correction = record.views[CORRECTION]
            weight = weight.to(correction.device)
            decoded["master_weight"] = weight_split.join(weight.contiguous().view(-1), correction.view(-1)).view(record.shape)
        else:
            decoded["master_weight"] = weight.float().clone()
        return decoded

    def reset_master(self, param: Tensor | None = None) -> None:
        """Forget the corrections of one parameter, or of all: the weights as they stand become the master weights."""
        self.synchronize()
        records = self._layout.records
        if param is not None and param not in records:
            return  # no state, so no correction
        for record in records.values() if param is None else [records[param]]:
            if CORRECTION in record.views:
                record.views[CORRECTION].zero_()

    def evict(self, nbytes: int | str | None = None) -> int:
        """Write pages of state that stay on the device back to host memory, and give their memory to whoever needs it.

        They come back by themselves, in later steps, when the device has memory to spare. Any moment outside `step` is fine.

        Args:
            nbytes: how much to give back at least, in bytes or as "2GiB"; None (default): all of it.

        Returns:
            Bytes of device memory given back.
        """
        return self._layout.evict(None if nbytes is None else parse_bytes(nbytes))

    def trim(self) -> int:
        """`evict` everything, and give back the memory for pages in flight too, until the next step. Returns the bytes."""
        return sum(engine.trim() for engine in self._layout.engines.values())

    def close(self) -> None:
        """Take the hooks of `gradient_release` off the parameters: gradients stay until `step`, which works as it does without."""
        if self._release is not None:
            self._release.close()

    def reopen(self) -> None:
        """Put the hooks of `gradient_release` on all parameters as they are now: after `close`, or when parameters were replaced."""
        if self._release is not None:
            self._release.open()

    def check_host_memory(self) -> None:
        """Look before training whether the host has memory for the state of all parameters, for every process on it.

        Call when the parameters are what they will be (wrapped, sharded, on their device). `step` looks again before it makes state.

        Raises:
            HostMemoryError: names what is needed and what is available on this host.
            OffloadError: the same of the disk, with `offload_dir`.
        """
        self._layout.check_host(self._layout.wanted(self.param_groups), together=True)

    def memory_report(self) -> MemoryReport:
        """Bytes of each plane, where they are, and what the last step moved. See `MemoryReport`."""
        return build_report(self._layout, self._guard.skipped)

    def examine(self, groups: int = 8) -> None:
        """Look closely at so many groups of 64 elements of every parameter in the next step that happens; see `findings`."""
        self._health.ask(groups)

    def findings(self, wait: bool = True) -> list[Finding] | None:
        """What `examine` found, once; None where there is nothing new. `wait=False`: only when another step has begun since."""
        return self._health.found(wait)

    def planned_bytes(self) -> tuple[int, int]:
        """(host, device) bytes of state once every parameter that requires a gradient has been stepped; nothing is allocated."""
        groups = ((param, group) for group in self.param_groups for param in group["params"] if param.requires_grad)
        return planned_bytes(self._layout, groups)

    # ------------------------------------------------------------------ one step

    def _plan_serving(self, gradients: Gradients) -> StepPlan | None:
        """The plan of the last step if it serves this one too."""
        plan = self._plan
        return plan if plan is not None and plan.serves(gradients, self.param_groups, self.state) else None

    def _plan_for(self, gradients: Gradients) -> StepPlan:
        """The plan of the last step if it serves this one too, else a new one."""
        self._plan = self._plan_serving(gradients) or self._make_plan(gradients)
        return self._plan

    def _make_plan(self, gradients: Gradients) -> StepPlan:
        """Give every parameter its place, show it in `state`, and prepare the step."""
        self._sweep_orphans()
        modes.check_accelerate()
        groups = [self.param_groups[number] for number in gradients.groups]
        for param, group in zip(gradients.params, groups, strict=True):
            sharded.check(param)
            learning.check(param, group, self.rule, self._release is not None)
            self._layout.check_shape(param)
        self._layout.ensure(zip(gradients.params, groups, strict=True))
        for param in gradients.params:
            self.state[param] = self._layout.records[param].views
        self._layout.offer()
        return StepPlan(gradients, self.param_groups, self._layout, self.state)

    def _sweep_orphans(self) -> None:
        """Free the state of parameters that are no longer in any group, or whose entry in `state` was removed."""
        orphans, emptied = self._layout.abandoned(self.param_groups, self.state)
        for param in dict.fromkeys([*orphans, *emptied]):
            self._layout.drop(param)
            self.state.pop(param, None)
        if orphans and not self._warned_orphans:
            self._warned_orphans = True
            warnings.warn(
                f"{len(orphans)} parameters with optimizer state are no longer in any parameter group: their state was freed, and the "
                "tensors that replaced them start without state. Wrap or shard the model before the first step, or load the state after.",
                stacklevel=4,
            )

    def _update(self, plan: StepPlan, gradients: Gradients, flags: dict[torch.device, Tensor]) -> None:
        """Run the kernel over every page of the plan, device by device."""
        plan.begin(gradients, self.param_groups, self.rule)
        self._auto.before(plan, self.param_groups, self._layout)
        self._health.begin(plan, self._layout)
        with self._learning.begin(plan, self.param_groups, self._layout, flags):
            for device, entries in plan.pages.items():
                kernel, engine = select.kernel_for(device, self.defaults["kernel"]), self._layout.engine(device)
                works = {id(work.page): work for work in entries}
                options = {"inv_scale": self._inv_scale(device), "skip": flags.get(device)}

                def prepare(
                    page: Page,
                    planes: tuple[Tensor, ...],
                    kernel: select.Kernel = kernel,
                    engine: Engine = engine,
                    works: dict[int, Any] = works,
                    options: dict[str, Any] = options,
                ) -> Callable[[], None]:
                    work = works[id(page)]
                    segments = plan.segments(work)
                    launch = self._learning.around(
                        select.launch(kernel, planes, segments, work.pool.fmt, **options), work, planes, engine.backend
                    )
                    return self._health.around(launch, work, planes, segments, engine.backend, **options)

                engine.run([work.page for work in entries], prepare)
            plan.finish()
        self._health.end(self._layout)
        self._guard.defer(flags, plan, self._layout)
        self._conclude(plan)

    def _conclude(self, plan: StepPlan, *, skipped: bool = False, stepped: Sequence[Tensor] | None = None) -> None:
        """What follows a step: a check whether its state could be saved, and a look at what 24 bits swallowed.

        Args:
            skipped: the step, or a part of it, is known not to have happened.
            stepped: the parameters that took part; None: all of the plan.
        """
        if not self._checked:
            if sharded.several_ranks() or any(sharded.is_sharded(param) for param in plan.params):
                self._layout.synchronize()
                sharded.self_check(self._layout.records)
            self._checked = True
        if self._auto.looking:
            promoted = self._auto.after(self._layout, skipped=self._guard.settle() or skipped, stepped=stepped)
            if promoted:
                self._plan = None
                groups = {param: group for group in self.param_groups for param in group["params"]}
                for param in self._layout.ensure((param, groups[param]) for param in promoted):
                    self.state[param] = self._layout.records[param].views

    def _inv_scale(self, device: torch.device) -> Tensor | None:
        """1 / the scale that `GradScaler` left on this optimizer, on `device`."""
        scale = getattr(self, "grad_scale", None)
        return None if scale is None else scale.to(device=device, dtype=torch.float32, non_blocking=True).reshape(()).reciprocal()
