"""Preference data as the model sees it, and adapters in fp16 runs, with trl's own trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import qlora_dpo
import qlora_sft
import torch
from datasets import Dataset
from peft import LoraConfig
from recipe_launch import run_here
from recipe_tiny import EOS, PAD, build_tokenizer
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOConfig

TEXT = {"prompt": "Which? ", "chosen": "This.", "rejected": "That one."}
CHAT = {
    "prompt": [{"role": "user", "content": "Which?"}],
    "chosen": [{"role": "assistant", "content": "This."}],
    "rejected": [{"role": "assistant", "content": "That one."}],
}


@pytest.mark.parametrize("pad", [EOS, PAD], ids=["pad is EOS", "own pad"])
@pytest.mark.parametrize("adds_bos", [True, False], ids=["tokenizer adds BOS", "tokenizer does not"])
@pytest.mark.parametrize("sample", [TEXT, CHAT], ids=["text", "messages"])
def test_answers_end_in_one_learned_eos_and_begin_with_one_bos(sample: dict[str, Any], adds_bos: bool, pad: str, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(adds_bos=adds_bos, pad=pad)
    config = LlamaConfig(vocab_size=264, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    trainer = qlora_dpo.PreferenceTrainer(
        model=LlamaForCausalLM(config),
        args=DPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", bf16=False),
        train_dataset=qlora_dpo.check_columns(Dataset.from_list([sample]), "training"),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    learned = []
    for ids, seen, answer in zip(batch["input_ids"], batch["attention_mask"].bool(), batch["completion_mask"].bool(), strict=True):
        assert ids[seen].tolist().count(tokenizer.bos_token_id) == int(adds_bos or sample is CHAT)
        learned.append(tokenizer.decode(ids[answer]).rstrip("\n"))
        assert not (answer & ~seen).any()  # padding is not learned, also where it is the EOS token
    assert learned == ["This." + EOS, "That one." + EOS]


@pytest.mark.parametrize("recipe", [qlora_sft, qlora_dpo])
def test_an_fp16_run_keeps_what_it_trains_in_fp32(recipe: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data.jsonl"
    rows = [TEXT if recipe is qlora_dpo else {"prompt": f"{i}? ", "completion": "Yes."} for i in range(4)]
    data.write_text("\n".join(map(json.dumps, rows)))
    words = ["--model_name_or_path", str(tiny_model), "--dataset", str(data), "--output_dir", str(tmp_path / "out"), "--eval_fraction", "0"]
    words += ["--dtype", "float16", "--fp16", "true", "--bf16", "false", "--max_steps", "1", "--per_device_train_batch_size", "2"]
    words += [
        "--max_length",
        "64",
        "--disable_tqdm",
        "true",
        *(("--sample_tokens", "0", "--first_look", "0") if recipe is qlora_sft else ()),
    ]
    run_here(recipe, monkeypatch, words)
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {weight.dtype for weight in adapter.values()} == {torch.float32}
    assert any(weight.any() for key, weight in adapter.items() if "lora_B" in key)
