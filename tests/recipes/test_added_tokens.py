"""Tokens that are added for a training: rows of any number, learned alone, saved, resumed, loaded into a fresh base, merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import qlora_sft
import sft_checks
import torch
from peft import LoraConfig, get_peft_model
from recipe_launch import run_here, state, tensors
from recipe_tiny import build_tokenizer
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from flashoptim_hf.after import load
from flashoptim_hf.cli import app

NEW = ["<new0>", "<new1>", "<new2>", "<new3>"]
STEPS, HALF = 4, 2


def llama(rows: int, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=rows, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=tied
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("before", "after"), [(261, 265), (263, 265), (300, 300)], ids=["no room", "too little room", "room"])
def test_new_rows_and_they_alone_are_learned(before: int, after: int, tied: bool) -> None:
    tokenizer, base = build_tokenizer(), llama(before, tied)
    tokenizer.add_tokens(NEW)
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    sft_checks.make_room(base, tokenizer, NEW, adapter)
    assert base.get_input_embeddings().weight.shape[0] == base.get_output_embeddings().weight.shape[0] == after
    sft_checks.tokenizer_fits(base, tokenizer, "m")
    model = get_peft_model(base, adapter)
    rows = [weight for name, weight in model.named_parameters() if weight.requires_grad and "lora" not in name]
    assert [tuple(weight.shape) for weight in rows] == [(4, 16)] * (1 if tied else 2)  # one state for each row
    ids = torch.tensor([[5, *range(261, 265), 6]])
    old = model.get_input_embeddings()(torch.arange(261)[None]).clone()
    new = model.get_input_embeddings()(ids[:, 1:5]).clone()
    optimizer = torch.optim.SGD(rows, lr=1.0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert torch.equal(model.get_input_embeddings()(torch.arange(261)[None]), old)
    assert (model.get_input_embeddings()(ids[:, 1:5]) != new).any(-1).all()
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied


def test_without_added_tokens_nothing_changes() -> None:
    base, adapter = llama(300, True), LoraConfig(r=2, target_modules="all-linear")
    for none in (None, []):
        sft_checks.make_room(base, build_tokenizer(), none, adapter)
    assert adapter.trainable_token_indices is None
    assert base.get_input_embeddings().weight.shape[0] == 300


def test_where_every_weight_is_trained_rows_are_all_that_it_takes() -> None:
    tokenizer, base = build_tokenizer(), llama(261, False)
    tokenizer.add_tokens(NEW)
    sft_checks.make_room(base, tokenizer, NEW)
    assert base.get_input_embeddings().weight.shape[0] == base.get_output_embeddings().weight.shape[0] == base.config.vocab_size == 265
    assert all(weight.requires_grad for weight in base.parameters())


def test_from_the_first_step_to_the_merged_model(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{NEW[i % 4]} {i}? ", "completion": f"{NEW[(i + 1) % 4]} yes"}) for i in range(16)))
    settings = {
        "model_name_or_path": tiny_model,
        "dataset": data,
        "eval_fraction": 0,
        "max_steps": STEPS,
        "save_steps": HALF,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "max_length": 64,
        "sample_tokens": 0,
        "first_look": 0,
        "disable_tqdm": True,
        "auto_resume": True,
    }
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))] + ["--added_tokens", *NEW]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_here(qlora_sft, monkeypatch, [*words, "--output_dir", str(whole)])
    shutil.copytree(whole / f"checkpoint-{HALF}", parts / f"checkpoint-{HALF}")
    run_here(qlora_sft, monkeypatch, [*words, "--output_dir", str(parts)])

    folders = [path / f"checkpoint-{STEPS}" for path in (whole, parts)]
    losses = [[row["loss"] for row in state(folder)["log_history"] if "loss" in row] for folder in folders]
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1]
    adapter, again = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert all(torch.equal(adapter[key], again[key]) for key in adapter)
    deltas = [value for key, value in adapter.items() if key.endswith("trainable_tokens_delta")]
    assert [tuple(delta.shape) for delta in deltas] == [(4, 64)] * 2
    early = load_file(whole / f"checkpoint-{HALF}" / "adapter_model.safetensors")
    assert not any(torch.equal(early[key], adapter[key]) for key in adapter if key.endswith("trainable_tokens_delta"))
    saved = tensors(torch.load(folders[0] / "optimizer.pt", weights_only=True)["state"])
    assert sum(value.shape == (4, 64) for key, value in saved.items() if key.endswith("/exp_avg")) == 2

    loaded = load.load(str(whole), device="cpu")  # a fresh base, of 264 rows
    assert len(loaded.tokenizer) == 265
    embedding = loaded.model.get_input_embeddings()
    ids = torch.tensor([loaded.tokenizer.convert_tokens_to_ids(NEW)])
    key = next(key for key in adapter if "embed_tokens" in key and key.endswith("trainable_tokens_delta"))
    torch.testing.assert_close(embedding(ids)[0].float(), adapter[key].float(), rtol=1e-2, atol=1e-2)
    done: Any = CliRunner().invoke(app, ["merge", str(whole), str(tmp_path / "merged"), "--json", str(tmp_path / "figures.json")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "figures.json").read_text())["differences"]["16 bit"]["same"] > 0.9
    assert load_file(tmp_path / "merged" / "model.safetensors")["model.embed_tokens.weight"].shape[0] == 265
