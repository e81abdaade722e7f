"""The tasks of `bench convergence`: what is trained, on what, with which algorithm and for how long.

A task together with a seed fixes the first weights, the batches and their order; nothing of that depends on the optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .convergence_models import Gpt, ResNet, Vit
from .peers import installed

HELD_OUT_IMAGES = 397
LORA_RANK = 16
LONG = "-long"
NEEDS = MappingProxyType(
    {
        "gpt": ("text",),
        "resnet": ("scikit-learn",),
        "vit": ("scikit-learn",),
        "qlora": ("text", "model", "peft", "bitsandbytes"),
        "full": ("text", "model"),
    }
)
"""Model to what it takes besides torch: packages, and files among the demo's assets."""


@dataclass(frozen=True)
class Task:
    """One line of training, the same for every optimizer.

    Attributes:
        model: "gpt", "resnet", "vit", "qlora" (NF4 base, fp32 adapters) or "full" (every weight, bf16); with "-long" behind it, the same
            for more steps: a task of its own, since runs of different lengths are not compared.
        algorithm: "adamw", "lion" or "sgd".
        lr: the highest learning rate.
        weight_decay: of every parameter; with "sgd" it is added to the gradient.
        steps: optimizer steps.
        batch: sequences or images of a step.
        length: tokens of a sequence; 0 for images.
        held_out: sequences of an evaluation; 0: all held-out images.
        evaluations: how many, evenly spread, besides the one before the first step.
        width, layers: of the models that start from random weights; 0 for the others.
    """

    model: str
    algorithm: str
    lr: float
    weight_decay: float
    steps: int
    batch: int
    length: int = 0
    held_out: int = 0
    evaluations: int = 10
    width: int = 0
    layers: int = 0

    @property
    def name(self) -> str:
        return f"{self.model}/{self.algorithm}"

    @property
    def kind(self) -> str:
        """The model alone, a key of `NEEDS`."""
        return self.model.removesuffix(LONG)

    def settings(self) -> dict[str, Any]:
        """Everything that two runs must have in common to be compared, as plain numbers and strings."""
        return asdict(self)

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ...: up over a tenth of the steps, then in a line down to a tenth of the highest."""
        warm = max(1, self.steps // 10)
        return self.lr * min(1.0, (step + 1) / warm) * (1 - 0.9 * step / self.steps)

    def evaluates_after(self, steps: int) -> bool:
        """Whether an evaluation follows when this many steps are done."""
        return steps * self.evaluations // self.steps != (steps - 1) * self.evaluations // self.steps

    def batches(self, seed: int, rows: int) -> Tensor:
        """int64 [steps, batch]: which of `rows` examples a step sees; every example once before one is seen again."""
        generator = torch.Generator().manual_seed(1000 + seed)
        needed = self.steps * self.batch
        order = torch.cat([torch.randperm(rows, generator=generator) for _ in range(-(-needed // rows))])
        return order[:needed].view(self.steps, self.batch)


@dataclass(frozen=True)
class Training:
    """A task with its model and data.

    Attributes:
        model: with the first weights.
        loss: number of a step to the loss of its batch, fp32 scalar with a graph.
        evaluate: the held-out figures: "loss", and "accuracy" of images.
    """

    model: nn.Module
    loss: Callable[[int], Tensor]
    evaluate: Callable[[], dict[str, float]]

    @property
    def params(self) -> list[nn.Parameter]:
        """What is trained, in the model's order."""
        return [param for param in self.model.parameters() if param.requires_grad]


