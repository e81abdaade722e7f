"""What hundreds of tensors are, asked in one call: `cpu/tensors.c` through ctypes.

It reads a Python tensor where Python and torch keep it in memory. Where in an object its parts lie is no public fact: it is found out when
it is first needed, from tensors of which everything is known, and tried on others. Where it cannot be found out, or the file was not
compiled, there is no `Reader`, and whoever asks goes through Python, tensor by tensor: the same answers, later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import cpu

_FUNCTIONS = {
    "dim": "aoti_torch_get_dim",
    "sizes": "aoti_torch_get_sizes",
    "strides": "aoti_torch_get_strides",
    "dtype": "aoti_torch_get_dtype",
    "device": "aoti_torch_get_device_index",
    "data": "aoti_torch_get_data_ptr",
    "layout": "aoti_torch_get_layout",
}
_CLASSES = (Tensor, torch.nn.Parameter)
_SEARCHED = 256
"""Bytes of a tensor's implementation in which its dispatch keys are looked for; it has some 200."""
_FACT_BYTES = 40
NOT_READ = -1


class _Torch(ctypes.Structure):
    """`struct torch` of tensors.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("type", "implementation", "keys", "autograd", "gradient")),
        *((name, ctypes.c_void_p) for name in _FUNCTIONS),
        ("strided", ctypes.c_int64),
        ("classes", ctypes.c_void_p * len(_CLASSES)),
    ]


class Reader:
    """Reads lists of tensors. Made by `reader`.

    Args:
        library: tensors.c.
        of_torch: where torch keeps what.
    """

    def __init__(self, library: ctypes.PyDLL, of_torch: _Torch) -> None:
        self._torch = of_torch
        self.torch = ctypes.addressof(of_torch)
        pointer, number, anything = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object
        self.learn, self.read = library.flashoptim_learn_tensors, library.flashoptim_read_tensors
        self.learn.argtypes, self.learn.restype = [pointer, anything, pointer, pointer, number], number
        self.read_gradients = library.flashoptim_read_gradients
        self.read.argtypes = self.read_gradients.argtypes = [pointer, anything, pointer, pointer, number, pointer]
        self._same_items, self._same_entries = library.flashoptim_same_items, library.flashoptim_same_entries
        self._same_items.argtypes = [anything, anything, number]
        self._same_entries.argtypes = [anything, anything, anything, pointer]

    @property
    def reads_gradients(self) -> bool:
        """Whether `Facts.addresses_of_gradients` ever answers."""
        return bool(self._torch.gradient != NOT_READ)

    def forget_gradients(self) -> None:
        """Say of all gradients from now on that nobody knows them."""
        self._torch.gradient = NOT_READ

    def facts(self, tensors: list[Tensor]) -> Facts | None:
        """What these tensors are; None where one is of another class than torch's two, or not strided."""
        found = Facts(self, len(tensors), 2 * sum(map(Tensor.dim, tensors)))
        return found if found.learn(tensors) else None

    def same_items(self, part: list[Any], whole: list[Any], begin: int) -> bool:
        """Whether these are the items of `whole` from `begin` on, by identity."""
        return bool(self._same_items(part, whole, begin))

    def same_entries(self, found: dict[Any, Any], keys: list[Any], values: list[Any], sizes: np.ndarray) -> bool:
        """Whether a dictionary has these entries, in this order and by identity.

        Args:
            values: dictionaries, as long as `sizes` says, int64.
        """
        return bool(self._same_entries(found, keys, values, sizes.ctypes.data))


class Facts:
    """What some tensors are: class, dtype, device, layout, shape, strides, and whether torch negates them when it reads them."""

    def __init__(self, by: Reader, count: int, room: int) -> None:
        self._by, self._count = by, count
        self._facts, self._extents = np.zeros(max(1, _FACT_BYTES * count), dtype=np.uint8), np.zeros(max(1, room), dtype=np.int64)
        self._at = self._facts.ctypes.data, self._extents.ctypes.data

    def learn(self, tensors: list[Tensor]) -> bool:
        """Look at them for the first time."""
        return self._by.learn(self._by.torch, tensors, *self._at, len(self._extents)) >= 0

    def addresses(self, tensors: list[Any]) -> np.ndarray | None:
        """The addresses of other tensors, int64, if they are all what those were, one by one; else None. Anything may be in the list."""
        return self._read(self._by.read, tensors)

    def addresses_of_gradients(self, params: list[Tensor]) -> np.ndarray | None:
        """`addresses` of the gradients of tensors, of whatever class, without asking Python for them. None may be because nobody knows."""
        return self._read(self._by.read_gradients, params)

    def _read(self, function: Any, tensors: list[Any]) -> np.ndarray | None:
        found = np.empty(self._count, dtype=np.int64)
        return found if function(self._by.torch, tensors, *self._at, self._count, found.ctypes.data) else None


@cache
def reader() -> Reader | None:
    """What reads lists of tensors in this process; None where it was not compiled, or does not know this torch."""
    path = cpu.where("_tensors")
    if path is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        try:
            made = Reader(ctypes.PyDLL(str(path)), _find_out())
        except (AttributeError, LookupError, OSError):  # no such function in this torch, or no such place
            return None
        if not all(_agrees(made, *case) for case in _cases()):
            return None
        if not _agrees_on_gradients(made):
            made.forget_gradients()
    return made


