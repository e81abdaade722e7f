"""The compiled reader of tensors says what Python says, and says nothing where it does not know."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashoptim_hf.kernels import cpu, tensors
from flashoptim_hf.optim import gradients
from flashoptim_hf.optim.adamw import FlashAdamW

pytestmark = pytest.mark.skipif(cpu.where("_tensors") is None, reason="no C compiler when the package was installed")


@pytest.fixture
def by() -> tensors.Reader:
    found = tensors.reader()
    assert found is not None
    return found


class Other(Tensor):
    pass


def kinds() -> list[Tensor]:
    """One of every kind that a parameter or gradient may be."""
    plain = torch.arange(24.0)
    return [
        *(plain.to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64)),
        *(plain.view(shape) for shape in ((24,), (4, 6), (6, 4), (2, 3, 4), (1, 24), (1, 1, 1, 24))),
        plain.view(4, 6).t(),
        plain[8:],
        plain[::2],
        plain[3],
        plain[:0],
        torch.empty(3, 0, 2),
        plain.expand(5, 24),
        torch._neg_view(plain),
        torch.randn(24, dtype=torch.complex64),
        torch.randn(24, dtype=torch.complex64).conj(),
        plain.clone().requires_grad_(),
        nn.Parameter(plain),
        nn.Parameter(plain, requires_grad=False),
        plain.to("meta"),
    ]


def same_for_python(one: Tensor, other: Tensor) -> bool:
    looks: list[Callable[[Tensor], Any]] = [type, lambda t: (t.dtype, t.device, t.shape, t.stride(), t.is_neg(), t.is_conj())]
    return all(look(one) == look(other) for look in looks)


def test_every_kind_against_every_other(by: tensors.Reader) -> None:
    one, other = kinds(), kinds()
    for tensor in one:
        facts = by.facts([tensor])
        assert facts is not None
        for candidate in other:
            found = facts.addresses([candidate])
            assert (found is not None) == same_for_python(tensor, candidate), (tensor, candidate)
            assert found is None or found.tolist() == [candidate.data_ptr()]


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 420])
def test_many_at_once_and_one_that_differs(by: tensors.Reader, count: int) -> None:
    def made() -> list[Tensor]:
        return [torch.zeros(1 + i % 7, 1 + i % 3, dtype=[torch.float32, torch.bfloat16][i % 2]) for i in range(count)]

    facts, others = by.facts(made()), made()
    assert facts is not None
    found = facts.addresses(others)
    assert found is not None
    assert found.tolist() == [other.data_ptr() for other in others]
    for at in {0, count // 2, count - 1} & set(range(count)):
        for wrong in (torch.zeros(9, 9), None, 1, "", [], Other(torch.zeros(others[at].shape, dtype=others[at].dtype))):
            changed: list[Any] = [*others[:at], wrong, *others[at + 1 :]]
            assert facts.addresses(changed) is None
    assert facts.addresses([*others, torch.zeros(1)]) is None
    assert not count or facts.addresses(others[:-1]) is None


def test_a_list_of_another_length_is_not_learned(by: tensors.Reader) -> None:
    """What was reserved is not written beyond."""
    facts = tensors.Facts(by, 2, 100)
    assert facts.learn([torch.zeros(1)] * 2)
    assert not facts.learn([torch.zeros(1)] * 3)
    assert not facts.learn([torch.zeros(1)])
    assert not tensors.Facts(by, 1, 3).learn([torch.zeros(1, 1)])


def test_what_cannot_be_read_is_not_learned(by: tensors.Reader) -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), Other(torch.zeros(3))):
        assert by.facts([torch.zeros(2), tensor]) is None


def leaves(count: int = 70) -> list[Tensor]:
    return [nn.Parameter(torch.randn(1 + i % 5, 4)) for i in range(count)]


def backward(params: list[Tensor]) -> None:
    torch.stack([param.square().sum() for param in params]).sum().backward()


def test_gradients_that_python_has_not_seen(by: tensors.Reader) -> None:
    params = leaves()
    backward(params)
    facts = by.facts([param.grad for param in params if param.grad is not None])
    assert facts is not None
    for _ in range(3):
        for param in params:
            param.grad = None
        assert facts.addresses_of_gradients(params) is None
        backward(params)
        found = facts.addresses_of_gradients(params)
        assert found is not None
        assert found[0].tolist() == [param.grad.data_ptr() for param in params if param.grad is not None]
        assert all(one is param.grad for one, param in zip(found[1].tensors(), params, strict=True))


def test_gradients_are_alive_as_long_as_they_are_held(by: tensors.Reader) -> None:
    params = leaves()
    backward(params)
    grads = [param.grad for param in params if param.grad is not None]
    facts, expected = by.facts(grads), [grad.clone() for grad in grads]
    del grads
    assert facts is not None
    found = facts.addresses_of_gradients(params)
    assert found is not None
    for param in params:
        param.grad = None
    spoiled = [torch.full_like(value, float("nan")) for value in expected for _ in range(3)]
    assert not set(found[0].tolist()) & {tensor.data_ptr() for tensor in spoiled}
    for tensor, value in zip(found[1].tensors(), expected, strict=True):
        assert torch.equal(tensor, value)


@pytest.mark.parametrize("at", [None, 0, 40, 69])
def test_what_is_held_is_let_go(by: tensors.Reader, at: int | None) -> None:
    """At the end, and at once where one of them is not what it should be."""
    params = leaves()
    backward(params)
    grads = [param.grad for param in params if param.grad is not None]
    facts = by.facts(grads)
    assert facts is not None
    if at is not None:
        params[at].grad = torch.ones_like(params[at]).to_sparse()

    def users() -> list[int]:
        return [grad._use_count() for grad in grads]

    before = users()
    found = facts.addresses_of_gradients(params)
    assert (found is None) == (at is not None)
    if found is not None:
        assert users() == [count + 1 for count in before]
        found[1].tensors()
        del found
    assert users() == before


def test_gradients_of_another_kind(by: tensors.Reader) -> None:
    params = leaves(40)
    backward(params)
    facts = by.facts([param.grad for param in params if param.grad is not None])
    assert facts is not None
    param = params[38]
    gradient = torch.ones(4, 4)
    for other in (gradient, nn.Parameter(gradient), Other(gradient)):  # of whatever class: these are the numbers
        param.grad = other
        assert facts.addresses_of_gradients(params) is not None
    for another in (torch._neg_view(gradient), gradient.to_sparse(), gradient.t().contiguous().t(), None):
        param.grad = another
        assert facts.addresses_of_gradients(params) is None
    param.grad = gradient.clone()
    assert facts.addresses_of_gradients(params) is not None
    param.grad.data = gradient.half()
    assert facts.addresses_of_gradients(params) is None
    param.grad = gradient
    assert facts.addresses_of_gradients([*params[:38], torch.ones(2), params[39]]) is None  # one of which autograd knows nothing
    assert facts.addresses_of_gradients(params[:-1]) is None


def test_nothing_is_kept(by: tensors.Reader) -> None:
    params = leaves(5)
    backward(params)
    grads = [param.grad for param in params if param.grad is not None]
    facts, state, values = by.facts(grads), {param: {"a": 1} for param in params}, None
    assert facts is not None
    values = list(state.values())
    sizes = np.ones(len(values), dtype=np.int64)

    def counts() -> list[int]:
        return [sys.getrefcount(thing) for thing in (*params, *grads, *values)]

    before = counts()
    for _ in range(50):
        facts.addresses(grads)
        facts.addresses_of_gradients(params)
        by.same_items(params, params, 0)
        assert by.same_entries(state, params, values, sizes)
    assert counts() == before


def test_lists_and_dictionaries_by_identity(by: tensors.Reader) -> None:
    items: list[Any] = leaves(4)
    assert by.same_items(items[1:3], items, 1)
    assert by.same_items([], items, 4)
    assert not by.same_items(items[1:3], items, 0)
    assert not by.same_items(items[1:3], items, 3)
    assert not by.same_items([items[0].detach()], items, 0)
    values = [{"a": 1}, {}, {"a": 1, "b": 2}, {"c": 3}]
    sizes = np.array([1, 0, 2, 1])
    state = dict(zip(items, values, strict=True))
    assert by.same_entries(state, items, values, sizes)
    assert by.same_entries({}, [], [], sizes[:0])
    assert not by.same_entries(dict(list(state.items())[:3]), items, values, sizes)
    assert not by.same_entries({**state, nn.Parameter(torch.ones(1)): {}}, items, values, sizes)
    assert not by.same_entries(dict(reversed(state.items())), items, values, sizes)
    assert not by.same_entries({**state, items[0]: {"a": 1}}, items, values, sizes)
    values[1]["new"] = 1
    assert not by.same_entries(state, items, values, sizes)


@pytest.mark.parametrize("place", ["type", "implementation", "keys"])
def test_a_torch_that_keeps_things_elsewhere_is_not_read(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found out is tried before it is used."""
    real = tensors._find_out()
    decoy = {"type": real.type, "implementation": real.implementation, "keys": real.keys - 8}[place]
    if place != "keys":
        monkeypatch.setattr(tensors, "_find_out", lambda: (_ for _ in ()).throw(LookupError(place)))
    else:
        real.keys = decoy
        monkeypatch.setattr(tensors, "_find_out", lambda: real)
    assert tensors.reader.__wrapped__() is None


