"""What would go wrong without a word, found before the first step. Each check raises an error that says what, where and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments
from trl import ModelConfig

from flashoptim_hf.errors import ConfigurationError


def precision(args: TrainingArguments, model_args: ModelConfig) -> None:
    """Precisions that contradict each other.

    Raises:
        ConfigurationError: names both settings.
    """
    if str(model_args.dtype) == "float16" and args.bf16:
        raise ConfigurationError(
            "dtype=float16 (how weights are stored) contradicts bf16=true (what is computed in). Use dtype=bfloat16, or fp16=true with "
            "bf16=false."
        )


def processes(environ: Mapping[str, str], started: int) -> None:
    """Several processes were asked for, and one was started.

    Args:
        environ: the environment as it was at the start.
        started: processes that there are.

    Raises:
        ConfigurationError: says how to start several on CPUs.
    """
    several = {"ACCELERATE_USE_CPU", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys() and "WORLD_SIZE" not in environ
    if several and started == 1:
        raise ConfigurationError(
            "accelerate launch was told of several processes or machines and started one process: it found one device only. Use "
            "--num_processes 1, or start several processes on CPUs with: torchrun --nproc-per-node N recipes/qlora_sft.py ... "
            "(if MASTER_ADDR and MASTER_PORT come from somewhere else, unset them)."
        )


def tokenizer_fits(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """The tokenizer's ids are rows of the embedding.

    Raises:
        ConfigurationError: it has more; an index error on the device would say so later, and not where.
    """
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0]
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= rows:
        raise ConfigurationError(
            f"the tokenizer of {name} has ids up to {highest} ({tokenizer.convert_ids_to_tokens(highest)!r}), and the embedding has "
            f"{rows} rows. It is another model's tokenizer, or tokens were added to it: take the model's own and name your tokens in "
            f"added_tokens, or make the embedding larger once (model.resize_token_embeddings({highest + 1})), save that model and start "
            "from it."
        )


def make_room(model: Any, tokenizer: PreTrainedTokenizerBase, added: Sequence[str] | None, adapter: Any = None) -> None:
    """Give added tokens their rows in the embedding and the head, before the optimizer and the adapter are made.

    Args:
        model: the base model; grown where it has too few rows, to any number of them.
        tokenizer: with the tokens in it.
        added: the tokens; none: nothing is done.
        adapter: its `LoraConfig`, in which the new rows, and they alone, become trainable; None where every weight is trained.
    """
    if not added:
        return
    ids = sorted(tokenizer.convert_tokens_to_ids(list(added)))
    highest = max(tokenizer.get_vocab().values())
    if highest >= model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(highest + 1)
    if adapter is not None:
        names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head is None or head.weight is embedding.weight
        # of tied weights the embedding is named alone: PEFT lets the head follow it
        adapter.trainable_token_indices = {names[id(module)]: ids for module in ([embedding] if tied else [embedding, head])}


def pass_bias_on(model: Any) -> None:
    """Give the wrapper of a head with new rows the head's bias: trl's loss asks for it, and PEFT (0.21.2) passes on the weight alone."""
    for module in model.modules():
        if hasattr(module, "token_adapter"):
            base = module.token_adapter.get_base_layer()
            if isinstance(base, torch.nn.Linear):
                module.bias = base.bias


def trainable(model: torch.nn.Module) -> None:
    """There is something to train.

    Raises:
        ConfigurationError: every weight is frozen; names adapters that are in inference mode.
    """
    if any(weight.requires_grad for weight in model.parameters()):
        return
    adapters = getattr(model, "peft_config", None) or {}
    asleep = [name for name, config in adapters.items() if config.inference_mode]
    cause = (
        f"adapter {', '.join(map(repr, asleep))} is in inference mode: load it with PeftModel.from_pretrained(..., is_trainable=True), or "
        "set inference_mode to false in its adapter_config.json"
        if asleep
        else "set requires_grad=True on what is to be trained"
    )
    raise ConfigurationError(f"{type(model).__name__} has zero trainable parameters, so nothing would change: {cause}.")


def checkpointing(model: torch.nn.Module, args: TrainingArguments) -> None:
    """Gradients reach adapters through checkpointed layers. The reentrant kind needs an input that asks for a gradient.

    Raises:
        ConfigurationError: the embedding is frozen and nothing makes its output ask for one, so that every gradient would be None.
    """
    if not args.gradient_checkpointing or not (args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False):
        return
    embedding = model.get_input_embeddings()
    probe = torch.zeros(1, 1, dtype=torch.long, device=embedding.weight.device)
    if not embedding(probe).requires_grad:
        raise ConfigurationError(
            "gradient_checkpointing=true with use_reentrant=true passes no gradient on: the embedding is frozen and its output asks for "
            'none. Set gradient_checkpointing_kwargs to {"use_reentrant": false}, or call model.enable_input_require_grads() first.'
        )


def tie_saved_modules(adapter: Any, model: torch.nn.Module) -> bool:
    """Keep the copies of tied weights tied where both or either is trained whole (`lora_modules_to_save`), and say whether that was needed.

    PEFT copies each such module; two copies of one matrix would train apart, and merging would throw one of them away.
    """
    saved = set(getattr(adapter, "modules_to_save", None) or ())
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    if not tied or not saved & {"embed_tokens", "lm_head", "wte", "embed_in", "embed_out"}:
        return False
    adapter.ensure_weight_tying = True
    return True
