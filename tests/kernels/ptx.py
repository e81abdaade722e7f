"""A model of one warp that runs PTX: what was compiled for a GPU that is not there, on tensors in this machine's memory.

It knows the instructions that `page_kernel` is compiled to. All threads run in step,
and a branch that they do not take together is an error: a warp that passes here has all of its threads in place wherever one reads
another's register. Special functions are exact but for their rounding to fp32.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from flashoptim_hf._triton import triton
from flashoptim_hf.bench import kernels
from flashoptim_hf.kernels import eager, fused

LANE = np.arange(32, dtype=np.uint32)
WIDTHS = {"%rd": np.uint64, "%rs": np.uint16, "%p": np.bool_, "q": np.bool_}
INTEGERS = {
    f"{kind}{bits}": np.dtype(f"{form}{bits // 8}") for kind, form in (("s", "i"), ("u", "u"), ("b", "u")) for bits in (8, 16, 32, 64)
}
_STATEMENT = re.compile(r"(?:@(!?)(%p\d+|q)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)


def f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.uint32, copy=False).view(np.float32)


def down(x: np.ndarray) -> np.ndarray:
    """fp64 to fp32, rounded towards minus infinity."""
    near = x.astype(np.float32)
    return np.where(near.astype(np.float64) > x, np.nextafter(near, np.float32(-np.inf)), near)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(np.float32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) * b + c


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    pool, result = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros(32, np.uint64)
    for i in range(4):
        digit = selector.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(15)
        byte = pool >> (digit & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
        byte = np.where(digit & np.uint64(8), np.where(byte & np.uint64(0x80), 0xFF, 0), byte).astype(np.uint64)
        result |= byte << np.uint64(8 * i)
    return result


def funnel(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; finite numbers."""
    bits = x.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


FLOATS: dict[str, Callable[..., np.ndarray]] = {
    "fma.rn.f32": fma,
    "fma.rm.f32": lambda a, b, c: down(fma(a, b, c)),
    "fma.rn.sat.f32": lambda a, b, c: np.nan_to_num(np.clip(fma(a, b, c), 0, 1), nan=0),
    "add.rm.f32": lambda a, b: down(a.astype(np.float64) + b),
    "add.f32": np.add,
    "sub.f32": np.subtract,
    "mul.f32": np.multiply,
    "div.full.f32": np.divide,
    "min.f32": np.fmin,
    "max.f32": np.fmax,
    "max.NaN.f32": np.maximum,
    "neg.f32": np.negative,
    "abs.f32": np.abs,
    "ex2.approx.ftz.f32": lambda a: flushed(np.exp2(flushed(a).astype(np.float64)).astype(np.float32)),
    "lg2.approx.ftz.f32": lambda a: np.log2(flushed(a)),
    "rcp.approx.ftz.f32": lambda a: flushed(1 / flushed(a)),
    "sqrt.approx.ftz.f32": lambda a: np.sqrt(flushed(a)),
    "rsqrt.approx.ftz.f32": lambda a: (1 / np.sqrt(flushed(a).astype(np.float64))).astype(np.float32),
    "cvt.rmi.ftz.f32.f32": lambda a: np.floor(flushed(a)),
    "cvt.rpi.ftz.f32.f32": lambda a: np.ceil(flushed(a)),
}
COMPARE = {
    "le": np.less_equal,
    "lt": np.less,
    "ge": np.greater_equal,
    "gt": np.greater,
    "eq": np.equal,
    "ne": np.not_equal,
    "num": lambda a, b: ~np.isnan(a + b),
}
WHOLE: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "mad.lo": lambda a, b, c: a * b + c,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": lambda a, b: a << b.astype(a.dtype),
    "shr": lambda a, b: a >> b.astype(a.dtype),
    "bfe": lambda a, at, count: a >> at & ((np.ones_like(a) << count) - 1),
}


