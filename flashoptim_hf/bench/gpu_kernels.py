"""GPU bench, correctness: the fused kernel against the readable path, and state that travels against state that stays."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..codecs.base import get_codec, known_codecs
from ..errors import ConfigurationError
from ..optim import options as optim_options
from ..optim.adamw import RULE, FlashAdamW
from .gpu_machine import Machine

SIZES = (1, 63, 64, 65, 1000, 4097, 70_001)
"""Below, at and above a group, a tile and a block; the last spans several blocks and ends in the middle of a group."""
SHIFT = 3
"""One more parameter begins this many elements into its memory, so that its address is on no 16-byte boundary."""
WEIGHTS: dict[str, tuple[torch.dtype, int | None]] = {
    "bf16+24": (torch.bfloat16, 24),
    "fp32": (torch.float32, None),
    "bf16+32": (torch.bfloat16, 32),
    "fp16+24": (torch.float16, 24),
    "fp16+32": (torch.float16, 32),
    "bf16": (torch.bfloat16, None),
}
MAIN = ("bf16+24", "fp32")
"""Formats in which every codec is compared; "log" is in all."""
LR = 1e-3
STEPS_BEFORE = 3
"""Steps of the readable path that make the state from which both do one step."""
MOST_CODES = 0.01
"""Share of codes that may differ, by one: two roundings of the same number differ where it lies between two codes."""
WEIGHT_ROUNDING = {"bf16+24": 2.0**-14, "bf16+32": 2.0**-21, "fp32": 2.0**-21, "fp16+24": 2.0**-17, "fp16+32": 2.0**-21, "bf16": 2.0**-7}
"""How far two weights may be apart, relative to the weight: one step of the format, and a little."""
UPDATE_ROUNDING = 1e-3
"""And relative to lr: the device's reciprocal and square root are approximate, to about 1e-6."""
FEEDBACK = 0.2
"""And, with codecs that feed errors back, where codes differ: what one code of u is worth at most."""
PATH_SIZES = ((300, 257), (64, 64), (7,), (100_000,))
PATH_PAGE = "64KiB"
PATH_STEPS = 20


def compare(machine: Machine) -> None:
    """One step of the kernel that serves the device and one of the readable path, from the same state with the same gradients."""
    cases = [("log", name) for name in MAIN]
    cases += [("log", name) for name in WEIGHTS if name not in MAIN]
    cases += [(codec, name) for codec in codecs() if codec != "log" for name in MAIN]
    for codec, name in cases:
        case = f"adamw/{codec}/{name}"
        machine.need(case)
        pair = _pair(machine, codec, name)
        _one_step(machine, case, name, *pair)
        if codec == "log" and name in MAIN:
            _special_arguments(machine, case, codec, name)
        machine.free()


def codecs() -> list[str]:
    """The codecs that hold AdamW's states."""
    found = []
    for name in known_codecs():
        try:
            get_codec(name, RULE.states, True)
        except ConfigurationError:
            continue
        found.append(name)
    return found


def _parameters(machine: Machine, name: str) -> list[torch.nn.Parameter]:
    """Parameters of all sizes, the same at each call; the last is not aligned."""
    generator = torch.Generator().manual_seed(1)
    dtype = WEIGHTS[name][0]
    made = [torch.nn.Parameter((torch.randn(size, generator=generator) * 0.02).to(machine.device, dtype)) for size in SIZES]
    shifted = (torch.randn(5000 + SHIFT, generator=generator) * 0.02).to(machine.device, dtype)[SHIFT:]
    return [*made, torch.nn.Parameter(shifted)]


