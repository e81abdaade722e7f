"""A model's shapes from its config alone: the model itself on the meta device, and what of it is quantized or gets an adapter."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import places
from ..errors import ConfigurationError

ARCHITECTURES = ("configs/architectures", str(Path(__file__).resolve().parents[2] / "configs" / "architectures"))
"""Where files with published sizes lie: below the current folder, or in the checkout that this package is in."""

VARIANT = re.compile(r"-(instruct|base|it|chat|bnb-4bit|hf)(-\d+)?$", re.IGNORECASE)
"""Ends of hub names that say nothing about sizes."""


@dataclass(frozen=True)
class Weight:
    """One parameter: its name, shape and dtype; `linear`: the weight of an `nn.Linear`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    linear: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def layer(self) -> int | None:
        """Number of the decoder layer that it belongs to."""
        found = re.search(r"\.layers\.(\d+)\.|\.h\.(\d+)\.", f".{self.name}")
        return int(found[1] or found[2]) if found else None


@dataclass(frozen=True)
class ModelShape:
    """What a model consists of.

    Attributes:
        source: where the sizes come from.
        weights: all parameters in the model's order, tied ones once.
        buffer_bytes: buffers, which are neither trained nor quantized.
        kept: names of linear layers that stay as they are when the model is quantized.
        embedding, head: names of the weights of the input embedding and of the output layer; the same where they are tied.
        hidden, layers, heads, kv_heads, head_dim, vocab: as in the config.
        intermediate: width of the feed-forward part that one token passes through; of several experts their sum.
        qk_norm: queries and keys are normalised.
        norms: other norms of a layer.
        softcapped: attention scores pass through tanh, for which transformers has no kernel that keeps no scores.
    """

    source: str
    weights: tuple[Weight, ...]
    buffer_bytes: int
    kept: frozenset[str]
    embedding: str
    head: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int
    qk_norm: bool
    norms: int
    softcapped: bool

    @property
    def num_params(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def expert_bytes(self) -> int:
        """Experts, which transformers keeps in tensors of three dimensions: neither quantized by bitsandbytes nor linear layers."""
        return sum(weight.nbytes for weight in self.weights if len(weight.shape) == 3)

    @property
    def tied(self) -> bool:
        return self.embedding == self.head

    def quantized(self, weight: Weight) -> bool:
        """Whether a weight becomes NF4 when the model is loaded in 4 bits: linear layers but for the output layer."""
        return weight.linear and weight.name.removesuffix(".weight") not in self.kept

    def adapted(self, weight: Weight, targets: str | tuple[str, ...]) -> bool:
        """Whether PEFT puts an adapter on a weight's module."""
        module = weight.name.removesuffix(".weight")
        if not weight.linear:
            return False
        if targets == "all-linear":
            return weight.name != self.head
        if isinstance(targets, str):
            return re.fullmatch(targets, module) is not None
        return any(module == target or module.endswith(f".{target}") for target in targets)


def read_config(model: str, trust_remote_code: bool = False) -> tuple[Any, str]:
    """A model's config and where it was found: a JSON file, a folder, published sizes in configs/architectures, or the hub.

    Raises:
        ConfigurationError: none of them has it.
    """
    from transformers import AutoConfig

    path = Path(model)
    if path.is_file() or (path / "config.json").is_file():
        return _from_file(path if path.is_file() else path / "config.json"), model
    known = {file.stem.lower(): file for folder in ARCHITECTURES for file in sorted(Path(folder).glob("*.json"))}
    stem = model.rpartition("/")[2]
    while stem.lower() not in known and VARIANT.search(stem):
        stem = VARIANT.sub("", stem)
    if stem.lower() in known:
        file = known[stem.lower()]
        return _from_file(file), f"published sizes in configs/architectures/{file.name}"
    places.check(model, "config.json")
    if path.is_dir():
        raise ConfigurationError(f"{model!r} is no folder with a config.json. {places.instead(path / 'config.json')}")
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code), f"the hub's {model}"
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{model!r} is no folder with a config.json, no JSON file, and the hub gave no config ({str(error).splitlines()[0]}). "
            f"Sizes that are there without a hub: {', '.join(sorted(file.stem for file in known.values())) or 'none'}."
        ) from error


def _from_file(path: Path) -> Any:
    from transformers import AutoConfig

    values = json.loads(path.read_text(encoding="utf-8"))
    if "model_type" not in values:
        raise ConfigurationError(f"{path} has no model_type, so it is no model's config.")
    return AutoConfig.for_model(**values)


def meta_model(config: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The model of a config on the meta device: shapes and no memory.

    Raises:
        ConfigurationError: transformers knows no causal language model of this kind.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), _quiet():
        try:
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except ValueError as error:
            kind = getattr(config, "model_type", "?")
            raise ConfigurationError(f"model_type={kind!r} is no causal language model that transformers can build: {error}") from error
    return model


def shape_of(config: Any, source: str, dtype: torch.dtype = torch.bfloat16) -> ModelShape:
    """Look at the model of a config."""
    model = meta_model(config, dtype)
    linears = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear}
    weights = tuple(Weight(name, tuple(p.shape), p.dtype, name in linears) for name, p in model.named_parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    embedding = names[id(model.get_input_embeddings().weight)]  # type: ignore[operator]
    output = model.get_output_embeddings()  # type: ignore[operator]
    head = names[id(output.weight)] if output is not None else embedding
    text = config.get_text_config()
    heads = text.num_attention_heads
    qk = sum(1 for weight in weights if weight.layer == 0 and re.search(r"[qk]_norm", weight.name))
    return ModelShape(
        source=source,
        weights=weights,
        buffer_bytes=sum(buffer.numel() * buffer.itemsize for buffer in model.buffers()),
        kept=_kept(model, head, [name for name, _ in model.named_parameters()][-1]),
        embedding=embedding,
        head=head,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab=text.vocab_size,
        intermediate=_intermediate(text),
        qk_norm=qk > 0,
        norms=sum(1 for w in weights if w.layer == 0 and len(w.shape) == 1 and re.search(r"norm(\.weight)?$|layernorm", w.name)) - qk,
        softcapped=getattr(text, "attn_logit_softcapping", None) is not None,
    )


def _kept(model: nn.Module, head: str, last: str) -> frozenset[str]:
    """Modules that transformers does not quantize: the output layer, tied weights, the last parameter's module."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = {*tied, *tied.values(), head, last, "lm_head.weight"}
    return frozenset(name.removesuffix(".weight") for name in names)


def _intermediate(text: Any) -> int:
    """Width of the feed-forward part that one token passes through."""
    experts = getattr(text, "num_experts_per_tok", None)
    width = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if experts:
        shared = getattr(text, "shared_expert_intermediate_size", None) or 0
        return int(experts * width + shared)
    width = getattr(text, "intermediate_size", width)
    return int(max(width) if isinstance(width, (list, tuple)) else width)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own remarks about a model that is never used."""
    from transformers.utils import logging

    before: int = logging.get_verbosity()
    restore: Callable[[int], None] = logging.set_verbosity
    logging.set_verbosity_error()
    try:
        yield
    finally:
        restore(before)
