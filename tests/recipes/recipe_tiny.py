"""A tiny random model, and tiny tokenizers with chat templates of several kinds, made offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, OPEN, CLOSE = "<s>", "</s>", "<pad>", "<|turn|>", "<|end|>"

# Stock style, no markers: turns that end in EOS and a line break, and BOS at the start.
STOCK = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
WITHOUT_EOS = STOCK.replace("{{ eos_token }}", "<|end|>")
LAST_EOS_ONLY = STOCK.replace("{{ eos_token }}", "{% if loop.last and m['role'] == 'assistant' %}{{ eos_token }}{% endif %}")
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
MARKED_CONTENT_ONLY = MARKED.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ eos_token }}")
MARKED_FULL = "{% generation %}" + STOCK + "{% endgeneration %}"
MARKED_EMPTY = STOCK + "{% generation %}{% endgeneration %}"
# Earlier answers are rendered without what they began with, as templates of reasoning models do.
FORGETFUL = STOCK.replace(
    "{{ m['content'] }}", "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ m['content'] }}"
)

# The same, but both renderings begin alike.
EMPTIED = STOCK.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' %}<think>{% if loop.last %}Well.{% endif %}</think>{% endif %}{{ m['content'] }}",
)


def build_tokenizer(template: str | None = STOCK, adds_bos: bool = True, adds_eos: bool = False, pad: str = PAD) -> Any:
    """A byte-level tokenizer of 261 entries. `adds_bos`, `adds_eos`: it adds them itself when special tokens are on."""
    special = [BOS, EOS, PAD, OPEN, CLOSE]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *letters])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(special)
    if adds_bos or adds_eos:
        single = f"{BOS if adds_bos else ''} $A {EOS if adds_eos else ''}".strip()
        raw.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(BOS, vocabulary[BOS]), (EOS, vocabulary[EOS])])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=BOS, eos_token=EOS, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer


def save_llama(folder: Path, tokenizer: Any, **config: Any) -> Path:
    """Save a random two-layer Llama in bf16, which is the same for the same settings, and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, **config)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
