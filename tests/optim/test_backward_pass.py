"""What is alive during backward, what moves, and what happens to gradients that are not finite and to steps that fail."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashoptim_hf import FlashAdamW
from flashoptim_hf.errors import DeviceMemoryError
from flashoptim_hf.paging import simulated
from flashoptim_hf.paging.simulated_model import InjectedError, Speeds
from tests.optim.release import RELEASED, WIDTH, Watch, batch, groups_of, layers, loss_of, step_on, trained


@pytest.fixture
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device runs everything at once, as a real one has begun it when the call returns: nothing waits in closures."""
    for name in simulated.POLICIES:
        monkeypatch.setitem(simulated.POLICIES, name, simulated.STREAMS)


@pytest.mark.usefixtures("prompt")
@pytest.mark.parametrize("count", [10, 40])
def test_live_gradients_are_about_a_page_whatever_the_depth(count: int) -> None:
    model = layers(count)
    watch = Watch(model)
    total = sum(p.nbytes for p in model.parameters())
    optimizer, _ = trained(model, steps=3, gradient_release=True, paged=True, page_bytes=4096, simulate=1)
    small = sum(p.nbytes for p in model.parameters() if p.dim() < 2)
    page = 2 * 4096 // 3
    largest = 2 * WIDTH * WIDTH
    assert watch.now == 0
    # a large parameter, the one before that shares a page with it, a page; and what lies in the pages of norms and biases
    assert watch.peak <= 2 * largest + page + small + 2
    assert watch.peak < total / (2 if count == 10 else 5)
    report = optimizer.memory_report()
    assert report.device_bytes == report.staging_bytes <= 10 * (4096 + 5 * 256), "ten slots for pages this small, whatever the depth"


def test_without_release_all_gradients_are_alive() -> None:
    """The measurement above can fail."""
    model = layers(10)
    watch = Watch(model)
    trained(model, steps=2)
    assert watch.peak == sum(p.nbytes for p in model.parameters())


@pytest.mark.usefixtures("prompt")
def test_the_first_step_takes_no_more_than_the_others() -> None:
    model = layers(20)
    watch = Watch(model)
    peaks = []
    optimizer = FlashAdamW(groups_of(model), lr=1e-2, gradient_release=True, paged=True, page_bytes=4096, simulate=1)
    for step in range(4):
        watch.peak = 0
        loss_of(model, batch(step)).backward()
        optimizer.step()
        peaks.append(watch.peak)
    assert max(peaks) == peaks[0] == peaks[-1]


def test_traffic_is_that_of_a_step_and_every_page_moves_once() -> None:
    model = layers(10)
    optimizer, _ = trained(model, steps=3, gradient_release=True, paged=True, page_bytes=4096, simulate=2, device_budget_bytes=0.25)
    report = optimizer.memory_report()
    stored = sum(page.nbytes for pool in optimizer._layout.pools.values() for page in pool.store.pages)
    assert report.page_in_bytes == report.page_out_bytes == stored - report.resident_bytes
    assert report.launches == report.pages > 10
    assert report.hidden_share is not None
    assert report.hidden_share > 0


def test_pages_are_updated_while_backward_runs() -> None:
    model = layers(8)
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, **RELEASED)
    before = [p.detach().clone() for p in model[-1].parameters()]
    seen: list[bool] = []

    def look(grad: Tensor) -> Tensor:
        optimizer._layout.engine(torch.device("cpu")).backend.wait_host(None)
        seen.append(not torch.equal(before[0], model[-1].weight))
        return grad

    x = model[:3](batch(0))
    x.register_hook(look)
    loss_of(model[3:], x).backward()
    assert seen == [True]


