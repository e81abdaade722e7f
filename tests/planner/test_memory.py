"""The plan as a whole: what grows with what, sharding, verdicts, advice, paging that pays or does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import small_config

from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.planner import advice, memory, states, weights
from flashoptim_hf.planner.setup import Setup, Span
from flashoptim_hf.planner.shapes import ModelShape, read_config, shape_of
from flashoptim_hf.planner.traffic import LINKS, traffic

GIB = 2**30


@pytest.fixture(scope="module")
def llama() -> ModelShape:
    return shape_of(*read_config("Llama-3.1-8B"))


def qlora(options: dict[str, Any], **changes: Any) -> Setup:
    return Setup(options=options, **changes)


def full(options: dict[str, Any], **changes: Any) -> Setup:
    return Setup(options=options, full=True, load_in_4bit=False, **changes)


def test_the_bytes_of_a_known_model(llama: ModelShape, options: dict[str, Any]) -> None:
    """By hand, from the published sizes of Llama-3.1-8B."""
    attention, feed = 4096 * 4096 * 2 + 4096 * 1024 * 2, 3 * 4096 * 14336
    linear, rest = 32 * (attention + feed), 2 * 128256 * 4096 + 65 * 4096
    planned = memory.plan(llama, qlora(options, lora_r=64))
    assert planned.weights.quantized == linear // 2
    blocks = linear // 64
    assert planned.weights.constants == blocks + 4 * blocks // 256 + 7 * 32 * (64 + 1024 + 4)
    assert planned.weights.plain == 2 * rest + llama.buffer_bytes
    adapters = 32 * 64 * ((4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 14336) * 3)
    assert planned.weights.trained_bytes == 2 * adapters
    assert planned.state.used == adapters * 3 + adapters * 10 // 64


GROWS = {
    "batch": {"batch": 2},
    "samples": {"seq_len": 4096},
    "no checkpointing": {"checkpointing": False},
    "all logits": {"fused_head": False},
    "rank": {"lora_r": 64},
    "scores": {"attention": "eager"},
    "16-bit weights": {"load_in_4bit": False},
    "DDP": {"ranks": 2, "ranks_per_host": 2},
}


@pytest.mark.parametrize("changes", GROWS.values(), ids=GROWS.keys())
def test_what_takes_more(llama: ModelShape, options: dict[str, Any], changes: dict[str, Any]) -> None:
    before, after = (memory.plan(llama, qlora(options, **more)).device for more in ({}, changes))
    assert after.low >= before.low
    assert after.high > before.high


def test_gradient_release_frees_most_of_the_gradients(llama: ModelShape, options: dict[str, Any]) -> None:
    plain = memory.plan(llama, full(options))
    released = memory.plan(llama, full({**options, "gradient_release": True}))
    assert plain.device.low - released.device.high > 0.7 * plain.weights.gradients
    assert released.device.low > plain.weights.trained_bytes + max(tensor.nbytes for tensor in plain.weights.trained)
    with pytest.raises(ConfigurationError, match="gradient_accumulation_steps=1"):
        full({**options, "gradient_release": True}, accumulation=2)


def test_accumulation_keeps_gradients_beside_activations(llama: ModelShape, options: dict[str, Any]) -> None:
    one, two = (memory.plan(llama, full(options, accumulation=n, checkpointing=False)) for n in (1, 2))
    assert two.device.high - one.device.high > 0.5 * one.weights.gradients


@pytest.mark.parametrize("rows", [0, 1, 5, 16, 33])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_the_first_rank_holds_what_torch_gives_it(rows: int, shards: int) -> None:
    """FSDP2 cuts with `torch.chunk` along the first dimension."""
    parts = torch.chunk(torch.empty(rows, 3), shards)
    assert weights.local_shape((rows, 3), shards) == tuple(parts[0].shape)


def test_fsdp2_shards_and_ddp_does_not(options: dict[str, Any]) -> None:
    config = small_config("llama, biases")
    shape = shape_of(config, "")
    alone, sharded, copied = (
        weights.count(shape, full(options, **more))
        for more in ({}, {"ranks": 2, "ranks_per_host": 2, "fsdp": True}, {"ranks": 2, "ranks_per_host": 2})
    )
    assert sharded.trained_bytes == sum(
        -(-w.shape[0] // 2) * (w.numel // w.shape[0]) * 2 for w in shape.weights
    )  # an odd number of rows leaves one more on the first rank
    assert copied.trained == alone.trained
    ddp = memory.plan(shape, full(options, ranks=4, ranks_per_host=2))
    assert ddp.host_total == ddp.host.times(2)


def test_offloaded_weights_and_state_are_on_the_host(llama: ModelShape, options: dict[str, Any]) -> None:
    setup = qlora(options, ranks=2, ranks_per_host=2, fsdp=True)
    here, away = (memory.plan(llama, replace(setup, offload=offload)) for offload in (False, True))
    assert here.device.low - away.device.low > 0.9 * (here.weights.quantized + here.weights.plain)
    assert away.host.low > away.weights.whole + away.weights.quantized
    assert (away.state.device, away.state.staging, away.state.travels) == (0, 0, 0)
    assert away.state.host == away.state.used
    with pytest.raises(ConfigurationError, match="--fsdp2"):
        replace(setup, fsdp=False, offload=True)


@pytest.mark.parametrize(("room", "word"), [(9, memory.FAILS), (10, memory.TIGHT), (19, memory.TIGHT), (20, memory.FITS), (None, None)])
def test_verdicts_go_by_the_bounds(room: int | None, word: str | None) -> None:
    assert memory.verdict(Span(10, 20), room) == word


def test_traffic_is_what_does_not_stay(llama: ModelShape, options: dict[str, Any]) -> None:
    none, quarter, everything = (memory.plan(llama, full({**options, "device_budget_bytes": budget})) for budget in (0, 0.25, 1.0))
    moved = none.state.travels
    assert moved >= none.state.used
    assert quarter.state.travels == pytest.approx(0.75 * moved, rel=0.01)
    assert everything.state.travels == everything.traffic.bytes_in == 0
    assert everything.state.staging == 0
    assert everything.saved == pytest.approx(0, abs=2**20)
    seconds = traffic(10**9, 10**9, "pcie4").seconds
    assert seconds == (10**9 / (0.8 * LINKS["pcie4"]), 2 * 10**9 / (0.8 * LINKS["pcie4"]))
    with pytest.raises(ConfigurationError, match="nvlink-c2c"):
        traffic(1, 1, "pcie9")


def test_it_says_where_paging_does_not_pay(llama: ModelShape, options: dict[str, Any]) -> None:
    small = memory.paging_pays(memory.plan(shape_of(*read_config("SmolLM2-135M")), qlora(options)))
    assert small is not None
    assert small.startswith("Paging does not pay here: all state is 14.7 MiB")
    little = memory.paging_pays(memory.plan(llama, qlora(options)))
    assert little is not None
    assert "saves 30.3 MiB" in little
    assert "That is little" in little
    worth = memory.paging_pays(memory.plan(llama, full(options)))
    assert worth is not None
    assert "saves 23.51 GiB" in worth
    assert "little" not in worth
    assert memory.paging_pays(memory.plan(llama, qlora({**options, "paged": False}))) is None


def test_other_optimizers_stand_beside(llama: ModelShape, options: dict[str, Any]) -> None:
    found = dict(memory.beside(llama, full(options)))
    assert list(found) == ["adamw_torch", "adamw_torch, fp32 weights", "adamw_8bit", "paged_adamw_8bit", "adafactor"]
    count = llama.num_params
    assert found["adamw_torch"].state.used == pytest.approx(4 * count, rel=1e-4)
    assert found["adamw_torch, fp32 weights"].state.used == pytest.approx(8 * count, rel=1e-4)
    assert found["adamw_8bit"].state.used == pytest.approx(2.03125 * count, rel=1e-3)
    assert found["paged_adamw_8bit"].state.host == pytest.approx(2 * count, rel=1e-3)


def test_advice_comes_in_order_and_ends_where_it_fits(llama: ModelShape, options: dict[str, Any]) -> None:
    setup = full(options, batch=4, checkpointing=False, gpu_bytes=24 * GIB, ram_bytes=64 * GIB)
    changes = advice.advise(llama, setup, options)
    assert changes[0].what.startswith("gradient_checkpointing")
    assert changes[-1].what.startswith("gradient_release")
    assert [change.plan.fits for change in changes] == [False] * (len(changes) - 1) + [True]
    assert advice.advise(llama, replace(setup, gpu_bytes=400 * GIB), options) == []


def test_advice_for_another_optimizer_is_ours(llama: ModelShape, options: dict[str, Any]) -> None:
    setup = Setup(full=True, load_in_4bit=False, optimizer="adamw_torch", seq_len=512, gpu_bytes=34 * GIB)
    assert "flashoptim_paged_adamw" in " ".join(change.what for change in advice.advise(llama, setup, options))


def test_advice_where_nothing_helps(llama: ModelShape, options: dict[str, Any]) -> None:
    changes = advice.advise(llama, qlora(options, gpu_bytes=2 * GIB), options)
    assert changes
    assert not changes[-1].plan.fits


def test_curves_go_neither_with_shards_nor_with_release(llama: ModelShape, options: dict[str, Any]) -> None:
    """Neither in what is planned nor in what is advised."""
    curves = {**options, "codec": "learned"}
    for changes in ({"fsdp": True, "ranks": 2}, {"options": {**curves, "gradient_release": True}}):
        with pytest.raises(ConfigurationError, match=r"codec='learned'.*codec='joint'"):
            replace(full(curves), **changes)
    for setup, begins in ((full(curves, gpu_bytes=24 * GIB), "gradient_release"), (qlora(curves, gpu_bytes=3 * GIB, ranks=4), "FSDP2")):
        changes = advice.advise(llama, setup, options)
        (change,) = [change for change in changes if change.what.startswith(begins)]
        assert change.what.endswith(", codec: joint")
        assert change.plan.setup.options["codec"] == "joint"


def test_experts(options: dict[str, Any]) -> None:
    shape = shape_of(small_config("qwen3_moe"), "")
    with pytest.raises(ConfigurationError, match="on experts"):
        memory.plan(shape, qlora(options))
    planned = memory.plan(shape, qlora(options, lora_targets=("q_proj",)))
    assert planned.weights.plain > shape.expert_bytes > 0


WRONG = {
    "batch": ({"batch": 0}, "batch=0"),
    "attention": ({"attention": "flash"}, "attention='flash'"),
    "full in 4 bits": ({"full": True}, "4-bit"),
    "hosts": ({"ranks": 3, "ranks_per_host": 2}, "divisor"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG.keys())
def test_contradictions_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Setup(**changes)


def test_unknown_optimizers_and_models_are_named(llama: ModelShape) -> None:
    with pytest.raises(ConfigurationError, match="'sgdx'"):
        states.peer("sgdx", [])
    with pytest.raises(ConfigurationError, match="flashoptim_adamx"):
        memory.plan(llama, Setup(optimizer="flashoptim_adamx"))
