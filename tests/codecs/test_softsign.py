"""`softsign` is the format of flashoptim 0.1.4, code for code, except where that breaks.

The peer's kernels run in Triton's interpreter, in a process of their own (`peer_flashoptim.py`), on the inputs of this file.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashoptim_hf.codecs.base import State, get_codec
from flashoptim_hf.codecs.weight_split import join, split
from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.kernels.eager import update_page
from flashoptim_hf.kernels.rule import Format, Segment
from flashoptim_hf.optim.adamw import RULE

MOMENTUM = (State("momentum_buffer", signed=True),)
ONE, TWO = get_codec("softsign", MOMENTUM), get_codec("softsign", RULE.states)
proof = settings(deadline=None, max_examples=100, derandomize=True, database=None)


def blank(codec, numel: int) -> list[Tensor]:
    return [torch.zeros(plane.entries(numel), dtype=plane.dtype) for plane in codec.planes]


def encode(codec, *values: Tensor) -> list[Tensor]:
    planes = blank(codec, values[0].numel())
    codec.encode(values, planes)
    return planes


# ---------------------------------------------------------------- the peer's kernels on the same numbers

SIZES = (1, 31, 32, 33, 63, 65, 1000, 1024, 1025, 5000)


def random_groups(numel: int, seed: int) -> Tensor:
    """Values whose groups have maxima from fp16's subnormals (where it is exact to a quarter only) to its largest; some zero."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(-(-numel // 32), generator=generator) * 34 - 20
    scale = torch.exp2(exponent).repeat_interleave(32)[:numel]
    values = torch.randn(numel, generator=generator).clamp(-3.9, 3.9) * scale
    values[torch.rand(numel, generator=generator) < 0.1] = 0
    return values


def cases() -> dict[str, Tensor]:
    """Where the peer works: every group maximum rounds to an fp16 number that is neither 0 nor infinite, or the group is zero."""
    grid = torch.linspace(-1, 1, 32 * 500)
    ends = torch.tensor([2.0**-25 * 1.0001, 2.0**-24, 3e-8, 6e-8, 1e-7, 6.1e-5, 65504.0, 65519.0])
    return {
        **{f"random {n}": random_groups(n, n) for n in SIZES},
        "grid": grid,
        "zeros": torch.zeros(100),
        "constant": torch.full((96,), -0.3),
        # each end of the range beside smaller elements, one group each
        "ends": (ends[:, None] * torch.cat((torch.ones(1), torch.linspace(-1, 1, 31)))).flatten(),
        "one of 32": torch.nn.functional.pad(torch.tensor([0.7]), (31, 0)),
    }


