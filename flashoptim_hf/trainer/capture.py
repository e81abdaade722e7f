"""Gradients of a run, written to a file that `flashoptim-hf bench fidelity --gradients FILE` reads.

What a step adds goes to the disk at once, so that memory is one row for each tensor, however long the run. While it lasts, the rows lie in
a plain file beside the target; the safetensors file, whose header needs the number of steps, is written when training ends. A run that dies
leaves the rows, and no safetensors file.
"""

# ruff: noqa: ARG002  (the signatures of the events are those of transformers)

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments
from transformers.utils import logging

from ..errors import ConfigurationError

logger = logging.get_logger(__name__)


class GradientCapture(TrainerCallback):
    """Keeps the gradients that the optimizer sees: after accumulation and clipping, before the step. Works with any optimizer and Trainer.

        trainer.add_callback(GradientCapture("gradients.safetensors", tensors=["*lora_A*"], steps=range(1, 121)))

    Each tensor of the file is fp32 [steps, elements]: consecutive elements from the middle of one parameter's flattened gradient. Steps
    where a gradient is missing or not finite are left out for all tensors; with `gradient_release` all are missing. In several processes
    the first one captures; sharded gradients are captured as far as they lie there. fp16 gradients that are not clipped carry the scale of
    the loss.

    Args:
        file: the safetensors file, in a folder that exists or can be made; an existing file is replaced when training ends.
        tensors: names of parameters, or patterns with * and ?. None (default): the largest parameter of each kind that is trained, where
            parameters whose names differ in numbers only are of one kind; at most 12.
        steps: optimizer steps, counted from 1 as the Trainer does. Default: the first 120.
        elements: most elements kept of a tensor. Default 2048, a megabyte for each tensor in 128 steps.

    Raises:
        ConfigurationError: when training begins: a name or pattern that no trained parameter has; a step or size below 1.
    """

    def __init__(
        self, file: str | Path, tensors: Sequence[str] | None = None, steps: Iterable[int] = range(1, 121), elements: int = 2048
    ) -> None:
        self.file = Path(file)
        self.patterns = None if tensors is None else [tensors] if isinstance(tensors, str) else list(tensors)
        # a range may reach far beyond the last step
        self.steps: range | frozenset[int] = steps if isinstance(steps, range) else frozenset(steps)
        self.elements = elements
        first = min(self.steps[0], self.steps[-1]) if isinstance(self.steps, range) and self.steps else min(self.steps, default=0)
        if elements < 1 or first < 1:
            raise ConfigurationError(f"GradientCapture: elements={elements} and steps from {first} must be 1 or more, and steps not empty.")
        self.kept = 0
        self.left_out = 0
        self._params: dict[str, Tensor] = {}
        self._rows: Any = None

    @property
    def part(self) -> Path:
        """Where rows lie during the run: fp32, one step after the other, in it one tensor after the other."""
        return self.file.with_name(self.file.name + ".rows")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        model = kwargs.get("model")
        if model is None or not state.is_world_process_zero:
            return
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._params = {name: trained[name] for name in choose({name: p.numel() for name, p in trained.items()}, self.patterns)}
        self.kept = self.left_out = 0
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._rows = self.part.open("wb")

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # the step that is about to be made; `global_step` counts those that are over
        if self._rows is None or state.global_step + 1 not in self.steps:
            return
        row = [middle(param.grad, self.elements) for param in self._params.values() if param.grad is not None]
        if len(row) < len(self._params) or not all(bool(torch.isfinite(part).all()) for part in row):
            self.left_out += 1
            return
        for part in row:
            self._rows.write(part.numpy().tobytes())
        self._rows.flush()
        self.kept += 1

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._rows is None:
            return
        self._rows.close()
        self._rows = None
        sizes = {name: middle(param, self.elements).numel() for name, param in self._params.items()}
        self._params = {}
        said = f"{self.left_out} steps were left out, since a gradient was missing or not finite" if self.left_out else "none was left out"
        if not self.kept:
            self.part.unlink()
            logger.warning(f"GradientCapture: no gradients for {self.file}; {said}.")
            return
        write(self.part, self.file, sizes, self.kept)
        size = os.path.getsize(self.file)
        logger.warning(
            f"GradientCapture: {self.file} has {self.kept} steps of {len(sizes)} tensors, {sum(sizes.values())} elements a step, "
            f"{size / 2**20:.1f} MiB; {said}. Judge codecs on it with: flashoptim-hf bench fidelity --gradients {self.file}"
        )


def choose(sizes: Mapping[str, int], patterns: Sequence[str] | None, most: int = 12) -> list[str]:
    """Names of the tensors to keep, in the order of `sizes`, which has the elements of every trained parameter; see `GradientCapture`.

    Raises:
        ConfigurationError: a pattern that fits no name, or nothing to choose from.
    """
    if not sizes:
        raise ConfigurationError("GradientCapture: the model has no parameters that are trained.")
    if patterns is None:
        kinds: dict[str, str] = {}
        for name, numel in sizes.items():
            kind = ".".join("#" if part.isdigit() else part for part in name.split("."))
            if kind not in kinds or numel > sizes[kinds[kind]]:
                kinds[kind] = name
        largest = set(sorted(kinds.values(), key=lambda name: -sizes[name])[:most])
        return [name for name in sizes if name in largest]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in sizes):
            some = ", ".join(list(sizes)[:3])
            raise ConfigurationError(
                f"GradientCapture: tensors={pattern!r} fits none of the {len(sizes)} trained parameters ({some}, ...)."
            )
    return [name for name in sizes if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def middle(tensor: Tensor, elements: int) -> Tensor:
    """Up to `elements` consecutive elements from the middle of a flattened tensor (of a DTensor, of what lies here), fp32 on the host."""
    local = getattr(tensor, "to_local", None)
    flat = (tensor if local is None else local()).detach().reshape(-1)
    start = max(0, flat.numel() // 2 - elements // 2)
    return flat[start : start + elements].float().cpu()


def write(rows: Path, file: Path, sizes: Mapping[str, int], steps: int) -> None:
    """Rows as `GradientCapture.part` has them to a safetensors file of one [steps, elements] tensor for each name; `rows` is removed.

    Tensors are written one after the other, each from its places in the rows, so that one of them is in memory at a time.
    """
    header, offset = {}, 0
    for name, numel in sizes.items():
        header[name] = {"dtype": "F32", "shape": [steps, numel], "data_offsets": [offset, offset + 4 * steps * numel]}
        offset += 4 * steps * numel
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole, part, begin = 4 * sum(sizes.values()), file.with_name(file.name + ".part"), 0
    with rows.open("rb") as source, part.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        for numel in sizes.values():
            for step in range(steps):
                source.seek(step * whole + begin)
                target.write(source.read(4 * numel))
            begin += 4 * numel
    part.replace(file)
    rows.unlink()
