"""The PTX forms of `codecs/device.py`, run by a small model of the instructions they use, and the plain forms in Triton's interpreter."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton")

from flashoptim_hf.codecs import device, weight_split
from tests.interpreted import run_interpreted

CASES = Path(__file__).with_name("device_interpreted.py")


def test_the_plain_forms() -> None:
    run_interpreted(CASES)


def prmt(a: int, b: int, selector: int) -> int:
    """PTX `prmt.b32` in its default mode: four bytes of eight, each as it is or as eight copies of its sign."""
    pool = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    result = 0
    for i in range(4):
        digit = selector >> (4 * i) & 0xF
        byte = pool[digit & 7]
        if digit & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << (8 * i)
    return result


def to_float(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def fma(a: int, b: int, c: int) -> int:
    """PTX `fma.rn.f32` on bits, subnormal numbers included. fp64 holds every product and sum that is tried here."""
    with np.errstate(over="ignore"):
        exact = np.float64(to_float(a)) * np.float64(to_float(b)) + np.float64(to_float(c))
        return int(np.float32(exact).view(np.uint32))


def lop3(a: int, b: int, c: int, function: int) -> int:
    """PTX `lop3.b32`: each bit is that bit of `function` which three bits count out."""
    bits = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32))
    return sum((function >> place & 1) << i for i, place in enumerate(bits))


def bf16_pair(high: int, low: int) -> int:
    """PTX `cvt.rn.bf16x2.f32`, finite numbers."""
    return sum((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16 * i for i, bits in enumerate((low, high)))


OPERATIONS = {
    "lop3.b32": lop3,
    "cvt.rn.bf16x2.f32": bf16_pair,
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, count: a << count & 0xFFFFFFFF,
    "prmt.b32": prmt,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: (a + b) & 0xFFFFFFFF,
    "shf.r.wrap.b32": lambda low, high, count: ((high << 32 | low) >> (count & 31)) & 0xFFFFFFFF,
    "fma.rn.f32": fma,
}


def run(program: str, *words: int, outputs: int = 4) -> list[int]:
    """The outputs $0, $1, ... of a program whose inputs, the numbers behind theirs, are `words`. None is read before it is written."""
    registers = {f"${outputs + i}": word for i, word in enumerate(words)}
    inputs = set(registers)

    def value(operand: str) -> int:
        if operand.startswith("0f"):
            return int(operand[2:], 16)
        return registers[operand] if operand in registers else int(operand, 0)

    for line in program.strip("{} ").split(";"):
        name, _, operands = line.strip().partition(" ")
        if name in ("", ".reg"):
            continue
        target, *sources = re.split(r",\s*", operands)
        assert target not in inputs
        registers[target] = OPERATIONS[name](*map(value, sources))
    return [registers[f"${i}"] for i in range(outputs)]


def words() -> list[int]:
    """Every byte in every place, beside neighbours that are 0, 1, 128 and 255 and hence carry, or do not."""
    return [
        (byte << (8 * place)) | (other * 0x01010101 & ~(0xFF << (8 * place))) & 0xFFFFFFFF
        for byte in range(256)
        for place in range(4)
        for other in (0, 1, 128, 255)
    ]


def test_bytes_become_floats() -> None:
    for word in words():
        values = [to_float(bits) for bits in run(device._BYTES.value, word)]
        assert values == [np.float32(2**23 + byte) for byte in word.to_bytes(4, "little")]


def test_signed_bytes_become_floats() -> None:
    for word in words():
        values = [to_float(bits) for bits in run(device._SIGNED_BYTES.value, word)]
        assert values == [np.float32(257 * 128 + x) for x in struct.unpack("4b", word.to_bytes(4, "little"))]


def test_the_upper_bits_of_a_word_become_a_fraction_above_1() -> None:
    """And of the words that follow it, an addend further each; of all words that come in, the first alone is looked at."""
    for word in (0, 511, 512, 0x7FFFFFFF, 0x80000000, 0xFFFFFE00, 0xFFFFFFFF, 2654435761):
        for addend in (2654435761, 2246822519):
            found = run(device._FRACTIONS.value, word, *[None] * 3, *[addend] * 4)
            assert [to_float(bits) for bits in found] == [1 + ((word + i * addend & 0xFFFFFFFF) >> 9) * 2.0**-23 for i in range(4)]
    wrong = device._FRACTIONS.value.replace("0x7F", "0x7E")
    assert run(wrong, 0, *[None] * 3, *[1] * 4) != run(device._FRACTIONS.value, 0, *[None] * 3, *[1] * 4)


def test_bf16_numbers_with_their_magic() -> None:
    """Both of a word: as they are, as fp32, and 1.5 times the power of two at or below each; the low byte of a sum counts units of 2^e."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        w = [to_float(int(bits)) for bits in rng.integers(0x00800000, 0x7F000000, 2) | rng.integers(0, 2, 2) << 31]
        bits = [int(x.view(np.uint32)) for x in w]
        word, *others = run(device._BF16.value, *bits, 0x7F800000, 0x7F800000, outputs=5)
        assert word == bf16_pair(*bits[::-1])
        p, magic = [to_float(x) for x in others[:2]], [to_float(x) for x in others[2:]]
        assert [int(x.view(np.uint32)) for x in p] == [(word & 0xFFFF) << 16, word & 0xFFFF0000]
        for x, m, master in zip(p, magic, w, strict=True):
            assert m == 1.5 * 2.0 ** np.floor(np.log2(abs(float(x))))
            exact = (float(master) - float(x)) / (129 * 2.0**-22) / (float(m) / 1.5)
            low = fma(*(int(np.float32(y).view(np.uint32)) for y in (master - x, weight_split._PLACE.value, m))) & 0xFF
            assert abs((low ^ 0x80) - 0x80 - exact) <= 0.5 + 1e-4


def test_an_entry_is_stored_where_there_is_one() -> None:
    for bits, text in ((16, device._STORE_16.value), (32, device._STORE_32.value)):
        assert f"setp.ne.u32 q, $3, 0; @q st.global.b{bits} [$1], $2;" in text


def test_a_signed_byte_times_15_bits_is_exact() -> None:
    """The multiply-add that follows: every byte, with scales of 15 bits that are as odd as can be."""
    for scale in (1.0, 129 * 2.0**-22, 0x7FFF * 2.0**-30, 0x5555 * 2.0**3):
        shift = np.float32(scale) * np.float32(-32896.0)
        assert float(shift) == scale * -32896.0
        for x in range(-128, 128):
            assert np.float32((32896.0 + x) * scale + float(shift)) == x * scale


def test_lattice() -> None:
    for word in words():
        values = [to_float(bits) for bits in run(device._LATTICE.value, word)]
        # each times 2^127, in the multiply-add that follows
        values = [fma(int(x.view(np.uint32)), 0x7F000000, 0xC07F0000) for x in values]
        expected = [np.float32((code - 255) / 64 if code else -np.inf) for code in word.to_bytes(4, "little")]
        assert [to_float(bits) for bits in values] == expected


def test_the_model_tells_wrong_programs() -> None:
    """A selector or constant that is off by one does not go unnoticed."""
    wrong = device._LATTICE.value.replace("0xC0CC", "0xC1CC")
    assert wrong != device._LATTICE.value
    assert any(run(wrong, word) != run(device._LATTICE.value, word) for word in words())
    assert prmt(0x44332211, 0x88776655, 0x7531) == 0x88664422
    assert prmt(0x000000FF, 0x80, 0xC8C4) == 0xFFFFFF80
