"""Activations against measurements: what autograd keeps, and the most that is alive at once in a step, lie in the planned ranges."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import ARCHITECTURES, small_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.planner.activations import activations
from flashoptim_hf.planner.moments import moments
from flashoptim_hf.planner.setup import Setup, largest
from flashoptim_hf.planner.shapes import shape_of
from flashoptim_hf.planner.states import StatePlan
from flashoptim_hf.planner.weights import count

BATCH, LENGTH, RANK = 2, 128, 8


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages that operations make and that are still there, but for those of some tensors."""

    def __init__(self, *others: torch.Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in others}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.known:
                    self.known[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, key)
        return out

    def _gone(self, key: int) -> None:
        self.now -= self.known.pop(key)


def build(name: str, full: bool, checkpointing: bool, **changes: Any) -> tuple[Any, nn.Module]:
    """A small random model, as it is trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 500, "head_dim": 16}
    config = small_config(name, **{**sizes, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if not full:
        wrapped = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"))
        for param in wrapped.parameters():
            if param.requires_grad:
                param.data = param.data.to(torch.bfloat16)
        model = wrapped.get_base_model()
        model.enable_input_require_grads()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return config, model.train()


def setup(full: bool, checkpointing: bool) -> Setup:
    return Setup(full=full, load_in_4bit=not full, lora_r=RANK, batch=BATCH, seq_len=LENGTH, checkpointing=checkpointing, fused_head=False)


def kept_bytes(model: nn.Module, tokens: torch.Tensor) -> int:
    """What autograd keeps after the layers' forward pass, weights aside."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    assert hidden.requires_grad  # and so the graph is there
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


CASES = [
    (name, full, checkpointing)
    for name in ARCHITECTURES
    for full in (True, False)
    for checkpointing in (False, True)
    if full or "moe" not in name
]


@pytest.mark.parametrize(("name", "full", "checkpointing"), CASES)
def test_what_layers_keep(name: str, full: bool, checkpointing: bool) -> None:
    config, model = build(name, full, checkpointing)
    planned = activations(shape_of(config, name), setup(full, checkpointing)).kept
    found = kept_bytes(model, torch.randint(1, 500, (BATCH, LENGTH)))
    assert planned.low <= found <= planned.high
    assert planned.high < 2.5 * found, "a range that says nothing"


@pytest.mark.parametrize(("name", "full", "checkpointing"), CASES)
def test_the_most_of_a_step(name: str, full: bool, checkpointing: bool) -> None:
    """Forward and backward with transformers' own loss, gradients included."""
    config, model = build(name, full, checkpointing)
    chosen = setup(full, checkpointing)
    shape = shape_of(config, name)
    planned = largest(*moments(shape, count(shape, chosen), StatePlan(), activations(shape, chosen), chosen).values())
    tokens = torch.randint(1, 500, (BATCH, LENGTH))
    with Alive() as alive:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert planned.low <= alive.most <= planned.high


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("name", ["llama, tied, GQA", "mistral", "qwen3"])
def test_gradients_with_and_without_release(name: str, release: bool) -> None:
    """Whole steps with the optimizer, of a model whose gradients are most of it."""
    config, model = build(name, full=True, checkpointing=True, hidden_size=192, intermediate_size=512, num_hidden_layers=12)
    optimizer = FlashAdamW(model.parameters(), lr=1e-4, paged=True, gradient_release=release, page_bytes="64KiB")
    chosen = replace(setup(True, True), batch=1, seq_len=32, options={"gradient_release": release})
    shape = shape_of(config, name)
    weights = count(shape, chosen)
    planned = largest(*moments(shape, weights, StatePlan(), activations(shape, chosen), chosen).values())
    tokens = torch.randint(1, 500, (1, 32))
    for _ in range(2):  # the first step makes the state
        planes = [plane for state in optimizer.state.values() for plane in state.values() if isinstance(plane, torch.Tensor)]
        with Alive(*model.parameters(), *model.buffers(), *planes) as alive:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert planned.low <= alive.most <= planned.high
    assert (alive.most < 0.2 * weights.gradients) == release
