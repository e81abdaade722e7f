"""The contract that every codec keeps, whatever it stores, and the arithmetic that codecs share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashoptim_hf.codecs.base import ALIGN, Codec, Plane, State, codecs_for, get_codec, grouped, known_codecs, store, weyl
from flashoptim_hf.errors import ConfigurationError

MOMENTS = (State("exp_avg", signed=True), State("exp_avg_sq", signed=False))


def blank(codec: Codec, numel: int) -> list[Tensor]:
    return [torch.zeros(plane.entries(numel), dtype=plane.dtype) for plane in codec.parts]


def moments(numel: int, seed: int = 0, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """First and second moments with element scales over several octaves, a tenth of them zero."""
    generator = torch.Generator().manual_seed(seed)
    r = torch.exp(torch.randn(numel, generator=generator) * spread - 7)
    r[torch.rand(numel, generator=generator) < 0.1] = 0
    return r * torch.randn(numel, generator=generator), r * r


@pytest.fixture(params=["joint", "learned", "log", "none", "softsign"])
def codec(request: pytest.FixtureRequest) -> Codec:
    return get_codec(request.param, MOMENTS)


def test_names_are_file_names() -> None:
    assert {"joint", "learned", "log", "none", "softsign", "square"} <= set(known_codecs())
    assert all(get_codec(name, MOMENTS).name == name for name in codecs_for(MOMENTS))
    assert "base" not in known_codecs()
    assert "weight_split" not in known_codecs()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"codec='lgo' is not known; choose one of .*log, none, softsign"):
        get_codec("lgo", MOMENTS)


def test_which_codecs_hold_which_states() -> None:
    assert set(codecs_for(MOMENTS)) >= {"joint", "log", "none", "softsign"}
    assert set(codecs_for(MOMENTS[:1])) >= {"none", "softsign", "square"}
    assert "square" not in codecs_for(MOMENTS)
    assert "log" not in codecs_for(MOMENTS[:1])
    assert not {"joint", "learned"} & set(codecs_for(MOMENTS[:1]))


@pytest.mark.parametrize("name", ["joint", "learned", "log", "none", "softsign", "square"])
def test_no_states_take_no_planes(name: str) -> None:
    codec = get_codec(name, ())
    assert codec.planes == ()
    assert codec.decode((), 100) == ()
    codec.encode((), ())
    assert codec.nbytes(100) == 0


def test_groups_fit_the_alignment(codec: Codec) -> None:
    assert ALIGN % codec.group == 0
    assert all(codec.group % plane.group == 0 for plane in codec.planes)


def test_code_planes_carry_the_names_of_the_states(codec: Codec) -> None:
    names = [plane.name for plane in codec.planes]
    assert names[:2] == ["exp_avg", "exp_avg_sq"]
    assert len(set(names)) == len(names)
    assert all(name.startswith("exp_avg") for name in names)


def test_zero_planes_decode_to_zero(codec: Codec) -> None:
    for value in codec.decode(blank(codec, 200), 200):
        assert value.dtype == torch.float32
        assert value.shape == (200,)
        assert not value.any()


def test_zero_values_decode_to_zero(codec: Codec) -> None:
    planes = blank(codec, 200)
    codec.encode(moments(200), planes)
    codec.encode((torch.zeros(200), torch.zeros(200)), planes, step=5)
    assert not any(value.any() for value in codec.decode(planes, 200))


@pytest.mark.parametrize("numel", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_a_short_last_group_counts_missing_elements_as_zero(codec: Codec, numel: int) -> None:
    m, v = moments(numel, seed=numel)
    short, whole = blank(codec, numel), blank(codec, 192)
    codec.encode((m, v), short, step=3)
    pad = (0, 192 - numel)
    codec.encode((torch.nn.functional.pad(m, pad), torch.nn.functional.pad(v, pad)), whole, step=3)
    for plane, full in zip(short, whole, strict=True):
        assert torch.equal(plane, full[: plane.numel()])
    for value, full in zip(codec.decode(short, numel), codec.decode(whole, 192), strict=True):
        assert torch.equal(value, full[:numel])


@pytest.mark.parametrize("begin", [64, 128, 448])
@pytest.mark.parametrize("offset", [0, 2**31 - 128, 2**31, 2**40])
def test_encode_of_a_slice_is_the_slice_of_the_encode(codec: Codec, begin: int, offset: int) -> None:
    """What a page or a chunk writes does not depend on where it is cut, at positions that need 64 bits too."""
    m, v = moments(500)
    whole, part = blank(codec, 500), blank(codec, 500 - begin)
    codec.encode((m, v), whole, index=offset, step=11)
    codec.encode((m[begin:], v[begin:]), part, index=offset + begin, step=11)
    for spec, plane, full in zip(codec.parts, part, whole, strict=True):
        assert torch.equal(plane, full[begin // spec.group :] if spec.group else full)


def test_the_same_call_gives_the_same_bits_wherever_the_planes_lie(codec: Codec) -> None:
    values, home = moments(300), blank(codec, 300)
    codec.encode(values, home, index=64, step=7)
    for shift in (1, 3, 17):
        # views that begin at odd addresses of larger buffers, and values that are strided
        buffers = [torch.full((plane.numel() + 40,), 1, dtype=plane.dtype) for plane in home]
        views = [buffer[shift : shift + plane.numel()] for buffer, plane in zip(buffers, home, strict=True)]
        for view in views[len(codec.planes) :]:
            view.zero_()  # whatever planes hold is written over; tables are read
        codec.encode([torch.stack((x, -x), 1)[:, 0] for x in values], views, index=64, step=7)
        for view, plane, buffer in zip(views, home, buffers, strict=True):
            assert torch.equal(view, plane)
            assert (buffer[:shift] == 1).all()
            assert (buffer[shift + plane.numel() :] == 1).all()


def test_encode_does_not_change_its_input(codec: Codec) -> None:
    m, v = moments(300)
    kept = m.clone(), v.clone()
    codec.encode((m, v), blank(codec, 300))
    assert torch.equal(m, kept[0])
    assert torch.equal(v, kept[1])


def test_decode_gives_memory_of_its_own(codec: Codec) -> None:
    planes = blank(codec, 128)
    codec.encode(moments(128), planes)
    kept = [plane.clone() for plane in planes]
    for value in codec.decode(planes, 128):
        value.fill_(7)
    assert all(torch.equal(plane, copy) for plane, copy in zip(planes, kept, strict=True))


def test_every_size_is_stored_in_the_same_bytes_per_element() -> None:
    """No matrix of a LoRA pair is too small or too thin for eight bits: only the last group is rounded up."""
    for rank in (1, 4, 8, 16):
        for numel in (rank * 576, 1536 * rank):
            for name, per_group in (("log", 2 * 64 + 10), ("softsign", 2 * 32 + 4)):
                codec = get_codec(name, MOMENTS)
                assert codec.nbytes(numel) == 2 * numel + -(-numel // codec.group) * (per_group - 2 * codec.group)
                assert codec.planes[0].dtype == torch.int8
                assert codec.planes[1].dtype == torch.uint8
    assert get_codec("log", MOMENTS).nbytes(64 * 1000) / 64000 == 2.15625
    assert get_codec("softsign", MOMENTS).nbytes(64 * 1000) / 64000 == 2.125
    assert get_codec("none", MOMENTS).nbytes(64 * 1000) / 64000 == 8


def test_plane_counts_started_groups() -> None:
    plane = Plane("x", torch.float32, 64)
    assert [plane.entries(n) for n in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]
    assert plane.nbytes(65) == 8


def test_grouped_is_a_view_where_nothing_is_missing() -> None:
    x = torch.arange(128.0)
    assert grouped(x, 64).data_ptr() == x.data_ptr()
    padded = grouped(x[:70], 64)
    assert padded.shape == (2, 64)
    assert torch.equal(padded.flatten()[:70], x[:70])
    assert not padded.flatten()[70:].any()


def test_store_cuts_to_the_plane_and_checks_the_count() -> None:
    plane = torch.zeros(3, dtype=torch.int8)
    store([plane], [torch.tensor([[1.0, 2.0], [3.0, 4.0]])])
    assert plane.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="zip"):
        store([plane], [])


@pytest.mark.parametrize("index", [0, 1, 2**31 - 3, 2**32 - 2, 2**40 + 5])
@pytest.mark.parametrize("step", [0, 1, 1000, 2**31 - 1])
def test_weyl_is_the_fraction_of_the_sequence(index: int, step: int) -> None:
    a, b = 2654435761, 2654435769
    expected = [((i * a + step * b) % 2**32 // 256) / 2**24 for i in range(index, index + 50)]
    assert weyl(50, index, step, (a, b), torch.device("cpu")).tolist() == expected


def test_weyl_never_reaches_one() -> None:
    d = weyl(1 << 20, 0, 1, (2654435761, 2654435769), torch.device("cpu"))
    assert d.min() >= 0
    assert d.max() < 1
    # and is even: every tenth of [0, 1) gets a tenth of the elements
    assert torch.histc(d, 10, 0, 1).sub(len(d) / 10).abs().max() < 10
