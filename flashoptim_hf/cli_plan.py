"""`flashoptim-hf plan`: what a run will take of GPU and host memory, before it is started."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import ConfigurationError

if TYPE_CHECKING:
    from .planner.setup import Setup

LAUNCH = "# accelerate launch "
LEAST = 2**20
"""Bytes: no GPU or machine has less."""


def run(
    model: Annotated[str | None, typer.Argument(help="A hub id, a model's folder, or a JSON file with its config.")] = None,
    config: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A YAML file of a recipe; options below win.")] = None,
    full: Annotated[bool | None, typer.Option("--full/--lora", help="Train all weights, or LoRA adapters.")] = None,
    load_in_4bit: Annotated[bool | None, typer.Option("--load-in-4bit/--no-load-in-4bit", help="NF4 weights: QLoRA, the default.")] = None,
    lora_r: Annotated[int | None, typer.Option(min=1, help="Rank of the adapters.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens per sample.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples per GPU and micro batch.")] = None,
    accumulation: Annotated[int | None, typer.Option(min=1, help="Micro batches per step.")] = None,
    checkpointing: Annotated[bool | None, typer.Option("--checkpointing/--no-checkpointing", help="Gradient checkpointing.")] = None,
    attention: Annotated[str | None, typer.Option(help="sdpa, flash_attention_2 or eager.")] = None,
    fused_head: Annotated[
        bool | None, typer.Option("--fused-head/--all-logits", help="Loss in tiles, as trl has it, or with all logits, as Trainer has it.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of weights that are not quantized.")] = None,
    optim: Annotated[str | None, typer.Option(help="As in TrainingArguments.")] = None,
    optim_args: Annotated[str | None, typer.Option(help="As in TrainingArguments: codec=log,page_bytes=32MiB,...")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Processes, each with a GPU.")] = None,
    hosts: Annotated[int, typer.Option(min=1, help="Machines that the GPUs are in.")] = 1,
    fsdp2: Annotated[bool | None, typer.Option("--fsdp2/--ddp", help="Several GPUs: shard with FSDP2, or DDP.")] = None,
    offload: Annotated[bool | None, typer.Option("--offload/--no-offload", help="FSDP2 with weights in host memory.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Memory of one GPU, for the verdict: 24GiB.")] = None,
    ram: Annotated[str | None, typer.Option(help="Memory of one machine, for the verdict: 64GiB.")] = None,
    link: Annotated[str, typer.Option(help="pcie3, pcie4, pcie5 or nvlink-c2c.")] = "pcie4",
    trust_remote_code: Annotated[bool, typer.Option(help="Allow code from the hub in the model's config.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write every number to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw GPU memory to this image file (needs matplotlib).")] = None,
) -> None:
    """Plan a run from the model's config alone: bytes on GPU and host, page traffic, other optimizers beside it, and whether it fits."""
    given = {
        "full": full,
        "load_in_4bit": load_in_4bit,
        "lora_r": lora_r,
        "seq_len": seq_len,
        "batch": batch_size,
        "accumulation": accumulation,
        "checkpointing": checkpointing,
        "attention": attention,
        "fused_head": fused_head,
        "dtype": dtype,
        "optim": optim,
        "optim_args": optim_args,
        "ranks": gpus,
        "fsdp": fsdp2,
        "offload": offload,
    }
    values = (from_recipe(config) if config is not None else {}) | {key: value for key, value in given.items() if value is not None}
    values |= {"gpu_bytes": memory_size("--gpu", gpu), "ram_bytes": memory_size("--ram", ram), "link": link}
    if model is not None:
        values["model"] = model
    show(values, hosts, trust_remote_code, json_file, plot)


def memory_size(flag: str, text: str | None) -> int | None:
    """Bytes of a GPU or a machine from a flag's text; None where it is not given.

    Raises:
        ConfigurationError: no size, or one below 1 MiB: a number without a unit counts bytes.
    """
    from .paging.plan import format_bytes, parse_bytes

    if text is None:
        return None
    nbytes = parse_bytes(text)
    if nbytes < LEAST:
        hint = f" A number alone counts bytes: write {flag} {text.strip()}GiB." if text.strip().isdecimal() and nbytes else ""
        raise ConfigurationError(f"{flag} {text} is {format_bytes(nbytes)}, less than the {format_bytes(LEAST)} that is the least.{hint}")
    return nbytes


def show(values: dict[str, Any], hosts: int, trust_remote_code: bool, json_file: Path | None, plot: Path | None) -> None:
    """Plan, print, and write the files that are asked for. `values`: see `make_setup`, and "model".

    Raises:
        ConfigurationError: no model, or one that has no config; bad values.
    """
    from rich.console import Console

    from .planner import advice, memory, report, shapes

    name = values.pop("model", None)
    if name is None:
        raise ConfigurationError("no model: name one, or pass --config FILE with model_name_or_path.")
    setup = make_setup(values, hosts)
    shape = shapes.shape_of(*shapes.read_config(name, trust_remote_code), setup.dtype)
    found = memory.plan(shape, setup)
    others = memory.beside(shape, setup)
    changes = advice.advise(shape, setup, defaults("flashoptim_paged_adamw"))
    report.show(found, others, changes, Console(width=140, highlight=False))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report.to_dict(found, others, changes), indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        report.draw(found, others, plot)


