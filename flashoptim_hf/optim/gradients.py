"""The gradients of a step as the kernels need them: contiguous, in a dtype that they read, and their addresses in one array.

Gradients are new tensors at every step of a usual loop, so nothing about them is remembered from one step to the next: what is read here
is read anew: for all of them in one call where `kernels.tensors` can be had, else by a few passes (`map` over a method of tensors).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, compress, islice, repeat
from operator import attrgetter, is_, is_not
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..kernels.rule import DTYPE_CODE
from ..kernels.tensors import Held, reader
from .layout import PLAIN, local

_grad_of, _dtype_of = attrgetter("grad"), attrgetter("dtype")
_READABLE = frozenset(DTYPE_CODE)
_PLAIN = frozenset(PLAIN)
_WITHOUT_ADDRESSES = ("meta", "xla", "lazy")
"""Devices where no tensor has an address; they are refused by name, as all that are not served."""


def all_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether these are tensors of torch's own two classes, none of which is a DTensor."""
    return set(map(type, tensors)) <= _PLAIN


def addresses_of(tensors: Sequence[Tensor]) -> np.ndarray:
    """int64, one for each."""
    return np.fromiter(map(Tensor.data_ptr, tensors), dtype=np.int64, count=len(tensors))


def check_memory(tensor: Tensor, what: str) -> None:
    """Refuse a tensor with elements that lie nowhere: kernels would read address 0.

    Raises:
        UnsupportedError: names `what` it is.
    """
    if tensor.numel() and not tensor.data_ptr() and tensor.device.type not in _WITHOUT_ADDRESSES:
        raise UnsupportedError(
            f"{what} of shape {tuple(tensor.shape)} and class {type(tensor).__name__} has no memory: its storage was resized to 0, or it "
            "only wraps the tensors that have some. Call step() when weights and gradients are there as plain tensors."
        )


def with_memory(grad: Tensor) -> Tensor:
    """The gradient itself, or zeros where it is a tensor that torch does not write out because it is all zeros.

    Raises:
        UnsupportedError: see `check_memory`.
    """
    if grad._is_zerotensor():
        return grad.clone()
    check_memory(grad, "a gradient")
    return grad


def same_run(part: Sequence[Any], whole: Sequence[Any], begin: int) -> bool:
    """Whether these are the items of `whole` from `begin` on, by identity."""
    by = reader()
    if by is not None and type(part) is list and type(whole) is list:
        return by.same_items(part, whole, begin)
    return begin + len(part) <= len(whole) and all(map(is_, part, islice(whole, begin, None)))


class Likeness:
    """What some tensors are: class, dtype, device, layout, shape, strides, negated or not; and whether others are the same, one by one.

    Asked at every step, of every parameter and gradient: `kernels.tensors` answers for all of them together. Where it cannot be had, torch
    has a function for `torch.compile`, which asks this of its inputs at every call. It is not public: where it is missing (it may be from
    some torch version on), or says no for a reason of its own, the attributes decide.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        by = reader()
        self._facts = None if by is None else by.facts(list(tensors))
        self._attributes = self._look_at(tensors) if self._facts is None else []
        self._count = len(tensors)
        self._check: Callable[..., bool] | None = None
        guards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
        if self._facts is None and guards is not None and tensors and all_plain(tensors):
            with suppress(TypeError, RuntimeError):  # of another torch version
                self._check = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    @staticmethod
    def _look_at(tensors: Sequence[Tensor]) -> list[list[Any]]:
        looks: list[Callable[[Tensor], Any]] = [type, *map(attrgetter, ("dtype", "device", "shape", "layout")), _stride, Tensor.is_neg]
        return [list(map(look, tensors)) for look in looks]

    def addresses(self, tensors: list[Any]) -> np.ndarray | None:
        """int64, the addresses of tensors that are all what those were. None: they are not, or it is unknown."""
        if self._facts is not None:
            return self._facts.addresses(tensors)
        return addresses_of(tensors) if self._check is not None and len(tensors) == self._count and self._check(*tensors) else None

    def addresses_of_gradients(self, params: list[Tensor]) -> tuple[np.ndarray, Held] | None:
        """The same of the gradients of tensors, without asking Python for them, and what keeps them alive."""
        return None if self._facts is None else self._facts.addresses_of_gradients(params)

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether these are all what those were."""
        if self.addresses(tensors) is not None:
            return True
        return self._facts is None and len(tensors) == self._count and self._look_at(tensors) == self._attributes


