"""QLoRA fine-tuning: a base model in NF4 with double quantization, LoRA on every linear layer, optimizer states paged into host RAM.

    accelerate launch --config_file configs/accelerate/single_gpu.yaml recipes/qlora_sft.py --config configs/qlora/smollm2-135m_demo.yaml

Every key of the YAML file is also a flag (`--learning_rate 1e-4`), and flags win. The keys are trl's `SFTConfig` and `ModelConfig` and the
few below. QLoRA: arXiv 2305.14314.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import sft_data
import sft_run
import torch
from accelerate import PartialState
from bitsandbytes.nn import Linear4bit
from datasets import Dataset
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, set_seed
from trl import ModelConfig, SFTConfig, TrlParser, get_peft_config, get_quantization_config

import flashoptim_hf
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
class DataConfig:
    """What this recipe adds to trl's options."""

    dataset: str = field(metadata={"help": "A .jsonl, .json, .csv or .parquet file, or a hub id (org/name or org/name:split)."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Held-out samples, given like dataset; default: a part of it."})
    eval_fraction: float = field(default=0.05, metadata={"help": "Share held out where there is no eval_dataset; 0: no evaluation."})
    adapter_name: str = field(default="default", metadata={"help": "The adapter's name in PEFT."})
    sample_tokens: int = field(default=64, metadata={"help": "Longest answer shown before and after training, in tokens; 0: none."})


def make_parser() -> TrlParser:
    """The parser of the command line and of the YAML files in configs/ that name this recipe."""
    flashoptim_hf.register()  # idempotent; without it the parser would not know the optimizer's name
    parser = TrlParser((DataConfig, SFTConfig, ModelConfig))
    parser.set_defaults(**DEFAULTS, use_cpu=not torch.accelerator.is_available())
    return parser


def load_tokenizer(model_args: ModelConfig, args: SFTConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the EOS token and the chat template that the options name."""
    source = model_args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(source, revision=model_args.model_revision, trust_remote_code=args.trust_remote_code)
    if args.eos_token is not None:
        tokenizer.eos_token = args.eos_token
    if args.chat_template_path is not None:
        tokenizer.chat_template = Path(args.chat_template_path).read_text(encoding="utf-8")
        args.chat_template_path = None  # done; trl would otherwise take it for a model to copy from if it is no .jinja file
    return tokenizer


def load_model(model_args: ModelConfig, args: SFTConfig, adapter_name: str) -> PeftModel:
    """The quantized base model on this process's own device, wrapped once in a fresh adapter; resuming loads into that adapter."""
    adapter = get_peft_config(model_args)
    if adapter is None:
        raise ConfigurationError("use_peft=false: this recipe trains an adapter on a quantized model; full fine-tuning is another recipe.")
    # trl computes in `dtype`, which is also what norms and embeddings are stored in; the two are told apart here.
    compute, sharded = "float16" if args.fp16 else "bfloat16", os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
    # FSDP2 cuts floating point tensors only: 4-bit weights in the default blocks of uint8 would stay whole on every process
    storage = model_args.bnb_4bit_quant_storage or (compute if sharded else None)
    quantization = get_quantization_config(replace(model_args, dtype=compute, bnb_4bit_quant_storage=storage))
    # Each process loads onto its own device. "auto" would spread the model over all of them, which a quantized model cannot train on.
    device = args.device.type if args.device.type == "cpu" else f"{args.device.type}:{args.local_process_index}"
    print(f"[rank {args.process_index}] loading {model_args.model_name_or_path} with device map {{'': '{device}'}}", flush=True)
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path,
        revision=model_args.model_revision,
        trust_remote_code=args.trust_remote_code,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
        quantization_config=quantization,
        device_map=None if sharded else {"": device},
    )
    # On CPUs with AVX512-BF16, bitsandbytes (0.50.2 at least) repacks a layer for good at its first pass in evaluation mode, and a repacked
    # layer passes no gradient on: training after an evaluation would go on with wrong gradients and no error.
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False
    set_seed(args.seed)  # the adapter starts from random numbers
    return get_peft_model(model, adapter, adapter_name=adapter_name)


def report_start(args: SFTConfig, model: PeftModel, tokenizer: PreTrainedTokenizerBase, counts: dict[str, sft_data.Counts]) -> None:
    """Say what is really in force, as opposed to what was asked for."""
    state = PartialState()
    trainable = {str(weight.dtype).removeprefix("torch.") for weight in model.parameters() if weight.requires_grad}
    state.print(
        f"in force: {state.num_processes} process(es), {args.device}, mixed precision {args.mixed_precision}, "
        f"trainable weights in {', '.join(sorted(trainable))}, optimizer {sft_run.optimizer_name(args)}"
    )
    eos, bos, pad = tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token
    state.print(f"EOS {eos!r} ends every sample that is not cut off, and is learned; BOS {bos!r}; padding {pad!r} is not learned")
    for name, count in counts.items():
        state.print(f"{name}: {count}")


def make_data(
    data_args: DataConfig, args: SFTConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Dataset | None], dict[str, sft_data.Counts], list[int]]:
    """The training and held-out samples as token ids and labels, what became of them, and the prompt of the sample that is shown."""
    train, held_out = sft_data.load_splits(data_args.dataset, data_args.eval_dataset, data_args.eval_fraction, args.seed)
    # Packing that keeps the overflow needs whole samples; everything else is cut here, where it can be counted.
    limit = None if args.packing and args.packing_strategy != "bfd" else args.max_length
    plan = sft_data.Plan(limit, args.assistant_only_loss, args.completion_only_loss, args.dataset_text_field)
    rows: dict[str, Dataset | None] = {"train": None, "eval": None}
    counts = {}
    with args.main_process_first(desc="tokenizing"):
        for name, split in (("train", train), ("eval", held_out)):
            if split is not None:
                rows[name], counts[name] = sft_data.prepare(split, tokenizer, plan, name, args.dataset_num_proc)
    args.assistant_only_loss = False  # the labels say it already, and trl accepts the switch for raw conversations only
    return rows, counts, sft_data.prompt_ids((train if held_out is None else held_out)[0], tokenizer)


def main() -> None:
    """Read the options, fine-tune, and report."""
    environ = dict(os.environ)  # what the launcher set, before the options below add to it
    data_args, args, model_args = make_parser().parse_args_and_config()
    sft_run.check_launch(args, environ)
    resumed = sft_run.resume_folder(args.resume_from_checkpoint, args.output_dir)
    args.gradient_checkpointing_kwargs = args.gradient_checkpointing_kwargs or {"use_reentrant": False}
    args.include_num_input_tokens_seen = "non_padding"

    tokenizer = load_tokenizer(model_args, args)
    rows, counts, prompt = make_data(data_args, args, tokenizer)
    args.eval_on_start = rows["eval"] is not None and resumed is None
    watch = sft_run.Watch(resumed)
    trainer = sft_run.AdapterTrainer(
        model=load_model(model_args, args, data_args.adapter_name),
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["eval"],
        processing_class=tokenizer,
        callbacks=[watch],
    )
    lifted = sft_run.lift_fp16(trainer.model, scaled=args.fp16)
    if lifted:
        trainer.accelerator.print(f"{len(lifted)} trainable tensors were in 16 bits that loss scaling cannot train in; they are fp32 now.")
    report_start(args, trainer.model, tokenizer, counts)

    # The base model's answer, on resumption too: the checkpoint is loaded later, when training begins.
    answers = {"before": sft_run.sample(trainer, prompt, data_args.sample_tokens, "Sample before")}
    trainer.train(resume_from_checkpoint=resumed)
    step = trainer.state.global_step
    if rows["eval"] is not None and not any("eval_loss" in row and row["step"] == step for row in trainer.state.log_history):
        trainer.evaluate()
    trainer.save_model()
    answers["after"] = sft_run.sample(trainer, prompt, data_args.sample_tokens, "Sample after")
    if trainer.is_world_process_zero():
        sft_run.report_end(trainer, watch, tokenizer.decode(prompt), answers)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
