"""`optim_args`: one string to keyword arguments, each parsed by the type that the optimizer's signature gives it.

    "codec=log, page_bytes=32MiB, betas=(0.9, 0.95), dither=false"

Items are separated by commas, outside brackets and quotes; blanks do not matter, and neither does one comma at the end. A tuple is
written (a, b), [a, b] or a:b. A truth value is true/false, yes/no, on/off or 1/0. None is none. Sizes stay text: the optimizer reads them.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigurationError

_PAIRS = {"(": ")", "[": "]"}
_ELSEWHERE = {
    "optim_bits": "States are in 8 bits already: codec chooses how, and codec=none keeps them in 32.",
    "is_paged": "A name with _paged_ in it pages the state, flashoptim_paged_adamw for example.",
}
"""Options of bitsandbytes' optimizers -> what there is in their place."""

_EXAMPLE = "Write key=value items with commas between them, for example 'codec=log,page_bytes=32MiB,betas=(0.9,0.95)'"


def option_types(optimizer: type) -> dict[str, Any]:
    """Option name -> annotated type, of every option in the signature of an optimizer class, in order."""
    hints = get_type_hints(optimizer.__init__)  # type: ignore[misc]
    parameters = list(inspect.signature(optimizer).parameters.values())[1:]  # the first one takes the model's parameters
    named = (parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD))
    return {parameter.name: hints.get(parameter.name, str) for parameter in named}


def parse_optim_args(text: str | None, types: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Parse the value of `TrainingArguments.optim_args`.

    Args:
        text: the string; None and blanks mean no options.
        types: option name -> type, from `option_types`.
        owner: the optimizer's name, for messages.

    Returns:
        Option name -> value, in the order in which they were written.

    Raises:
        ConfigurationError: an unknown key, a value that its type does not take, a malformed item, or a key given twice. The message names
            the item and lists what is known.
    """
    if text is None:
        return {}
    if not isinstance(text, str):
        raise ConfigurationError(f"optim_args={text!r} is a {type(text).__name__}, but must be a string. {_EXAMPLE}.")
    values: dict[str, Any] = {}
    for item in _items(text):
        key, equals, raw = (part.strip() for part in item.partition("="))
        if not equals or not key or not raw or raw.startswith("="):
            raise ConfigurationError(f"optim_args item {item!r} is malformed. {_EXAMPLE}. {_known(types, owner)}")
        if key not in types:
            close = difflib.get_close_matches(key, types, n=1, cutoff=0.5)
            said = _ELSEWHERE.get(key, f"Did you mean {close[0]}?" if close else "")
            hint = f" {said}" if said else ""
            raise ConfigurationError(f"optim_args item {item!r}: {owner} has no option {key!r}.{hint} {_known(types, owner)}")
        if key in values:
            raise ConfigurationError(f"optim_args item {item!r}: {key} is given twice. Keep one of them.")
        values[key] = parse_value(item, key, raw, types[key])
    return values


def parse_value(item: str, key: str, raw: str, hint: Any) -> Any:
    """`raw` as the first type in `hint` that takes it: None, bool, int, float, tuple, Literal, str, in this order.

    Raises:
        ConfigurationError: none of the types takes it.
    """
    accepted = []
    for matches, describe, parse in _TYPES:
        for alternative in _alternatives(hint):
            if matches(alternative):
                try:
                    return parse(raw, alternative)
                except ValueError:
                    accepted.append(describe(alternative))
    raise ConfigurationError(f"optim_args item {item!r}: {key}={raw!r} must be {' or '.join(accepted) or 'set in code, not as text'}.")


def _items(text: str) -> list[str]:
    """The items of `text`, split at commas that are neither in brackets nor in quotes."""
    items, current, closers, quote = [], "", [], ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in _PAIRS:
            closers.append(_PAIRS[char])
        elif closers and char == closers[-1]:
            closers.pop()
        elif char == "," and not closers:
            items.append(current.strip())
            current = ""
            continue
        current += char
    if quote or closers:
        raise ConfigurationError(
            f"optim_args={text!r} is malformed: {quote or closers[-1]!r} is missing after {current.strip()!r}. {_EXAMPLE}."
        )
    if current.strip():
        items.append(current.strip())  # nothing stands behind a comma at the end
    return items


def _known(types: Mapping[str, Any], owner: str) -> str:
    return f"Options of {owner}: {', '.join(types)}."


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _parse_none(raw: str, _: Any) -> None:
    if raw.lower() not in ("none", "null"):
        raise ValueError(raw)


def _parse_bool(raw: str, _: Any) -> bool:
    word = raw.lower()
    if word not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise ValueError(raw)
    return word in ("true", "yes", "on", "1")


def _parse_tuple(raw: str, hint: Any) -> tuple[Any, ...]:
    bracketed = raw[0] in _PAIRS and raw[-1] == _PAIRS[raw[0]]
    parts = [part.strip() for part in (raw[1:-1].split(",") if bracketed else raw.split(":"))]
    if bracketed and len(parts) > 1 and not parts[-1]:
        parts.pop()  # (0.9, 0.95,) is a tuple in Python too
    types = get_args(hint)
    if types[-1:] == (Ellipsis,):
        types = types[:1] * len(parts)
    return tuple(kind(part) for kind, part in zip(types, parts, strict=True))


def _describe_tuple(hint: Any) -> str:
    types = get_args(hint)
    count = "numbers" if types[-1:] == (Ellipsis,) else f"{len(types)} numbers"
    return f"{count}, written (a,b) or a:b"


def _parse_literal(raw: str, hint: Any) -> Any:
    choices = {str(choice): choice for choice in get_args(hint)}
    if raw not in choices:
        raise ValueError(raw)
    return choices[raw]


def _parse_str(raw: str, _: Any) -> str:
    return raw[1:-1] if len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "\"'" else raw


_TYPES: tuple[tuple[Callable[[Any], bool], Callable[[Any], str], Callable[[str, Any], Any]], ...] = (
    (lambda hint: hint is NoneType, lambda _: "none", _parse_none),
    (lambda hint: hint is bool, lambda _: "true or false", _parse_bool),
    (lambda hint: hint is int, lambda _: "a whole number", lambda raw, _: int(raw)),
    (lambda hint: hint is float, lambda _: "a number", lambda raw, _: float(raw)),
    (lambda hint: get_origin(hint) is tuple, _describe_tuple, _parse_tuple),
    (lambda hint: get_origin(hint) is Literal, lambda hint: " or ".join(map(str, get_args(hint))), _parse_literal),
    (lambda hint: hint is str, lambda _: "text", _parse_str),
)
