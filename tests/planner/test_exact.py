"""The planner against real loads on the CPU: weights, adapters, gradients and optimizer state of small models and of the demo's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import ARCHITECTURES, ROOT, small_config
from torch import nn

from flashoptim_hf.optim import layout
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.paging.simulated import SimulatedBackend
from flashoptim_hf.planner import memory, states, weights
from flashoptim_hf.planner.setup import PEERS, Setup
from flashoptim_hf.planner.shapes import read_config, shape_of

DEMO = ROOT / ".demo" / "model"


def storages(tensors: list[torch.Tensor]) -> int:
    """Bytes of distinct tensors."""
    return sum({t.data_ptr() if t.numel() else -i: t.numel() * t.itemsize for i, t in enumerate(tensors, 1)}.values())


def held_by_layer(weight: Any) -> list[torch.Tensor]:
    """What bitsandbytes keeps with a 4-bit weight."""
    state = weight.quant_state
    nested = [state.state2.absmax, state.state2.code, state.offset] if state.nested else []
    return [state.absmax, state.code, *nested]


def base_bytes(model: nn.Module) -> int:
    """Everything that is not trained: frozen weights, constants of 4-bit weights, buffers."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    constants = [t for p in frozen if hasattr(p, "quant_state") for t in held_by_layer(p)]
    return storages([p.data for p in frozen]) + storages(constants) + storages(list(model.buffers()))


def load(config: Any, folder: Path, *arguments: str) -> nn.Module:
    """A random model of the config, saved and loaded as recipes/qlora_sft.py does it."""
    import qlora_sft

    torch.manual_seed(0)
    if not (folder / "config.json").exists():
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    given = ["--dataset", "-", "--model_name_or_path", str(folder), "--use_cpu", "true", *arguments]
    _, args, model_args = qlora_sft.make_parser().parse_args_and_config(given)
    model = qlora_sft.load_model(model_args, args, "default")
    for param in model.parameters():
        if param.requires_grad:
            param.data = param.data.to(torch.bfloat16)  # as trl's SFTTrainer does with adapters on 4-bit weights
    return model


def step(model: nn.Module, vocab: int, **options: Any) -> FlashAdamW:
    """One step on a few tokens."""
    optimizer = FlashAdamW(trainer_groups(model), lr=1e-4, **options)
    tokens = torch.randint(1, vocab, (1, 8), generator=torch.Generator().manual_seed(0))
    model.train()
    model(input_ids=tokens, labels=tokens).loss.backward()
    for param in model.parameters():
        if param.requires_grad and param.grad is None:
            param.grad = torch.zeros_like(param)  # an expert that no token reached
    optimizer.step()
    return optimizer


def trainer_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The Trainer's groups: what decays, then biases and norms."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def same_state(optimizer: FlashAdamW, trained: tuple[states.Trainable, ...], options: dict[str, Any], **where: bool) -> states.StatePlan:
    """Every plane, and host and device memory, to the byte."""
    planned = states.ours(trained, states.rule_of("flashoptim_adamw"), options, **where)
    report = optimizer.memory_report()
    assert dict(planned.planes) == report.planes
    assert planned.used == report.state_bytes
    assert planned.host == report.host_bytes
    if report.device_bytes is not None:
        assert (planned.staging, planned.device + planned.staging) == (report.staging_bytes, report.device_bytes)
    assert planned.pages == report.pages
    return planned


