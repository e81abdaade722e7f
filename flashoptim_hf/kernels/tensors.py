"""What hundreds of tensors are, asked in one call: `cpu/tensors.c` through ctypes.

It reads a Python tensor where Python and torch keep it in memory. Where in an object its parts lie is no public fact: it is found out when
it is first needed, from tensors of which everything is known, and tried on others. Where it cannot be found out, or the file was not
compiled, there is no `Reader`, and whoever asks goes through Python, tensor by tensor: the same answers, later.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from threading import Thread
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
    "assign": "aoti_torch_assign_tensors",
}
_CLASSES = (Tensor, torch.nn.Parameter)
_SEARCHED = 256
"""Bytes of a tensor's implementation in which its dispatch keys are looked for; it has some 200."""
_FACT_BYTES = 40
NOT_READ = -1
_VERSION = 2
"""Of tensors.c: another one wherever a function or a struct there becomes another one."""

# prototypes of our own: those of `ctypes.pythonapi` are everybody's
_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


class _Torch(ctypes.Structure):
    """`struct torch` of tensors.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("type", "implementation", "keys", "autograd", "gradient")),
        *((name, ctypes.c_void_p) for name in _FUNCTIONS),
        ("strided", ctypes.c_int64),
        ("nothing", ctypes.c_void_p),
        ("classes", ctypes.c_void_p * len(_CLASSES)),
    ]


class Reader:
    """Reads lists of tensors. Made by `reader`.

    Args:
        library: tensors.c.
        of_torch: where torch keeps what.

    Raises:
        LookupError, ValueError: the library was built from another version of this package.
    """

    def __init__(self, library: ctypes.PyDLL, of_torch: _Torch) -> None:
        expected = (ctypes.c_int64 * 3).in_dll(library, "flashoptim_tensors_expects")
        if list(expected) != [_VERSION, ctypes.sizeof(_Torch), _FACT_BYTES]:
            raise LookupError("the library was built from another version of this package")
        self._torch = of_torch
        self.torch = ctypes.addressof(of_torch)
        pointer, number, anything = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object
        self.learn, self.read = library.flashoptim_learn_tensors, library.flashoptim_read_tensors
        self.learn.argtypes, self.learn.restype = [pointer, anything, pointer, pointer, number, number], number
        self.read_gradients, self.release = library.flashoptim_read_gradients, library.flashoptim_release
        self.read.argtypes = [pointer, anything, pointer, pointer, number, pointer]
        self.read_gradients.argtypes = [*self.read.argtypes, pointer]
        self.release.argtypes, self.release.restype = [pointer, pointer, number], None
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
        self._pointers = ctypes.c_void_p * count

    def learn(self, tensors: list[Tensor]) -> bool:
        """Look at them for the first time."""
        return self._by.learn(self._by.torch, tensors, *self._at, self._count, len(self._extents)) >= 0

    def addresses(self, tensors: list[Any]) -> np.ndarray | None:
        """The addresses of other tensors, int64, if they are all what those were, one by one; else None. Anything may be in the list."""
        found = np.empty(self._count, dtype=np.int64)
        return found if self._by.read(self._by.torch, tensors, *self._at, self._count, found.ctypes.data) else None

    def addresses_of_gradients(self, params: list[Tensor]) -> tuple[np.ndarray, Held] | None:
        """`addresses` of the gradients of tensors, of whatever class, without asking Python for them, and what keeps them alive.

        None may be because nobody knows.
        """
        found, pointers = np.empty(self._count, dtype=np.int64), self._pointers()
        if self._by.read_gradients(self._by.torch, params, *self._at, self._count, found.ctypes.data, pointers):
            return found, Held(self._by, pointers)
        return None


class Held:
    """Gradients that were read: they are alive as long as this is, whoever takes them away from their parameters meanwhile.

    Args:
        by: the reader.
        pointers: as `flashoptim_read_gradients` left them. They are this object's from here on.
    """

    __slots__ = ("_by", "_pointers")

    def __init__(self, by: Reader, pointers: ctypes.Array[ctypes.c_void_p]) -> None:
        self._by, self._pointers = by, pointers

    def tensors(self) -> list[Tensor]:
        """The gradients as Python has them."""
        first = ctypes.addressof(self._pointers)
        handles = [_another_handle(first + 8 * i) for i in range(len(self._pointers))]
        return torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([_capsule(handle, None, None) for handle in handles])

    def __del__(self) -> None:
        self._by.release(self._by.torch, self._pointers, len(self._pointers))


def _another_handle(handle: int) -> int | None:
    """A handle that belongs to whoever asks."""
    found = ctypes.c_void_p()
    _shim().aoti_torch_new_tensor_handle(ctypes.c_void_p(handle), ctypes.byref(found))
    return found.value


@cache
def _shim() -> ctypes.PyDLL:
    """Torch's C interface: the libraries that this one needs are searched too."""
    return ctypes.PyDLL(torch._C.__file__)


@cache
def reader() -> Reader | None:
    """What reads lists of tensors in this process; None where it was not compiled, or does not know this torch.

    Nor is there one where Python runs threads side by side: one of them might change a list that another one reads.
    """
    path = cpu.where("_tensors")
    if path is None or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    found: list[Reader | None] = []
    # what surrounds the first step (inference mode, a default device, torch's modes and transforms) holds in its own thread only
    thread = Thread(target=lambda: found.append(_made(path)), name="flashoptim-hf: where torch keeps what")
    try:
        thread.start()
    except RuntimeError:  # there may be no more threads
        return None
    thread.join()
    return found[0]