def test_a_torch_without_such_functions_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_aoti")
    assert tensors.reader.__wrapped__() is None


def test_gradients_that_cannot_be_found_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only they: everything else is read."""
    monkeypatch.setattr(tensors, "_places_of_gradients", lambda: (tensors.NOT_READ, tensors.NOT_READ))
    found = tensors.reader.__wrapped__()
    assert found is not None
    assert not found.reads_gradients
    assert tensors.reader().reads_gradients
    params = leaves(3)
    backward(params)
    grads = [param.grad for param in params if param.grad is not None]
    facts = found.facts(grads)
    assert facts is not None
    assert facts.addresses(grads) is not None
    assert facts.addresses_of_gradients(params) is None


def test_what_is_no_address_is_not_followed() -> None:
    with open("/proc/self/mem", "rb", buffering=0) as file:
        for nowhere in (8, 2**63, 2**64 - 8):
            assert not tensors._words_at(file, nowhere).any()
        inner = (ctypes.c_uint64 * 32)(*range(100, 132))
        outer = (ctypes.c_uint64 * 32)(*range(8, 31), ctypes.addressof(inner))
        assert tensors._paths(file, ctypes.addressof(outer), 105, None) == {(8 * 23, 40)}
        assert tensors._paths(file, ctypes.addressof(outer), 105, {(0, 40)}) == set()


def test_two_ways_to_a_gradient_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them would be there by chance, until the next tensor lies elsewhere."""
    paths = tensors._paths
    monkeypatch.setattr(tensors, "_paths", lambda *given: paths(*given) | {(200, 16)})
    found = tensors.reader.__wrapped__()
    assert found is not None
    assert not found.reads_gradients