def test_gradients_in_the_worst_order_stay_within_the_limit() -> None:
    """Parameters whose gradients come in an order that has nothing to do with where they lie."""

    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.ones(60)) for _ in range(200))

        def forward(self, order: list[int]) -> Tensor:
            value = torch.ones(60)
            for i in order:
                value = value * self.parts[i].cos()
            return value.sum()

    generator = torch.Generator().manual_seed(0)
    results, peaks = [], []
    for options in ({}, {"gradient_release": True, "page_bytes": 1024}):
        model = Shuffled()
        watch = Watch(model)
        optimizer = FlashAdamW(model.parameters(), lr=1e-2, **options)
        generator.manual_seed(0)
        for _ in range(3):
            model(torch.randperm(200, generator=generator).tolist()).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
        peaks.append(watch.peak)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert peaks[0] == 200 * 240
    page = 1024 // 2 * 4
    assert peaks[1] <= 3 * 240 + page + 240


# ---------------------------------------------------------------------- gradients that are not finite


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.mark.parametrize("options", [{}, RELEASED | {"page_bytes": 3000}], ids=["plain", "simulated"])
def test_a_batch_that_is_nan_throughout_leaves_nothing(options: dict[str, Any], as_bits: Callable[[Any], Any]) -> None:
    model, clean = layers(), layers()
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, **{**options, "gradient_release": True})
    other = FlashAdamW(clean.parameters(), lr=1e-2)
    for step in range(4):
        x = batch(step)
        if step == 1:
            with pytest.warns(RuntimeWarning, match="left out of this step"):
                step_on(optimizer, loss_of(model, x) * float("nan"))
            continue
        for m, o in ((model, optimizer), (clean, other)):
            loss_of(m, x).backward()
            o.step()
            o.zero_grad()
    assert optimizer.memory_report().skipped_steps == 1
    assert as_bits(list(model.parameters())) == as_bits(list(clean.parameters()))
    assert as_bits(optimizer.state_dict()["state"]) == as_bits(other.state_dict()["state"])


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("page_bytes", [1024, 1400, 2048, 3000])
def test_pages_before_a_bad_gradient_are_stepped_and_a_parameter_moves_as_a_whole_or_not(
    page_bytes: int, as_bits: Callable[[Any], Any]
) -> None:
    model = layers(6)
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, **{**RELEASED, "page_bytes": page_bytes})
    loss_of(model, batch(0)).backward()
    optimizer.step()
    middle = model[9].weight
    handle = middle.register_hook(lambda grad: grad * float("nan"))
    before = [p.detach().clone() for p in model.parameters()]
    saved = as_bits(optimizer.state_dict()["state"])
    loss_of(model, batch(1)).backward()
    optimizer.step()
    handle.remove()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    for p, old, any_moved in zip(model.parameters(), before, moved, strict=True):
        parts = (p != old).float().view(-1).split(64)
        assert p.numel() < 1024 or [bool(part.mean() > 0.5) for part in parts] == [any_moved] * len(parts), "as a whole"
    steps = [int(optimizer.state[p]["step"]) for p in model.parameters()]
    assert steps == [2 if m else 1 for m in moved]
    place = next(i for i, p in enumerate(model.parameters()) if p is middle)
    assert not moved[place]
    assert any(moved[place + 1 :])
    after = as_bits(optimizer.state_dict()["state"])
    assert [after[i] != saved[i] for i in range(len(moved))] == moved, "state moves with its weight"
    assert optimizer.memory_report().skipped_steps == 1
    for p in model.parameters():
        assert torch.isfinite(p).all()


def test_raising_names_what_has_happened() -> None:
    model = layers()
    optimizer = FlashAdamW(model.parameters(), lr=1e-2, nonfinite="raise", **RELEASED)
    handle = model[0].weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(FloatingPointError, match=r"zero_grad\(\) drops what waits"):
        loss_of(model, batch(0)).backward()
    handle.remove()
    with pytest.warns(RuntimeWarning, match=r"zero_grad\(\) before step\(\)"):
        optimizer.zero_grad()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model[0].weight)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    assert int(optimizer.state[model[0].weight]["step"]) == 1
    assert int(optimizer.state[model[-1].weight]["step"]) == 2


