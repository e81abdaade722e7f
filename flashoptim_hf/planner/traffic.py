"""Page traffic and what it costs: bytes over the link, by the link's speed."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigurationError

LINKS = {"pcie3": 15.75e9, "pcie4": 31.5e9, "pcie5": 63.0e9, "nvlink-c2c": 450e9}
"""Bytes per second in one direction, as the standards say: PCIe with 16 lanes (PCI-SIG), Grace Hopper's NVLink-C2C (NVIDIA)."""

REACHED = 0.8
"""Share of it that large copies from pinned memory reach; an assumption, 0.75 to 0.85 being usual with PCIe."""


@dataclass(frozen=True)
class Traffic:
    """What a step moves between host and GPU.

    Attributes:
        bytes_in, bytes_out: per step and process.
        link: its name.
        seconds: (both directions at once, one after the other), as if nothing else were computed meanwhile.
    """

    bytes_in: int
    bytes_out: int
    link: str
    seconds: tuple[float, float]


def traffic(bytes_in: int, bytes_out: int, link: str) -> Traffic:
    """The cost of a step's copies.

    Raises:
        ConfigurationError: an unknown link.
    """
    if link not in LINKS:
        raise ConfigurationError(f"link={link!r} is not known; choose one of {', '.join(LINKS)}.")
    speed = LINKS[link] * REACHED
    return Traffic(bytes_in, bytes_out, link, (max(bytes_in, bytes_out) / speed, (bytes_in + bytes_out) / speed))
