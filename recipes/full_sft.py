"""Full fine-tuning: every weight, in bf16 with 24-bit master weights, optimizer states paged into host RAM.

    accelerate launch --config_file configs/accelerate/single_gpu.yaml recipes/full_sft.py --config FILE.yaml

What a GPU must hold is the weights and the gradients, 2 + 2 bytes per parameter, and activations. `optim_args: gradient_release=true`
updates each page during the backward pass and lets go of its gradients; it needs max_grad_norm 0 (the default here) and
gradient_accumulation_steps 1. Every key of the YAML file is also a flag, and flags win: trl's `SFTConfig` and `ModelConfig`, and
`RecipeConfig` in sft_options.py, the same as recipes/qlora_sft.py has.
"""

from __future__ import annotations

import os

import sft_checks
import sft_entry
import sft_options
import sft_run
import sft_train
import torch
from sft_options import RecipeConfig
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed
from trl import ModelConfig, SFTConfig, TrlParser

from flashoptim_hf.errors import ConfigurationError

DEFAULTS = {
    "optim": "flashoptim_paged_adamw",
    "learning_rate": 1e-5,
    "dtype": "bfloat16",
    "max_grad_norm": 0.0,  # clipping needs all gradients at once, which is what gradient release avoids
    "gradient_checkpointing": True,
    "report_to": "none",
    "ddp_find_unused_parameters": False,
}


def make_parser() -> TrlParser:
    """The parser of the command line and of the YAML files in configs/ that name this recipe."""
    return sft_options.make_parser(RecipeConfig, SFTConfig, DEFAULTS)


def check(args: SFTConfig, model_args: ModelConfig) -> None:
    """What this recipe does not do.

    Raises:
        ConfigurationError: an adapter or a quantized model is asked for, or weights are to train in fp16.
    """
    if model_args.use_peft or model_args.load_in_4bit or model_args.load_in_8bit:
        raise ConfigurationError("use_peft, load_in_4bit and load_in_8bit are for adapters on a quantized model: recipes/qlora_sft.py.")
    if model_args.dtype == "float16":
        raise ConfigurationError("dtype=float16: gradients in fp16 cannot be unscaled. Use dtype=bfloat16, or float32 with fp16=true.")
    if model_args.dtype == "bfloat16" and args.fp16:
        raise ConfigurationError("dtype=bfloat16 contradicts fp16=true. Use bf16=true, or dtype=float32 with fp16=true.")


def load_model(model_args: ModelConfig, args: SFTConfig) -> PreTrainedModel:
    """The model in `dtype` on this process's own device; with FSDP on the host, from where it is cut up."""
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=args.trust_remote_code,
        attn_implementation=model_args.attn_implementation,
        dtype=getattr(torch, model_args.dtype) if model_args.dtype in ("bfloat16", "float32") else model_args.dtype,
    )
    return model if sharded else model.to(args.device)


def main() -> None:
    """Read the options, fine-tune, and report."""
    environ = dict(os.environ)  # what the launcher set, before the options below add to it
    config, args, model_args = sft_options.read(make_parser())
    check(args, model_args)
    sft_run.check_launch(args, environ)
    sft_options.hide_token(args)
    resumed = sft_run.resumption(args, config.auto_resume)
    args.gradient_checkpointing_kwargs = args.gradient_checkpointing_kwargs or {"use_reentrant": False}
    args.include_num_input_tokens_seen = "non_padding"

    tokenizer = sft_options.load_tokenizer(model_args, args, config.added_tokens)
    rows, prompt = sft_options.make_data(config, args, tokenizer)
    args.eval_on_start = rows["eval"] is not None and resumed is None
    watch = sft_run.Watch(resumed)
    model = load_model(model_args, args)
    set_seed(args.seed)  # new rows start from random numbers
    sft_checks.make_room(model, tokenizer, config.added_tokens)
    trainer = sft_run.AdapterTrainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["eval"],
        processing_class=tokenizer,
        callbacks=[watch],
    )
    sft_train.fine_tune(trainer, config, watch, prompt, str(model_args.model_name_or_path))


if __name__ == "__main__":
    sft_entry.run(main)
