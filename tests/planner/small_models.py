"""Small configs of several architectures, and the demo's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

ROOT = Path(__file__).resolve().parents[2]

# Sizes off every boundary: short last groups, odd heads, widths that 64 does not divide.
SMALL = {"hidden_size": 72, "intermediate_size": 200, "num_hidden_layers": 3, "vocab_size": 301, "head_dim": 12}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama, tied, GQA": {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama, biases": {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "head_dim": 20},
    "gemma2": {"model_type": "gemma2", "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "phi3": {"model_type": "phi3", "num_attention_heads": 6, "num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": False},
    "mistral": {"model_type": "mistral", "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "tie_word_embeddings": False,
    },
}


def small_config(name: str, **changes: Any) -> Any:
    """A transformers config of a few thousand parameters."""
    return AutoConfig.for_model(**{**SMALL, **ARCHITECTURES[name], **changes})