@pytest.mark.usefixtures("quiet")
def test_flags_that_only_the_device_knows_count_the_same(monkeypatch: pytest.MonkeyPatch, as_bits: Callable[[Any], Any]) -> None:
    """The way of a device, where nobody waits for flags: kernels obey them, and counts are set right later."""
    from flashoptim_hf.optim import backward_pass

    results = []
    for deferred in (False, True):
        model = layers(6)
        optimizer = FlashAdamW(model.parameters(), lr=1e-2, gradient_release=True, page_bytes=2048)
        with monkeypatch.context() as patch:
            if deferred:
                patch.setattr(backward_pass, "known_at_once", lambda _: False)
            for step in range(4):
                handle = model[9].weight.register_hook(lambda grad, step=step: grad * float("nan") if step == 1 else grad)
                loss_of(model, batch(step)).backward()
                optimizer.step()
                handle.remove()
            if deferred:
                assert optimizer._guard._pending is not None
            state = optimizer.state_dict()["state"]
        results.append(as_bits([list(model.parameters()), state]))
        assert optimizer.memory_report().skipped_steps == 1
    assert results[0] == results[1]


# ---------------------------------------------------------------------- failures and second thoughts


def test_no_device_memory_is_said_before_a_weight_changes(as_bits: Callable[[Any], Any]) -> None:
    expected, model = layers(), layers()
    trained(expected, steps=3)
    optimizer = FlashAdamW(groups_of(model), lr=1e-2, **RELEASED)
    for step in range(3):
        if step == 1:
            optimizer.trim()
            before = as_bits(list(model.parameters()))
            backend = optimizer._layout.engine(torch.device("cpu")).backend
            backend.capacity = 0
            with pytest.raises(DeviceMemoryError, match="page_bytes"):
                loss_of(model, batch(step)).backward()
            assert as_bits(list(model.parameters())) == before
            backend.capacity = None
            optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert as_bits(list(model.parameters())) == as_bits(list(expected.parameters()))


@pytest.mark.parametrize("what", ["copy", "launch"])
def test_after_a_failure_a_page_was_updated_once_or_not_at_all(what: Any) -> None:
    """Nothing is updated twice: what went through stands, the rest is stepped by the next backward."""
    model = layers()
    optimizer = FlashAdamW(groups_of(model), lr=1e-2, **RELEASED)
    backend = optimizer._layout.engine(torch.device("cpu")).backend
    loss_of(model, batch(0)).backward()
    optimizer.step()
    backend.fail(what, at=9)
    with pytest.raises(InjectedError):
        step_on(optimizer, loss_of(model, batch(1)))
    optimizer.step()
    optimizer.zero_grad()
    assert {int(values["step"]) for values in optimizer.state.values()} <= {1, 2}
    loss_of(model, batch(2)).backward()
    optimizer.step()
    assert {int(values["step"]) for values in optimizer.state.values()} <= {2, 3}
    for p in model.parameters():
        assert torch.isfinite(p).all()


def test_zero_grad_before_step_drops_what_waits_and_says_so() -> None:
    model = layers()
    optimizer = FlashAdamW(groups_of(model), lr=1e-2, gradient_release=True, page_bytes=1 << 20)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    loss = loss_of(model, batch(1))
    small = [p for p in model.parameters() if p.dim() < 2]
    loss.backward(inputs=small[:3])
    optimizer.zero_grad()  # nothing had been updated: nothing to say
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    loss_of(model, batch(1)).backward(inputs=[p for p in model.parameters() if p.dim() > 1])
    with pytest.warns(RuntimeWarning, match=r"zero_grad\(\) before step\(\)"):
        optimizer.zero_grad()
    assert [int(optimizer.state[p]["step"]) for p in model.parameters()] == [2 if p.dim() > 1 else 1 for p in model.parameters()]


