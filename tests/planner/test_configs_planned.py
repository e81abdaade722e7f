"""Every recipe's YAML is planned and built on the meta device; what its head says it needs is what the planner says, and it fits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import ROOT
from torch import nn

from flashoptim_hf import cli_plan
from flashoptim_hf.paging.plan import parse_bytes
from flashoptim_hf.planner import memory, shapes, weights
from flashoptim_hf.planner.setup import Setup
from flashoptim_hf.planner.shapes import ModelShape

CONFIGS = ROOT / "configs"
FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "accelerate")
STAND_INS = {".demo/model": "SmolLM2-135M"}
"""The demo's model is made by a script; its sizes are known without it."""


def planned(path: Path) -> tuple[Any, ModelShape, Setup]:
    """The config of a YAML file's model, its shape, and the setup."""
    values = cli_plan.from_recipe(path)
    name = values.pop("model")
    config, source = shapes.read_config(STAND_INS.get(name, name))
    assert "published" in source, f"{name} has no file in configs/architectures"
    return config, shapes.shape_of(config, source), cli_plan.make_setup(values)


def head(path: Path) -> str:
    """The comment that a file opens with, as running text."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def build(config: Any, setup: Setup) -> nn.Module:
    """The model as the recipe makes it, on the meta device, by the packages that make it."""
    model = shapes.meta_model(config, setup.dtype)
    if setup.full:
        return model
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig
    from transformers.integrations import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=setup.double_quant)
    model = replace_with_bnb_linear(model, get_keys_to_not_convert(model), kind)
    model.is_loaded_in_4bit = True
    adapter = LoraConfig(r=setup.lora_r, target_modules=setup.lora_targets, task_type="CAUSAL_LM")
    return get_peft_model(model, adapter, low_cpu_mem_usage=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_planned_built_and_as_its_head_says(path: Path) -> None:
    config, shape, setup = planned(path)
    plan = memory.plan(shape, setup)
    text = head(path)
    assert re.search(rf"Needs, as planned[^:]*: {re.escape(plan.needs)}\.", text), f"the planner says: Needs, as planned: {plan.needs}."
    room = re.search(r"_(?:\d+x)?(\d+)gb$", path.stem)
    if room:
        assert memory.verdict(plan.device, parse_bytes(f"{room[1]}GiB")) == memory.FITS
        ram = re.search(r"--ram ([\w.]+)", text)
        assert ram
        assert memory.verdict(plan.host_total, parse_bytes(ram[1])) == memory.FITS
        assert f"--gpu {room[1]}GiB" in text

    model = build(config, setup)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(tensor.numel for tensor in weights.count(shape, whole(setup)).trained)
    assert all(p.device.type == "meta" for p in model.parameters())
    if setup.load_in_4bit:
        import bitsandbytes as bnb

        quantized = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, bnb.nn.Linear4bit))
        assert quantized == sum(weight.numel for weight in shape.weights if shape.quantized(weight))


def whole(setup: Setup) -> Setup:
    """The same without sharding."""
    return replace(setup, ranks=1, ranks_per_host=1, fsdp=False, offload=False)


def test_there_are_the_configs_that_are_promised() -> None:
    names = {path.stem for path in FILES}
    assert {"smollm2-135m_demo", "qwen3-0.6b_6gb", "qwen3-4b_8gb", "llama-3.1-8b_12gb", "llama-3.1-8b_24gb", "qwen3-32b_24gb"} <= names
    assert {"qwen3-32b_48gb", "llama-3.3-70b_48gb", "llama-3.3-70b_2x24gb", "llama-3.2-1b_12gb", "llama-3.2-3b_16gb"} <= names


COUNTS = {
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.3-70B": 70_553_706_496,
}
"""Parameters, as the models' pages on the hub count them."""


@pytest.mark.parametrize("path", sorted((CONFIGS / "architectures").iterdir()), ids=lambda path: path.stem)
def test_architectures_hold_sizes_alone_and_the_right_ones(path: Path) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    assert path.suffix == ".json"
    assert set(values) == {
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "tie_word_embeddings",
    }
    assert shapes.shape_of(*shapes.read_config(path.stem)).num_params == COUNTS[path.stem]


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-Instruct", "unsloth/llama-3.1-8b-instruct-bnb-4bit", "Llama-3.1-8B"])
def test_published_sizes_are_found_by_name(name: str) -> None:
    assert shapes.read_config(name)[1].endswith("Llama-3.1-8B.json")


def test_meta_takes_no_memory() -> None:
    assert shapes.meta_model(shapes.read_config("Llama-3.3-70B")[0]).get_input_embeddings().weight.device == torch.device("meta")