class Warp:
    """One warp.

    Args:
        ptx: a module with one kernel.
        params: its parameters: tensors on the CPU, or numbers.
        program: number of the warp's program.
    """

    def __init__(self, ptx: str, params: Sequence[Tensor | int], program: int) -> None:
        body = ptx[ptx.index("\n{", ptx.index(".entry")) + 2 : ptx.rindex("\n}")]
        lines = [re.sub(r"//.*", "", line).strip() for line in body.splitlines()]
        # an operand in braces stays whole, a block in braces is its statements
        text = " ".join(line for line in lines if line and not line.startswith((".loc", ".pragma")))
        text = re.sub(r"\{([^;{}]*)\}", r"<\1>", text).replace("{", " ").replace("}", " ").replace("end_inline_asm", "")
        parts = re.split(r"(\$\w+:)|;", text)
        self.code = [part.strip() for part in parts if part and part.strip() and not part.strip().startswith(".reg")]
        self.labels = {part[:-1]: i for i, part in enumerate(self.code) if part.endswith(":")}
        self.params = [p.data_ptr() if isinstance(p, Tensor) else p for p in params]
        self.registers: dict[str, np.ndarray] = {}
        self.shared = np.zeros(1 << 16, np.uint8)
        self.program, self.steps = program, 0

    def run(self) -> int:
        """Run to the end; how many instructions it took."""
        at = 0
        with np.errstate(all="ignore"):
            while at < len(self.code):
                found = None if self.code[at].endswith(":") else _STATEMENT.fullmatch(self.code[at])
                if found is None:
                    assert self.code[at].endswith(":"), self.code[at]
                    at += 1
                    continue
                no, guard, name, operands = found.groups()
                active = np.ones(32, bool) if guard is None else self.registers[guard] ^ (no == "!")
                self.steps += 1
                if name == "ret":
                    break
                if name.startswith("bra"):
                    assert active.all() or not active.any(), "threads part"
                    at = self.labels[operands.strip()] if active.all() else at + 1
                    continue
                self.execute(name, [x.strip() for x in re.split(r",\s*(?![^<\[]*[>\]])", operands)], active)
                at += 1
        return self.steps

    def read(self, operand: str, dtype: Any = np.uint32) -> np.ndarray:
        if operand in self.registers:
            value = self.registers[operand]
            return (
                value
                if value.dtype == np.dtype(dtype)
                else value.view(dtype)
                if value.itemsize == np.dtype(dtype).itemsize
                else value.astype(dtype)
            )
        if operand.startswith("0f"):
            return np.full(32, int(operand[2:], 16), np.uint32).view(dtype)
        special = {
            "global_smem": np.zeros(32, np.uint32),
            "%laneid": LANE,
            "%tid.x": LANE,
            "%ctaid.x": np.full(32, self.program, np.uint32),
        }
        if operand in special:
            return special[operand].astype(dtype)
        return np.full(32, int(operand.rstrip("U"), 0) & (1 << 64) - 1, np.uint64).astype(dtype)

    def write(self, name: str, value: np.ndarray) -> None:
        if name == "_":
            return
        width = WIDTHS.get(re.match(r"%?[a-z]+", name)[0], np.uint32)  # type: ignore[index]
        value = np.asarray(value)
        if value.dtype.kind == "f":
            value = value.astype(np.float32).view(np.uint32)
        elif value.dtype.kind == "i":
            value = value.astype(np.int64).view(np.uint64)
        self.registers[name] = np.broadcast_to(value.astype(width), 32).copy()

    def execute(self, name: str, operands: list[str], active: np.ndarray) -> None:
        target, *sources = operands
        kind = name.rsplit(".", 1)[1] if "." in name else ""
        if name.startswith(("ld.global", "st.global")):
            self.move(name, operands, active)
        elif name.startswith("bar."):
            pass
        elif ".shared" in name:
            self.exchange(name, operands)
        elif name.startswith("ld.param"):
            self.write(target, np.full(32, self.params[int(re.search(r"(\d+)\]", sources[0])[1])], np.uint64))  # type: ignore[index]
        elif name in FLOATS:
            self.write(target, FLOATS[name](*(self.read(x, np.uint32).view(np.float32) for x in sources)).astype(np.float32))
        elif name.startswith("setp"):
            dtype = {"f32": np.float32, "f16": np.float16}.get(kind) or INTEGERS[kind]
            self.write(target, COMPARE[name.split(".")[1]](*(self.read(x, dtype) for x in sources)))
        elif name.startswith("selp"):
            wide = np.uint64 if kind == "b64" else np.uint32
            self.write(target, np.where(self.registers[sources[2]], self.read(sources[0], wide), self.read(sources[1], wide)))
        elif name == "and.pred":
            self.write(target, self.registers[sources[0]] & self.registers[sources[1]])
        elif name.startswith("shfl"):
            table, other = self.read(sources[0]), self.read(sources[1])
            assert sources[3] == "-1"
            assert active.all()
            self.write(target, table[(LANE ^ other if ".bfly" in name else other) & 31])
        elif name.startswith("shf."):
            low, high, count = (self.read(x) for x in sources)
            pair, count = funnel(low, high), (count & 31).astype(np.uint64)
            self.write(target, pair >> count & np.uint64(0xFFFFFFFF) if ".r." in name else (pair << count) >> np.uint64(32))
        elif name == "lop3.b32":
            a, b, c, function = (self.read(x) for x in sources)
            found = np.zeros(32, np.uint32)
            for place in range(8):
                terms = [x if place >> (2 - i) & 1 else ~x for i, x in enumerate((a, b, c))]
                found |= np.where(function >> place & 1, terms[0] & terms[1] & terms[2], 0).astype(np.uint32)
            self.write(target, found)
        elif name == "prmt.b32":
            self.write(target, prmt(*(self.read(x) for x in sources)))
        elif name.startswith("mov"):
            self.copy(target, sources[0], INTEGERS[kind])
        elif name.startswith("cvt"):
            self.convert(name, target, sources)
        elif ".wide." in name:
            short, wide = (np.int32, np.int64) if kind == "s32" else (np.uint32, np.uint64)
            a, b = (self.read(x, short).astype(wide) for x in sources[:2])
            self.write(target, a * b + (self.read(sources[2], wide) if name.startswith("mad") else 0))
        else:
            dtype = INTEGERS[kind]
            counts = name.startswith(("shl", "shr", "bfe"))
            values = [self.read(x, np.uint32 if counts and i else dtype) for i, x in enumerate(sources)]
            self.write(target, WHOLE[name.rsplit(".", 1)[0]](*values))

    def copy(self, target: str, source: str, dtype: Any) -> None:
        if target.startswith("<"):
            low, high = target.strip("<> ").split(",")
            whole = self.read(source)
            self.write(low.strip(), whole & 0xFFFF)
            self.write(high.strip(), whole >> 16)
        elif source.startswith("<"):
            low, high = (self.read(x.strip(), np.uint16).astype(np.uint32) for x in source.strip("<> ").split(","))
            self.write(target, high << 16 | low)
        else:
            self.write(target, self.read(source, dtype))

    def convert(self, name: str, target: str, sources: list[str]) -> None:
        *_, to, of = name.split(".")
        if name == "cvt.rn.bf16x2.f32":
            high, low = (to_bf16(f32(self.read(x))) for x in sources)
            self.write(target, high << 16 | low)
        elif name == "cvt.f32.bf16":
            self.write(target, (self.read(sources[0], np.uint16).astype(np.uint32) << 16).view(np.float32))
        elif name == "cvt.f32.f16":
            self.write(target, self.read(sources[0], np.float16).astype(np.float32))
        elif name == "cvt.rn.f16.f32":
            self.write(target, f32(self.read(sources[0])).astype(np.float16).view(np.uint16))
        elif name == "cvt.rzi.s32.f32":
            self.write(target, np.trunc(f32(self.read(sources[0]))).astype(np.int32))
        elif to == "f32":
            self.write(target, self.read(sources[0], INTEGERS[of]).astype(np.float32))
        else:
            self.write(target, self.read(sources[0], INTEGERS[of]).astype(INTEGERS[to]))

    def move(self, name: str, operands: list[str], active: np.ndarray) -> None:
        place, value = operands[::-1] if name.startswith("ld") else operands
        register, offset = re.fullmatch(r"\[\s*(%rd\d+)\s*\+?\s*(-?\d*)\s*\]", place).groups()  # type: ignore[union-attr]
        names = [x.strip() for x in value.strip("<> ").split(",")]
        dtype = INTEGERS[name.rsplit(".", 1)[1]]
        at = self.registers[register].astype(np.int64) + int(offset or 0)
        for i, one in enumerate(names):
            if name.startswith("ld"):
                found = self.registers[one].copy() if one in self.registers else np.zeros(32, np.uint64)
                for lane in np.flatnonzero(active):
                    raw = ctypes.string_at(int(at[lane]) + i * dtype.itemsize, dtype.itemsize)
                    found[lane] = np.frombuffer(raw, dtype)[0]
                self.write(one, found)
            else:
                values = self.read(one, dtype)
                for lane in np.flatnonzero(active):
                    ctypes.memmove(int(at[lane]) + i * dtype.itemsize, values[lane].tobytes(), dtype.itemsize)

    def exchange(self, name: str, operands: list[str]) -> None:
        """Words of four registers to shared memory, and matrices of 8 rows of 16 bytes, whose addresses four times 8 threads hold, back."""
        place, value = operands if name.startswith("st") else operands[::-1]
        names = [x.strip() for x in value.strip("<> ").split(",")]
        at = self.read(place.strip("[] ")).astype(np.int64)
        assert name in ("st.shared.v4.b32", "ldmatrix.sync.aligned.m8n8.x4.shared.b16")
        for i, one in enumerate(names):
            if name.startswith("st"):
                self.shared[at[:, None] + 4 * i + np.arange(4)] = self.read(one)[:, None].view(np.uint8)
            else:
                rows = at[8 * i + LANE // 4, None] + 4 * (LANE[:, None] % 4) + np.arange(4)
                self.write(one, self.shared[rows].view(np.uint32)[:, 0])


def compiled(variant: kernels.Variant, arch: int = 90) -> Launcher:
    """What runs the kernel of a variant, with `skip`, as it was compiled."""
    found = []

    def compile_(*args: Any, **options: Any) -> Any:
        found.append(original(*args, **options))
        return found[-1]

    original = triton.compile
    with patch.object(triton, "compile", compile_):
        kernels.compile_variant(variant, arch)
    return Launcher(found[0].asm["ptx"])


class Launcher:
    """Stands in for `page_kernel`: runs the PTX of a kernel for the programs of a grid, one after the other."""

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self.programs = self.steps = 0

    def beside_eager(self, start: Any) -> tuple[Any, Any]:
        """A page after a step of what was compiled, and after one of the eager path."""
        fast, slow = start.clone(), start.clone()
        with patch.object(fused, "page_kernel", self):
            fused.update_page(fast.planes, fast.segments, fast.fmt, skip=torch.zeros(()))
        eager.update_page(slow.planes, slow.segments, slow.fmt)
        return fast, slow

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(codes: Sequence[Tensor], *others: Tensor | int | None, **options: Any) -> None:  # noqa: ARG001
            params = [*codes, *(x for x in others if x is not None)]
            for program in range(grid[0]):
                self.programs += 1
                self.steps += Warp(self.ptx, [*params, 0, 0], program).run()

        return launch
