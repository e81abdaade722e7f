"""What a run checks and tells: precision and processes in force, safe resumption, speed, samples, the loss curve, the closing table."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import sft_card
import sft_checks
import torch
from accelerate import PartialState
from peft import PeftModel, get_peft_model_state_dict
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from safetensors.torch import load_file
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.generation import BaseStreamer
from trl import SFTTrainer

import flashoptim_hf
from flashoptim_hf.errors import CheckpointError, ConfigurationError
from flashoptim_hf.trainer import complete
from flashoptim_hf.trainer.saving import steps_of

ADAPTER = "adapter_model.safetensors"


def check_launch(args: TrainingArguments, environ: dict[str, str]) -> None:
    """Compare what the launcher was told with what the recipe was told. `environ`: the environment as it was at the start.

    Raises:
        ConfigurationError: two different precisions, or several processes asked for and one started.
    """
    launched = environ.get("ACCELERATE_MIXED_PRECISION", "no")  # "no" is also what the launcher says when it was told nothing
    if launched not in ("no", args.mixed_precision):
        raise ConfigurationError(
            f"accelerate launch says mixed precision {launched}, the recipe says {args.mixed_precision}. Pass the same to both "
            f"(--{launched} true{' --bf16 false' if launched == 'fp16' else ''} after the script's name), or leave it out of the launcher."
        )
    sft_checks.processes(environ, args.world_size)


def lift_fp16(model: torch.nn.Module, scaled: bool) -> list[str]:
    """Turn trainable fp16 weights into fp32, in place, and return their names. Gradient scaling cannot unscale fp16 gradients.

    Args:
        scaled: fp16 training with loss scaling. Then bf16 weights become fp32 too: whoever trains in fp16 has a device without bf16.
    """
    narrow = (torch.float16, torch.bfloat16) if scaled else (torch.float16,)
    names = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.dtype in narrow]
    for name in names:
        weight = model.get_parameter(name)
        weight.data = weight.data.float()
    return names


def resume_folder(option: Any, output_dir: str, auto: bool = False) -> str | None:
    """The checkpoint that `resume_from_checkpoint` means: nothing, a folder, for `true` the last complete one in the output folder, and
    for `auto` the same or, where there is none, a fresh start. `auto`: what is meant where the option is not set.

    Raises:
        CheckpointError: there is no such folder, a file is missing or damaged, or nothing shows that its files belong together.
    """
    if str(option).lower() == "auto" or (auto and option is None):
        return flashoptim_hf.last_complete_checkpoint(output_dir)
    if option is None or str(option).lower() in ("", "false", "none"):
        return None
    if str(option).lower() == "true":
        folder = flashoptim_hf.last_complete_checkpoint(output_dir)
        if folder is None:
            raise CheckpointError(
                f"resume_from_checkpoint=true, but {output_dir} holds no complete checkpoint; name a folder, or leave it out to start."
            )
        return folder
    complete.require(option)
    if not Path(option, complete.MARK).is_file():
        raise CheckpointError(
            f"{option} has no {complete.MARK}, so nothing shows that its adapter and its optimizer belong to the same step. It was not "
            "saved by this recipe, or not to the end: resume from an earlier checkpoint."
        )
    return str(option)


def resumption(args: TrainingArguments, auto: bool = False) -> str | None:
    """`resume_folder` of these arguments, after saying which checkpoint it is, or that none was found."""
    folder = resume_folder(args.resume_from_checkpoint, args.output_dir, auto)
    if folder is not None:
        mark = complete.read_mark(folder) or {}
        PartialState().print(f"resuming from {folder} (step {mark.get('step')})")
    elif auto or args.resume_from_checkpoint is not None:
        PartialState().print(f"resuming from nothing: no complete checkpoint in {args.output_dir}; the run begins at step 0")
    return folder


class TrainedAlready(Exception):
    """The checkpoint that a run was resumed from is its end: the Trainer would make one more step."""


class Watch(TrainerCallback):
    """Checks a run before its first step, seals every checkpoint, and measures the time spent in training steps alone.

    Args:
        resumed: the checkpoint's folder, None for a fresh start.
    """

    def __init__(self, resumed: str | None) -> None:
        self.resumed = resumed
        self.seconds = 0.0
        self.steps = 0
        self._began = 0.0
        self._tokens_before = 0
        self.tokens = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, **kwargs: Any) -> None:
        self._tokens_before = state.num_input_tokens_seen
        if self.resumed is not None:
            _check_loaded(Path(self.resumed), kwargs["model"], kwargs["optimizer"], state.global_step, skips=args.fp16)
            if 0 < state.max_steps <= state.global_step:
                raise TrainedAlready
        model = kwargs.get("model")
        if model is not None and not getattr(args, "fsdp", None):
            sft_checks.checkpointing(model, args)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        self.seconds += time.perf_counter() - self._began
        self.steps += 1
        self.tokens = state.num_input_tokens_seen - self._tokens_before

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        # an optimizer of this package has seen to it already, at a better moment: before older checkpoints are deleted
        if state.is_world_process_zero and folder.is_dir() and not Path(folder, complete.MARK).is_file():
            complete.seal(folder, state.global_step)


class Steady(Trainer):
    """For any Trainer: trainable weights keep their dtypes when a checkpoint is loaded, evaluations log `eval_perplexity`, and the card is
    complete.

    PEFT (0.21.2 at least) turns a bf16 adapter into fp32 while it loads it. The run would go on in another precision, and the low bits of
    bf16 weights that the optimizer keeps would no longer belong to them. The optimizer is made after the loading, so this is the place.
    """

    dtypes: dict[str, torch.dtype]
    perplexities = True  # whether the loss is one per token

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        for key in [key for key in logs if self.perplexities and key.startswith("eval_") and key.endswith("_loss")]:
            logs[f"{key.removesuffix('loss')}perplexity"] = perplexity(logs[key])
        super().log(logs, *args, **kwargs)

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, **kwargs: Any) -> None:
        model_name = model_name or Path(self.args.output_dir).name
        super().create_model_card(model_name=model_name, dataset_name=sft_card.hub_id(dataset_name), **kwargs)
        if self.is_world_process_zero():
            sft_card.complete(self, Path(self.args.output_dir, "README.md"))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.dtypes = {name: weight.dtype for name, weight in self.model.named_parameters() if weight.requires_grad}
        return super().train(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        for name, dtype in self.dtypes.items():
            weight = self.model.get_parameter(name)
            weight.data = weight.data.to(dtype)
        return super().create_optimizer(*args, **kwargs)


class AdapterTrainer(Steady, SFTTrainer):
    """trl's trainer of the supervised recipes."""


