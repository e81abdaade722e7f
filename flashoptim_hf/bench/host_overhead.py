"""Host overhead: what a step over many small tensors costs in Python, before any GPU does anything.

    flashoptim-hf bench host-overhead --json host_overhead.json

The tensors are the LoRA adapters of a small model: 30 layers of SmolLM2-135M, 7 linear layers each, r = 16, 420 bf16 tensors. They lie in
CPU memory, and every Triton launch is replaced by a function that only counts; what is left is the time that a GPU would have to wait for:
CPU time of the thread that steps. Both sides do everything else with their own code: ours looks up the plan and builds the tables of its
two kernels, the look at gradients and the update; flashoptim's loop goes through its tensors one by one.

Before each step, untimed, every parameter gets a new gradient, as in the usual loop with `zero_grad(set_to_none=True)`. Before a subject's
turn, untimed too, the C library sorts the memory that the subject before it gave back: whoever asks for memory next would do so, for 2 to
3 ms behind the two that go through Triton's own Python.

lora420                   Ours as it is by default; flashoptim as it is by default. Gradients are other tensors than in the last step, and
                          Python has gone through them before, as clipping (the Trainer's default) does.
lora420/fresh_gradients   The same straight behind a backward pass: Python has not seen these gradients, whoever asks it for one first pays
                          for having it wrapped, and the caches of the core are full of something else. `wrapping` is
                          `[p.grad for p in params]` there and nothing else: no optimizer that asks Python takes less.
lora420/kept_gradients    The same with the gradients of the step before, as with `zero_grad(set_to_none=False)`.
lora420/nonfinite=off     Ours without the look for NaN and infinity.
lora420/null_kernel       Ours with an update kernel that does nothing at all: the difference to `lora420` is its tables.
lora420/page_bytes=1MiB   Ours paged through a device whose copies do nothing, with many pages: the difference is what pages cost.
lora420/cpu_check         Ours with the look as a CPU makes it.
lora420/triton            Both with Triton's own Python for a launch: kernels are compiled for sm_90 and looked up with their arguments as
                          usual, and only the call into the GPU's driver is replaced. This is nearest to what a user waits for.

`launches_per_step` counts the kernels that update, `looks_per_step` those that look at gradients. Not in these numbers: the copies of the
tables to the device, and the driver's part of a launch (some µs each; one and two per page for ours, one per tensor for flashoptim).

flashoptim's class refuses to be made without CUDA. `torch.cuda.is_available` is true while it is made, and its quantized states are put
into `optimizer.state` before the first step, as loading a checkpoint would; its `step` then runs as it is.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor

from .. import _triton
from ..kernels import fused, look, select
from ..optim import finite, layout
from ..optim.adamw import FlashAdamW
from ..paging.streams import HostBackend
from .adamw_peers import available
from .report import JsonOption, Report, Row, check_outputs, cpu_name, show, table
from .timing import Turn, add_load, add_ratio, label, round_robin

LAYERS, RANK = 30, 16
LINEARS = ((576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576))
"""(in, out) of q, k, v, o, gate, up and down of SmolLM2-135M."""
MULTIPLE_PAGES = "1MiB"
TIDY_UP = 10
"""Allocations before a turn. glibc sorts at most 10,000 freed pieces in one."""
OTHER_GRADIENTS = {"fresh_gradients": "fresh", "kept_gradients": "kept"}


def run(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the round-robin.")] = 15,
    inner: Annotated[int, typer.Option(min=1, help="Steps of each subject in a round.")] = 10,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model; 30 are 420 tensors.")] = LAYERS,
    json_file: JsonOption = None,
) -> None:
    """Python time per step for the 420 LoRA tensors of a small model, with the kernel launch taken out; beside flashoptim's loop.

    Prints milliseconds per step, launches per step, and the ratio to flashoptim, all of one run.
    """
    check_outputs(json_file, None)
    _triton.require()
    report, missing = measure(rounds, inner, layers)
    show(table([label(row) for row in report.rows], f"Python time per step, {14 * layers} LoRA tensors", across="metric", digits=3))
    if missing:
        show(f"Peers that are not installed and were left out: {', '.join(missing)}.")
    if json_file is not None:
        report.write_json(json_file)


def lora_parameters(layers: int, device: torch.device | None = None) -> list[torch.nn.Parameter]:
    """The adapters A [r, in] and B [out, r] of every linear layer, bf16, with gradients; on the CPU by default."""
    made = []
    for _ in range(layers):
        for inputs, outputs in LINEARS:
            for shape in ((RANK, inputs), (outputs, RANK)):
                param = torch.nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02)
                param.grad = torch.randn_like(param) * 1e-3
                made.append(param)
    return made


@dataclass
class Launches:
    """Stands for a Triton kernel: `kernel[grid](...)` counts and does nothing.

    Attributes:
        count: of all kernels but the look at gradients.
        looks: what stands for that one.
    """

    count: int = 0
    looks: Any = None

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.count += 1


class PretendDriver:
    """What Triton asks of a GPU's driver, for a GPU that is not there: it is an sm_90, binaries load, and launches do nothing.

    Args:
        launches: counts the launches.
    """

    DEVICE = 1000
    """Triton keeps compiled kernels by device number; no real device has this one."""

    def __init__(self, launches: Launches) -> None:
        self.utils = self
        self._target = importlib.import_module(_triton.triton.__name__ + ".backends.compiler").GPUTarget("cuda", 90, 32)
        self._launches = launches

    def launcher_cls(self, source: Any, *_: Any) -> Callable[..., None]:
        """The launcher of a compiled kernel. It is kept with the kernel, so it looks up who counts when it is called."""
        is_look = source.fn is look.look_kernel

        def launch(*args: Any) -> None:
            launches = _triton.triton.runtime.driver.active._launches
            (launches.looks if is_look else launches)._launch(*args)

        return launch

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self.DEVICE

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 20, "multiprocessor_count": 132}

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        """Module, function, registers, spills, and the most threads."""
        return object(), 0, 0, 0, 1024

    def unload_module(self, _: Any) -> None:
        pass


def launch_patches(module: Any, name: str, launches: Launches, with_triton: bool) -> list[AbstractContextManager[Any]]:
    """Replace the launches of a kernel, and of the look: all of them, or only the driver's part."""
    if with_triton:
        return [patch.object(_triton.triton.runtime.driver, "_active", PretendDriver(launches))]
    return [patch.object(module, name, launches), patch.object(look, "look_kernel", launches.looks)]


