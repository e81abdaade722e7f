"""QLoRA fine-tuning: a base model in NF4 with double quantization, LoRA on every linear layer, optimizer states paged into host RAM.

    accelerate launch --config_file configs/accelerate/single_gpu.yaml recipes/qlora_sft.py --config configs/qlora/smollm2-135m_demo.yaml

Every key of the YAML file is also a flag (`--learning_rate 1e-4`), and flags win. The keys are trl's `SFTConfig` and `ModelConfig` and the
few below. QLoRA: arXiv 2305.14314.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import sft_checks
import sft_entry
import sft_options
import sft_run
import sft_train
from bitsandbytes.nn import Linear4bit
from peft import PeftConfig, PeftModel, get_peft_model
from sft_options import RecipeConfig
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed
from trl import ModelConfig, SFTConfig, TrlParser, get_peft_config, get_quantization_config

from flashoptim_hf.errors import ConfigurationError

# Where trl's defaults would not give QLoRA, or would give it at a price: fp32 compute, single quantization, LoRA on attention alone.
DEFAULTS = {
    "optim": "flashoptim_paged_adamw",
    "learning_rate": 2e-4,
    "use_peft": True,
    "load_in_4bit": True,
    "use_bnb_nested_quant": True,
    "dtype": "bfloat16",
    "lora_target_modules": "all-linear",
    "report_to": "none",
    "ddp_find_unused_parameters": False,
}


@dataclass
class QLoraConfig(RecipeConfig):
    """What this recipe adds to the options that the recipes share."""

    adapter_name: str = field(default="default", metadata={"help": "The adapter's name in PEFT."})


def make_parser() -> TrlParser:
    """The parser of the command line and of the YAML files in configs/ that name this recipe."""
    return sft_options.make_parser(QLoraConfig, SFTConfig, DEFAULTS)


def load_base(model_args: ModelConfig, args: TrainingArguments) -> PreTrainedModel:
    """The quantized base model on this process's own device."""
    # trl computes in `dtype`, which is also what norms and embeddings are stored in; the two are told apart here.
    compute, sharded = "float16" if args.fp16 else "bfloat16", os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
    # FSDP2 cuts floating point tensors only: 4-bit weights in the default blocks of uint8 would stay whole on every process
    storage = model_args.bnb_4bit_quant_storage or (compute if sharded else None)
    quantization = get_quantization_config(replace(model_args, dtype=compute, bnb_4bit_quant_storage=storage))
    # Each process loads onto its own device. "auto" would spread the model over all of them, which a quantized model cannot train on. Under
    # FSDP it loads into host memory, and what becomes of it there goes to the device: all of it at once would not fit.
    device = "cpu" if sharded or args.device.type == "cpu" else f"{args.device.type}:{args.local_process_index}"
    print(f"[rank {args.process_index}] loading {model_args.model_name_or_path} with device map {{'': '{device}'}}", flush=True)
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=args.trust_remote_code,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
        quantization_config=quantization,
        device_map={"": device},
    )
    # On CPUs with AVX512-BF16, bitsandbytes (0.50.2 at least) repacks a layer for good at its first pass in evaluation mode, and a repacked
    # layer passes no gradient on: training after an evaluation would go on with wrong gradients and no error.
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False
    return model


def make_adapter(model_args: ModelConfig, model: PreTrainedModel) -> PeftConfig:
    """The adapter's settings; copies of tied weights that are trained whole stay tied."""
    adapter = get_peft_config(model_args)
    if adapter is None:
        raise ConfigurationError("use_peft=false: this recipe trains an adapter on a quantized model; recipes/full_sft.py trains all.")
    sft_checks.tie_saved_modules(adapter, model)
    return adapter


def load_model(
    model_args: ModelConfig,
    args: SFTConfig,
    adapter_name: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    added: Sequence[str] | None = None,
) -> PeftModel:
    """The quantized base model, wrapped once in a fresh adapter; resuming loads into that adapter. `added`: tokens that it has to learn."""
    model = load_base(model_args, args)
    adapter = make_adapter(model_args, model)
    set_seed(args.seed)  # the adapter and new rows start from random numbers
    if tokenizer is not None:
        sft_checks.make_room(model, tokenizer, added, adapter)
    adapted = get_peft_model(model, adapter, adapter_name=adapter_name)
    sft_checks.pass_bias_on(adapted)
    return adapted


def main() -> None:
    """Read the options, fine-tune, and report."""
    environ = dict(os.environ)  # what the launcher set, before the options below add to it
    config, args, model_args = sft_options.read(make_parser())
    sft_run.check_launch(args, environ)
    sft_options.hide_token(args)
    sft_checks.precision(args, model_args)
    resumed = sft_run.resumption(args, config.auto_resume)
    args.gradient_checkpointing_kwargs = args.gradient_checkpointing_kwargs or {"use_reentrant": False}
    args.include_num_input_tokens_seen = "non_padding"

    tokenizer = sft_options.load_tokenizer(model_args, args, config.added_tokens)
    rows, prompt = sft_options.make_data(config, args, tokenizer)
    args.eval_on_start = rows["eval"] is not None and resumed is None
    watch = sft_run.Watch(resumed)
    trainer = sft_run.AdapterTrainer(
        model=load_model(model_args, args, config.adapter_name, tokenizer, config.added_tokens),
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["eval"],
        processing_class=tokenizer,
        callbacks=[watch],
    )
    lifted = sft_run.lift_fp16(trainer.model, scaled=args.fp16)
    if lifted:
        trainer.accelerator.print(f"{len(lifted)} trainable tensors were in 16 bits that loss scaling cannot train in; they are fp32 now.")
    sft_train.fine_tune(trainer, config, watch, prompt, str(model_args.model_name_or_path))


if __name__ == "__main__":
    sft_entry.run(main)
