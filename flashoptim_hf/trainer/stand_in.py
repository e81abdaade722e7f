"""In place of `torch.optim.AdamW`, for programs that make their optimizer themselves and are not to be changed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from ..errors import ConfigurationError
from .options import option_types, parse_optim_args
from .register import handlers, optimizer_class

STEM = "adamw"
IGNORED = ("foreach", "fused", "capturable")
"""How torch's own AdamW does its arithmetic. It says nothing about what is computed."""

REFUSED = ("amsgrad", "maximize", "differentiable")
"""Another algorithm than AdamW."""


class Maker:
    """Called as `torch.optim.AdamW` is, it makes one of this package's optimizers.

    Args:
        name: a registered name of AdamW; it says whether the state is paged.
        optim_args: more options, as in `TrainingArguments.optim_args`.
        made: called with each optimizer that is made.

    Raises:
        ConfigurationError: not such a name, or bad `optim_args`.
    """

    def __init__(self, name: str, optim_args: str | None, made: Callable[[Any], None]) -> None:
        known = {known: handler for known, handler in handlers().items() if handler.stem == STEM}
        if name not in known:
            raise ConfigurationError(f"{name!r} cannot stand in for torch.optim.AdamW; choose one of {', '.join(known)}.")
        self.cls = optimizer_class(STEM)
        self.options = {"paged": known[name].paged, **parse_optim_args(optim_args, option_types(self.cls), name)}
        self.made = made

    def __call__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **more: Any,
    ) -> Any:
        more["amsgrad"] = amsgrad
        asked = [key for key in REFUSED if more.pop(key, False)]
        if asked:
            raise ConfigurationError(
                f"torch.optim.AdamW({asked[0]}=True) is another algorithm than the optimizer that stands in for it: change the program, or "
                "run it without --adamw."
            )
        for key in IGNORED:
            more.pop(key, None)
        if more:
            raise TypeError(f"AdamW.__init__() got an unexpected keyword argument {next(iter(more))!r}")
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        optimizer = self.cls(params, **{**values, **self.options})
        self.made(optimizer)
        return optimizer


def stand_in(maker: Maker, original: type) -> type:
    """A class in place of `original`, which programs may use as they use that: what it makes is made by `maker`.

    `isinstance` and `issubclass` are true for the optimizers of both. A class that is derived from it makes its own instances, of
    `original`'s algorithm.
    """

    class StandIn(type):
        def __call__(cls, *args: Any, **named: Any) -> Any:
            return maker(*args, **named) if cls is new else super().__call__(*args, **named)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, maker.cls | original) if cls is new else super().__instancecheck__(instance)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, maker.cls | original) if cls is new else super().__subclasscheck__(other)

        @property
        def __signature__(cls) -> inspect.Signature:
            found = inspect.signature(type.__getattribute__(cls, "__init__"))
            return found.replace(parameters=list(found.parameters.values())[1:])

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    new = StandIn(original.__name__, (original,), names)
    return new


def install(name: str, optim_args: str | None, made: Callable[[Any], None] = lambda _: None) -> Callable[[], None]:
    """Put a stand-in where programs find `torch.optim.AdamW`. Returns what takes it out again.

    Args:
        name, optim_args, made: see `Maker`.

    Raises:
        ConfigurationError: see `Maker`.
    """
    import torch

    places = (torch.optim, importlib.import_module("torch.optim.adamw"))
    original = torch.optim.AdamW
    new = stand_in(Maker(name, optim_args, made), original)
    for place in places:
        setattr(place, original.__name__, new)

    def remove() -> None:
        for place in places:
            setattr(place, original.__name__, original)

    return remove
