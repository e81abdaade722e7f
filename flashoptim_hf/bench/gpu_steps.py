"""GPU bench, speed of steps: resident state against a copy on the device, paged state against copies to and from the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from . import adamw_peers
from .gpu_machine import Machine
from .host_overhead import lora_parameters

LLAMA_1B = (128_256 * 2048, *16 * (2048 * 2048, 512 * 2048, 512 * 2048, 2048 * 2048, *3 * (8192 * 2048,)))
"""Elements of the matrices of Llama-3.2-1B, 1.24B in all."""
DRY_SIZES = (70_000, 20_000, 5000)
BYTES_PER_PARAM = 18
"""What the hungriest subject takes: fp32 weights, gradients and two moments, and room to make them."""
COPY_BYTES = 1 << 30
REPEATS, LORA_REPEATS = 10, 30
RESIDENT = ("torch_fused", "flashoptim", "bitsandbytes", "torchao")
PAGED = ("bitsandbytes_paged_8bit", "bitsandbytes_paged_32bit")


def copy_size(machine: Machine) -> int:
    """Bytes of the copies that bandwidth is measured with."""
    return 1 << 20 if machine.dry else min(COPY_BYTES, machine.free_bytes() // 8)


def device_bandwidth(machine: Machine) -> float:
    """Bytes per second read and written by a copy on the device."""
    nbytes = copy_size(machine)
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=machine.device) for _ in range(2))
    samples, _ = machine.time_ms(lambda: target.copy_(source), REPEATS)
    rates = [2 * nbytes / (1e6 * ms) for ms in samples]
    machine.timing("copy/device", "device", "bandwidth", rates, "GB/s")
    return _last(machine) * 1e9


def host_bandwidths(machine: Machine) -> tuple[float, float, float]:
    """Bytes per second to the device, from it, and each way when both go on at once, with pinned host memory."""
    nbytes = copy_size(machine)
    pinned = machine.api is not None
    homes = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    there = [torch.zeros(nbytes, dtype=torch.uint8, device=machine.device) for _ in range(2)]

    def into() -> None:
        there[0].copy_(homes[0], non_blocking=True)

    def out() -> None:
        homes[1].copy_(there[1], non_blocking=True)

    side: Any = machine.api.Stream(device=machine.device) if machine.api is not None else None

    def both() -> None:
        if machine.api is None:
            into()
            out()
            return
        current = machine.api.current_stream(machine.device)
        side.wait_stream(current)
        with machine.api.stream(side):
            out()
        into()
        current.wait_stream(side)

    found = []
    for name, function in (("to_device", into), ("from_device", out), ("each_way_at_once", both)):
        samples, _ = machine.time_ms(function, REPEATS)
        machine.timing(f"copy/{name}", "device", "bandwidth", [nbytes / (1e6 * ms) for ms in samples], "GB/s")
        found.append(_last(machine) * 1e9)
    return found[0], found[1], found[2]


def _last(machine: Machine) -> float:
    """The value of the last row."""
    return machine.report.rows[-1].value


def big_sizes(machine: Machine) -> tuple[int, ...]:
    """Elements of the tensors of the large case; scaled down, and noted, where device memory is short."""
    if machine.dry:
        return DRY_SIZES
    fits = 0.8 * machine.free_bytes() / BYTES_PER_PARAM
    share = min(1.0, fits / sum(LLAMA_1B))
    if share < 1:
        machine.note(f"the large case has {share * sum(LLAMA_1B) / 1e9:.2f}B parameters instead of {sum(LLAMA_1B) / 1e9:.2f}B: memory.")
    return tuple(max(64, int(size * share) // 64 * 64) for size in LLAMA_1B)


def big_parameters(machine: Machine, sizes: Sequence[int], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Random weights with gradients, made on the device."""
    made = []
    for size in sizes:
        param = torch.nn.Parameter(torch.randn(size, device=machine.device, dtype=dtype).mul_(0.02))
        param.grad = torch.randn_like(param).mul_(1e-3)
        made.append(param)
    return made