def test_gradients_are_found_however_tensors_lie_in_memory() -> None:
    kept: list[Tensor] = []
    rng = random.Random(0)
    for _ in range(20):
        kept += [torch.zeros(rng.randrange(1, 9)) for _ in range(30)]
        rng.shuffle(kept)
        del kept[: rng.randrange(30)]
        assert tensors._places_of_gradients() == (tensors.reader()._torch.autograd, tensors.reader()._torch.gradient)


class NoOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} in this mode")


class Lies(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 0


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta"), FakeTensorMode, NoOperators, Lies])
def test_found_out_in_any_mode(mode: Callable[[], Any]) -> None:
    """The first step may come within `inference_mode`, with other defaults, or within a backward pass."""
    with mode():
        found = tensors.reader.__wrapped__()
    assert found is not None
    assert found.reads_gradients


def test_found_out_within_a_transform() -> None:
    found = []
    torch.func.grad(lambda x: (found.append(tensors.reader.__wrapped__()), x * 1)[1])(torch.tensor(1.0))
    assert found[0] is not None
    assert found[0].reads_gradients


def test_found_out_with_any_default_dtype() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            assert tensors.reader.__wrapped__().reads_gradients
        finally:
            torch.set_default_dtype(torch.float32)


def no_such_file(name: Any, *_: Any, **__: Any) -> Any:
    raise PermissionError(name)


def no_thread(_: Any) -> None:
    raise RuntimeError("can't start new thread")


def no_such_thing(*_: Any) -> None:
    raise TypeError("another signature")


def test_where_memory_cannot_be_read_gradients_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "open", no_such_file, raising=False)
    found = tensors.reader.__wrapped__()
    assert found is not None
    assert not found.reads_gradients


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (sys, "_is_gil_enabled", lambda: False),  # threads side by side: a list may change while it is read
        (tensors, "_VERSION", -1),  # the library of another version of this package
        (tensors.Thread, "start", no_thread),
        (tensors, "_implementation", no_such_thing),
    ],
    ids=["threads", "version", "no thread", "another torch"],
)
def test_where_nothing_can_be_read_there_is_no_reader(where: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, value, raising=False)
    assert tensors.reader.__wrapped__() is None


def test_a_step_does_not_ask_python_for_gradients(by: tensors.Reader, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    params = leaves(6)
    optimizer = FlashAdamW(params)
    asked: list[Tensor] = []
    grad_of = gradients._grad_of
    monkeypatch.setattr(gradients, "_grad_of", lambda param: (asked.append(param), grad_of(param))[1])
    for step in range(4):
        optimizer.zero_grad()
        backward(params)
        asked.clear()
        optimizer.step()
        assert len(asked) == (len(params) if step == 0 else 0)