def test_host_memory_is_planned_as_it_is_taken() -> None:
    model = layers()
    optimizer = FlashAdamW(groups_of(model), gradient_release=True, paged=True, page_bytes=2048)
    planned = optimizer.planned_bytes()[0]
    loss_of(model, batch(0)).backward()
    optimizer.step()
    assert optimizer.memory_report().host_bytes == planned


def test_pages_hold_parameters_that_become_final_together() -> None:
    """Last parameter first, and what belongs to another group on pages of its own."""
    model = layers()
    optimizer = FlashAdamW(groups_of(model), **RELEASED)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    order: list[Tensor] = []
    for pool in optimizer._layout.pools.values():
        for page in pool.store.pages:
            order += [piece.block.owner for piece in page.pieces]
            assert len({piece.block.owner.dim() > 1 for piece in page.pieces}) == 1
    large = [p for p in dict.fromkeys(order) if p.dim() > 1]
    assert [id(p) for p in large] == [id(p) for p in reversed(list(model.parameters())) if p.dim() > 1]


# ---------------------------------------------------------------------- any order of anything


class Parts(nn.Module):
    """Parameters of any size and dtype; each use names those that take part, in the order in which their gradients do not come."""

    SHAPES = ((64, 20), (7,), (300, 3), (129,), (64, 5), (1,), (2, 65), (500,))

    def __init__(self) -> None:
        super().__init__()
        parts = []
        for i, shape in enumerate(self.SHAPES * 2):
            generator = torch.Generator().manual_seed(i)
            parts.append(nn.Parameter(torch.randn(shape, generator=generator).to((torch.float32, torch.bfloat16)[i % 3 == 0])))
        self.parts = nn.ParameterList(parts)

    def forward(self, order: list[int], between: dict[int, Callable[[], Any]]) -> Tensor:
        value = torch.zeros(())
        for i in order:
            part = self.parts[i].float()
            if i in between:
                part.register_hook(lambda _, act=between[i]: [act()].clear())
            value = value + (part.cos() * (i + 1)).sum()
        return value


def played(seed: int, **options: Any) -> tuple[Parts, FlashAdamW]:
    """Eight steps; in the middle of backward, and between backward and step, somebody saves, evicts, looks or waits."""
    rng, model = random.Random(seed), Parts()
    groups = [{"params": list(model.parts[:6])}, {"params": list(model.parts[6:]), "lr": 3e-3, "weight_decay": 0.1}]
    optimizer = FlashAdamW(groups, lr=1e-2, **options)
    actions = [optimizer.evict, lambda: optimizer.evict(1), optimizer.trim, optimizer.synchronize, optimizer.state_dict]
    actions += [optimizer.memory_report, lambda: [optimizer.decoded_state(p) for p in list(optimizer.state)[:2]]]
    usual = rng.sample(range(16), 16)
    for _ in range(8):
        order = usual if rng.random() < 0.6 else rng.sample(range(16), rng.choice([16, 16, 9, 1]))
        between = {i: rng.choice(actions) for i in order if rng.random() < 0.15}
        model(order, between).backward()
        if rng.random() < 0.3:
            rng.choice(actions)()
        optimizer.step()
        if rng.random() < 0.2:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
    return model, optimizer


def placed(seed: int) -> dict[str, Any]:
    rng = random.Random(seed + 10**6)
    transport = rng.choice(["staged", "staged", "zero_copy", "resident"])
    budget = 0 if transport == "resident" else rng.choice([0, 0, 0.3, 0.7, 1.0, "auto", 3000])
    page = rng.choice([1024, 2048, 4096, 10_000])
    return {"paged": True, "simulate": seed, "page_bytes": page, "transport": transport, "device_budget_bytes": budget}


