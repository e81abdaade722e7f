"""The model card: trl's, with what it leaves out: the library of an adapter, the optimizer, the steps and the held-out loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from peft import PeftModel
from sft_data import LOADERS

from flashoptim_hf.report import facts

TAG = "flashoptim-hf"


def hub_id(dataset: str | None) -> str | None:
    """The hub id that `dataset` names; None for files of this machine, whose paths are nobody's business and no ids."""
    if dataset is None or Path(dataset).suffix.lower() in LOADERS or Path(dataset).exists():
        return None
    return dataset.partition(":")[0]


def complete(trainer: Any, path: Path) -> None:
    """Add to the card at `path` what trl's does not say."""
    card = ModelCard.load(path)
    card.data.tags = sorted({*(card.data.tags or []), TAG})
    if isinstance(trainer.model, PeftModel):
        card.data.library_name = "peft"
    # trl names a base model and a repository that there may not be
    text = card.text.replace("[None](https://huggingface.co/None)", "a model in a local folder").replace('model="None"', 'model="FOLDER"')
    card.text = f"{text.rstrip()}\n\n## Training\n\n| | |\n| --- | --- |\n" + "".join(
        f"| {label} | {value.replace('|', '/')} |\n" for label, value in rows(trainer)
    )
    card.save(path)


def rows(trainer: Any) -> list[tuple[str, str]]:
    """(label, value) of how the model was trained."""
    args, history = trainer.args, trainer.state.log_history
    held_out = [row["eval_loss"] for row in history if "eval_loss" in row]
    found = [
        ("optimizer", str(getattr(args.optim, "value", args.optim)) + (f" ({args.optim_args})" if args.optim_args else "")),
        ("learning rate", f"{args.learning_rate:g}, {getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)}"),
        ("steps", f"{trainer.state.global_step} of {trainer.state.max_steps}"),
        ("samples per step", str(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)),
    ]
    if held_out:
        found.append(("held-out loss, before and after", f"{held_out[0]:.4f}, {held_out[-1]:.4f}"))
    return found + [(name, version) for name, version in facts.versions() if name in (TAG, "torch", "transformers", "peft", "bitsandbytes")]
