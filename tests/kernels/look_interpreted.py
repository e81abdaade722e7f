"""The look at gradients in Triton's interpreter, against `torch.isfinite`. `test_look.py` runs this file in a process of its own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from flashoptim_hf.errors import UnsupportedError
from flashoptim_hf.kernels import look, select
from flashoptim_hf.kernels.look import too_large
from flashoptim_hf.kernels.rule import DTYPE_CODE, LIMIT
from flashoptim_hf.optim import backward_pass, finite
from flashoptim_hf.optim.adamw import FlashAdamW

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
CPU = torch.device("cpu")
TILE = look.TILE
# around a 16-byte word of each dtype, a tile and a block
SIZES = (1, 3, 4, 7, 8, 9, 15, 17, TILE - 1, TILE + 1, TILE * look.TILES + 5)

# what must be found in which dtype, and what is nearest to it on the other side; a number that fp16 cannot hold is its infinity
BAD = {BF16: LIMIT, FP16: float("inf"), FP32: LIMIT}
GOOD = {BF16: float(torch.nextafter(torch.tensor(LIMIT, dtype=BF16), torch.tensor(0.0, dtype=BF16))), FP16: 65504.0}
GOOD[FP32] = float(np.nextafter(np.float32(LIMIT), np.float32(0)))


def flag(grads: Sequence[Tensor]) -> float:
    found = look.too_large(
        np.array([g.data_ptr() for g in grads], dtype=np.int64),
        np.array([g.numel() for g in grads], dtype=np.int64),
        np.array([DTYPE_CODE[g.dtype] for g in grads], dtype=np.int64),
        CPU,
    )
    assert found.shape == ()
    assert found.dtype == FP32
    return float(found)


def gradient(numel: int, dtype: torch.dtype, shift: int = 0, pad: float = float("nan")) -> Tensor:
    """A gradient of ordinary numbers `shift` elements behind a 16-byte boundary, with numbers around it that must not be read."""
    room = torch.full((shift + numel + 64,), pad, dtype=dtype)
    assert room.data_ptr() % 16 == 0
    made = room[shift : shift + numel]
    made.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(numel)))
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf"), "limit", "-limit"])
def test_every_kind_of_bad_number_is_found(dtype: torch.dtype, bad: float | str) -> None:
    value = BAD[dtype] * (-1 if bad == "-limit" else 1) if isinstance(bad, str) else bad
    grads = [gradient(70, dtype), gradient(9, dtype)]
    assert flag(grads) == 0
    grads[1][8] = value
    assert flag(grads) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_smallest_good_numbers_are_good(dtype: torch.dtype) -> None:
    grad = gradient(40, dtype)
    grad[:6] = torch.tensor([GOOD[dtype], -GOOD[dtype], 0.0, -0.0, torch.finfo(dtype).smallest_normal, torch.finfo(dtype).tiny / 2])
    assert flag([grad]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0, 1, 3, 7])
def test_every_place_is_looked_at_and_nothing_around_it(dtype: torch.dtype, shift: int) -> None:
    """Ends, both sides of each boundary, and the whole of a small tensor; the memory around is full of NaN."""
    for numel in SIZES:
        grad = gradient(numel, dtype, shift)
        assert flag([grad]) == 0, numel
        edges = {0, 1, numel // 2, numel - 1, TILE - shift, TILE, 2 * TILE - 1, TILE * look.TILES - 1, TILE * look.TILES}
        for place in range(numel) if numel < 20 and shift in (0, 3) else sorted(edge for edge in edges if 0 <= edge < numel):
            before = grad[place].clone()
            grad[place] = float("nan")
            assert flag([grad]) == 1, (numel, place)
            grad[place] = before


def test_every_tensor_among_many_is_looked_at() -> None:
    """Empty ones in between, which have no address."""
    grads = [gradient(numel, BF16, numel % 3) for numel in (5, 0, 64, 0, 2 * TILE, 1)]
    assert flag(grads) == 0
    for grad in grads:
        if grad.numel():
            grad[-1] = float("inf")
            assert flag(grads) == 1
            grad[-1] = 0


def test_dtypes_may_be_mixed() -> None:
    for spoiled in range(4):
        grads = [gradient(33, dtype) for dtype in (FP32, BF16, FP16, FP32)]
        assert flag(grads) == 0
        grads[spoiled][32] = float("nan")
        assert flag(grads) == 1


def test_blocks_become_longer_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "ENOUGH", 1)
    look._deal.cache_clear()
    grad = gradient(9 * TILE * look.TILES + 3, BF16, 1)
    blocks, block = look._blocks(np.array([grad.numel()], dtype=np.int64))
    assert (len(blocks), block) == (2, 8 * TILE * look.TILES)
    assert flag([grad]) == 0
    for place in (block - 1, block, grad.numel() - 1):
        grad[place] = float("inf")
        assert flag([grad]) == 1
        grad[place] = 0
    look._deal.cache_clear()


def test_the_blocks_of_large_tensors_cover_them_once() -> None:
    """Eight tensors of half a billion elements and a hundred small ones: few programs, each element in one."""
    sizes = np.array([2**29 + 7] * 8 + [1000] * 100, dtype=np.int64)
    words, block = look._blocks(sizes)
    blocks = words.view(np.int32).reshape(-1, 2)
    assert len(blocks) <= look.ENOUGH + len(sizes)
    for span, size in enumerate(sizes.tolist()):
        mine = blocks[blocks[:, 0] == span, 1]  # span, block within it
        assert mine.tolist() == list(range(-(-size // block)))
    assert block < 2**31


def test_the_flag_of_one_look_is_not_that_of_the_next() -> None:
    good, bad = gradient(10, FP32), gradient(10, FP32)
    bad[0] = float("nan")

    def look_at(grad: Tensor) -> Tensor:
        return look.too_large(np.array([grad.data_ptr()]), np.array([10]), np.array([DTYPE_CODE[FP32]]), CPU)

    flags = [look_at(grad) for grad in (bad, good, bad)]
    assert [float(one) for one in flags] == [1, 0, 1]


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look._triton, "HAS_TRITON", False)
    with pytest.raises(UnsupportedError, match="Triton"):
        flag([gradient(4, FP32)])


@pytest.mark.parametrize("options", [{}, {"paged": True, "page_bytes": 4096}, {"gradient_release": True}])
@pytest.mark.parametrize("deferred", [False, True])
def test_the_optimizer_looks_with_it(options: dict, deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kernel="fused"` in the interpreter; `deferred` as on a device, where kernels obey the flag and the host learns of it later."""
    if deferred:
        monkeypatch.setattr(finite, "known_at_once", lambda _: False)
        monkeypatch.setattr(backward_pass, "known_at_once", lambda _: False)
    launched = []
    monkeypatch.setattr(look, "too_large", lambda *given: launched.append(given) or too_large(*given))
    params = [torch.nn.Parameter(torch.ones(numel, dtype=BF16)) for numel in (100, 70)]
    optimizer = FlashAdamW(params, lr=0.1, kernel="fused", **options)
    for step, bad in enumerate((False, True, False)):
        before = [p.detach().clone() for p in params]
        for p in params:
            slope = torch.ones_like(p)
            if bad:
                slope[69] = float("nan")
            (p * slope).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            optimizer.step()
            optimizer.synchronize()
        optimizer.zero_grad()
        assert launched
        launched.clear()
        for p, old in zip(params, before, strict=True):
            assert torch.equal(p, old) == bad, step
            assert int(optimizer.state[p]["step"]) == (1, 1, 2)[step]
    assert optimizer.memory_report().skipped_steps == 1


def test_which_devices_are_looked_at_by_kernel() -> None:
    assert select.look_for(CPU) is None
    assert select.look_for(CPU, "eager") is None
    assert select.look_for(CPU, "fused") is look.too_large
    assert select.look_for(torch.device("cuda")) is look.too_large
    assert select.look_for(torch.device("cuda"), "eager") is None
    assert select.look_for(torch.device("meta")) is None