def perplexity(loss: float) -> float:
    """exp of a loss per token; infinite where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf


def _check_loaded(folder: Path, model: Any, optimizer: Any, step: int, skips: bool) -> None:
    """Compare the adapter in memory with the checkpoint's, bit for bit, and the optimizer's step count with the Trainer's.

    Args:
        skips: True where the optimizer may have skipped steps (loss scaling), so that fewer are right too.

    Raises:
        CheckpointError: the adapter was not loaded, or was replaced afterwards; or the optimizer is at another step.
    """
    while hasattr(model, "module"):
        model = model.module
    for name in model.active_adapters if isinstance(model, PeftModel) else []:
        path = next((p for p in (folder / name / ADAPTER, folder / ADAPTER) if p.is_file()), None)
        if path is None:
            continue
        loaded = get_peft_model_state_dict(model, adapter_name=name)
        for key, saved in load_file(path).items():
            if key not in loaded or not torch.equal(loaded[key].detach().cpu(), saved):
                raise CheckpointError(
                    f"the weight {key} of adapter {name!r} is not what {path} holds: it was not loaded, or was replaced afterwards."
                )
    complete.check_steps(folder, steps_of(optimizer), step, skips)


class _Bar(BaseStreamer):
    """A progress bar for `generate`."""

    def __init__(self, total: int, label: str) -> None:
        self.bar = tqdm(total=total, desc=label, unit="token")
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:  # the first call brings the prompt
            self.bar.update(value.numel())
        self.prompt_seen = True

    def end(self) -> None:
        self.bar.close()


def sample(trainer: Trainer, prompt: list[int], tokens: int, label: str) -> str:
    """The model's greedy answer to a prompt, at most `tokens` tokens (0: none); on the main process alone, empty elsewhere.

    Empty with FSDP too, where one process alone cannot run the model; `flashoptim-hf sample` answers after the run.
    """
    text = ""
    if tokens > 0 and trainer.is_world_process_zero() and not trainer.is_fsdp_enabled:
        model, tokenizer = trainer.model, trainer.processing_class
        training = model.training
        model.eval()
        ids = torch.tensor([prompt], device=trainer.args.device)
        with torch.no_grad(), trainer.accelerator.autocast():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                streamer=_Bar(tokens, label),
            )
        model.train(training)
        text = tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
    trainer.accelerator.wait_for_everyone()
    return text


def plot_losses(history: list[dict[str, Any]], path: Path) -> None:
    """Training and evaluation loss over the steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
        points = [(row["step"], row[key]) for row in history if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="loss per token", title="Loss")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def optimizer_name(args: TrainingArguments) -> str:
    """The optimizer's name as the user writes it; transformers keeps it as a member of an enumeration."""
    return str(getattr(args.optim, "value", args.optim))


