"""The optimizers' names in transformers, and the way from `TrainingArguments` to an optimizer class with its options.

Names are file names: `optim/<stem>.py` is an algorithm if it defines a class whose name in lower case is `flash<stem>` (`adamw.py` has
`FlashAdamW`), and gives `flashoptim_<stem>` and `flashoptim_paged_<stem>`. Files are read to find this out, not imported.

What is touched in transformers, each only where it concerns these names: members of the enum `OptimizerNames`; entries in
`trainer_optimizer._OPTIMIZER_HANDLERS`; one more class in `trainer.DEFAULT_CALLBACKS`; `Trainer.get_optimizer_cls_and_kwargs`, which
otherwise cuts `optim_args` at every comma before a handler sees it, so that neither a tuple nor a comma at the end survives; and the
methods of `Trainer` that save and resume, see `saving.py`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..errors import ConfigurationError
from . import hook
from .options import option_types, parse_optim_args

PACKAGE = __package__.rpartition(".")[0]
PREFIX = "flashoptim_"

_OURS = "_flashoptim_hf"
_METHOD = "get_optimizer_cls_and_kwargs"

FROM_ARGUMENTS = {
    "lr": ("learning_rate",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
    "weight_decay": ("weight_decay",),
}
"""Option -> the fields of `TrainingArguments` that give its value. An optimizer gets those that are in its signature."""


# ---------------------------------------------------------------------- which optimizers there are


def algorithms() -> dict[str, str]:
    """Stem of each algorithm's file in `optim/` -> name of its class."""
    spec = importlib.util.find_spec(f"{PACKAGE}.optim")
    found = {}
    for module in pkgutil.iter_modules(spec.submodule_search_locations if spec else None, f"{PACKAGE}.optim."):
        stem = module.name.rpartition(".")[2]
        own = module.module_finder.find_spec(module.name, None)
        source = own.loader.get_source(module.name) if own and own.loader else None  # type: ignore[attr-defined]
        for name in re.findall(r"^class (Flash\w+)", source or "", re.MULTILINE):
            if name.lower() == "flash" + stem.replace("_", ""):
                found[stem] = name
    return found


def optimizer_class(stem: str) -> Any:
    """The optimizer class in `optim/<stem>.py`; imports it."""
    return getattr(importlib.import_module(f"{PACKAGE}.optim.{stem}"), algorithms()[stem])


# ---------------------------------------------------------------------- from TrainingArguments to an optimizer


