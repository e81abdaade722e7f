"""A model's or an adapter's folder as a model that answers, the base of an adapter in NF4 as it was trained on."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer

from .. import places
from ..errors import ConfigurationError, UnsupportedError

ADAPTER_CONFIG = "adapter_config.json"


@dataclass
class Loaded:
    """A model in evaluation mode with its tokenizer. `adapter`: the adapter's folder, None for a plain model; `base`: the model's name."""

    model: Any
    tokenizer: Any
    adapter: Path | None
    base: str


def need(module: str, extra: str) -> Any:
    """An optional package.

    Raises:
        UnsupportedError: it is not installed; names the command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(f"this needs {module}, which cannot be imported ({error}). Install it: pip install {extra}") from error


def adapter_folder(path: str | Path) -> Path | None:
    """The folder with the adapter's files: `path`, or the one folder in it that has them (adapters with a name); None for other models.

    Raises:
        ConfigurationError: several adapters lie in it.
    """
    path = Path(path)
    if (path / ADAPTER_CONFIG).is_file():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    inner = sorted(file.parent for file in path.glob(f"*/{ADAPTER_CONFIG}") if not file.parent.name.startswith("checkpoint-"))
    if len(inner) > 1:
        raise ConfigurationError(f"{path} holds the adapters {', '.join(folder.name for folder in inner)}: name the folder of one.")
    return inner[0] if inner else None


def find(path: str | Path) -> Path | None:
    """`adapter_folder` for a user's word: what was taken is said on stderr where it is not what was named.

    Raises:
        ConfigurationError: there is no such folder; or it holds neither a model nor an adapter, but folders in it do; or see there.
    """
    places.check(str(path), "model or an adapter")
    folder = adapter_folder(path)
    if folder is not None and folder != Path(path):
        typer.echo(f"the adapter is {folder}, the only one in {path}", err=True)
    if folder is None and Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        inside = sorted(
            {str(file.parent) for name in (ADAPTER_CONFIG, "config.json") for file in Path(path).glob(f"*/{name}")}, key=_number
        )
        way = f"These do: {', '.join(inside[-places.NAMED :])}." if inside else "Name the folder that a run or a merge has written."
        raise ConfigurationError(f"{path} holds neither a model (config.json) nor an adapter ({ADAPTER_CONFIG}). {way}")
    return folder


def _number(name: str) -> tuple[str, int]:
    """For an order in which checkpoint-9 comes before checkpoint-10."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdigit() else (name, 0)


def base_of(adapter: Path) -> str:
    """The base model that an adapter's config names.

    Raises:
        ConfigurationError: it names none.
    """
    name = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise ConfigurationError(f"{adapter / ADAPTER_CONFIG} names no base model: give one with --base.")
    return str(name)


def load_base(name: str, dtype: torch.dtype, in_4bit: bool, device: str) -> Any:
    """A causal language model on `device`; `in_4bit`: in NF4 with double quantization, as the QLoRA recipe trains on it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = None
    if in_4bit:
        need("bitsandbytes", "bitsandbytes")
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, quantization_config=quantization, device_map={"": device})
    except OSError as error:
        raise ConfigurationError(f"the model {name!r} cannot be loaded: {str(error).splitlines()[0]} Give its folder or hub id.") from error
    # On CPUs with AVX512-BF16, bitsandbytes (0.50.2 at least) repacks a layer for good at its first pass, and what dequantizes it later
    # takes the repacked bytes for the ordinary ones.
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            setattr(layer, "support_avx512bf16_for_cpu", False)  # noqa: B010 (torch types attributes of modules as tensors)
    return model.eval()


def load(path: str, base: str | None = None, in_4bit: bool | None = None, device: str | None = None) -> Loaded:
    """A model or an adapter on its base.

    Args:
        path: a folder or a hub id; folders of adapters are recognised.
        base: the adapter's base model; None: the one that it names.
        in_4bit: whether weights are in NF4; None: under an adapter only.
        device: None: the accelerator if there is one, else the CPU.

    Raises:
        ConfigurationError: see `find`; or the base is not there.
    """
    from transformers import AutoTokenizer

    adapter = find(path)
    name = base or (path if adapter is None else base_of(adapter))
    if adapter is not None:
        try:
            places.check(name, "base model")
        except ConfigurationError as error:
            raise ConfigurationError(
                f"{error} {'' if base else f'{adapter} names it; '}--base names the place of the adapter's base."
            ) from error
    device = device or default_device()
    model = load_base(name, torch.bfloat16, adapter is not None if in_4bit is None else in_4bit, device)
    homes = [folder for folder in (adapter, adapter and adapter.parent) if folder and (folder / "tokenizer_config.json").is_file()]
    tokenizer = AutoTokenizer.from_pretrained(str(homes[0]) if homes else name)
    if adapter is not None:
        # tokens that were added for the training have rows in the adapter's file, which the base has to have before
        rows = max(tokenizer.get_vocab().values(), default=-1) + 1
        if rows > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(rows)
        model = need("peft", "peft").PeftModel.from_pretrained(model, str(adapter)).eval()
    return Loaded(model, tokenizer, adapter, name)


def default_device() -> str:
    """The first accelerator that optimizer state is served on, else the CPU."""
    from ..paging.streams import devices

    return next((str(device) for device in devices()), "cpu")
