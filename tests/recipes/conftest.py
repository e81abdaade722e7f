"""What the recipes' tests share: the recipes' folder on the path, and a tiny random model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The recipes' folder as Python itself puts it there for `python recipes/qlora_sft.py`, and this one for recipe_tiny.
sys.path[:0] = [str(ROOT / "recipes"), str(Path(__file__).parent)]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random two-layer Llama with 261 tokens, and its tokenizer, whose padding token is its EOS token."""
    import torch
    from recipe_tiny import EOS, build_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer(pad=EOS).save_pretrained(folder)
    return folder
