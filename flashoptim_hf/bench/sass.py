"""Kernels compiled for GPUs that are not there, and what their machine code says about them.

Triton brings the assembler and the disassembler along, so none of this needs a GPU or a CUDA toolkit. SASS is the code that the hardware
runs; instructions are those of one thread, which works on several elements.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import _triton
from ..errors import UnsupportedError

SPECIAL = ("MUFU", "I2F", "F2I", "FRND")
"""Instructions of the special-function pipe, which takes a quarter of a warp's lanes in one cycle, or less."""

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?);", re.MULTILINE)
_WIDTH = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address in bytes, its name with modifiers ("LDG.E.128"), and its operands."""

    address: int
    name: str
    operands: str

    @property
    def opcode(self) -> str:
        return self.name.split(".", 1)[0]

    @property
    def global_bits(self) -> int:
        """Bits that it moves between global memory and one thread; 0 for every other instruction."""
        if self.opcode not in ("LDG", "STG"):
            return 0
        return next((_WIDTH[part] for part in self.name.split(".") if part in _WIDTH), 32)


@dataclass(frozen=True)
class Binary:
    """One compiled kernel.

    Attributes:
        instructions: all of them, in order; padding at the end included.
        registers: registers of a thread.
        stack_bytes: local memory of a thread; more than 0 where registers were spilled.
    """

    instructions: tuple[Instruction, ...]
    registers: int
    stack_bytes: int

    @cached_property
    def loops(self) -> tuple[range, ...]:
        """Ranges of indices into `instructions`, one for each branch backwards, from its target to the branch."""
        place = {instruction.address: i for i, instruction in enumerate(self.instructions)}
        found = []
        for i, instruction in enumerate(self.instructions):
            target = re.search(r"0x([0-9a-f]+)\s*$", instruction.operands)
            if instruction.opcode == "BRA" and target and int(target.group(1), 16) < instruction.address:
                found.append(range(place[int(target.group(1), 16)], i + 1))
        return tuple(found)

    @cached_property
    def hot_range(self) -> range:
        """The loop that moves the most bytes: what runs for every full tile, as indices."""
        return max(self.loops, key=lambda loop: sum(self.instructions[i].global_bits for i in loop))

    @cached_property
    def hot(self) -> tuple[Instruction, ...]:
        """One trip through the hot loop."""
        return self.instructions[self.hot_range.start : self.hot_range.stop]

    def narrowest(self, opcode: str, nbytes: int) -> int:
        """Bits of the narrowest of the widest accesses that together move `nbytes`, in one trip through the hot loop.

        Args:
            opcode: "LDG" or "STG".
            nbytes: what a thread loads or stores for elements. What is moved beyond that, in narrower words, is for whole groups.
        """
        widths = sorted((instruction.global_bits for instruction in self.hot if instruction.opcode == opcode), reverse=True)
        moved = 0
        for width in widths:
            moved += width // 8
            if moved >= nbytes:
                return width
        raise AssertionError(f"the hot loop moves {moved} bytes with {opcode}, less than the {nbytes} of its elements")


def special(instructions: tuple[Instruction, ...]) -> int:
    """How many of the instructions go through the special-function pipe."""
    return sum(instruction.opcode in SPECIAL for instruction in instructions)


def compile_for(function: Any, signature: dict[str, Any], constants: dict[str, Any], arch: int) -> Binary:
    """Compile a Triton function for an NVIDIA GPU.

    Args:
        function: the decorated function.
        signature: types of its other arguments by name, as Triton writes them ("*fp32", "i32"), a tuple for a tuple, None for an argument
            that is None. ":16" behind a type says that the number or address is a multiple of 16.
        constants: values of its compile-time arguments by name, and launch options (num_warps, ...).
        arch: 80, 90, 100, ...

    Raises:
        UnsupportedError: Triton is missing, or is set to interpret.
    """
    _triton.require()
    if _triton.INTERPRET:
        raise UnsupportedError("TRITON_INTERPRET=1 is set, so Triton compiles nothing. Unset it.")
    names = list(function.arg_names)
    types: dict[str, Any] = {}
    values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(names):
        kind = signature.get(name)
        if kind is None:
            types[name] = "constexpr"
            values[(i,)] = constants.get(name)
            continue
        paths = [((i, j), part) for j, part in enumerate(kind)] if isinstance(kind, tuple) else [((i,), kind)]
        attributes |= {path: [["tt.divisibility", 16]] for path, part in paths if part.endswith(":16")}
        plain = [part.removesuffix(":16") for _, part in paths]
        types[name] = tuple(plain) if isinstance(kind, tuple) else plain[0]
    triton = _triton.triton
    source = triton.compiler.ASTSource(function, types, values, attributes)
    target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
    options = {name: value for name, value in constants.items() if name not in names}
    compiled = triton.compile(source, target=target, options=options)
    return disassemble(compiled.asm["cubin"])


def disassemble(cubin: bytes) -> Binary:
    """Machine code to instructions, with the disassembler that comes with Triton."""
    tool = Path(_triton.triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-sass", file.name], check=True, capture_output=True, text=True).stdout
        usage = subprocess.run([str(tool), "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    instructions = tuple(Instruction(int(at, 16), name, operands) for at, name, operands in _INSTRUCTION.findall(text))
    return Binary(instructions, _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise AssertionError(f"cuobjdump says nothing that looks like {pattern}")
    return int(found.group(1))