@pytest.mark.parametrize("part", range(4))
def test_any_order_of_gradients_and_anything_between_equals_the_unpaged_step(part: int, as_bits: Callable[[Any], Any]) -> None:
    for seed in range(part, 28, 4):
        expected, plain = played(seed)
        options = {"page_bytes": 1024} if seed % 6 == 5 else placed(seed)
        model, optimizer = played(seed, gradient_release=True, **options)
        assert as_bits(list(model.parameters())) == as_bits(list(expected.parameters())), (seed, options)
        state = optimizer.state_dict()["state"]
        never = [key for key, values in state.items() if not values["step"]]
        for key in never:
            del state[key]
        assert as_bits(state) == as_bits(plain.state_dict()["state"]), (seed, options)


# ---------------------------------------------------------------------- figures


@pytest.mark.usefixtures("prompt")
def test_an_eight_billion_model_in_small_takes_two_bytes_per_parameter_and_little_more() -> None:
    """Llama 3.1 8B in all proportions, 4000 times smaller, pages too: weights, the gradients that are alive at one time, staging."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 32, "num_attention_heads": 4, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2004, max_position_embeddings=16, tie_word_embeddings=False, **shape)).bfloat16()
    params = sum(p.numel() for p in model.parameters())
    page = 32 * 2**20 * params // 8_030_261_248
    watch = Watch(model)
    optimizer = FlashAdamW(groups_of(model), gradient_release=True, paged=True, page_bytes=page, simulate=1)
    ids = torch.arange(12)[None]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    report = optimizer.memory_report()
    assert report.state_bytes / params == pytest.approx(3.156, abs=0.01)
    weights = sum(p.nbytes for p in model.parameters()) / params
    live, staging = watch.peak / params, report.device_bytes / params
    largest = max(p.nbytes for p in model.parameters()) / params
    assert weights == 2
    assert largest <= live <= 1.2 * largest, "the output layer's, which is one tensor, and what shares a page with it"
    assert report.device_bytes == report.staging_bytes
    assert staging < 0.06
    assert weights + live + staging < 2.25


def overhead(backward: float, monkeypatch: pytest.MonkeyPatch, **options: Any) -> float:
    """Seconds that backward and step take beyond a backward of so many, on the clock of the simulated device, at PCIe 4 x16 in small."""
    from flashoptim_hf.optim import layout
    from flashoptim_hf.paging.residency import pages_ahead

    model = layers(40)
    params = sum(p.numel() for p in model.parameters())
    scale = params / 8e9
    # as many pages ahead as for the real size
    monkeypatch.setattr(layout, "pages_ahead", lambda _, in_flight: pages_ahead(32 * 2**20, in_flight))
    optimizer = FlashAdamW(groups_of(model), paged=True, page_bytes=max(1024, int(32 * 2**20 * scale)), simulate=1, **options)
    backend = optimizer._layout.engine(torch.device("cpu")).backend
    assert isinstance(backend, simulated.SimulatedBackend)
    backend.speeds = Speeds(link_in=25e9 * scale, link_out=25e9 * scale, memory=2e12 * scale)
    for p in model.parameters():
        # before the hook of the optimizer: a gradient is final when its share of backward is done
        p.register_hook(lambda grad: backend.work(backward * grad.numel() / params))
    for step in range(3):
        loss = loss_of(model, batch(step))
        backend.wait_host(None)
        start = backend.record("compute")
        loss.backward()
        optimizer.step()
        stop = backend.record("compute")
        backend.wait_host(stop)
        optimizer.zero_grad()
    elapsed = backend.elapsed(start, stop)
    assert elapsed is not None
    return elapsed - backward


@pytest.mark.usefixtures("prompt")
def test_transfers_are_hidden_behind_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """8B parameters: a second of transfers each way. A tenth is left where backward takes twice as long, all where it comes before."""
    released = overhead(2.0, monkeypatch, gradient_release=True)
    after = overhead(2.0, monkeypatch)
    assert after > 1.0
    assert released < 0.2 * after