def _find_out() -> _Torch:
    """Where this torch keeps what.

    Raises:
        AttributeError, LookupError: it keeps it elsewhere.
    """
    shim = ctypes.CDLL(torch._C.__file__)  # its libraries are searched too
    found = _Torch()
    for name, function in _FUNCTIONS.items():
        setattr(found, name, ctypes.cast(getattr(shim, function), ctypes.c_void_p).value)
    found.strided = shim.aoti_torch_layout_strided()
    found.classes = (ctypes.c_void_p * len(_CLASSES))(*map(id, _CLASSES))
    tensors = [
        torch.zeros(3, device="cpu"),
        torch.nn.Parameter(torch.zeros(2, device="cpu")),
        torch._neg_view(torch.zeros(2, device="cpu")),
    ]
    implementations = [_implementation(tensor, shim) for tensor in tensors]
    size = min(type(tensor).__basicsize__ for tensor in tensors)
    found.type = _place(map(id, tensors), [id(type(tensor)) for tensor in tensors], size)
    found.implementation = _place(map(id, tensors), implementations, size)
    found.keys = _place(implementations, [torch._C._dispatch_keys(tensor).raw_repr() for tensor in tensors], _SEARCHED)
    found.autograd, found.gradient = _places_of_gradients(shim)
    return found


def _places_of_gradients(shim: ctypes.CDLL) -> tuple[int, int]:
    """(where in an implementation lies the pointer to what autograd knows, where in that the gradient); `NOT_READ` twice if nobody knows.

    What is tried may be no pointer at all, so the kernel is asked for the memory that it points to.
    """
    pairs = []
    for size in (2, 3, 4):
        param = torch.nn.Parameter(torch.zeros(size, device="cpu"))
        param.grad = torch.zeros(size, device="cpu")
        pairs.append((param, _implementation(param, shim), _implementation(param.grad, shim)))
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            for place in range(0, _SEARCHED, 8):
                found = [_places_in(memory, ctypes.c_uint64.from_address(base + place).value, grad) for _, base, grad in pairs]
                if common := set.intersection(*found):
                    return place, min(common)
    except OSError:
        pass
    return NOT_READ, NOT_READ


def _places_in(memory: Any, address: int, value: int) -> set[int]:
    """At which places, in bytes, behind an address a value lies; none where there is no such address."""
    try:
        memory.seek(address)
        found = memory.read(_SEARCHED)
    except (OSError, OverflowError, ValueError):
        return set()
    return {8 * at for at in np.flatnonzero(np.frombuffer(found[: len(found) // 8 * 8], dtype=np.uint64) == value).tolist()}


def _implementation(tensor: Tensor, shim: ctypes.CDLL) -> int:
    """The address of a tensor's implementation. A handle is the address of a pointer to it, and torch makes one for whoever asks."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    handle = pointer(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None)
    try:
        return ctypes.c_uint64.from_address(handle).value
    finally:
        shim.aoti_torch_delete_tensor_object(ctypes.c_void_p(handle))


def _place(bases: Any, values: Sequence[int], size: int) -> int:
    """The first place, in bytes, at which every base has its value.

    Raises:
        LookupError: there is none.
    """
    pairs = list(zip(bases, values, strict=True))
    for place in range(0, size, 8):
        if all(ctypes.c_uint64.from_address(base + place).value == value for base, value in pairs):
            return place
    raise LookupError("no place")


def _cases() -> Iterator[tuple[list[Tensor], list[Tensor], bool]]:
    """Tensors, others, and whether those are the same kind: what the answers are tried on."""

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device="cpu")

    several = [made(3, 4), torch.nn.Parameter(made(5, dtype=torch.bfloat16)), made(), made(0, 2), made(4, 6).t(), made(9)[4:]]
    yield several, [made(3, 4), torch.nn.Parameter(made(5, dtype=torch.bfloat16)), made(), made(0, 2), made(4, 6).t(), made(7)[2:]], True
    for one, other in (
        (made(4, 6), made(6, 4)),
        (made(4, 6), made(6, 4).t()),
        (made(4, 6), made(24)),
        (made(4), made(4, dtype=torch.bfloat16)),
        (made(4), torch.nn.Parameter(made(4))),
        (made(4), torch._neg_view(made(4))),
        (made(4), made(4).to_sparse()),
        (made(4), made(4).to("meta")),
    ):
        yield [made(2), one], [made(2), other], False


def _agrees(by: Reader, tensors: list[Tensor], others: list[Tensor], same: bool) -> bool:
    """Whether a reader says of these what is known of them."""
    facts = by.facts(tensors)
    if facts is None:
        return False
    found = facts.addresses(others)
    return (found is None) != same and (found is None or found.tolist() == [other.data_ptr() for other in others])


def _agrees_on_gradients(by: Reader) -> bool:
    """The same of gradients: there, of another kind, and not there."""
    params: list[Tensor] = [torch.nn.Parameter(torch.zeros(shape, device="cpu")) for shape in ((3, 4), (5,), ())]
    grads = [torch.ones_like(param, requires_grad=False) for param in params]
    facts = by.facts(grads)
    if facts is None or facts.addresses_of_gradients(params) is not None:
        return False
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    found = facts.addresses_of_gradients(params)
    if found is None or found.tolist() != [grad.data_ptr() for grad in grads]:
        return False
    for other in (torch.zeros(3, 4, device="cpu"), torch.nn.Parameter(torch.zeros(4, 3, device="cpu"))):
        if other.requires_grad:
            other.grad = torch.ones(4, 3, device="cpu")
        if facts.addresses_of_gradients([other, *params[1:]]) is not None:
            return False
    params[1].grad = None
    return facts.addresses_of_gradients(params) is None