def check(model: nn.Module, planned: weights.Weights) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    assert planned.base == base_bytes(model)
    assert planned.trained_bytes == storages([p.data for p in trained])
    assert planned.gradients == sum(p.grad.numel() * p.grad.itemsize for p in trained)
    assert sum(t.numel for t in planned.trained) == sum(p.numel() for p in trained)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_qlora(name: str, tmp_path: Path, options: dict[str, Any]) -> None:
    config = small_config(name)
    targets = ("q_proj", "v_proj") if "moe" in name else "all-linear"
    chosen = ["--lora_target_modules", *([targets] if isinstance(targets, str) else targets)]
    model = load(config, tmp_path / "model", "--lora_r", "5", *chosen)
    shape = shape_of(config, name)
    planned = weights.count(shape, Setup(lora_r=5, lora_targets=targets, options=options))
    optimizer = step(model, config.vocab_size, paged=True)
    check(model, planned)
    assert planned.quantized
    assert planned.trained
    same_state(optimizer, planned.trained, options, gpu=False)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_full(name: str, options: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    config = small_config(name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shape = shape_of(config, name)
    setup = Setup(full=True, load_in_4bit=False, options=options)
    planned = weights.count(shape, setup)
    optimizer = step(model, config.vocab_size, paged=True)
    check(model, planned)
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    same_state(optimizer, planned.trained, options, gpu=False)


@pytest.mark.parametrize("double", [True, False])
def test_targets_and_single_quantization(double: bool, tmp_path: Path, options: dict[str, Any]) -> None:
    config = small_config("qwen2")
    chosen = ("--lora_target_modules", "q_proj", "down_proj", "--use_bnb_nested_quant", str(double).lower())
    model = load(config, tmp_path / "model", *chosen)
    setup = Setup(lora_targets=("q_proj", "down_proj"), double_quant=double, options=options)
    planned = weights.count(shape_of(config, "qwen2"), setup)
    step(model, config.vocab_size)
    check(model, planned)


OPTIONS = {
    "pages": {"page_bytes": 8192},
    "a quarter stays": {"page_bytes": 8192, "device_budget_bytes": 0.25},
    "all stays": {"page_bytes": 8192, "transport": "resident"},
    "on the device": {"paged": False},
    "32-bit masters": {"page_bytes": 8192, "master_bits": 32, "codec": "softsign"},
    "curves": {"codec": "learned", "page_bytes": 8192, "device_budget_bytes": 0.25},
    "curves on the device": {"codec": "learned", "paged": False},
    "fp32": {"codec": "none", "master_bits": None, "page_bytes": 16384},
}


class Pinning(SimulatedBackend):
    """A device whose host memory is pinned as far as the planning of it goes; there is nothing to pin for here."""

    def _pin(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS.keys())
def test_state_on_a_simulated_device(
    changes: dict[str, Any], pinned: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(layout, "backend_for", lambda _device, seed: Pinning(seed, pin=pinned))
    config = small_config("llama, tied, GQA")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    planned = weights.count(shape_of(config, ""), Setup(full=True, load_in_4bit=False, options=options))
    given = {"paged": True, **changes}
    optimizer = step(model, config.vocab_size, simulate=0, **given)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()  # the second: the first one also brings what stays
    options = {**options, **given}
    travels = same_state(optimizer, planned.trained, options, pinned=pinned).travels
    report = optimizer.memory_report()
    assert (travels, travels) == (report.page_in_bytes, report.page_out_bytes)


def peer_bytes(name: str, model: nn.Module) -> int:
    """State of another optimizer after a step; bitsandbytes' as it makes it before one, which is the same."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw_torch":
        optimizer: Any = torch.optim.AdamW(trained)
    elif name == "adafactor":
        from transformers.optimization import Adafactor

        optimizer = Adafactor(trained, lr=1e-3, scale_parameter=False, relative_step=False)
    else:
        import bitsandbytes as bnb

        optimizer = bnb.optim.AdamW(trained, optim_bits=8, is_paged=name.startswith("paged"))
        for number, param in enumerate(trained):
            optimizer.init_state(optimizer.param_groups[0], param, 0, number)
    if "8bit" not in name:
        for param in trained:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    return storages([value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)])


@pytest.mark.parametrize("name", PEERS)
def test_peers(name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = small_config("llama, biases", vocab_size=2503)  # an embedding above bitsandbytes' limit for pages
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    planned = weights.count(shape_of(config, ""), Setup(full=True, load_in_4bit=False, optimizer=name))
    found = states.peer(name, planned.trained)
    assert found.used == peer_bytes(name, model)
    assert found.device + found.host == found.used
    assert bool(found.host) == (name == "paged_adamw_8bit")


@pytest.mark.skipif(not (DEMO / "config.json").is_file(), reason="the demo's model is not there: python recipes/demo_assets.py makes it")
def test_the_demo_model_through_the_recipe(options: dict[str, Any]) -> None:
    """A real load in NF4 and one step; and the published sizes are those of the real model."""
    config, source = read_config(str(DEMO))
    model = load(config, DEMO, "--lora_r", "16")
    shape = shape_of(config, source)
    planned = memory.plan(shape, Setup(options=options))
    optimizer = step(model, config.vocab_size, paged=True)
    check(model, planned.weights)
    same_state(optimizer, planned.weights.trained, options, gpu=False)
    published, where = read_config("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "published" in where
    assert shape_of(published, where).weights == shape.weights
