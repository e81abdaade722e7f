"""GPU bench, whole training steps of random models: QLoRA at the shapes of a 7B model, and full fine-tuning under a memory cap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from .gpu_machine import Machine, is_out_of_memory
from .peers import installed

LLAMA_7B = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
DRY_MODEL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
RANK = 16
TOKENS = 512
CAP_BYTES = 24 * 10**9
"""Device memory that full fine-tuning may take."""
MODEL_SHARE = 0.8
"""Of the cap, for weights and gradients; the rest is for activations, logits and staging."""
HOST_BYTES_PER_PARAM = 10
"""Free host memory to have per parameter before paged state is put there: 3.2 for the state, as much again for the powers of two that it is
pinned in, and some for everybody else."""
LEARNING_RATE = 1e-5
REPEATS = 5
QLORA_SUBJECTS = ("torch_fused", "bitsandbytes_paged_32bit", "bitsandbytes_paged_8bit", "bitsandbytes", "flashoptim")
FULL_SUBJECTS = ("bitsandbytes_paged_8bit", "torch_fused", "bitsandbytes", "flashoptim")


class LoraLinear(nn.Module):
    """A frozen linear layer with a trained low-rank addition: base(x) + 2 x A^T B^T, A [r, in], B [out, r], bf16 (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int, device: torch.device) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features, device=device, dtype=torch.bfloat16) * 0.02)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=device, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        low = nn.functional.linear(nn.functional.linear(x.to(self.a.dtype), self.a), self.b)
        return self.base(x) + 2 * low.to(x.dtype)


def random_model(shapes: dict[str, Any], device: torch.device) -> Any:
    """A Llama of those shapes with random bf16 weights, made on the device, with gradient checkpointing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fixed: dict[str, Any] = {"max_position_embeddings": 4096, "use_cache": False, "tie_word_embeddings": False}
    config = LlamaConfig(**fixed, **shapes)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(dtype)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def adapt(model: Any, device: torch.device, *, four_bit: bool) -> list[nn.Parameter]:
    """Freeze a model, store the linear layers of its blocks in NF4 with double quantization if wanted, and add adapters.

    Returns:
        the adapters.
    """
    model.requires_grad_(False)
    targets = [
        (parent, name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and not (path == "" and name == "lm_head")
    ]
    adapters = []
    for parent, name, linear in targets:
        layer = LoraLinear(_nf4(linear, device) if four_bit else linear, RANK, device)
        setattr(parent, name, layer)
        adapters += [layer.a, layer.b]
    # checkpointed blocks need an input that asks for gradients, and the embedding is frozen
    model.enable_input_require_grads()
    return adapters


def _nf4(linear: nn.Linear, device: torch.device) -> nn.Linear:
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer = Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=torch.bfloat16,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    layer.weight = Params4bit(linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4")
    quantized: nn.Linear = layer.to(device)
    return quantized


def qlora(machine: Machine) -> None:
    """Steps of LoRA on a frozen 4-bit model of 7B shapes with each optimizer; on a bf16 model where bitsandbytes is missing."""
    four_bit = installed("bitsandbytes")
    if not four_bit:
        machine.note("bitsandbytes is not installed: the frozen model of the section qlora is bf16 instead of NF4.")
    machine.need("the model of the section qlora")
    model = random_model(DRY_MODEL if machine.dry else LLAMA_7B, machine.device)
    adapters = adapt(model, machine.device, four_bit=four_bit)
    machine.free()
    case = f"qlora/{'nf4' if four_bit else 'bf16'}/r={RANK}"
    machine.add(case, "model", "trained_params", sum(param.numel() for param in adapters))
    train(machine, case, model, adapters, ("ours", "ours_paged", *machine.peers(*QLORA_SUBJECTS)))


def full_shapes(device_bytes: int, host_bytes: int) -> dict[str, Any]:
    """Shapes of the model to train in full.

    Weights and gradients, four bytes per parameter, have to fit into `MODEL_SHARE` of the cap, and state into free host memory; an 8B model
    is given fewer layers until they do.
    """
    width, inner, vocabulary = LLAMA_8B["hidden_size"], LLAMA_8B["intermediate_size"], LLAMA_8B["vocab_size"]
    kept = LLAMA_8B["num_key_value_heads"] / LLAMA_8B["num_attention_heads"]
    layer = width * width * (2 + 2 * kept) + 3 * width * inner
    most = min(MODEL_SHARE * device_bytes / 4, host_bytes / HOST_BYTES_PER_PARAM)
    layers = int(min(LLAMA_8B["num_hidden_layers"], max(1, (most - 2 * width * vocabulary) // layer)))
    return LLAMA_8B | {"num_hidden_layers": layers}


def full(machine: Machine) -> None:
    """Steps of full fine-tuning under a cap of 24 GB with each optimizer: which ones fit, and how long a step takes.

    Weights and all gradients are there at once, since a step begins after backward. The model is one of 8B shapes with as many layers as
    then fit. bitsandbytes' paged states are evicted by the driver here, since device memory really is short.
    """
    with machine.capped(CAP_BYTES):
        shapes = DRY_MODEL
        if not machine.dry:
            shapes = full_shapes(min(CAP_BYTES, machine.free_bytes()), psutil.virtual_memory().available)
            machine.note(f"full fine-tuning: {shapes['num_hidden_layers']} of 32 layers of an 8B model, so that weights and gradients fit.")
        machine.need("the model of the section full")
        model = random_model(shapes, machine.device)
        params = list(model.parameters())
        case = f"full/8b_shapes/{shapes['num_hidden_layers']}_layers"
        machine.add(case, "model", "trained_params", sum(param.numel() for param in params))
        train(machine, case, model, params, ("ours_paged", "ours", *machine.peers(*FULL_SUBJECTS)))


def train(machine: Machine, case: str, model: Any, params: Sequence[nn.Parameter], subjects: Sequence[str]) -> None:
    """Time whole steps of the model with one optimizer after the other; what does not fit gets `fits` 0."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(model.config.vocab_size, (1, 32 if machine.dry else TOKENS), generator=generator).to(machine.device)

    def backward() -> None:
        for param in params:
            param.grad = None
        model(input_ids=tokens, labels=tokens).loss.backward()

    for subject in subjects:
        machine.need(f"{case} with {subject}")
        machine.start_peak()
        try:
            _train_with(machine, case, subject, params, backward)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            machine.add(case, subject, "fits", 0.0)
        for param in params:
            param.grad = None
        machine.free()


def _train_with(machine: Machine, case: str, subject: str, params: Sequence[nn.Parameter], backward: Callable[[], None]) -> None:
    optimizer = machine.make(subject, params)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE

    def step() -> Any:
        backward()
        return optimizer.step()

    whole, _ = machine.time_ms(step, REPEATS)
    machine.add(case, subject, "fits", 1.0)
    machine.timing(case, subject, "ms_per_step", whole)
    machine.add(case, subject, "peak_bytes", machine.peak_bytes(), "B")
    alone, host = machine.time_ms(optimizer.step, REPEATS, apart=True)
    machine.timing(case, subject, "ms_optimizer", alone)
    machine.add(case, subject, "host_ms_optimizer", host, "ms")