@dataclass(frozen=True)
class Handler:
    """What transformers calls for one name. `stem`: the algorithm; `paged`: whether the name asks for paged state."""

    stem: str
    paged: bool

    @property
    def name(self) -> str:
        return f"{PREFIX}{'paged_' if self.paged else ''}{self.stem}"

    def __call__(self, context: Any) -> tuple[Any, dict[str, Any]]:
        return self.resolve(context.args, context.model)

    def given(self, args: Any) -> dict[str, Any]:
        """The options in `args.optim_args`.

        Raises:
            ConfigurationError: see `parse_optim_args`.
        """
        return parse_optim_args(args.optim_args, option_types(optimizer_class(self.stem)), self.name)

    def resolve(self, args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """The optimizer class and its keyword arguments: those that `TrainingArguments` has, and over them those in `optim_args`.

        Args:
            args: `TrainingArguments`.
            model: the model that the Trainer makes groups from; None where there is none yet.

        Raises:
            ConfigurationError: bad `optim_args`, a model without trainable parameters, or a weight decay that the Trainer would override.
        """
        optimizer = optimizer_class(self.stem)
        types = option_types(optimizer)
        options: dict[str, Any] = {}
        for option, names in FROM_ARGUMENTS.items():
            if option in types:
                values = tuple(getattr(args, name) for name in names)
                options[option] = values if len(values) > 1 else values[0]
        options["paged"] = self.paged

        given = self.given(args)
        for option, value in given.items():
            if option in options and options[option] != value:
                _say(args, f"optim_args sets {option}={value!r}, which wins over {self._rival(option, options[option])}.")
        if model is not None:
            _check_trainable(model)
            decay = given.get("weight_decay", args.weight_decay)
            if decay != args.weight_decay:
                raise ConfigurationError(
                    f"optim_args sets weight_decay={decay}, but the Trainer sets weight_decay={args.weight_decay} on each parameter group "
                    f"(0 on biases and norms), which would win. Use TrainingArguments(weight_decay={decay})."
                )
        return optimizer, {**options, **given}

    def _rival(self, option: str, value: Any) -> str:
        if option == "paged":
            return f"the name {self.name}"
        return f"{'/'.join(FROM_ARGUMENTS[option])}={value!r} of TrainingArguments"


def handlers() -> dict[str, Handler]:
    """Registered name -> handler."""
    made = [Handler(stem, paged) for stem in algorithms() for paged in (False, True)]
    return {handler.name: handler for handler in made}


def handler_of(args: Any) -> Handler | None:
    """The handler that serves `args.optim`, or None where it is another package's name."""
    known = sys.modules.get("transformers.trainer_optimizer")
    handler = getattr(known, "_OPTIMIZER_HANDLERS", {}).get(args.optim)
    return handler if isinstance(handler, Handler) else None


def settle(args: Any) -> None:
    """Check `args.optim_args`, and copy what it says of learning rate, betas, eps and weight decay into `args`.

    Called when a Trainer is made. From then on `args` tells what is in force, to the model card and to the Trainer, which makes the groups
    and their weight decay from it. Each change is logged.

    Raises:
        ConfigurationError: see `parse_optim_args`.
    """
    handler = handler_of(args)
    if handler is None:
        return
    for option, value in handler.given(args).items():
        names = FROM_ARGUMENTS.get(option, ())
        for name, new in zip(names, value if len(names) > 1 else (value,), strict=bool(names)):
            old = getattr(args, name)
            if old != new:
                _say(
                    args, f"optim_args sets {option}={value!r}, which wins over {name}={old!r} of TrainingArguments: {name} is now {new!r}."
                )
                setattr(args, name, new)


def _say(args: Any, line: str) -> None:
    from transformers.utils import logging

    if args.should_log:  # one process speaks for all
        logging.get_logger(__name__).warning(line)


def _check_trainable(model: Any) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError(
            f"{type(model).__name__} has no trainable parameters: every one has requires_grad=False, so there is nothing to optimize. "
            "The usual cause is an adapter loaded for inference: load it with PeftModel.from_pretrained(..., is_trainable=True). "
            "Otherwise set requires_grad=True on what you want to train."
        )


# ---------------------------------------------------------------------- the seams in transformers


def register() -> None:
    """Make the names known to transformers, at once where it is loaded, and else as soon as it is.

    May be called any number of times. A name that transformers already has is left alone.
    """
    hook.install(_ACTIONS)


def unregister() -> None:
    """Take back everything that `register` did. Trainers that exist keep their optimizer and their callback."""
    hook.remove()
    arguments, optimizer, trainer = (sys.modules.get(name) for name in _ACTIONS)
    if arguments is not None:
        _remove_members(arguments.OptimizerNames)
    if optimizer is not None:
        table = getattr(optimizer, "_OPTIMIZER_HANDLERS", {})
        for name in [name for name, handler in table.items() if isinstance(handler, Handler)]:
            del table[name]
    if trainer is not None:
        from . import saving
        from .callbacks import FlashOptimCallback

        saving.remove(trainer.Trainer)
        trainer.DEFAULT_CALLBACKS[:] = [callback for callback in trainer.DEFAULT_CALLBACKS if callback is not FlashOptimCallback]
        method = inspect.getattr_static(trainer.Trainer, _METHOD).__func__
        if hasattr(method, _OURS):  # if another package has wrapped it since, it stays inside and passes everything on
            setattr(trainer.Trainer, _METHOD, staticmethod(method.__wrapped__))


def _extend_enum(module: ModuleType) -> bool:
    """`transformers.training_args` is loaded: add members to its enum. Returns whether this version of transformers can use them."""
    if importlib.util.find_spec("transformers.trainer_optimizer") is None:
        _warn_unsupported()
        return False
    for name in handlers():
        if name not in module.OptimizerNames._value2member_map_:
            _add_member(module.OptimizerNames, name)
    return True


def _extend_table(module: ModuleType) -> bool:
    """`transformers.trainer_optimizer` is loaded: add handlers to its table, one for each member that is ours."""
    arguments = importlib.import_module("transformers.training_args")
    table = getattr(module, "_OPTIMIZER_HANDLERS", None)
    if table is None:
        _remove_members(arguments.OptimizerNames)
        _warn_unsupported()
        return False
    _extend_enum(arguments)
    for name, handler in handlers().items():
        member = arguments.OptimizerNames(name)
        if hasattr(member, _OURS):
            table.setdefault(member, handler)
    return True


def _extend_trainer(module: ModuleType) -> None:
    """`transformers.trainer` is loaded: add the callback, make saving safe, and see to it that `optim_args` arrives whole."""
    from . import saving
    from .callbacks import FlashOptimCallback

    if FlashOptimCallback not in module.DEFAULT_CALLBACKS:
        module.DEFAULT_CALLBACKS.append(FlashOptimCallback)
    saving.install(module.Trainer)
    # another finder may have kept ours from seeing the two modules before: each action makes up for those that should have run
    table = sys.modules.get("transformers.trainer_optimizer")
    if table is None or not _extend_table(table):
        return
    original = inspect.getattr_static(module.Trainer, _METHOD).__func__
    if not hasattr(original, _OURS):
        setattr(module.Trainer, _METHOD, staticmethod(_with_raw_optim_args(original)))


_ACTIONS: dict[str, hook.Action] = {
    "transformers.training_args": _extend_enum,
    "transformers.trainer_optimizer": _extend_table,
    "transformers.trainer": _extend_trainer,
}


def _with_raw_optim_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer.get_optimizer_cls_and_kwargs`, which goes to our handler for our names, and to `original` for all others."""

    @functools.wraps(original)
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        handler = handler_of(args)
        return original(args, model) if handler is None else handler.resolve(args, model)

    setattr(get_optimizer_cls_and_kwargs, _OURS, True)
    return get_optimizer_cls_and_kwargs


def _add_member(enum: Any, value: str) -> None:
    """Add a member as `class` statements do. It pickles as a plain string, so that `training_args.bin` loads without this package."""
    name = value.upper()
    member = str.__new__(enum, value)
    member._name_ = name
    member._value_ = value
    member.__objclass__ = enum
    member._sort_order_ = len(enum._member_names_)
    member.__reduce_ex__ = lambda _protocol: (str, (value,))
    member.__deepcopy__ = lambda _memo: member  # a copy within a process stays the member; copy.deepcopy would use __reduce_ex__
    setattr(member, _OURS, True)
    enum._member_names_.append(name)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member
    if hasattr(enum, "_hashable_values_"):  # Python 3.12 and later
        enum._hashable_values_.append(value)
    type.__setattr__(enum, name, member)  # the enum's own __setattr__ refuses members


def _remove_members(enum: Any) -> None:
    for name, member in list(enum._member_map_.items()):
        if hasattr(member, _OURS):
            enum._member_names_.remove(name)
            del enum._member_map_[name], enum._value2member_map_[member._value_]
            if hasattr(enum, "_hashable_values_"):
                enum._hashable_values_.remove(member._value_)
            type.__delattr__(enum, name)


def _warn_unsupported() -> None:
    import transformers

    warnings.warn(
        f"transformers {transformers.__version__} has no table of optimizers that could be extended (5.2 is the first with one): the names "
        f"{', '.join(handlers())} are not registered. Pass the class itself, which works in every version: "
        "Trainer(optimizer_cls_and_kwargs=(flashoptim_hf.FlashAdamW, {'lr': 1e-4, 'paged': True})), or install transformers>=5.2.",
        stacklevel=1,  # one place, so that the warning appears once
    )