def defaults(optimizer: str) -> dict[str, Any]:
    """Every option of one of our optimizers with its default, `paged` as its name says; none for the optimizers of others."""
    from .planner.setup import PREFIX
    from .trainer.register import algorithms, optimizer_class

    if not optimizer.startswith(PREFIX):
        return {}
    stem = optimizer.removeprefix(PREFIX).removeprefix("paged_")
    if stem not in algorithms():
        raise ConfigurationError(f"optim={optimizer!r} is not known; flashoptim_[paged_] goes with {', '.join(algorithms())}.")
    signature = inspect.signature(optimizer_class(stem)).parameters
    found = {name: parameter.default for name, parameter in signature.items() if name != "params"}
    return found | {"paged": optimizer.startswith(f"{PREFIX}paged_")}


def make_setup(values: Mapping[str, Any], hosts: int = 1) -> Setup:
    """The planner's setup from flags and YAML values.

    Args:
        values: fields of `Setup`, with `optim` and `optim_args` for the optimizer, and dtypes by name.
        hosts: machines that the processes are on.

    Raises:
        ConfigurationError: a bad or unknown value.
    """
    from .planner.setup import ALIASES, PEERS, PREFIX, Setup
    from .planner.weights import dtype_of
    from .trainer.options import option_types, parse_optim_args
    from .trainer.register import optimizer_class

    values = dict(values)
    name = str(values.pop("optim", "flashoptim_paged_adamw"))
    name = ALIASES.get(name, name)
    options = defaults(name)
    if name.startswith(PREFIX):
        types = option_types(optimizer_class(name.removeprefix(PREFIX).removeprefix("paged_")))
        options |= parse_optim_args(values.pop("optim_args", None), types, name)
    elif name not in PEERS:
        raise ConfigurationError(f"optim={name!r} is not planned; choose flashoptim_[paged_]adamw, lion or sgd, or {', '.join(PEERS)}.")
    values.pop("optim_args", None)
    ranks = values.get("ranks", 1)
    if ranks % hosts:
        raise ConfigurationError(f"--gpus {ranks} cannot be spread over --hosts {hosts} evenly.")
    full = values.get("full", False)
    values.setdefault("load_in_4bit", not full)
    values["dtype"] = dtype_of(str(values.get("dtype", "bfloat16")))
    return Setup(optimizer=name, options=options, ranks_per_host=ranks // hosts, **values)


def from_recipe(file: Path) -> dict[str, Any]:
    """What a recipe's YAML file says, under the planner's names; processes come from the launch command that it opens with.

    Raises:
        ConfigurationError: keys that the planner cannot count.
    """
    import yaml

    text = file.read_text(encoding="utf-8")
    read: dict[str, Any] = yaml.safe_load(text) or {}
    for key in ("use_dora", "lora_modules_to_save", "added_tokens", "activation_offloading", "load_in_8bit"):
        if read.get(key):
            raise ConfigurationError(f"{file}: {key}={read[key]!r} is not planned.")
    full = not read.get("use_peft", "full_sft.py" not in text.partition("\n")[0])
    values: dict[str, Any] = {"full": full, "load_in_4bit": False if full else read.get("load_in_4bit", True)}
    names = {
        "model_name_or_path": "model",
        "max_length": "seq_len",
        "per_device_train_batch_size": "batch",
        "gradient_accumulation_steps": "accumulation",
        "gradient_checkpointing": "checkpointing",
        "attn_implementation": "attention",
        "dtype": "dtype",
        "optim": "optim",
        "optim_args": "optim_args",
        "use_bnb_nested_quant": "double_quant",
        "lora_r": "lora_r",
        "lora_dropout": "lora_dropout",
        "lora_target_modules": "lora_targets",
    }
    values |= {ours: read[key] for key, ours in names.items() if read.get(key) is not None}
    values = {"seq_len": 1024, "batch": 8, "lora_dropout": 0.05} | values  # trl's own defaults
    if isinstance(values.get("lora_targets"), list):
        values["lora_targets"] = tuple(values["lora_targets"])
    return values | from_launch(text.partition("\n")[0])


def from_launch(line: str) -> dict[str, Any]:
    """Processes and sharding from a launch command in a comment; nothing where there is none."""
    import yaml

    if not line.startswith(LAUNCH):
        return {}
    words = shlex.split(line.removeprefix(LAUNCH))
    options = {word.lstrip("-"): value for word, value in pairwise(words) if word.startswith("--")}
    file = Path(options.get("config_file", ""))
    settings: dict[str, Any] = {}
    for folder in (Path(), Path(__file__).resolve().parents[1]):
        if (folder / file).is_file():
            settings = yaml.safe_load((folder / file).read_text(encoding="utf-8"))
            break
    fsdp = settings.get("distributed_type") == "FSDP"
    offload = options.get("fsdp_offload_params", str(settings.get("fsdp_config", {}).get("fsdp_offload_params", False)))
    ranks = int(options.get("num_processes") or settings.get("num_processes", 1))
    return {"ranks": ranks, "fsdp": fsdp, "offload": offload.lower() == "true"}