def adamw_case(dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(9)
    scale = torch.exp(torch.randn(999, generator=generator) * 0.5) * 1e-2
    noise = [torch.randn(999, generator=generator) for _ in range(8)]
    grads = [scale * (z + 0.3 * z.sign()) for z in noise]  # none so small that v has code 0
    param = torch.randn(999, generator=generator).to(dtype)
    return {"param": param, "grads": grads, "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def master_weights() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(4096, generator=generator) * torch.exp2(torch.rand(4096, generator=generator) * 12 - 10)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("flashoptim") is None or importlib.util.find_spec("triton") is None:
        pytest.skip("needs flashoptim and triton")
    folder = tmp_path_factory.mktemp("peer")
    w = master_weights()
    inputs = {
        "quantize": {
            **{f"m {name}": (x, True) for name, x in cases().items()},
            # squares, so that r covers the same range as m
            **{f"v {name}": (x.square(), False) for name, x in cases().items()},
        },
        "adamw": {"fp32": adamw_case(torch.float32), "bf16": adamw_case(torch.bfloat16)},
        "correct": {f"{d} {n}": (w, w.to(d), n) for d in (torch.bfloat16, torch.float16) for n in (1, 2)},
    }
    torch.save(inputs, folder / "in.pt")
    script = Path(__file__).with_name("peer_flashoptim.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, folder / "in.pt", folder / "out.pt"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize("name", list(cases()))
def test_signed_state_is_the_peers_code_for_code(peer: dict[str, Any], name: str) -> None:
    theirs = peer["quantize"][f"m {name}"]
    codes, scales = encode(ONE, cases()[name])
    assert torch.equal(codes, theirs["codes"])
    assert torch.equal(scales, theirs["scales"])
    (decoded,) = ONE.decode((theirs["codes"], theirs["scales"]), len(codes))
    assert torch.equal(decoded, theirs["decoded"])


@pytest.mark.parametrize("name", list(cases()))
def test_second_moment_is_the_peers_code_for_code(peer: dict[str, Any], name: str) -> None:
    theirs = peer["quantize"][f"v {name}"]
    v = cases()[name].square()
    _, codes, _, scales = encode(TWO, torch.zeros_like(v), v)
    assert torch.equal(codes, theirs["codes"])
    assert torch.equal(scales, theirs["scales"])
    zero = torch.zeros(len(codes), dtype=torch.int8), torch.zeros(len(scales), dtype=torch.float16)
    _, decoded = TWO.decode((zero[0], theirs["codes"], zero[1], theirs["scales"]), len(codes))
    assert torch.equal(decoded, theirs["decoded"])


def test_the_cases_are_not_all_alike(peer: dict[str, Any]) -> None:
    """The comparison above covers every code of both kinds."""
    seen = {kind: set() for kind in "mv"}
    for name, result in peer["quantize"].items():
        seen[name[0]] |= set(result["codes"].tolist())
    assert seen["m"] == set(range(-127, 128))
    assert seen["v"] == set(range(256))


def test_adamw_steps_are_the_peers_code_for_code(peer: dict[str, Any]) -> None:
    """Eight whole steps from zero states: decode, update, encode. No code of v is 0 here, so there is no deviation."""
    case = adamw_case(torch.float32)
    options = {"betas": (case["beta1"], case["beta2"]), "eps": case["eps"], "weight_decay": case["weight_decay"]}
    param, planes = case["param"].clone(), blank(TWO, 999)
    for step, grad in enumerate(case["grads"], 1):
        # in the interpreter the peer's 1 - beta is formed in fp64, as ours is
        segment = Segment(param, grad, start=0, index=0, step=step, hyper=(case["lr"], *RULE.scalars(options, step)))
        update_page(planes, [segment], Format(RULE, TWO, 0))
        for dtype in ("fp32", "bf16"):  # the states do not depend on the weight
            theirs = peer["adamw"][dtype]["history"][step - 1]
            assert theirs["var"].min() > 0
            names = ("mom", "var", "mom_scales_f16", "var_scales_f16")
            for plane, name in zip(planes, names, strict=True):
                assert torch.equal(plane, theirs[name]), (step, name)
        # the peer forms 1 - 0.999^t in fp32, which is wrong by 3e-5 of a step of 1e-3
        torch.testing.assert_close(param, peer["adamw"]["fp32"]["history"][step - 1]["param"], rtol=1e-6, atol=1e-7)
    assert (param - case["param"]).abs().median() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("correction_bytes", [1, 2])
def test_corrections_mean_what_the_peers_mean(peer: dict[str, Any], dtype: torch.dtype, correction_bytes: int) -> None:
    """`error_bits`: the same numbers, but for one 16-bit code where the peer's product is rounded twice, and the same weights."""
    theirs, w = peer["correct"][f"{dtype} {correction_bytes}"], master_weights()
    p, c = split(w, dtype, 16 + 8 * correction_bytes)
    difference = (c.int() - theirs["correction"].int()).abs()
    assert difference.max() <= correction_bytes - 1
    assert (difference > 0).float().mean() < 5e-3
    torch.testing.assert_close(join(p, theirs["correction"]), theirs["joined"], rtol=2.0**-22, atol=0)


# ---------------------------------------------------------------- where the peer breaks


def test_scale_above_fp16_saturates() -> None:
    """65520 and more rounds to infinity in fp16: stored as 65504, elements beyond it are cut, and the others are not disturbed."""
    m = torch.zeros(32)
    m[:4] = torch.tensor([1e6, -7e4, 3e4, 65504.0])
    planes = encode(TWO, m, m.square())
    assert planes[2].item() == planes[3].item() == 65504
    m_hat, v_hat = TWO.decode(planes, 32)
    torch.testing.assert_close(m_hat[:4], torch.tensor([65504.0, -65504.0, 3e4, 65504.0]), rtol=0.01, atol=0)
    torch.testing.assert_close(v_hat[:4].sqrt(), torch.tensor([65504.0, 65504.0, 3e4, 65504.0]), rtol=0.01, atol=0)


@pytest.mark.parametrize("size", [65520.0, 1e10, 1e19, 1e38, math.inf])
def test_large_values_stay_finite(size: float) -> None:
    m = torch.full((40,), size)
    planes = encode(TWO, m, m)
    assert all(value.isfinite().all() and (value > 0).all() for value in TWO.decode(planes, 40))


@pytest.mark.parametrize("size", [2.0**-25, 2e-8, 1e-9])
def test_scale_below_fp16_saturates(size: float) -> None:
    """Where the peer's scale becomes 0 the smallest one is stored, and what it can hold is kept: within half a code of v's lattice."""
    m = torch.linspace(-size, size, 32)
    planes = encode(TWO, m, m.square())
    assert planes[2].item() == planes[3].item() == 2.0**-24
    m_hat, v_hat = TWO.decode(planes, 32)
    assert ((v_hat.sqrt() - m.abs()).abs() <= 2.0**-24 / 510 * 1.001).all()
    kept = v_hat > 0
    assert kept.any()
    assert ((m_hat - m).abs()[kept] <= 2.0**-24 / 250).all()


def test_m_is_zero_where_v_has_code_zero() -> None:
    """Stored so and read so; the rest of the group, its scale included, is what it would be otherwise."""
    m, v = torch.full((64,), 0.01), torch.ones(64)
    v[5], v[40] = 1e-6, 3e-6  # r / max = 1/1000 and 1/577: code 0
    m[5] = 0.5  # and the largest m of its group
    planes = encode(TWO, m, v)
    alone = encode(ONE, m)
    assert planes[1][5] == planes[1][40] == 0
    expected = alone[0].clone()
    expected[[5, 40]] = 0
    assert torch.equal(planes[0], expected)
    assert torch.equal(planes[2], alone[1])
    # planes of a peer's checkpoint, with the m that it keeps
    m_hat, v_hat = TWO.decode((alone[0], planes[1], planes[2], planes[3]), 64)
    assert alone[0][5] == 127
    assert not m_hat[[5, 40]].any()
    assert torch.equal(m_hat != 0, v_hat != 0)


# ---------------------------------------------------------------- the codec by itself


@proof
@given(values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=100))
def test_bounds(values: list[float]) -> None:
    """Half a code of error: of y for m, of r for v; zero stays zero, the maximum is reached and not exceeded."""
    m = torch.tensor(values)
    m_hat, v_hat = TWO.decode(encode(TWO, m, m.square()), len(m))
    (alone,) = ONE.decode(encode(ONE, m), len(m))
    largest = torch.stack([x.abs().max() for x in m.split(32)]).repeat_interleave(32)[: len(m)]
    # fp16 rounds the scale: 2^-11 of it, or 2^-25 where it is subnormal or saturates
    slack = largest * 2.0**-11 + 2.0**-24
    assert ((v_hat.sqrt() - m.abs()).abs() <= largest / 510 + slack).all()
    y = lambda x: 2 * x / (largest.clamp_min(1e-30) + x.abs())  # noqa: E731
    inside = largest > 1e-3
    assert ((y(alone) - y(m)).abs() <= 0.5 / 127 + 2.0**-10)[inside].all()
    assert (alone.abs() <= largest + slack).all()
    assert not v_hat[m == 0].any()
    assert not alone[m == 0].any()
    assert torch.equal(m_hat, torch.where(v_hat > 0, alone, 0))


@pytest.mark.parametrize("scale", [2.0**-14, 0.37109375, 1.0, 65504.0])
def test_every_code_survives_a_round_trip(scale: float) -> None:
    codes = torch.cat((torch.arange(-127, 128), torch.zeros(1))).to(torch.int8).view(8, 32)
    codes[:, 0] = 127
    rest = torch.arange(256).to(torch.uint8).view(8, 32).clone()
    rest[:, 1] = 255
    codes[0, 31] = codes[0, 0]
    rest[0, 0] = 1  # code 0 would take the largest m with it
    scales = torch.full((8,), scale, dtype=torch.float16)
    planes = [codes.flatten(), rest.flatten(), scales, scales.clone()]
    again = encode(TWO, *TWO.decode(planes, 256))
    assert all(torch.equal(a, b) for a, b in zip(planes, again, strict=True))


def test_nearest_is_monotone_and_symmetric() -> None:
    m = torch.linspace(-2, 2, 3200).view(100, 32).T.flatten()  # each group spans the range
    (decoded,) = ONE.decode(encode(ONE, m), 3200)
    (negated,) = ONE.decode(encode(ONE, -m), 3200)
    for group in range(100):
        part = slice(32 * group, 32 * group + 32)
        assert (decoded[part][m[part].argsort()].diff() >= 0).all()
    assert ((decoded + negated).abs() <= 2 * 2.1 / 127).all()


def test_dither_has_no_effect() -> None:
    m = torch.randn(100, generator=torch.Generator().manual_seed(0))
    first, second = blank(TWO, 100), blank(TWO, 100)
    TWO.encode((m, m.square()), first, index=0, step=1)
    get_codec("softsign", RULE.states, dither=False).encode((m, m.square()), second, index=320, step=9)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_golden() -> None:
    """The format, pinned: works without the peer."""
    m = torch.tensor([0.0, 1.0, -1.0, 0.5, -0.25, 0.01, 1e-4, 2.0])
    planes = encode(TWO, m, m.square())
    assert planes[0].tolist() == [0, 85, -85, 51, -28, 1, 0, 127]
    assert planes[1].tolist() == [0, 128, 128, 64, 32, 1, 0, 255]
    assert planes[2].tolist() == planes[3].tolist() == [2.0]


def test_planes() -> None:
    assert [(p.name, p.dtype, p.group) for p in TWO.planes] == [
        ("exp_avg", torch.int8, 1),
        ("exp_avg_sq", torch.uint8, 1),
        ("exp_avg_scale", torch.float16, 32),
        ("exp_avg_sq_scale", torch.float16, 32),
    ]
    assert [p.name for p in ONE.planes] == ["momentum_buffer", "momentum_buffer_scale"]
    assert TWO.nbytes(64) / 64 == 2.125
    assert ONE.nbytes(64) / 64 == 1.0625


@pytest.mark.parametrize("signs", [[False], [True, True], [False, True], [True, False, False]])
def test_other_states_are_refused(signs: list[bool]) -> None:
    with pytest.raises(ConfigurationError, match=r"codec='softsign' stores one signed state.*Use codec='none'"):
        get_codec("softsign", [State(f"s{i}", signed) for i, signed in enumerate(signs)])