@dataclass
class Subject:
    """A step whose launches are stubbed.

    Attributes:
        step: one step.
        params: what it steps.
        launches: its stub.
        patches: makes the patches that stand while it steps.
        pages: pages of its state, None for a peer.
        gradients: "new", "fresh" or "kept"; see `renew`.
    """

    step: Callable[[], Any]
    params: list[torch.nn.Parameter]
    launches: Launches
    patches: Callable[[], list[AbstractContextManager[Any]]]
    pages: Callable[[], int] | None = None
    gradients: str = "new"
    steps: int = field(default=0)

    def __post_init__(self) -> None:
        self._old = [param.grad for param in self.params if param.grad is not None]
        # in memory of its own, so that addresses change from step to step
        self._next = [grad.clone() for grad in self._old]

    def renew(self) -> None:
        """Give every parameter another gradient than that of the last step, but with "kept".

        "new": made beforehand and known to Python. "fresh": made by a backward pass and seen by nobody. No number is computed or copied: a
        GPU would do that, and here it would empty the caches of the core that steps.
        """
        if self.gradients == "kept":
            return
        self._old, self._next = self._next, self._old
        if self.gradients == "new":
            for param, grad in zip(self.params, self._old, strict=True):
                param.grad = grad
        else:
            for param in self.params:
                param.grad = None
            torch.autograd.backward([param.view(-1) for param in self.params], [grad.view(-1) for grad in self._old])

    def counted(self) -> None:
        """One step, counted."""
        self.step()
        self.steps += 1

    @contextmanager
    def around(self) -> Iterator[None]:
        """The patches, behind the allocator's work for whoever had them before."""
        for _ in range(TIDY_UP):
            bytearray(1 << 16)  # larger than what was freed, so all of that is gone through, but not a mapping of its own
        with ExitStack() as stack:
            for one in self.patches():
                stack.enter_context(one)
            yield


