"""Captures gradients of a fine-tune, for `flashoptim-hf bench fidelity --gradients FILE`.

    python benchmarks/capture_gradients.py MODEL_FOLDER OUT.safetensors --text /usr/lib/python3.11 --steps 120

Fine-tunes a few matrices and one norm of a causal language model on Python source code, in fp32 on the CPU with `torch.optim.AdamW` at lr
1e-4, and keeps 2048 consecutive elements from the middle of each parameter's gradient at every step. SmolLM2-135M takes less than a second
a step. Files in order of their names, windows of tokens one after the other: a run is repeatable on one machine.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

CHOSEN = (
    "model.layers.22.self_attn.v_proj.weight",
    "model.layers.23.mlp.down_proj.weight",
    "model.layers.24.self_attn.k_proj.weight",
    "model.layers.26.self_attn.o_proj.weight",
    "model.layers.27.post_attention_layernorm.weight",
    "model.layers.28.mlp.up_proj.weight",
)
ELEMENTS, LENGTH, BATCH = 2048, 32, 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, default=Path("/usr/lib/python3.11"))
    parser.add_argument("--steps", type=int, default=120)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    chosen = {name: param for name, param in model.named_parameters() if name in CHOSEN}
    for name, param in model.named_parameters():
        param.requires_grad_(name in chosen)
    optimizer = torch.optim.AdamW(chosen.values(), lr=1e-4, weight_decay=0.0)

    needed = args.steps * BATCH * LENGTH
    tokens: list[int] = []
    for file in sorted(args.text.rglob("*.py")):
        tokens += tokenizer(file.read_text(encoding="utf-8", errors="ignore")[:20000])["input_ids"]
        if len(tokens) >= needed:
            break
    if len(tokens) < needed:
        raise SystemExit(f"{args.text} holds {len(tokens)} tokens; {needed} are needed.")
    batches = torch.tensor(tokens[:needed]).view(args.steps, BATCH, LENGTH)
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in chosen}
    for step, ids in enumerate(islice(batches, args.steps), start=1):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        for name, param in chosen.items():
            flat = param.grad.view(-1)
            start = max(0, flat.numel() // 2 - ELEMENTS // 2)
            kept[name].append(flat[start : start + ELEMENTS].clone())
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    save_file({name: torch.stack(rows) for name, rows in kept.items()}, args.out)


if __name__ == "__main__":
    main()