def _stride(tensor: Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout is torch.strided else None


@dataclass(frozen=True)
class Known:
    """Gradients that came before: what they were, and what follows for gradients of the same kind.

    Attributes:
        like: what they were. All were contiguous, of torch's own class and not empty, on `device`, of the dtype of `code`.
        numels: int64, elements of each.
    """

    like: Likeness
    numels: np.ndarray
    code: int
    device: torch.device


class Later(Sequence[Tensor]):
    """Tensors that are asked for when somebody needs one of them: Python makes an object of each, and takes as long as the rest of a step.

    Args:
        make: gives them, and keeps them alive until then.
        count: how many there are.
    """

    def __init__(self, make: Callable[[], list[Tensor]], count: int) -> None:
        self._make, self._count = make, count

    @cached_property
    def _made(self) -> list[Tensor]:
        return self._make()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Tensor: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, at: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(at, slice):
            return Later(lambda: self._made[at], len(range(*at.indices(self._count))))
        return self._made[at]


class Spans:
    """Gradients as kernels read them, in the order given.

    Attributes:
        grads: local, contiguous, bf16, fp16 or fp32: the gradients themselves where they are so already, else copies.
        addresses: int64, of `grads`.
        codes: of their dtypes, as in `DTYPE_CODE`: one for all, or an array.

    Args:
        grads: of any floating dtype and layout in memory; DTensors count as what this process holds of them.
        known: what they are, where that is known already.
        addresses: and where.

    Raises:
        UnsupportedError: a sparse gradient, or one without memory.
    """

    def __init__(self, grads: Sequence[Tensor], known: Known | None = None, addresses: np.ndarray | None = None) -> None:
        self.codes: int | np.ndarray
        self.grads: Sequence[Tensor]
        self.known: Known | None = None
        if known is not None:
            addresses = addresses_of(grads) if addresses is None else addresses
            if addresses.all():
                self.known, self.grads, self.addresses, self.codes = known, grads, addresses, known.code
                return
        if not all_plain(grads):
            grads = [local(grad) for grad in grads]
        try:
            addresses = addresses_of(grads)
        except RuntimeError:
            _refuse_sparse(grads)
            raise
        if not addresses.all():
            grads = list(map(with_memory, grads))
            addresses = addresses_of(grads)
        dtypes = set(map(_dtype_of, grads))
        # a view that torch negates when it reads it, as of a conjugate's imaginary part, has the address of what it is not
        if not (dtypes <= _READABLE and all(map(Tensor.is_contiguous, grads))) or any(map(Tensor.is_neg, grads)):
            grads = [(grad if grad.dtype in _READABLE else grad.float()).resolve_neg().contiguous() for grad in grads]
            addresses = addresses_of(grads)
            dtypes = set(map(_dtype_of, grads))
        self.grads, self.addresses = grads, addresses
        if len(dtypes) == 1:
            self.codes = DTYPE_CODE[dtypes.pop()]
        else:
            self.codes = np.array([DTYPE_CODE[grad.dtype] for grad in grads], dtype=np.int64)

    @cached_property
    def numels(self) -> np.ndarray:
        """int64, elements of each gradient; one array for all that are known to be the same."""
        if self.known is not None:
            return self.known.numels
        return np.fromiter(map(Tensor.numel, self.grads), dtype=np.int64, count=len(self.grads))

    def by_device(self) -> list[tuple[torch.device, Spans]]:
        """The gradients of each device, those without elements left out; a device without any is left out too."""
        if self.known is not None:
            return [(self.known.device, self)]
        found: dict[torch.device, list[Tensor]] = {}
        for grad in self.grads:
            if grad.numel():
                found.setdefault(grad.device, []).append(grad)
        return [(device, Spans(grads)) for device, grads in found.items()]

    def learn(self) -> Known | None:
        """What there is to know of these for gradients to come; None where they are not all of one kind."""
        if self.known is not None:
            return self.known
        devices = {grad.device for grad in self.grads}
        if not isinstance(self.codes, int) or len(devices) != 1 or not self.numels.all() or not all_plain(self.grads):
            return None
        return Known(Likeness(self.grads), self.numels, self.codes, devices.pop())


class Roster:
    """All parameters of an optimizer in order, and what follows from which they are.

    Attributes:
        listed: the parameters of all groups.
        groups: the number of each one's group.
        sharded: whether any may be a DTensor.
    """

    def __init__(self, members: Sequence[Sequence[Tensor]]) -> None:
        self.listed: list[Tensor] = list(chain.from_iterable(members))
        self.groups = [number for number, group in enumerate(members) for _ in group]
        self.sharded = not all_plain(self.listed)
        self._sizes = list(map(len, members))
        self._begins = [0, *accumulate(self._sizes)][:-1]
        self._silent = True

    def warn_of_frozen(self) -> None:
        """Say once that there is nothing to train: every parameter is frozen, so no step will ever change one."""
        if self._silent and self.listed and not any(param.requires_grad for param in self.listed):
            warnings.warn(
                f"none of this optimizer's {len(self.listed)} parameters has requires_grad=True: its steps change nothing. Give it the "
                "parameters that are to be trained; adapters must be in training mode (is_trainable=True) when it is made.",
                RuntimeWarning,
                stacklevel=6,
            )
            self._silent = False

    def lists(self, members: Sequence[Sequence[Tensor]]) -> bool:
        """Whether the groups still have the same parameters, by identity."""
        return list(map(len, members)) == self._sizes and all(map(same_run, members, repeat(self.listed), self._begins))


class Gradients(Spans):
    """The parameters that have a gradient now, their local gradients, and the number of each one's group.

    Attributes:
        roster: of all parameters.
        params, groups: those with a gradient, and the number of each one's group; where all have one, the roster's own lists.

    Args:
        param_groups: the optimizer's.
        roster: of the last step: taken over if the groups still have the same parameters.
        known: what gradients of an earlier step were.

    Raises:
        UnsupportedError: a sparse gradient.
    """

    def __init__(self, param_groups: Sequence[dict[str, Any]], roster: Roster | None = None, known: Known | None = None) -> None:
        members = [group["params"] for group in param_groups]
        self.roster = roster if roster is not None and roster.lists(members) else Roster(members)
        self.params, self.groups = self.roster.listed, self.roster.groups
        if known is not None and not self.roster.sharded:
            read = known.like.addresses_of_gradients(self.params)
            if read is not None:  # the usual case
                super().__init__(Later(read[1].tensors, len(self.params)), known, read[0])
                return
        grads = list(map(_grad_of, self.params))
        if known is not None and (addresses := known.like.addresses(grads)) is not None:
            super().__init__(grads, known, addresses)
            return
        present = list(map(is_not, grads, repeat(None)))
        if not all(present):
            self.params, self.groups = list(compress(self.params, present)), list(compress(self.groups, present))
            grads = list(compress(grads, present))
            if not grads:
                self.roster.warn_of_frozen()
        if self.roster.sharded:
            grads = list(map(local, grads))
        known = known if known is not None and known.like.holds(grads) else None
        super().__init__(grads, known)


def _refuse_sparse(grads: Sequence[Tensor]) -> None:
    for grad in grads:
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"a gradient of shape {tuple(grad.shape)} has layout {grad.layout}; sparse gradients are not supported. "
                "Use nn.Embedding(..., sparse=False)."
            )