def resident(machine: Machine) -> None:
    """Steps with all state on the device: time, bandwidth by the bytes that the format has to move, and its share of a copy's bandwidth."""
    bandwidth = device_bandwidth(machine)
    sizes = big_sizes(machine)
    layers = 1 if machine.dry else 30

    def lora() -> list[torch.nn.Parameter]:
        return lora_parameters(layers, machine.device)

    def big(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
        return big_parameters(machine, sizes, dtype)

    large, small = f"resident/{sum(sizes) / 1e9:.2g}b", f"resident/lora{14 * layers}"
    peers = machine.peers(*RESIDENT)
    jobs: list[tuple[str, str, Callable[[], list[torch.nn.Parameter]], dict[str, Any]]] = [
        (f"{large}/bf16+24", "ours", big, {}),
        (f"{small}/bf16+24", "ours", lora, {}),
        (f"{small}/bf16+24/nonfinite=off", "ours", lora, {"nonfinite": "off"}),
        (f"{large}/bf16+24/nonfinite=off", "ours", big, {"nonfinite": "off"}),
        (f"{large}/bf16+32", "ours", big, {"master_bits": 32}),
        (f"{large}/fp32", "ours", lambda: big(torch.float32), {}),
        (f"{large}/fp32", "torch_fused", lambda: big(torch.float32), {}),
    ]
    jobs += [(f"{case}/bf16", peer, params, {}) for peer in peers for case, params in ((large, big), (small, lora))]
    for case, subject, params, options in jobs:
        machine.need(f"{case} with {subject}")
        repeats = LORA_REPEATS if case.startswith(small) else REPEATS
        time_step(machine, case, subject, params(), bandwidth, repeats, options)
        machine.free()


def time_step(
    machine: Machine,
    case: str,
    subject: str,
    params: list[torch.nn.Parameter],
    bandwidth: float,
    repeats: int,
    options: dict[str, Any],
) -> None:
    """Rows of one subject whose state is on the device. `bandwidth` in bytes per second."""
    optimizer = machine.make(subject, params, **options)
    samples, host = _timed(machine, subject, optimizer, repeats)
    machine.timing(case, subject, "ms_per_step", samples)
    median = _last(machine)
    machine.add(case, subject, "host_ms_per_step", host, "ms")
    state = adamw_peers.state_bytes(optimizer)
    # states and weights are read and written, gradients read
    moved = 2 * state + sum(3 * param.numel() * param.itemsize for param in params)
    machine.add(case, subject, "bytes_per_param", state / sum(param.numel() for param in params), "B")
    machine.add(case, subject, "bandwidth", moved / (1e6 * median), "GB/s")
    machine.add(case, subject, "share_of_copy_bandwidth", moved / (1e-3 * median) / bandwidth)


def _timed(machine: Machine, subject: str, optimizer: Optimizer, repeats: int) -> tuple[list[float], float]:
    """`Machine.time_ms` of the optimizer's step, with other work between the steps."""
    with adamw_peers.stance(subject, machine.device)():
        return machine.time_ms(optimizer.step, repeats, apart=True)


def paged(machine: Machine) -> None:
    """Steps with state in host memory, back to back, beside what the copies alone would take.

    bitsandbytes' paged optimizers use unified memory, which stays on the device as long as there is room, and here there is: what they take
    when memory is short is in the section `full`.
    """
    into, out, each_way = host_bandwidths(machine)
    sizes = big_sizes(machine)
    case = f"paged/{sum(sizes) / 1e9:.2g}b/bf16+24"
    for page_bytes in ("1MiB",) if machine.dry else ("32MiB", "64MiB", "16MiB"):
        machine.need(f"{case} with pages of {page_bytes}")
        params = big_parameters(machine, sizes, torch.bfloat16)
        optimizer = machine.ours(params, paged=True, page_bytes=page_bytes)
        samples, host = machine.time_ms(optimizer.step, REPEATS)
        report = optimizer.memory_report()
        name = f"{case}/page_bytes={page_bytes}"
        machine.timing(name, "ours", "ms_per_step", samples)
        seconds = _last(machine) / 1e3
        machine.add(name, "ours", "host_ms_per_step", host, "ms")
        machine.add(name, "ours", "bytes_per_step", report.page_in_bytes + report.page_out_bytes, "B")
        machine.add(name, "ours", "staging_bytes", report.staging_bytes, "B")
        machine.add(name, "ours", "pinned", float(bool(report.pinned)))
        floor = max(report.page_in_bytes / into, report.page_out_bytes / out, report.page_in_bytes / each_way)
        machine.add(name, "ours", "copy_time_share", floor / seconds)
        machine.check(name, "moves_all_state_once_each_way", report.page_in_bytes == report.page_out_bytes >= report.state_bytes)
        del params, optimizer
        machine.free()
    for subject in machine.peers(*PAGED):
        machine.need(f"{case} with {subject}")
        peer = machine.make(subject, big_parameters(machine, sizes, torch.bfloat16))
        samples, host = _timed(machine, subject, peer, REPEATS)
        machine.timing(case, subject, "ms_per_step", samples)
        machine.add(case, subject, "host_ms_per_step", host, "ms")
        del peer
        machine.free()