def optimizer_rows(optimizer: Any, trainable: list[torch.nn.Parameter], world_size: int) -> list[tuple[str, str]]:
    """What the optimizer's state takes, beside fp32 AdamW: 8 bytes per parameter, 12 with the fp32 masters of 16-bit weights."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    report = getattr(optimizer, "memory_report", None)
    if report is None:
        return []
    numbers = report().to_dict()
    fp32 = sum(weight.numel() * (8 if weight.dtype == torch.float32 else 12) for weight in trainable)
    device = "no device" if numbers["device_bytes"] is None else _bytes(numbers["device_bytes"])
    steps = "" if world_size == 1 else " (this process)"
    return [
        (
            f"optimizer state{steps}",
            f"{_bytes(numbers['state_bytes'])} ({numbers['state_bytes'] / numbers['num_params']:.2f} bytes per parameter)",
        ),
        ("  on the host / on the device", f"{_bytes(numbers['host_bytes'])} / {device}"),
        ("  fp32 AdamW would hold", f"{_bytes(fp32)} ({fp32 / numbers['num_params']:.2f} bytes per parameter)"),
        (
            "  pages in / out per step",
            f"{_bytes(numbers['page_in_bytes'])} / {_bytes(numbers['page_out_bytes'])} ({numbers['pages']} pages)",
        ),
    ]


def report_end(trainer: Trainer, watch: Watch, prompt: str, answers: dict[str, str], page: Path | None) -> None:
    """Write the loss curve, print the sample answers and the closing table.

    Args:
        answers: by what is printed before them; may be empty.
        page: of the report; None where there is none, because nothing was trained.
    """
    args, history, console = trainer.args, trainer.state.log_history, Console()
    curve = Path(args.output_dir, "loss.png")
    plot_losses(history, curve)
    trainable = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    rows = [
        *loss_rows(history),
        (
            "tokens per second",
            f"{watch.tokens / max(watch.seconds, 1e-9):.0f} ({watch.steps} steps of {watch.seconds / max(watch.steps, 1):.2f} s)",
        ),
        ("trainable parameters", f"{sum(weight.numel() for weight in trainable):,} in {len(trainable)} tensors"),
        *optimizer_rows(trainer.optimizer, trainable, args.world_size),
        ("adapter" if isinstance(trainer.model, PeftModel) else "model", args.output_dir),
        ("loss curve", str(curve)),
        *([("report", str(page))] if page is not None else []),
    ]
    if any(answers.values()):
        console.print(Panel(Text(prompt.strip()), title="prompt"))
        for label, answer in answers.items():
            console.print(Panel(Text(answer.strip()), title=f"answer {label}"))
    table = Table(title=f"{trainer.state.global_step} steps, optimizer {optimizer_name(args)}", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def loss_rows(history: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Evaluation loss and perplexity before the first and after the last step."""
    losses = [row["eval_loss"] for row in history if "eval_loss" in row]
    if not losses:
        return []
    return [
        ("held-out loss before / after", f"{losses[0]:.4f} / {losses[-1]:.4f}"),
        ("perplexity before / after", f"{perplexity(losses[0]):.2f} / {perplexity(losses[-1]):.2f}"),
    ]


def _bytes(number: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.2f} {unit}"
        number /= 1024
    return f"{number:.2f} GiB"
