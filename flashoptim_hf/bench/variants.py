"""A codec, how it rounds, and the size of its groups: what the laboratory runs beside one another.

A codec's own group is part of its format, and kernels are compiled for it. Here others are tried too, through the eager path, to see what
they would bring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..codecs.base import Codec, get_codec
from ..errors import ConfigurationError
from .streams import Problem
from .subjects import Algorithm, Outcome, Subject, through_codec

ROUNDINGS = ("dither", "nearest")


@dataclass(frozen=True)
class Variant:
    """One of them. `group` is None for the codec's own."""

    codec: str
    dither: bool = True
    group: int | None = None

    @property
    def name(self) -> str:
        """Its name in reports: "log", "log/nearest", "log/group=32", "log/nearest/group=32"."""
        return self.codec + ("" if self.dither else "/nearest") + (f"/group={self.group}" if self.group else "")

    def make(self, algorithm: Algorithm) -> Codec:
        """The codec, with its own group or with another."""
        codec = get_codec(self.codec, algorithm.rule.states, self.dither)
        if self.group is None:
            return codec
        kind = type(codec)
        resized: Codec = type(kind.__name__, (kind,), {"group": self.group})(codec.states, codec.dither)
        return resized

    def subject(self, algorithm: Algorithm) -> Subject:
        """It as one that takes part in a bench."""
        codec = self.make(algorithm)

        def solve(problems: Sequence[Problem]) -> Iterator[Outcome]:
            for problem in problems:
                numel = problem.grads.shape[1]
                yield Outcome(through_codec(problem, codec, algorithm), codec.nbytes(numel) / numel)

        return Subject(self.name, solve)


def variants(codecs: Sequence[str], roundings: Sequence[str], groups: Sequence[int | None], algorithm: Algorithm) -> list[Variant]:
    """Every codec with every rounding and group, but each only once: `none` has no groups, and not every codec can dither.

    Raises:
        ConfigurationError: an unknown codec, rounding, or a group that is not at least 1.
    """
    for rounding in roundings:
        if rounding not in ROUNDINGS:
            raise ConfigurationError(f"--roundings: {rounding!r} is not known; choose from {', '.join(ROUNDINGS)}.")
    for group in groups:
        if group is not None and group < 1:
            raise ConfigurationError(f"--groups: {group} is no size of a group; give whole numbers from 1, for example 16,32,64.")
    found = []
    for name in codecs:
        codec = get_codec(name, algorithm.rule.states)
        constants = any(plane.group > 1 for plane in codec.planes)
        for rounding in roundings if codec.dithers else ("dither",):
            found += [Variant(name, rounding == "dither", group) for group in groups if constants or group is None]
    return found
