"""Estimates for models as they come: odd vocabularies, grown ones, tied and untied, in 4 bits on disk; each against the real thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from flashoptim_hf import FlashAdamW, FlashLion, FlashSGD
from flashoptim_hf.cli import app
from flashoptim_hf.cli_plan import defaults, from_recipe
from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.planner import memory
from flashoptim_hf.planner.setup import Setup
from flashoptim_hf.planner.shapes import read_config, shape_of

OPTIMIZERS = {"flashoptim_paged_adamw": FlashAdamW, "flashoptim_paged_lion": FlashLion, "flashoptim_paged_sgd": FlashSGD}


def llama(rows: int, tied: bool = True) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=rows, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, tie_word_embeddings=tied
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("rows", "grown", "tied"), [(263, 263, True), (263, 267, True), (263, 267, False), (64, 64, False)])
def test_full_fine_tuning_to_the_byte(rows: int, grown: int, tied: bool, name: str, tmp_path: Path) -> None:
    """A grown vocabulary is in the config that is saved with the model, and the estimate follows it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(rows, tied), dtype=torch.bfloat16)
    if grown != rows:
        model.resize_token_embeddings(grown)
    model.save_pretrained(tmp_path)
    setup = Setup(full=True, load_in_4bit=False, optimizer=name, options=defaults(name))
    found = memory.plan(shape_of(*read_config(str(tmp_path)), setup.dtype), setup)

    trained = list(model.parameters())
    assert found.weights.trained_bytes == sum(weight.numel() * weight.itemsize for weight in trained)
    optimizer = OPTIMIZERS[name](trained, lr=1e-4, paged=True)
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    report = optimizer.memory_report()
    assert found.state.used == report.state_bytes
    assert dict(found.state.planes) == report.planes


def test_what_is_not_counted_is_a_range_and_never_one_number() -> None:
    setup = Setup(options=defaults("flashoptim_paged_adamw"))
    found = memory.plan(shape_of(llama(263), "llama", setup.dtype), setup)
    parts = {line.name: line for line in found.lines}
    for name in ("weights in NF4", "gradients", "state: exp_avg"):
        span = parts[name].device if parts[name].device.high else parts[name].host
        assert 0 < span.low == span.high
    assert any(line.device.low < line.device.high for name, line in parts.items() if "activations" in name)
    assert found.device.low < found.device.high


def test_a_model_in_4_bits_on_disk_is_the_model(tmp_path: Path) -> None:
    config = json.loads(llama(263).to_json_string()) | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    plans = []
    for quantization in (None, {"load_in_4bit": True, "quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}):
        (tmp_path / "config.json").write_text(json.dumps(config | ({"quantization_config": quantization} if quantization else {})))
        done = CliRunner().invoke(app, ["plan", str(tmp_path), "--json", str(tmp_path / "plan.json")])
        assert done.exit_code == 0, done.output
        plans.append(json.loads((tmp_path / "plan.json").read_text())["bytes"])
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("model", "message"),
    [("no/such-model", "the hub gave no config"), (".", "is no folder with a config.json")],
    ids=["offline", "no config"],
)
def test_models_without_a_config_are_a_sentence(model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plan", model])
    assert done.exit_code == 2
    assert message in " ".join((done.output + done.stderr).split())


@pytest.mark.parametrize("key", ["lora_modules_to_save", "added_tokens", "use_dora"])
def test_keys_that_would_make_another_run_are_refused(key: str, tmp_path: Path) -> None:
    value: Any = ["lm_head"] if key != "use_dora" else True
    (tmp_path / "recipe.yaml").write_text(json.dumps({"model_name_or_path": "m", key: value}))
    with pytest.raises(ConfigurationError, match=f"{key}=.* is not planned"):
        from_recipe(tmp_path / "recipe.yaml")