class Assets:
    """Text, images and the pretrained model; each is read once, when it is first needed.

    Args:
        folder: what `python recipes/demo_assets.py` has made: `model`, `train.jsonl` and `eval.jsonl`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def missing(self, model: str) -> list[str]:
        """What a task's model takes and is not there, in words."""
        words = []
        for need in NEEDS[model.removesuffix(LONG)]:
            if need == "text" and not all((self.folder / f"{part}.jsonl").is_file() for part in ("train", "eval")):
                words.append(f"{self.folder}/train.jsonl and eval.jsonl (python recipes/demo_assets.py --folder {self.folder})")
            elif need == "model" and not (self.folder / "model" / "config.json").is_file():
                words.append(f"{self.folder}/model (python recipes/demo_assets.py --folder {self.folder})")
            elif need not in ("text", "model") and not installed({"scikit-learn": "sklearn"}.get(need, need)):
                words.append(f"{need} (pip install {need})")
        return words

    def text(self, part: str) -> str:
        """The answers of all conversations of "train" or "eval", with an empty line between."""
        lines = (self.folder / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
        answers = (message["content"] for line in lines for message in json.loads(line)["messages"] if message["role"] == "assistant")
        return "\n\n".join(answers)

    @cached_property
    def raw(self) -> dict[str, Tensor]:
        """ "train" and "eval" as bytes, int64 [n]."""
        return {part: torch.tensor(list(self.text(part).encode())) for part in ("train", "eval")}

    @cached_property
    def tokens(self) -> dict[str, Tensor]:
        """ "train" and "eval" as the pretrained model's tokens, int64 [n]."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder / "model")
        return {
            part: torch.tensor(tokenizer(self.text(part), add_special_tokens=False, verbose=False)["input_ids"])
            for part in ("train", "eval")
        }

    @cached_property
    def digits(self) -> tuple[Tensor, Tensor]:
        """scikit-learn's digits: fp32 [1797, 1, 8, 8] of mean 0 and deviation 1, and int64 [1797], in a fixed random order."""
        from sklearn.datasets import load_digits

        found = load_digits()
        order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(found.images, dtype=torch.float32)[order, None]
        return (images - images.mean()) / images.std(), torch.tensor(found.target)[order]


def begin(task: Task, assets: Assets, seed: int) -> Training:
    """The model with its first weights, and the data in order."""
    torch.manual_seed(seed)
    if task.kind in ("resnet", "vit"):
        return _images(task, (ResNet if task.kind == "resnet" else Vit)(task.width, task.layers), assets, seed)
    if task.kind == "gpt":
        return _language(task, Gpt(task.width, task.layers, task.length), assets.raw, seed)
    return _language(task, (_qlora if task.kind == "qlora" else _full)(assets.folder / "model"), assets.tokens, seed)


def _images(task: Task, model: nn.Module, assets: Assets, seed: int) -> Training:
    """A classifier of digits."""
    images, classes = assets.digits
    known = len(classes) - HELD_OUT_IMAGES
    order = task.batches(seed, known)

    def loss(step: int) -> Tensor:
        model.train()
        return F.cross_entropy(model(images[order[step]]), classes[order[step]])

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        model.eval()
        logits = model(images[known:])
        right = (logits.argmax(1) == classes[known:]).double().mean()
        return {"loss": F.cross_entropy(logits, classes[known:]).item(), "accuracy": right.item()}

    return Training(model, loss, evaluate)


def _language(task: Task, model: nn.Module, tokens: Mapping[str, Tensor], seed: int) -> Training:
    """A language model on windows of `length` tokens; the loss is the mean over all of them, cross entropy in nats."""
    windows = {part: values[: len(values) // task.length * task.length].view(-1, task.length) for part, values in tokens.items()}
    order = task.batches(seed, len(windows["train"]))

    def cross_entropy(ids: Tensor) -> Tensor:
        logits = model(ids)
        logits = logits if isinstance(logits, Tensor) else logits.logits
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())

    # The model stays in training mode, in which these have no dropout: for inference bitsandbytes repacks 4-bit layers on some CPUs, and a
    # repacked one passes no gradient.
    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        parts = windows["eval"][: task.held_out].split(max(task.batch, 2))
        return {"loss": sum(cross_entropy(part).item() * len(part) for part in parts) / sum(map(len, parts))}

    return Training(model, lambda step: cross_entropy(windows["train"][order[step]]), evaluate)


def _full(folder: Path) -> nn.Module:
    """The pretrained model in bf16."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_cache=False).train()


def _qlora(folder: Path) -> nn.Module:
    """The pretrained model in NF4 with double quantization, computed in bf16; fp32 adapters on every linear layer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    base = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.bfloat16, device_map={"": "cpu"}, use_cache=False
    )
    adapter = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(base, adapter).train()


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task("resnet", "sgd", lr=0.05, weight_decay=5e-4, steps=400, batch=32, width=16, layers=1),
            Task("resnet", "adamw", lr=4e-3, weight_decay=0.01, steps=400, batch=32, width=16, layers=1),
            Task("vit", "sgd", lr=0.1, weight_decay=5e-4, steps=320, batch=32, width=64, layers=2),
            Task("vit", "adamw", lr=4e-3, weight_decay=0.01, steps=320, batch=32, width=64, layers=2),
            Task("vit", "lion", lr=1e-3, weight_decay=0.1, steps=320, batch=32, width=64, layers=2),
            Task("gpt", "adamw", lr=5e-3, weight_decay=0.01, steps=240, batch=8, length=64, held_out=64, width=96, layers=2),
            Task("gpt", "lion", lr=1e-3, weight_decay=0.1, steps=240, batch=8, length=64, held_out=64, width=96, layers=2),
            Task("qlora", "adamw", lr=2e-4, weight_decay=0.0, steps=24, batch=2, length=64, held_out=6, evaluations=4),
            Task("qlora", "lion", lr=1e-4, weight_decay=0.0, steps=24, batch=2, length=64, held_out=6, evaluations=4),
            Task("full", "adamw", lr=5e-5, weight_decay=0.0, steps=10, batch=2, length=64, held_out=6, evaluations=4),
            Task("qlora-long", "adamw", lr=2e-4, weight_decay=0.0, steps=80, batch=2, length=64, held_out=8, evaluations=8),
            Task("full-long", "adamw", lr=5e-5, weight_decay=0.0, steps=40, batch=2, length=64, held_out=8, evaluations=8),
        )
    }
)
"""Name to task, in the order in which they are run: the cheap ones first."""