class NullDevice(HostBackend):
    """A device with staging whose copies and events do nothing."""

    name = "null"
    stages = True

    def copy(self, stream: Any, dst: Tensor, src: Tensor, *, keep: bool = False) -> None:
        pass

    def read_later(self, value: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        super().read_later(value, into)
        return lambda: value


def ours(
    layers: int,
    *,
    null_kernel: bool = False,
    with_triton: bool = False,
    stage: bool = False,
    cpu_check: bool = False,
    gradients: str = "new",
    **options: Any,
) -> Subject:
    """Our optimizer with the fused kernel, its launch stubbed.

    Args:
        layers: layers of the model.
        null_kernel: replace the whole kernel and not only its launch.
        with_triton: replace only the driver's part of a launch.
        stage: run on a `NullDevice`.
        cpu_check: look at gradients as on a CPU, instead of by a GPU's path.
        gradients: of each step; see `Subject`.
        options: of `FlashAdamW`.
    """
    params = lora_parameters(layers)
    optimizer = FlashAdamW(params, **options)
    launches = Launches(looks=Launches())
    kernel: Any = launches._launch if null_kernel else fused.update_page

    def gpu_check() -> list[AbstractContextManager[Any]]:
        return [patch.object(select, "look_for", lambda *_: look.too_large), patch.object(finite, "known_at_once", lambda _: False)]

    def patches() -> list[AbstractContextManager[Any]]:
        return [
            patch.object(select, "kernel_for", lambda *_: kernel),
            *launch_patches(fused, "page_kernel", launches, with_triton),
            patch.object(layout, "backend_for", lambda device, _: NullDevice(device)) if stage else nullcontext(),
            *([] if cpu_check else gpu_check()),
        ]

    return Subject(optimizer.step, params, launches, patches, lambda: optimizer.memory_report().pages, gradients)


def flashoptim(layers: int, *, with_triton: bool = False, gradients: str = "new") -> Subject:
    """flashoptim's own step, its kernel's launch stubbed; how it is made on a CPU is at the head of this file.

    Args:
        with_triton: replace only the driver's part of a launch, and the number of multiprocessors, which sizes the grid.
        gradients: of each step; see `Subject`.
    """
    import flashoptim.optimizers as peer

    params = lora_parameters(layers)
    with patch.object(torch.get_device_module("cuda"), "is_available", lambda: True):
        optimizer = peer.FlashAdamW(params)
    for param in params:
        for name, spec in optimizer.quantized_state_spec.items():
            state = peer._MaybeQuantizedTensor(None, signed=spec.signed, sqrt=spec.sqrt, softsign=spec.softsign)
            codes = torch.zeros_like(param, dtype=torch.int8 if spec.signed else torch.uint8)
            scales = torch.zeros(-(-param.numel() // 32), dtype=torch.float16)
            state.load_state_dict({f"{name}::quantized": codes, f"{name}::scales": scales}, name)
            optimizer.state[param][name] = state
    launches = Launches(looks=Launches())

    def patches() -> list[AbstractContextManager[Any]]:
        return [*launch_patches(peer, "_triton_adam_kernel", launches, with_triton), patch.object(peer, "_get_sm_count", lambda *_: 132)]

    return Subject(optimizer.step, params, launches, patches, gradients=gradients)


def wrapping(layers: int) -> Subject:
    """Nothing but asking for every gradient straight behind a backward pass, which has Python make an object for each."""
    params = lora_parameters(layers)
    return Subject(lambda: [param.grad for param in params], params, Launches(looks=Launches()), list, gradients="fresh")


def measure(rounds: int, inner: int, layers: int) -> tuple[Report, list[str]]:
    """Time everything; the report, and the peers that are missing."""
    report = Report("host-overhead", cpu_name())
    add_load(report)
    base = f"lora{14 * layers}"
    subjects = {
        (base, "ours"): ours(layers),
        **{(f"{base}/{case}", "ours"): ours(layers, gradients=gradients) for case, gradients in OTHER_GRADIENTS.items()},
        (f"{base}/nonfinite=off", "ours"): ours(layers, nonfinite="off"),
        (f"{base}/null_kernel", "ours"): ours(layers, null_kernel=True),
        (f"{base}/null_kernel/nonfinite=off", "ours"): ours(layers, null_kernel=True, nonfinite="off"),
        (f"{base}/page_bytes={MULTIPLE_PAGES}", "ours"): ours(layers, stage=True, paged=True, page_bytes=MULTIPLE_PAGES),
        (f"{base}/cpu_check", "ours"): ours(layers, cpu_check=True),
        (f"{base}/triton", "ours"): ours(layers, with_triton=True),
    }
    subjects[f"{base}/fresh_gradients", "wrapping"] = wrapping(layers)
    present, missing = available(["flashoptim"])
    if present:
        subjects[base, "flashoptim"] = flashoptim(layers)
        for case, gradients in OTHER_GRADIENTS.items():
            subjects[f"{base}/{case}", "flashoptim"] = flashoptim(layers, gradients=gradients)
        subjects[f"{base}/triton", "flashoptim"] = flashoptim(layers, with_triton=True)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # another thread's time is not the host thread's
    try:
        turns = {
            key: Turn(subject.counted, rounds, inner, subject.around, prepare=subject.renew, clock=time.thread_time)
            for key, subject in subjects.items()
        }
        round_robin(list(turns.values()))
    finally:
        torch.set_num_threads(before)
    for (case, name), subject in subjects.items():
        turn = turns[case, name]
        report.rows.append(Row.timing(case, name, "ms_per_step", [1e3 * s for s in turn.seconds], "ms"))
        report.add(case, name, "launches_per_step", subject.launches.count / subject.steps)
        report.add(case, name, "looks_per_step", subject.launches.looks.count / subject.steps)
        if subject.pages is not None:
            report.add(case, name, "pages", subject.pages())
            if present:
                theirs = turns[case if (case, "flashoptim") in turns else base, "flashoptim"]
                add_ratio(report, case, name, "ratio_to_flashoptim", turn, theirs)
    return report, missing
