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
    from recipe_tiny import EOS, build_tokenizer, save_llama

    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return save_llama(tmp_path_factory.mktemp("tiny") / "model", build_tokenizer(pad=EOS), max_position_embeddings=256, **ids)
