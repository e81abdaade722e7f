"""What a codec is: a list of planes, and arithmetic that goes from planes to fp32 numbers and back.

A *group* is G consecutive elements of the flattened local parameter; a short last group counts its missing elements as zero, and a
group never spans two parameters. A *plane* is one flat buffer: a code plane has one entry per element, a constant plane one entry per
group. Planes are cut into pages; a *table* is a few numbers that a codec keeps for each whole parameter beside them. A codec serves all
states of one parameter together, since rounding them apart is what breaks other 8-bit formats.

A new codec is a file `codecs/<name>.py` that sets `CODEC`; `get_codec` finds it by its file name.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigurationError

ALIGN = 64
"""Every parameter starts at a multiple of this many elements in its planes; a multiple of every codec's group size."""


@dataclass(frozen=True)
class State:
    """One state of an update rule. `name` as in `torch.optim`; `signed` is False for a second moment, which is never negative."""

    name: str
    signed: bool


@dataclass(frozen=True)
class Plane:
    """One flat buffer: `dtype`, and how many elements share an entry (`group` = 1 for codes, G for group constants).

    A *table* has `group` = 0 and `count` entries, however many elements its parameter has.
    """

    name: str
    dtype: torch.dtype
    group: int = 1
    count: int = 0

    def entries(self, numel: int) -> int:
        """Entries that `numel` elements take."""
        return -(-numel // self.group) if self.group else self.count

    def nbytes(self, numel: int) -> int:
        """Bytes that `numel` elements take."""
        return self.entries(numel) * self.dtype.itemsize


class Codec(ABC):
    """Stores the states of an update rule in planes.

    Args:
        states: the rule's states, in the rule's order.
        dither: deterministic dither instead of rounding to nearest.

    Raises:
        ConfigurationError: the codec cannot hold such a combination of states.
    """

    name: ClassVar[str]
    group: ClassVar[int]
    dithers: ClassVar[bool] = False
    """Whether `dither` makes a difference."""
    feeds_back: ClassVar[bool] = False
    """Whether `encode` returns what rounding took from the first state, for `UpdateRule.settle`."""

    def __init__(self, states: Sequence[State], dither: bool = True) -> None:
        self.states = tuple(states)
        self.dither = dither

    @property
    @abstractmethod
    def planes(self) -> tuple[Plane, ...]:
        """The planes, in the order in which `decode`, `encode` and the device functions take them.

        A state's code plane has the state's name (`exp_avg`), its constants have names that begin with it (`exp_avg_sq_max`).
        All-zero planes decode to all-zero states.
        """

    @property
    def tables(self) -> tuple[Plane, ...]:
        """What a parameter has once, beside its planes: on its device, never in a page. None, unless a codec says otherwise."""
        return ()

    def fresh_tables(self) -> tuple[Tensor, ...]:
        """The tables of a parameter that was never stepped, flat, on the CPU."""
        return ()

    def advance(self, parts: Sequence[Tensor], step: int) -> None:  # noqa: B027 (most codecs have no tables)
        """What is due between two steps: call after the encode of step `step` over all of a parameter, before the next decode."""

    def flaw(self, parts: Sequence[Tensor]) -> str | None:  # noqa: ARG002
        """What is wrong with saved parts of the right sizes and dtypes, for a message; None: nothing that shows."""
        return None

    @property
    def parts(self) -> tuple[Plane, ...]:
        """All of a parameter's state: the planes, then the tables. What `decode` and `encode` take, as one sequence."""
        return self.planes + self.tables

    @abstractmethod
    def decode(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, ...]:
        """Planes (flat, on any device) of `numel` elements, and the tables, to one fp32 tensor of shape (numel,) per state."""

    @abstractmethod
    def encode(self, values: Sequence[Tensor], planes: Sequence[Tensor], *, index: int = 0, step: int = 0) -> Tensor | None:
        """Write fp32 `values`, one of shape (numel,) per state, into `planes` in place. Of the tables, zeros alone are replaced.

        `index` is the position of the first element in its parameter (a multiple of the group size) and `step` the parameter's step
        count: together they fix the dither, so the same call gives the same bits wherever the planes lie. A codec may look at the
        constants that it finds in `planes`, and keep them where they fit; zeros say nothing.

        Returns:
            With `feeds_back`, the first state less what it will decode to, fp32 of shape (numel,); else None.
        """

    def expected_errors(self, planes: Sequence[Tensor], numel: int) -> tuple[Tensor, ...] | None:  # noqa: ARG002
        """The root mean square error of one encode at each number (at its root, where a state is not signed), fp32 (numel,) per state.

        None where the next entries up and down in the state's own plane tell it.
        """
        return None

    # Device forms. Both are Triton functions and work on one tile: ROWS groups, which begin at a multiple of ALIGN.
    #
    #   device_decode(planes, first, limit, ROWS)                              -> tuple of fp32 [ROWS, group], one per state
    #   device_encode(planes, values, first, limit, index, step, DITHER, ROWS)    stores; with `feeds_back`, returns fp32 [ROWS, group]
    #   device_tables(pointer)                                                 -> anything; once, before the first tile; with tables alone
    #   device_units(hyper, BETAS)                                             -> anything; once, before the first tile; where it is set
    #
    # planes   tuple of pointers to the page's planes, in the order of `planes`, then what `device_tables` made of the segment's tables, and
    #          what `device_units` made of the rule's scalars and its `device_betas`, which may be None. Where that is not None, decode and
    #          encode take states as `UpdateRule.device_sums` does
    # first    int64, the tile's first element in the page's planes, a multiple of ALIGN
    # limit    int32, how many of the tile's elements exist, or more. Groups from there on decode to anything and are not stored; what is
    #          missing of the last group has weight and gradient 0, and places of its own in the planes
    # index    int64, position of the tile's first element in its parameter
    # step     int64, the parameter's step count
    #
    # `codecs/device.py` has what they are made of.
    device_decode: ClassVar[Any]
    device_encode: ClassVar[Any]
    device_tables: ClassVar[Any] = None
    device_units: ClassVar[Any] = None

    def nbytes(self, numel: int) -> int:
        """Bytes that the states of one parameter of `numel` elements take, tables included."""
        return sum(plane.nbytes(numel) for plane in self.parts)


@cache
def known_codecs() -> tuple[str, ...]:
    """Names of the codecs, which are the names of their files."""
    package = importlib.import_module(__package__)
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return tuple(name for name in names if hasattr(importlib.import_module(f"{__package__}.{name}"), "CODEC"))


def get_codec(name: str, states: Sequence[State], dither: bool = True) -> Codec:
    """The codec `name` for the given states; no states take the codec "none", without planes.

    Raises:
        ConfigurationError: no such codec; the message lists those that exist.
    """
    if name not in known_codecs():
        raise ConfigurationError(f"codec={name!r} is not known; choose one of {', '.join(known_codecs())}.")
    if not states:
        name = "none"  # a rule without states has nothing to store, whatever the codec
    codec: Codec = importlib.import_module(f"{__package__}.{name}").CODEC(states, dither)
    return codec


def codecs_for(states: Sequence[State]) -> tuple[str, ...]:
    """Names of the codecs that can hold the given states."""
    names = []
    for name in known_codecs():
        try:
            get_codec(name, states)
        except ConfigurationError:
            continue
        names.append(name)
    return tuple(names)


def grouped(flat: Tensor, group: int) -> Tensor:
    """A flat tensor of shape (numel,) as (groups, group), padded with zeros; a view where nothing is missing."""
    missing = -flat.numel() % group
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(-1, group)


def store(planes: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write each value, flattened and cut to the plane's length, into its plane in place; the plane's dtype wins."""
    for plane, value in zip(planes, values, strict=True):
        plane.copy_(value.flatten()[: plane.numel()])


def weyl(numel: int, index: int, step: int, multipliers: tuple[int, int], device: torch.device) -> Tensor:
    """Dither in [0, 1): the fraction of a 32-bit Weyl sequence, (i a + t b mod 2^32) / 2^32 in 24 bits, fp32 of shape (numel,).

    i runs from `index`, t is `step`, (a, b) the multipliers. 24 bits, since fp32 would round the largest fractions up to 1.
    """
    a, b = multipliers
    i = torch.arange(index, index + numel, dtype=torch.int64, device=device)
    return ((i * a + (step * b) % 2**32) % 2**32 >> 8).float() * 2.0**-24
