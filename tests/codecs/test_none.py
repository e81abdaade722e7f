"""`none` stores fp32 as it is."""

from __future__ import annotations

import torch

from flashoptim_hf.codecs.base import State, get_codec


def test_every_bit_pattern_survives() -> None:
    """NaN payloads, infinities, subnormals and both zeros included: random bits."""
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    bits[:4] = torch.tensor([0, -(2**31), 0x7F800000, 1])
    codec = get_codec("none", (State("exp_avg", True),))
    plane = torch.zeros(4096)
    codec.encode((bits.view(torch.float32),), (plane,), index=64, step=9)
    assert torch.equal(plane.view(torch.int32), bits)
    (decoded,) = codec.decode((plane,), 4096)
    assert torch.equal(decoded.view(torch.int32), bits)


def test_any_states_are_held() -> None:
    states = tuple(State(name, signed) for name, signed in (("a", True), ("b", False), ("c", True)))
    codec = get_codec("none", states, dither=False)
    assert [plane.name for plane in codec.planes] == ["a", "b", "c"]
    assert codec.nbytes(10) == 120


def test_decode_stops_at_numel() -> None:
    codec = get_codec("none", (State("exp_avg", True),))
    (decoded,) = codec.decode((torch.arange(10.0),), 7)
    assert decoded.tolist() == [0, 1, 2, 3, 4, 5, 6]
