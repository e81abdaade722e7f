"""A tiny Llama, and an adapter that was trained on it in NF4 with weights that matter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "recipes"), str(ROOT / "recipes")]  # recipe_tiny; sft_data, whose samples are compared


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random two-layer Llama with tied embeddings, and its tokenizer."""
    from recipe_tiny import build_tokenizer, save_llama

    return save_llama(tmp_path_factory.mktemp("after") / "base", build_tokenizer(), tie_word_embeddings=True, initializer_range=0.1)


@pytest.fixture(scope="session")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A named adapter on it, saved as PEFT does: in a folder of its name, with a checkpoint beside it."""
    import torch
    from peft import LoraConfig, get_peft_model

    from flashoptim_hf.after import load

    folder = tmp_path_factory.mktemp("after") / "run"
    model = load.load_base(str(base), torch.bfloat16, True, "cpu")
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"), adapter_name="mine")
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    model.save_pretrained(folder)
    model.save_pretrained(folder / "checkpoint-3")
    return folder