def _set_gradients(params: Sequence[torch.nn.Parameter], step: int, factor: float = 1.0) -> None:
    """Gradients over five decades, a few of them 0; the same for the same step."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        size = torch.exp(2 * torch.randn(param.shape, generator=generator))
        grad = 1e-3 * size.clamp(max=100) * torch.randn(param.shape, generator=generator)
        grad[torch.rand(param.shape, generator=generator) < 0.05] = 0
        param.grad = (grad.to(param.dtype) * factor).to(param.device)


def _optimizer(machine: Machine, codec: str, name: str, **options: Any) -> FlashAdamW:
    return machine.ours(_parameters(machine, name), lr=LR, codec=codec, master_bits=WEIGHTS[name][1], **options)


def _params(optimizer: FlashAdamW) -> list[torch.nn.Parameter]:
    return list(optimizer.param_groups[0]["params"])


def _follow(optimizer: FlashAdamW, source: FlashAdamW) -> FlashAdamW:
    """Give an optimizer the weights and the state of another."""
    with torch.no_grad():
        for param, other in zip(_params(optimizer), _params(source), strict=True):
            param.copy_(other)
    optimizer.load_state_dict(source.state_dict())
    return optimizer


def _pair(machine: Machine, codec: str, name: str) -> tuple[FlashAdamW, FlashAdamW]:
    """(readable path after a few steps, the device's kernel in the same state)."""
    readable = _optimizer(machine, codec, name, kernel="eager")
    for step in range(STEPS_BEFORE):
        _set_gradients(_params(readable), step)
        readable.step()
    return readable, _follow(_optimizer(machine, codec, name), readable)


def _one_step(machine: Machine, case: str, name: str, readable: FlashAdamW, fast: FlashAdamW) -> None:
    """Step both and compare codes, group constants and master weights."""
    for optimizer in (readable, fast):
        _set_gradients(_params(optimizer), STEPS_BEFORE)
        optimizer.step()
    feeds_back = get_codec(readable.param_groups[0]["codec"], RULE.states).feeds_back
    most, different, codes, constants, weights, excess = 0, 0, 0, 0.0, 0.0, 0.0
    for a, b in zip(_params(readable), _params(fast), strict=True):
        # m is stored relative to what v decodes to, and to the largest of its group: where v fell to another side of a rounding boundary,
        # the codes of m in that group say something else
        same = torch.ones(a.numel(), dtype=torch.bool, device=a.device)
        for key, plane in reversed(readable.state[a].items()):
            other = fast.state[b][key]
            if key in ("step", "correction"):  # a correction is judged with its weight, since the two carry over
                continue
            if plane.is_floating_point():
                error = (plane - other).abs() / plane.abs().clamp(min=1e-30)
                constants = max(constants, float(error.max()))
            else:
                apart = (plane.int() - other.int()).abs().flatten()
                different, codes = different + int((apart > 0).sum()), codes + apart.numel()
                if len(apart) == len(same):
                    most, same = max(most, int((apart * same.to(apart.device)).max())), same & _equal_groups(apart).to(same.device)
                else:
                    most = max(most, int(apart.max()))
        first, second = (optimizer.decoded_state(p)["master_weight"].double() for optimizer, p in ((readable, a), (fast, b)))
        apart = (first - second).abs().flatten()
        # what rounding took from m is made up for in the weight, so that another code is another weight
        fed_back = FEEDBACK * LR * (~same).to(apart) if feeds_back else 0
        weights = max(weights, float(apart.max()) / LR)
        excess = max(excess, float((apart - WEIGHT_ROUNDING[name] * first.abs().flatten() - UPDATE_ROUNDING * LR - fed_back).max()))
    share = different / max(codes, 1)
    machine.add(case, "ours", "largest_code_difference", most)
    machine.add(case, "ours", "share_of_codes_that_differ", share)
    machine.add(case, "ours", "largest_constant_error", constants)
    machine.add(case, "ours", "largest_weight_difference", weights, "lr")
    machine.check(case, "codes_agree", most <= 1 and share <= MOST_CODES)
    machine.check(case, "weights_agree", excess <= 0)


def _equal_groups(apart: Tensor, group: int = 64) -> Tensor:
    """For each element, whether all codes of its group are equal; no codec's group is larger."""
    padded = torch.nn.functional.pad(apart, (0, -len(apart) % group)).view(-1, group)
    return (padded.amax(dim=1) == 0).repeat_interleave(group)[: len(apart)]


def snapshot(optimizer: FlashAdamW) -> list[Tensor]:
    """Copies of all weights, planes and step counts, on the host."""
    optimizer.synchronize()
    found = []
    for param in _params(optimizer):
        found += [param.detach().cpu().clone(), *(value.cpu().clone() for value in optimizer.state[param].values())]
    return found


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether all bits are equal."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)) for a, b in zip(first, second, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def _special_arguments(machine: Machine, case: str, codec: str, name: str) -> None:
    """Steps that must change nothing, a scale of gradients, and a learning rate on the device."""
    readable, _ = _pair(machine, codec, name)

    def stepped(factor: float = 1.0, **found: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        optimizer = _follow(_optimizer(machine, codec, name), readable)
        before = snapshot(optimizer)
        _set_gradients(_params(optimizer), STEPS_BEFORE, factor)
        if "lr" in found:
            optimizer.param_groups[0]["lr"] = found.pop("lr")
        for key, value in found.items():
            setattr(optimizer, key, value)
        if math.isnan(factor):
            for param in _params(optimizer)[:-1]:
                param.grad = torch.zeros_like(param)  # one parameter's NaN must stop the others too
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a gradient held NaN", RuntimeWarning)  # it was put there
            optimizer.step()
            return before, snapshot(optimizer)

    def number(value: float) -> Tensor:
        return torch.tensor(value, device=machine.device)

    _, plain = stepped()
    before, after = stepped(factor=float("nan"))
    machine.check(case, "nan_changes_nothing", same(before, after))
    before, after = stepped(found_inf=number(1.0), grad_scale=number(1.0))
    machine.check(case, "found_inf_changes_nothing", same(before, after))
    _, after = stepped(factor=1024.0, found_inf=number(0.0), grad_scale=number(1024.0))
    machine.check(case, "scaled_gradients_are_unscaled", same(plain, after))
    _, after = stepped(lr=number(float(np.float32(LR))))
    machine.check(case, "lr_tensor_is_lr", same(plain, after))


def paths(machine: Machine) -> None:
    """Twenty steps with resident state, with paged state on tiny pages, and by every other transport there is: all bits must agree."""
    for name in MAIN:
        machine.need(f"paths/{name}")
        expected, _ = _walk(machine, name, {})
        for transport in optim_options.CHOICES["transport"]:
            found, pages = _walk(machine, name, {"paged": True, "page_bytes": PATH_PAGE, "transport": transport})
            case = f"paths/{name}/{transport}"
            machine.add(case, "ours", "pages", pages)
            machine.check(case, "equals_resident", same(expected, found))


def _walk(machine: Machine, name: str, options: dict[str, Any]) -> tuple[list[Tensor], int]:
    """The end of a short run, and its pages."""
    generator = torch.Generator().manual_seed(2)
    dtype, bits = WEIGHTS[name]
    params = [torch.nn.Parameter((torch.randn(size, generator=generator) * 0.02).to(machine.device, dtype)) for size in PATH_SIZES]
    optimizer = machine.ours(params, lr=LR, master_bits=bits, **options)
    for step in range(PATH_STEPS):
        _set_gradients(params, step)
        optimizer.step()
    return snapshot(optimizer), optimizer.memory_report().pages
