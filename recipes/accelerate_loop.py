"""A plain Accelerate loop: full fine-tuning of a causal language model in bf16 with 24-bit master weights and paged 8-bit states.

    accelerate launch --config_file configs/accelerate/single_gpu.yaml recipes/accelerate_loop.py \
        --model_name_or_path .demo/model --dataset .demo/train.jsonl --output_dir .demo/loop

Options come as flags or from one YAML file (`--config FILE`). `--resume true` goes on from the last complete one, bit for bit. Several
processes are DDP, and with configs/accelerate/fsdp2_full.yaml FSDP2; on CPUs: torchrun --nproc-per-node 2 recipes/accelerate_loop.py ...
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import sft_checks
import sft_data
import sft_entry
import sft_parser
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, get_scheduler

from flashoptim_hf import FlashAdamW, last_complete_checkpoint
from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.trainer import complete


@dataclass
class LoopConfig:
    """The options of the loop."""

    model_name_or_path: str = field(metadata={"help": "A folder or a hub id."})
    dataset: str = field(metadata={"help": "A .jsonl, .json, .csv or .parquet file, or a hub id."})
    text_as_chat: bool = field(default=True, metadata={"help": "Text in prompt and completion becomes two turns of the chat template."})
    output_dir: str = field(default="run", metadata={"help": "Checkpoints go here."})
    max_steps: int = field(default=100, metadata={"help": "Optimizer steps in all."})
    save_steps: int = field(default=50, metadata={"help": "Optimizer steps between checkpoints."})
    resume: bool = field(default=False, metadata={"help": "Go on from the last complete checkpoint in output_dir."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Highest learning rate."})
    warmup_steps: int = field(default=5, metadata={"help": "Steps from 0 to it; then down along a cosine."})
    weight_decay: float = field(default=0.0, metadata={"help": "Decoupled weight decay."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm."})
    batch_size: int = field(default=2, metadata={"help": "Samples per process and micro batch."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Micro batches per step."})
    max_length: int = field(default=256, metadata={"help": "Longest sample in tokens."})
    seed: int = field(default=0, metadata={"help": "Of the order of samples and of dropout."})
    paged: bool = field(default=True, metadata={"help": "Whether states live in host memory."})
    use_cpu: bool = field(default=not torch.accelerator.is_available(), metadata={"help": "Train on the CPU."})


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Save under another name, mark it complete with the checksum of every file, and rename it at the end."""
    part = folder.with_name(f"{folder.name}.part")
    accelerator.save_state(str(part), safe_serialization=False)  # tied weights stay tied
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        complete.seal(part, step)
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
        os.replace(part, folder)
    accelerator.wait_for_everyone()


def main() -> None:
    """Train, save, resume."""
    environ = dict(os.environ)
    (config,) = sft_parser.RecipeParser((LoopConfig,), allow_abbrev=False).parse_args_and_config()
    sft_parser.check_model(config.model_name_or_path)
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=config.seed)
    accumulation = config.gradient_accumulation_steps
    accelerator = Accelerator(cpu=config.use_cpu, gradient_accumulation_steps=accumulation, dataloader_config=order)
    sft_checks.processes(environ, accelerator.num_processes)
    if accelerator.mixed_precision == "fp16":
        raise ConfigurationError(
            "accelerate launch says mixed precision fp16, and the weights are bfloat16 here: leave it out, or say bf16."
        )
    accelerator.print(
        f"in force: {accelerator.num_processes} process(es), {accelerator.device}, mixed precision {accelerator.mixed_precision}, "
        "trainable weights in bfloat16"
    )
    set_seed(config.seed)
    tokenizer = AutoTokenizer.from_pretrained(config.model_name_or_path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with accelerator.main_process_first():
        samples = sft_data.load(config.dataset)
        plan, said = sft_data.Plan(config.max_length, text_as_chat=config.text_as_chat).settled(samples, tokenizer)
        data, _ = sft_data.prepare(samples, tokenizer, plan)
    accelerator.print(said or "the samples are learned as they come")
    # a generator of its own: to begin an epoch would otherwise draw from the one that dropout uses, and a resumed run begins one more
    own = torch.Generator().manual_seed(config.seed)
    collate = DataCollatorForSeq2Seq(tokenizer)
    loader = DataLoader(data, config.batch_size, shuffle=True, drop_last=True, collate_fn=collate, generator=own)
    model = AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=torch.bfloat16)
    sft_checks.tokenizer_fits(model, tokenizer, config.model_name_or_path)
    optimizer = FlashAdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, paged=config.paged)
    ends = [steps * accelerator.num_processes for steps in (config.warmup_steps, config.max_steps)]  # Accelerate counts every process's
    scheduler = get_scheduler("cosine", optimizer, *ends)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    output = Path(config.output_dir)
    folder = last_complete_checkpoint(output) if config.resume else None
    step = int(folder.rpartition("-")[2]) if folder else 0
    if folder:
        accelerator.print(f"resuming from {folder} (step {step})")
        accelerator.load_state(folder)
    elif config.resume and complete.checkpoints(output):
        raise ConfigurationError(
            f"none of the checkpoints in {output} is complete and whole: choose another output_dir, or leave out resume."
        )
    steps_per_epoch = -(-len(loader) // accumulation)
    model.train()
    with sft_entry.stoppable(lambda: step, output, "--resume true"):
        while step < config.max_steps:
            epoch, done = divmod(step, steps_per_epoch)
            loader.set_epoch(epoch)
            losses = []
            for batch in accelerator.skip_first_batches(loader, done * accumulation):
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    losses.append(loss.detach())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if not accelerator.sync_gradients:
                    continue
                step += 1
                mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
                accelerator.print(f"step {step}: loss {mean!r}")
                losses = []
                if step % config.save_steps == 0 or step == config.max_steps:
                    save(accelerator, output / f"checkpoint-{step}", step)
                if step == config.max_steps:
                    break
    del model  # and what Accelerate has of it: the group of processes that it belongs to is left first otherwise, which can hang
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    sft_entry.run(main)
