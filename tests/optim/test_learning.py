"""Codecs that learn while they train: what is saved, skipped, moved or changed between a look and the step after it loses nothing.

After a look a parameter has two curves until its next step: what is stored is read by one, and written by the other.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flashoptim_hf.codecs import learned
from flashoptim_hf.codecs.base import get_codec
from flashoptim_hf.errors import CheckpointError, ConfigurationError, UnsupportedError
from flashoptim_hf.optim import convert, finite, layout, learning, statistics
from flashoptim_hf.optim.adamw import RULE, FlashAdamW
from flashoptim_hf.optim.lion import FlashLion
from flashoptim_hf.optim.sgd import FlashSGD

# parameters of several pages, ragged ones, scalars, and such as have no element
SHAPES = [(64, 80), (7,), (300, 11), (129,), (1,), (), (0,), (0, 4)]
CURVE = "exp_avg_sq_curve"
PLACED = {
    "plain": {},
    "eager": {"kernel": "eager"},
    "paged": {"paged": True, "page_bytes": 2048},
    "simulated": {"paged": True, "page_bytes": 2048, "simulate": 3},
}


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def optimizer_of(params: Iterable[Any], **options: Any) -> FlashAdamW:
    return FlashAdamW(params, **{"lr": 1e-3, "codec": "learned", **options})


def give_gradients(params: list[nn.Parameter], seed: int, spread: float = 1.5) -> None:
    """Gradients of different magnitudes, so that curves bend; some parameters have none in some steps."""
    generator = torch.Generator().manual_seed(seed)
    for number, param in enumerate(params):
        scale = torch.exp(spread * torch.randn(param.shape, generator=torch.Generator().manual_seed(number)))
        grad = (torch.randn(param.shape, generator=generator) * scale * 1e-2).to(param.dtype)
        param.grad = None if number % 3 == 1 and seed % 4 == 3 else grad


def train(params: list[nn.Parameter], optimizer: FlashAdamW, steps: Iterable[int]) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def curves_of(optimizer: FlashAdamW, param: Tensor) -> Tensor:
    return optimizer.state[param][CURVE].view(2, -1)


def mixed(optimizer: FlashAdamW, param: Tensor) -> bool:
    return not torch.equal(*curves_of(optimizer, param))


# ---------------------------------------------------------------------- when


def test_looks_come_after_steps_1_2_4_and_so_on_and_hold_from_the_next_step_on() -> None:
    params = parameters()[:1]
    optimizer = optimizer_of(params, learn_interval=11)
    changes, before = [], learned.straight()
    for step in range(1, 35):
        train(params, optimizer, [step])
        now, following = curves_of(optimizer, params[0]).clone()
        assert torch.equal(now, before), step
        if not torch.equal(now, following):
            changes.append(step)
        before = following
    assert changes == [1, 2, 4, 8, 11, 16, 22, 32, 33]


@pytest.mark.parametrize("interval", [0, -1, 2.0, True, "100", None])
def test_an_interval_that_is_none_is_refused(interval: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"learn_interval=.*at least 1.*100 is usual"):
        optimizer_of(parameters(), learn_interval=interval)
    with pytest.raises(ConfigurationError, match="learn_interval="):
        optimizer_of([{"params": parameters(), "learn_interval": interval}])


def test_groups_may_learn_at_intervals_of_their_own() -> None:
    params = parameters()[:1] + parameters()[2:3]
    optimizer = optimizer_of([{"params": params[:1], "learn_interval": 3}, {"params": params[1:]}], learn_interval=7)
    seen: list[list[int]] = [[], []]
    for step in range(1, 10):
        train(params, optimizer, [4 * step])
        for looks, param in zip(seen, params, strict=True):
            if mixed(optimizer, param):
                looks.append(step)
    assert seen == [[1, 2, 3, 4, 6, 8, 9], [1, 2, 4, 7, 8]]


def test_groups_are_looked_at_a_few_at_a_time_and_counted_once(monkeypatch: pytest.MonkeyPatch, as_bits) -> None:
    """Also of a parameter of more groups than are looked at, whatever its pages."""
    looked: list[int] = []
    observe = learned.LearnedCodec.observe

    def counting(self: Any, planes: Any, at: Tensor, *rest: Any) -> None:
        assert len(at) <= learning.AT_ONCE
        looked.append(len(at))
        observe(self, planes, at, *rest)

    monkeypatch.setattr(learned.LearnedCodec, "observe", counting)
    results = []
    for at_once, page in ((1 << 12, "32MiB"), (7, 4096)):
        monkeypatch.setattr(learning, "AT_ONCE", at_once)
        params = [nn.Parameter(torch.ones(300, 45)), nn.Parameter(torch.ones(70))]
        optimizer = optimizer_of(params, paged=True, page_bytes=page)
        for step in range(1, 4):
            looked.clear()
            give_gradients(params, 4 * step)
            optimizer.step()
            # 422 groups, each third of them, and the 3 of the other
            assert sum(looked) == (141 + 3 if step in (1, 2) else 0)
        results.append(as_bits(optimizer.state_dict()))
    assert results[0] == results[1]


@pytest.mark.parametrize("dither", [True, False])
@pytest.mark.parametrize("shape", [(300, 45), (8192,), (8191,), (70,), (1,)])
def test_the_optimizer_learns_what_the_codec_does_alone(shape: tuple[int, ...], dither: bool) -> None:
    """A loop over one parameter, by hand: decode, the rule, encode, `advance`."""
    param = nn.Parameter(torch.zeros(shape))
    optimizer = optimizer_of([param], kernel="eager", weight_decay=0.0, dither=dither, page_bytes=4096, paged=True)
    codec = get_codec("learned", RULE.states, dither)
    parts = [torch.zeros(part.entries(param.numel()), dtype=part.dtype) for part in codec.parts]
    weight = torch.zeros(param.numel())
    for step in range(1, 10):
        give_gradients([param], 4 * step)
        optimizer.step()
        hyper = tuple(torch.tensor((1e-3, *RULE.scalars(optimizer.param_groups[0], step))).tolist())
        states, weight = RULE.eager(codec.decode(parts, param.numel()), weight, param.grad.view(-1), hyper)
        lost = codec.encode(states, parts, step=step)
        weight = RULE.settle(states, lost, weight, hyper, step)
        codec.advance(parts, step)
        for part, value in zip(codec.parts, parts, strict=True):
            assert torch.equal(optimizer.state[param][part.name].view(-1), value), (step, part.name)
        assert torch.equal(param.detach().view(-1), weight)


def test_codecs_without_tables_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "due", None)
    monkeypatch.setattr(learning, "_tables", None)
    params = parameters()
    optimizer = optimizer_of(params, codec="joint")
    train(params, optimizer, range(1, 4))
    assert not optimizer._learning._devices


# ---------------------------------------------------------------------- cut anywhere


CUTS = [*range(1, 10), *range(99, 103), *range(127, 131)]


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, dict[int, tuple[Any, list[Tensor]]]]:
    """By kernel: state and weights after each step of one training."""
    found: dict[str, dict[int, tuple[Any, list[Tensor]]]] = {}
    for kernel, last in (("auto", 133), ("eager", 12)):
        params = parameters()
        optimizer = optimizer_of(params, kernel=kernel)
        found[kernel] = {}
        for step in range(1, last + 1):
            train(params, optimizer, [step])
            if step in CUTS or step - 3 in CUTS:
                found[kernel][step] = (optimizer.state_dict(), [param.detach().clone() for param in params])
    return found


@pytest.mark.parametrize(("placed", "step"), [(placed, step) for placed in PLACED for step in CUTS if step < 10 or placed != "eager"])
def test_resumed_equals_uninterrupted(placed: str, step: int, uninterrupted, as_bits) -> None:
    whole = uninterrupted[PLACED[placed].get("kernel", "auto")]
    saved, weights = whole[step]
    params = parameters()
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    resumed = optimizer_of(params, **PLACED[placed])
    resumed.load_state_dict(copy.deepcopy(saved))
    assert as_bits(resumed.state_dict()["state"]) == as_bits(saved["state"])
    train(params, resumed, range(step + 1, step + 4))
    expected, weights = whole[step + 3]
    assert as_bits(resumed.state_dict()["state"]) == as_bits(expected["state"])
    assert as_bits([param.detach() for param in params]) == as_bits(weights)


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_copy_goes_on_as_the_original(way: str, step: int, as_bits) -> None:
    params = parameters()
    optimizer = optimizer_of(params, paged=True, page_bytes=2048)
    train(params, optimizer, range(1, step + 1))
    pair = (params, optimizer)
    others, other = pickle.loads(pickle.dumps(pair)) if way == "pickle" else copy.deepcopy(pair)
    for mine, one in ((params, optimizer), (others, other)):
        train(mine, one, range(step + 1, step + 4))
    assert as_bits(other.state_dict()) == as_bits(optimizer.state_dict())
    assert as_bits([p.detach() for p in others]) == as_bits([p.detach() for p in params])


# ---------------------------------------------------------------------- steps that do not happen


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("placed", ["plain", "simulated"])
@pytest.mark.parametrize("bad", [(1,), (2,), (3,), (2, 3), (1, 2, 3, 4, 5)])
def test_a_step_that_is_skipped_leaves_no_trace(bad, placed, where, monkeypatch, as_bits) -> None:
    """Before each of the steps `bad` one more is tried with a gradient that is not finite."""
    results = []
    for spoiled in ((), bad):
        params = parameters()
        optimizer = optimizer_of(params, **PLACED[placed])
        if where == "device":
            monkeypatch.setattr(finite, "known_at_once", lambda _: False)
        for step in range(1, 8):
            for _ in range(2 * (step in spoiled)):
                give_gradients(params, 100 + step)
                params[0].grad.view(-1)[5] = float("nan")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    optimizer.step()
            train(params, optimizer, [step])
        results.append(as_bits([optimizer.state_dict()["state"], [param.detach() for param in params]]))
    assert results[0] == results[1]


@pytest.mark.parametrize("where", ["host", "device"])
def test_the_grad_scaler_skips_around_a_look(where: str, monkeypatch, as_bits) -> None:
    if where == "device":
        monkeypatch.setattr(finite, "known_at_once", lambda _: False)
    results = []
    for overflows in (False, True):
        params = parameters(torch.float32)
        optimizer = optimizer_of(params)
        for step in range(1, 8):
            for infinite in (True, False) if overflows and step in (2, 3, 5) else (False,):
                give_gradients(params, step)
                optimizer.grad_scale = torch.tensor(4.0)
                optimizer.found_inf = torch.tensor(float(infinite))
                for param in params:
                    if param.grad is not None:
                        param.grad *= 4
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        results.append(as_bits([optimizer.state_dict()["state"], [param.detach() for param in params]]))
    assert results[0] == results[1]


# ---------------------------------------------------------------------- parameters that come, go and change


def test_what_is_stored_is_read_by_the_curve_that_wrote_it(reference) -> None:
    """Whatever happens right after a look, before the curves are one again: the training goes on as fp64 does."""

    def interval(optimizer: FlashAdamW, _: list[nn.Parameter]) -> FlashAdamW:
        optimizer.param_groups[0]["learn_interval"] = 100
        return optimizer

    def loaded(optimizer: FlashAdamW, params: list[nn.Parameter]) -> FlashAdamW:
        other = optimizer_of(params, learn_interval=100)
        other.load_state_dict(optimizer.state_dict())
        assert other.param_groups[0]["learn_interval"] == 100, "an optimizer keeps its own"
        return other

    def dithered(optimizer: FlashAdamW, _: list[nn.Parameter]) -> FlashAdamW:
        optimizer.param_groups[0]["dither"] = False
        return optimizer

    def frozen(optimizer: FlashAdamW, params: list[nn.Parameter]) -> FlashAdamW:
        grads = [param.grad for param in params]
        for param in params:
            param.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return optimizer

    def promoted(optimizer: FlashAdamW, _: list[nn.Parameter]) -> FlashAdamW:
        optimizer.param_groups[0]["master_bits"] = 32
        return optimizer

    def pickled(optimizer: FlashAdamW, params: list[nn.Parameter]) -> FlashAdamW:
        state = pickle.loads(pickle.dumps(optimizer)).state_dict()
        other = optimizer_of(params, learn_interval=100)
        other.load_state_dict(state)
        return other

    for change in (interval, loaded, dithered, frozen, promoted, pickled):
        params = [nn.Parameter(torch.zeros(64, 96, dtype=torch.bfloat16 if change is promoted else torch.float32))]
        optimizer = optimizer_of(params, learn_interval=5)
        exact = reference(params)
        for step in range(1, 13):
            give_gradients(params, 4 * step, spread=2.5)
            exact.step()
            optimizer.step()
            if step == 5:
                assert mixed(optimizer, params[0])
                following = curves_of(optimizer, params[0])[1].clone()
                optimizer = change(optimizer, params)
            if step == 6:
                assert torch.equal(curves_of(optimizer, params[0]), following.expand(2, -1)), change.__name__
        master = optimizer.decoded_state(params[0])["master_weight"]
        assert exact.error(0, master) < 0.02, change.__name__
        assert int(optimizer.state[params[0]]["step"]) == 12
        second = optimizer.decoded_state(params[0])["exp_avg_sq"].double()
        assert float((second.sqrt() - exact.v[0].sqrt()).norm() / exact.v[0].sqrt().norm()) < 0.03, change.__name__


def test_a_new_group_and_an_unfrozen_parameter_learn_from_their_own_first_step(as_bits) -> None:
    params = parameters()
    params[2].requires_grad_(False)
    optimizer = optimizer_of(params[:4])
    alone = [parameters()[2], parameters()[0]]
    for step in range(1, 13):
        give_gradients(params, 4 * step)
        if step < 4:
            params[2].grad = None
        if step == 4:
            params[2].requires_grad_(True)
        if step == 6:
            optimizer.add_param_group({"params": params[4:]})
        optimizer.step()
    other = optimizer_of(alone[:1])
    for step in range(4, 13):
        give_gradients(params, 4 * step)
        alone[0].grad = params[2].grad
        other.step()
    assert as_bits(dict(other.state[alone[0]])) == as_bits(dict(optimizer.state[params[2]]))
    assert torch.equal(alone[0], params[2])
    assert [int(optimizer.state[param]["step"]) for param in params[3:6]] == [12, 7, 7]


@pytest.mark.parametrize("other", ["joint", "log", "none", "softsign"])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_the_codec_of_a_group_may_change_to_it_and_from_it(other: str, at: int) -> None:
    params = parameters(torch.float32)[:3]
    optimizer = optimizer_of(params, codec=other)
    for codec in ("learned", other):
        train(params, optimizer, range(1, at + 1))
        before = [optimizer.decoded_state(param) for param in params]
        steps = [int(optimizer.state[param]["step"]) for param in params]
        optimizer.param_groups[0]["codec"] = codec
        # what a step does first
        optimizer._layout.ensure((param, optimizer.param_groups[0]) for param in params)
        for param, was in zip(params, before, strict=True):
            record = optimizer._layout.records[param]
            optimizer.state[param] = record.views
            assert (CURVE in record.views) == (codec == "learned")
            m, v = record.pool.fmt.codec.decode(layout.codec_views(record), param.numel())
            assert within(m.view(param.shape), was["exp_avg"]) < (0.03 if codec == "softsign" else 0.02)
            assert within(v.view(param.shape).sqrt(), was["exp_avg_sq"].sqrt()) < (0.03 if codec == "softsign" else 0.02)
        train(params, optimizer, [4])
        assert [int(optimizer.state[param]["step"]) for param in params] == [step + 1 for step in steps]


def within(value: Tensor, exact: Tensor) -> float:
    return float((value - exact).norm() / exact.norm().clamp_min(1e-30))


def test_auto_masters_move_a_parameter_with_its_curves(monkeypatch, as_bits) -> None:
    from flashoptim_hf.optim import auto_master

    for interval in (4, 5):  # right after a look, and the step after
        monkeypatch.setattr(auto_master, "INTERVAL", interval)
        results = []
        for options in ({}, {"paged": True, "page_bytes": 2048, "simulate": 2}):
            params = [nn.Parameter(torch.ones(64, 40).bfloat16())]
            optimizer = optimizer_of(params, lr=1e-7, master_bits="auto", weight_decay=0.0, **options)
            for step in range(1, interval + 1):
                before = None if step == 1 else curves_of(optimizer, params[0]).clone()
                give_gradients(params, 4 * step)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    optimizer.step()
            assert optimizer.state[params[0]]["correction"].dtype == torch.int16
            assert before is not None
            assert torch.equal(curves_of(optimizer, params[0])[0], before[1])
            assert mixed(optimizer, params[0]) == (interval == 4)
            for step in range(interval + 1, 10):
                give_gradients(params, 4 * step)
                optimizer.step()
            assert not mixed(optimizer, params[0])
            results.append(as_bits([optimizer.state_dict()["state"], params[0].detach()]))
        assert results[0] == results[1]


# ---------------------------------------------------------------------- checkpoints


SPOILED: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "NaN": lambda curve: curve.index_fill(0, torch.tensor([5]), float("nan")),
    "not a number at the end": lambda curve: curve.index_fill(0, torch.tensor([33]), float("nan")),
    "falling": lambda curve: curve.flip(0),
    "level": lambda curve: curve.index_copy(0, torch.tensor([9]), curve[8:9]),
    "second one falling": lambda curve: curve.index_fill(0, torch.tensor([20]), 0.9),
    "from below": lambda curve: curve.index_fill(0, torch.tensor([0]), -0.25),
    "beyond": lambda curve: curve.index_fill(0, torch.tensor([16]), 2.0),
    "too short": lambda curve: curve[:17],
    "too long": lambda curve: torch.cat([curve, curve]),
    "of another dtype": Tensor.float,
    "in rows": lambda curve: curve.float().view(2, 17),
}


@pytest.mark.parametrize("codec", ["learned", "log"])
@pytest.mark.parametrize("spoil", SPOILED)
def test_a_damaged_curve_is_refused_before_anything_changes(spoil: str, codec: str, as_bits) -> None:
    params = parameters()
    optimizer = optimizer_of(params)
    train(params, optimizer, range(1, 5))
    saved = optimizer.state_dict()
    saved["state"][2][CURVE] = SPOILED[spoil](saved["state"][2][CURVE])
    others = parameters()
    target = optimizer_of(others, codec=codec)
    train(others, target, [9, 10])
    before = as_bits([target.state_dict(), target.param_groups])
    with pytest.raises(CheckpointError, match=CURVE):
        target.load_state_dict(saved)
    assert as_bits([target.state_dict(), target.param_groups]) == before


def test_a_missing_curve_is_named() -> None:
    params = parameters()
    optimizer = optimizer_of(params)
    train(params, optimizer, [1])
    saved = optimizer.state_dict()
    del saved["state"][0][CURVE]
    with pytest.raises(CheckpointError, match=f"lacks {CURVE}"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("step", [2, 3, 4])
@pytest.mark.parametrize(
    ("source", "target"), [("learned", c) for c in ("joint", "log", "none")] + [("joint", "learned"), ("none", "learned")]
)
def test_loading_into_another_codec_stays_within_its_error(source: str, target: str, step: int) -> None:
    params = parameters(torch.float32)
    optimizer = optimizer_of(params, codec=source)
    train(params, optimizer, range(1, step + 1))
    others = parameters(torch.float32)
    other = optimizer_of(others, codec=target)
    with pytest.warns(UserWarning, match=f"codec='{source}' and has been stored anew with '{target}'"):
        other.load_state_dict(optimizer.state_dict())
    for mine, theirs in zip(params, others, strict=True):
        if mine.numel():
            was, now = optimizer.decoded_state(mine), other.decoded_state(theirs)
            limit = 0.0 if target == "none" else 0.02
            assert within(now["exp_avg"], was["exp_avg"]) <= limit
            assert within(now["exp_avg_sq"].sqrt(), was["exp_avg_sq"].sqrt()) <= limit
            if target == "learned":
                assert torch.equal(curves_of(other, theirs), learned.straight().expand(2, -1))
    train(others, other, range(step + 1, step + 4))


@pytest.mark.parametrize("way", ["state dict", "pickle"])
@pytest.mark.parametrize("placed", ["plain", "simulated"])
def test_a_codec_that_was_changed_is_in_what_is_saved(placed: str, way: str, as_bits) -> None:
    """Some parameters have been stepped since, and some have not: the state is read as the group says, and goes on alike."""
    params = parameters(torch.float32)
    optimizer = optimizer_of(params, codec="log", **PLACED[placed])
    train(params, optimizer, [4, 8])
    optimizer.param_groups[0]["codec"] = "learned"
    train(params, optimizer, [3])  # not of all
    if way == "pickle":
        others, other = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        others, other = copy.deepcopy(params), None
        other = optimizer_of(others, **PLACED[placed])
        other.load_state_dict(optimizer.state_dict())
    for mine, one in ((params, optimizer), (others, other)):
        train(mine, one, [12, 16])
    assert as_bits(other.state_dict()["state"]) == as_bits(optimizer.state_dict()["state"])
    assert as_bits([p.detach() for p in others]) == as_bits([p.detach() for p in params])


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("target", ["adamw_torch", "bitsandbytes", "flashoptim"])
def test_states_go_to_other_packages_and_come_back(target: str, step: int) -> None:
    params = [param for param in parameters() if param.numel() > 4096 or target != "bitsandbytes"]
    optimizer = optimizer_of(params)
    train(params, optimizer, range(1, step + 1))
    written, _ = convert.from_ours(optimizer.state_dict(), target, weight_dtype=torch.bfloat16)
    assert not any(CURVE in values for values in written["state"].values())
    assert "learn_interval" not in written["param_groups"][0]
    others = [nn.Parameter(param.detach().clone()) for param in params]
    again = optimizer_of(others)
    with pytest.warns(UserWarning, match="has taken it over"):
        again.load_state_dict(written)
    for mine, theirs in zip(params, others, strict=True):
        if mine.numel():
            was, now = optimizer.decoded_state(mine), again.decoded_state(theirs)
            assert within(now["exp_avg"], was["exp_avg"]) < 0.05
            assert within(now["exp_avg_sq"].sqrt(), was["exp_avg_sq"].sqrt()) < 0.05
    train(others, again, [step + 1])


def test_a_file_is_inspected() -> None:
    params = [param for param in parameters() if param.numel()]
    optimizer = optimizer_of(params)
    train(params, optimizer, range(1, 5))
    saved = optimizer.state_dict()
    rows = statistics.of_state(saved, "adamw", 0, saved["param_groups"][0])
    assert [row.state for row in rows] == ["exp_avg", "exp_avg_sq"]
    decoded = optimizer.decoded_state(params[0])
    assert rows[0].largest == float(decoded["exp_avg"].abs().max())
    assert all(row.error is not None and 0 < row.error < 0.02 for row in rows)
    saved["state"][0][CURVE][3] = 0
    with pytest.raises(CheckpointError, match=CURVE):
        statistics.of_state(saved, "adamw", 0, saved["param_groups"][0])


# ---------------------------------------------------------------------- what there is to see


@pytest.mark.parametrize("options", [{}, {"paged": True}, {"paged": True, "simulate": 1, "page_bytes": 2048}, {"simulate": 2}])
def test_the_report_counts_tables(options: dict[str, Any], tmp_path) -> None:
    for folder in ({}, {"offload_dir": str(tmp_path)}) if options.get("paged") else ({},):
        params = parameters()
        optimizer = optimizer_of(params, **options, **folder)
        planned = optimizer.planned_bytes()
        train(params, optimizer, [1, 2])
        report = optimizer.memory_report()
        assert report.planes[CURVE] == 68 * len(params)
        assert report.state_bytes == sum(report.planes.values())
        assert report.host_bytes == report.host_pinned_bytes + report.host_pageable_bytes + report.host_file_bytes
        assert planned[0] == report.host_bytes
        if report.device_bytes is not None:
            assert planned[1] == report.device_bytes - report.staging_bytes
            assert planned[1] % (1 << 7) == (68 * len(params)) % (1 << 7) or not options.get("paged")
            assert report.page_in_bytes == report.page_out_bytes
        assert report.quantized_share == 1.0


def test_a_close_look_raises_no_alarm_whenever_it_comes() -> None:
    params = [param for param in parameters() if param.numel() > 100]
    twin = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer, joint = optimizer_of(params), optimizer_of(twin, codec="joint")
    for step in range(1, 20):
        errors = []
        for mine, one in ((params, optimizer), (twin, joint)):
            one.examine()
            give_gradients(mine, 4 * step)
            one.step()
            found = one.findings()
            assert len(found) == len(mine)
            errors.append([(finding.saturated, finding.codec_error) for finding in found])
        for (saturated, error), (as_much, usual) in zip(*errors, strict=True):
            assert saturated <= as_much + 0.005, (step, errors)
            assert error <= 1.3 * usual, (step, errors)


def test_what_cannot_learn_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"codec='learned'.*gradient_release=True.*codec='joint'"):
        optimizer_of(parameters(), gradient_release=True)
    params = parameters()
    optimizer = optimizer_of(params, codec="joint", gradient_release=True)
    with pytest.raises(UnsupportedError, match="gradient_release=True"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "codec": "learned"})
    assert len(optimizer.param_groups) == 1
    for make, options in ((FlashLion, {}), (FlashSGD, {"momentum": 0.9})):
        with pytest.raises(ConfigurationError, match="codec='learned' cannot store"):
            make(parameters(), codec="learned", **options)


def test_where_there_is_no_memory_for_tables_nothing_has_changed(monkeypatch) -> None:
    params = parameters()
    optimizer = optimizer_of(params)

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(learned.LearnedCodec, "fresh_tables", refuse)
        give_gradients(params, 4)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    assert not optimizer.state
    assert optimizer.memory_report().host_bytes == 0
    train(params, optimizer, [4])
    assert int(optimizer.state[params[0]]["step"]) == 1