def _made(path: Path) -> Reader | None:
    """A reader that has been tried, or None."""
    try:
        made = Reader(ctypes.PyDLL(str(path)), _find_out())
        if not all(_agrees(made, *case) for case in _cases()):
            return None
        if not _agrees_on_gradients(made):
            made.forget_gradients()
    except Exception:  # a torch that lacks any of this, in whatever way it says so
        return None
    return made


def _find_out() -> _Torch:
    """Where this torch keeps what.

    Raises:
        AttributeError, LookupError: it keeps it elsewhere.
    """
    found = _Torch()
    for name, function in _FUNCTIONS.items():
        setattr(found, name, ctypes.cast(getattr(_shim(), function), ctypes.c_void_p).value)
    found.strided, found.nothing = _shim().aoti_torch_layout_strided(), _nothing()
    found.classes = (ctypes.c_void_p * len(_CLASSES))(*map(id, _CLASSES))
    tensors = [
        torch.zeros(3, device="cpu"),
        torch.nn.Parameter(torch.zeros(2, device="cpu")),
        torch._neg_view(torch.zeros(2, device="cpu")),
    ]
    implementations = list(map(_implementation, tensors))
    size = min(type(tensor).__basicsize__ for tensor in tensors)
    found.type = _place(map(id, tensors), [id(type(tensor)) for tensor in tensors], size)
    found.implementation = _place(map(id, tensors), implementations, size)
    found.keys = _place(implementations, [torch._C._dispatch_keys(tensor).raw_repr() for tensor in tensors], _SEARCHED)
    found.autograd, found.gradient = _places_of_gradients()
    return found


def _places_of_gradients() -> tuple[int, int]:
    """(where in an implementation lies the pointer to what autograd knows, where in that the gradient); `NOT_READ` twice if nobody knows.

    What is tried may be no pointer at all, so the kernel is asked for the memory that it points to. And it may be a pointer to something
    that has a gradient beside it in memory by chance. So tensors share a storage, and what they get later, they get in another order.
    """
    whole = torch.zeros(5, device="cpu")
    params = [whole[i : i + 1].data for i in range(len(whole))]  # of which autograd knows nothing yet
    for param in reversed(params):
        param.requires_grad_()
    bases = list(map(_implementation, params))
    kept: list[Tensor] = []
    places: set[tuple[int, int]] | None = None
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            for stride in (1, 2, 3):
                for i in range(len(params)):
                    params[i * stride % len(params)].grad = torch.zeros(1, device="cpu")
                kept += [param.grad for param in params if param.grad is not None]  # so that the next ones lie elsewhere
                for base, grad in zip(bases, kept[-len(params) :], strict=True):
                    found = _paths(memory, base, _implementation(grad), places)
                    places = found if places is None else places & found
    except OSError:
        return NOT_READ, NOT_READ
    return places.pop() if places is not None and len(places) == 1 else (NOT_READ, NOT_READ)


def _paths(memory: Any, base: int, value: int, among: Iterable[tuple[int, int]] | None) -> set[tuple[int, int]]:
    """(a place behind `base`, a place behind the address that stands there): where a value stands. `among`: look at these, if given."""
    places = range(0, _SEARCHED, 8) if among is None else {place for place, _ in among}
    words = _words_at(memory, base)
    return {(place, 8 * at) for place in places for at in np.flatnonzero(_words_at(memory, int(words[place // 8])) == value).tolist()}


def _words_at(memory: Any, address: int) -> np.ndarray:
    """What lies at an address, as uint64; 0 where there is no such address."""
    words = np.zeros(_SEARCHED // 8, dtype=np.uint64)
    try:
        memory.seek(address)
        found = memory.read(_SEARCHED)
    except (OSError, OverflowError, ValueError):
        return words
    words[: len(found) // 8] = np.frombuffer(found[: len(found) // 8 * 8], dtype=np.uint64)
    return words


def _implementation(tensor: Tensor) -> int:
    """The address of a tensor's implementation. A handle is the address of a pointer to it, and torch makes one for whoever asks."""
    return _pointed_to(_pointer(torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor), None))


def _nothing() -> int:
    """The same of a tensor that is none."""
    handle = ctypes.c_void_p()
    _shim().aoti_torch_new_uninitialized_tensor(ctypes.byref(handle))
    return _pointed_to(handle.value)


def _pointed_to(handle: int | None) -> int:
    """What a handle points to; the handle is gone then.

    Raises:
        LookupError: there is no handle.
    """
    if handle is None:
        raise LookupError("no handle")
    try:
        return ctypes.c_uint64.from_address(handle).value
    finally:
        _shim().aoti_torch_delete_tensor_object(ctypes.c_void_p(handle))


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
    if found is None or found[0].tolist() != [grad.data_ptr() for grad in grads]:
        return False
    if not all(one is other for one, other in zip(found[1].tensors(), grads, strict=True)):
        return False
    users = [grad._use_count() for grad in grads]  # type: ignore[attr-defined]
    del found
    if [grad._use_count() + 1 for grad in grads] != users:  # type: ignore[attr-defined]
        return False
    for other in (torch.zeros(3, 4, device="cpu"), torch.nn.Parameter(torch.zeros(4, 3, device="cpu"))):
        if other.requires_grad:
            other.grad = torch.ones(4, 3, device="cpu")
        if facts.addresses_of_gradients([other, *params[1:]]) is not None:
            return False
    params[1].grad = None
    return facts.addresses_of_gradients(params) is None
