"""States of other packages in and out: bit for bit where that is possible, within the codec's bound else, and never one for another."""

from __future__ import annotations

import warnings
from copy import deepcopy

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

from flashoptim_hf.bench import conversion_model as runs
from flashoptim_hf.bench.conversion_model import Job
from flashoptim_hf.bench.conversions import PACKAGES, maker
from flashoptim_hf.codecs import weight_split
from flashoptim_hf.errors import CheckpointError, ConfigurationError
from flashoptim_hf.optim import foreign
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.optim.convert import STATES, from_ours, recognise, to_ours
from flashoptim_hf.optim.lion import FlashLion
from flashoptim_hf.optim.sgd import FlashSGD

OURS = {"adamw": FlashAdamW, "lion": FlashLion, "sgd": FlashSGD}
CASES = [(algorithm, form) for algorithm, forms in PACKAGES.items() for form in forms if form != "flashoptim"]


@pytest.fixture(scope="module")
def source():
    """(algorithm, form) -> what five steps of that optimizer leave; made once, handed out as copies."""
    made: dict[tuple[str, str], runs.Outcome] = {}

    def get(algorithm: str, form: str) -> runs.Outcome:
        if (algorithm, form) not in made:
            made[algorithm, form] = runs.train(maker(form, algorithm), Job(algorithm, {}, None, 0, 5))
        done = made[algorithm, form]
        return runs.Outcome(done.losses, done.weights, runs.copied(done.state))

    return get


@pytest.fixture(scope="module")
def flashoptim():
    """(algorithm, dtype) -> what three steps of flashoptim's own classes and kernels leave."""
    keys = [("adamw", "float32"), ("adamw", "bfloat16"), ("lion", "bfloat16"), ("sgd", "bfloat16")]
    outcomes = runs.run_flashoptim([Job(algorithm, {}, None, 0, 3, dtype) for algorithm, dtype in keys])
    return dict(zip(keys, outcomes, strict=True))


def parameters(outcome: runs.Outcome) -> list[nn.Parameter]:
    return [nn.Parameter(value.clone()) for value in outcome.weights.values()]


def loaded(algorithm: str, outcome: runs.Outcome, **options):
    """Our optimizer with that state, its parameters, and what it said."""
    params = parameters(outcome)
    optimizer = OURS[algorithm](params, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.load_state_dict(outcome.state)
    return optimizer, params, [str(one.message) for one in said if "optimizer state is one of" in str(one.message)]


# ---------------------------------------------------------------------- whose it is


@pytest.mark.parametrize(("algorithm", "form"), CASES)
def test_each_is_recognised(source, algorithm, form):
    found = recognise(source(algorithm, form).state)
    assert found == (form.rstrip("0123456789"), algorithm)
    assert algorithm in str(found).lower()


@pytest.mark.parametrize("algorithm", OURS)
def test_our_own_is_recognised_before_and_after_the_first_step(algorithm):
    p = nn.Parameter(torch.ones(8))
    for codec in ("none", "softsign"):
        optimizer = OURS[algorithm]([p], codec=codec, **runs.OPTIONS[algorithm])
        assert recognise(optimizer.state_dict()) == ("flashoptim_hf", algorithm)
        p.grad = torch.ones(8)
        optimizer.step()
        assert recognise(optimizer.state_dict()) == ("flashoptim_hf", algorithm)


STRANGERS = {
    "RAdam": lambda p: torch.optim.RAdam(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Muon": lambda p: torch.optim.Muon(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "bitsandbytes AdEMAMix": lambda p: bnb.optim.AdEMAMix8bit(p),
    "bitsandbytes LAMB": lambda p: bnb.optim.LAMB32bit(p),
    "bitsandbytes RMSprop": lambda p: bnb.optim.RMSprop8bit(p),
    "bitsandbytes Adagrad": lambda p: bnb.optim.Adagrad8bit(p),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_another_algorithm_with_similar_states_is_refused(name, as_bits):
    p = nn.Parameter(torch.randn(70, 64))
    p.grad = torch.randn(70, 64)
    stranger = STRANGERS[name]([p])
    stranger.step()
    assert recognise(stranger.state_dict()) is None
    with pytest.raises(CheckpointError, match=r"no format known here"):
        to_ours(stranger.state_dict())
    optimizer = FlashAdamW([p])
    before = as_bits([optimizer.state_dict(), optimizer.param_groups])
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(stranger.state_dict())
    assert as_bits([optimizer.state_dict(), optimizer.param_groups]) == before


@pytest.mark.parametrize(("algorithm", "form"), [*CASES, *((name, "none") for name in OURS)])
def test_the_wrong_algorithm_raises_before_anything_changes_and_names_both(source, algorithm, form, as_bits):
    outcome = source(algorithm, form)
    for other in set(OURS) - {algorithm}:
        params = parameters(outcome)
        optimizer = OURS[other](params, **runs.OPTIONS[other])
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        before = as_bits([optimizer.state_dict(), params])
        with pytest.raises(CheckpointError, match=f"{recognise(outcome.state)} .*{OURS[other].__name__} takes states of {other}"):
            optimizer.load_state_dict(outcome.state)
        assert as_bits([optimizer.state_dict(), params]) == before


# ---------------------------------------------------------------------- in


@pytest.mark.parametrize(("algorithm", "form"), CASES)
def test_fp32_states_go_in_bit_for_bit_and_groups_are_mapped(source, algorithm, form):
    outcome = source(algorithm, form)
    optimizer, params, said = loaded(algorithm, outcome, codec="none", **{"betas": (0.5, 0.6)} if algorithm != "sgd" else {"momentum": 0.5})
    assert len(said) == 1
    assert str(recognise(outcome.state)) in said[0]
    names = [state.name for state in STATES[algorithm]]
    for i, p in enumerate(params):
        values = foreign.unnested(outcome.state["state"][i])
        old = [values.get(f"state{k}", values.get(name)) for k, name in enumerate(names, 1)]
        for name, value in zip(names, old, strict=True):
            if value.dtype == torch.float32 and not foreign.is_torchao(value):
                assert torch.equal(optimizer.decoded_state(p)[name], value)
        assert int(optimizer.state[p]["step"]) == int(values.get("step", 1))
    group = optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(runs.RATES[algorithm])
    assert isinstance(group["lr"], float)
    for name, value in runs.OPTIONS[algorithm].items():
        assert group[name] == value
    if algorithm != "sgd":
        assert group["betas"] == ((0.9, 0.999) if algorithm == "adamw" else (0.9, 0.99))
    assert not {"alpha", "amsgrad", "foreach", "fused", "capturable", "maximize", "master_bytewidth"} & set(group)
    assert group["codec"] == "none"


@pytest.mark.parametrize("form", ["bitsandbytes8", "torchao"])
@pytest.mark.parametrize("codec", ["none", "log"])
def test_8_bit_states_are_decoded_as_their_own_package_does(source, form, codec):
    outcome = source("adamw", form)
    optimizer, params, said = loaded("adamw", outcome, codec=codec)
    assert ("as it was" in said[0]) == (codec == "none")
    for i in (0, 1, 3):
        values = foreign.unnested(outcome.state["state"][i])
        if form == "torchao":
            m, v = values["exp_avg"].dequantize(), values["exp_avg_sq"].dequantize()
        else:
            m, v = (
                bnb.functional.dequantize_blockwise(
                    values[f"state{k}"], absmax=values[f"absmax{k}"], code=values[f"qmap{k}"], blocksize=256
                )
                for k in (1, 2)
            )
        found = optimizer.decoded_state(params[i])
        where = v > 0  # elsewhere m / eps would follow, and m is dropped
        assert not found["exp_avg"][~where].any()
        if codec == "none":
            assert torch.equal(found["exp_avg"][where], m[where])
            assert torch.equal(found["exp_avg_sq"], v)
            continue
        step = optimizer.state[params[i]]["exp_avg_sq_step"].max()
        assert ((found["exp_avg_sq"][where] / v[where]).log2().abs() / 2).max() <= step * 1.001
        r, umax = found["exp_avg_sq"].sqrt(), optimizer.state[params[i]]["exp_avg_max"].float().max()
        assert ((found["exp_avg"] - m)[where].abs() <= r[where] * umax / 127 * 1.001).all()


def test_m_is_dropped_where_an_8_bit_v_is_0(source):
    """m and v were rounded apart; m / eps would be the next update."""
    outcome = source("adamw", "bitsandbytes8")
    inner = outcome.state["state"][1][foreign.BNB_NESTED]
    inner["state2"].view(-1)[:300] = 0
    assert inner["qmap2"][0] == 0
    assert foreign.read_bitsandbytes(inner, 1).view(-1)[:300].all()
    optimizer, params, _ = loaded("adamw", outcome, codec="none")
    m = optimizer.decoded_state(params[1])["exp_avg"].view(-1)
    assert not m[:300].any()
    assert torch.equal(m[300:], foreign.read_bitsandbytes(inner, 1).view(-1)[300:])


def test_a_group_that_asks_for_fp32_gets_it_beside_one_that_does_not(source):
    outcome = source("adamw", "bitsandbytes8")
    params = parameters(outcome)
    outcome.state["param_groups"] = [
        {**outcome.state["param_groups"][0], "params": ids, "name": name} for ids, name in (([0], "e"), ([1, 2, 3, 4], "r"))
    ]
    optimizer = FlashAdamW([{"params": params[:1], "codec": "none"}, {"params": params[1:]}])
    with pytest.warns(UserWarning, match="bitsandbytes AdamW"):
        optimizer.load_state_dict(outcome.state)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32
    assert optimizer.state[params[1]]["exp_avg"].dtype == torch.int8
    assert [group["name"] for group in optimizer.param_groups] == ["e", "r"]
    again = FlashAdamW([{"params": params[:1], "codec": "none"}, {"params": params[1:]}])
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[params[0]]["exp_avg_sq"], optimizer.state[params[0]]["exp_avg_sq"])


def test_16_bit_weights_of_torch_start_their_masters_from_the_weights():
    p = nn.Parameter(torch.randn(100).bfloat16())
    p.grad = torch.randn(100).bfloat16()
    other = torch.optim.AdamW([p])
    other.step()
    optimizer = FlashAdamW([p], codec="none")
    with pytest.warns(UserWarning, match=r"one of torch AdamW.*as it was.*master weights start from the weights as they are"):
        optimizer.load_state_dict(other.state_dict())
    assert torch.equal(optimizer.decoded_state(p)["exp_avg"], other.state[p]["exp_avg"].float())
    assert torch.equal(optimizer.decoded_state(p)["master_weight"], p.float())


def test_options_that_mean_another_algorithm():
    p = nn.Parameter(torch.randn(10))
    p.grad = torch.randn(10)
    for options, word in (({"amsgrad": True}, "amsgrad"), ({"maximize": True}, "maximize")):
        other = torch.optim.AdamW([p], **options)
        other.step()
        with pytest.raises(CheckpointError, match=word):
            FlashAdamW([p]).load_state_dict(other.state_dict())
    adam = torch.optim.Adam([p], weight_decay=0.1)
    adam.step()
    with pytest.warns(UserWarning, match=r"Adam's, which adds weight_decay=0.1 to the gradient"):
        FlashAdamW([p]).load_state_dict(adam.state_dict())


@pytest.mark.parametrize("name", ["absmax1", "qmap2", "state2", "step"])
def test_a_damaged_state_names_what_is_missing_and_changes_nothing(source, name, as_bits):
    outcome = source("adamw", "bitsandbytes8")
    optimizer, _, _ = loaded("adamw", outcome)
    before = as_bits(optimizer.state_dict())
    values = outcome.state["state"][1]
    (values if name == "step" else values[foreign.BNB_NESTED]).pop(name)
    with pytest.raises(CheckpointError, match=name if name != "step" else "step count"):
        optimizer.load_state_dict(outcome.state)
    assert as_bits(optimizer.state_dict()) == before


def test_a_state_of_other_shapes_is_refused(source):
    outcome = source("adamw", "torch")
    params = [nn.Parameter(torch.zeros(*p.shape[:-1], p.shape[-1] + 1)) for p in parameters(outcome)]
    with pytest.raises(CheckpointError, match=r"parameter 0 of group 0 has shape \(64, 65\)"):
        FlashAdamW(params).load_state_dict(outcome.state)


def test_names_match_where_both_sides_know_them():
    named = {name: nn.Parameter(torch.randn(size)) for name, size in (("a", 6), ("b", 6))}
    other = torch.optim.AdamW(named.items())
    for i, p in enumerate(named.values()):
        p.grad = torch.full((6,), 1.0 + i)
    other.step()
    for order, match in ((["b", "a"], None), (["a", "c"], "Only in the state: b; only here: c")):
        mine = {name: nn.Parameter(torch.zeros(6)) for name in order}
        optimizer = FlashAdamW(mine.items(), codec="none")
        if match:
            with pytest.raises(CheckpointError, match=match):
                optimizer.load_state_dict(other.state_dict())
            continue
        with pytest.warns(UserWarning, match="torch AdamW"):
            optimizer.load_state_dict(other.state_dict())
        for name, p in mine.items():
            assert torch.equal(optimizer.state[p]["exp_avg"], other.state[named[name]]["exp_avg"])


def test_flat_keys_of_older_bitsandbytes(source, as_bits):
    outcome = source("adamw", "bitsandbytes8")
    flat = {**outcome.state, "state": {key: foreign.unnested(values) for key, values in outcome.state["state"].items()}}
    assert as_bits(to_ours(flat)[0]) == as_bits(to_ours(outcome.state)[0])


# ---------------------------------------------------------------------- flashoptim


@pytest.mark.parametrize("algorithm", ["adamw", "lion", "sgd"])
def test_flashoptim_goes_in_and_out_bit_for_bit(flashoptim, algorithm, as_bits):
    """Codes, scales and corrections as flashoptim's own kernels left them, and its whole state dict again on the way out."""
    outcome = deepcopy(flashoptim[algorithm, "bfloat16"])
    optimizer, params, said = loaded(algorithm, outcome, codec="softsign", **{"momentum": 0.9} if algorithm == "sgd" else {})
    assert "flashoptim Flash" in said[0]
    assert "as it was" in said[0]
    assert "start from" not in said[0]
    for i, p in enumerate(params):
        values, mine = outcome.state["state"][i], optimizer.state[p]
        for state in STATES[algorithm]:
            assert torch.equal(mine[state.name], values[f"{state.name}::quantized"])
            assert as_bits(mine[f"{state.name}_scale"]) == as_bits(values[f"{state.name}::scales"].view(torch.float16))
        assert torch.equal(mine["correction"], values["error_bits"].to(torch.int8))
        master = weight_split.join(p.detach().flatten(), values["error_bits"].to(torch.int8).flatten()).view(p.shape)
        assert torch.equal(optimizer.decoded_state(p)["master_weight"], master)
    assert any(optimizer.state[p]["correction"].any() for p in params)
    back, notes = from_ours(optimizer.state_dict(), "flashoptim")
    assert notes == []
    assert as_bits(back["state"]) == as_bits(outcome.state["state"])
    assert back["param_groups"] == outcome.state["param_groups"]
    for target in ("bitsandbytes", *({"adamw": ["adamw_torch"], "sgd": ["sgd"]}.get(algorithm, []))):
        there, _ = from_ours(to_ours(outcome.state)[0], target, bits=32)
        assert recognise(there).algorithm == algorithm


def test_uncompressed_states_of_flashoptim(flashoptim):
    """`compress_state_dict=False` writes fp32 moments, beside the corrections."""
    outcome = deepcopy(flashoptim["adamw", "bfloat16"])
    exact, _, _ = loaded("adamw", outcome, codec="softsign")
    values = {name: [exact.decoded_state(p)[name] for p in exact.param_groups[0]["params"]] for name in ("exp_avg", "exp_avg_sq")}
    for key, entry in outcome.state["state"].items():
        outcome.state["state"][key] = {
            "step": entry["step"],
            "error_bits": entry["error_bits"],
            **{name: values[name][key] for name in values},
        }
    assert recognise(outcome.state) == ("flashoptim", "adamw")
    optimizer, params, said = loaded("adamw", outcome, codec="none")
    assert "as it was" in said[0]
    for key, p in enumerate(params):
        assert torch.equal(optimizer.decoded_state(p)["exp_avg_sq"], values["exp_avg_sq"][key])
        assert torch.equal(optimizer.state[p]["correction"], exact.state[exact.param_groups[0]["params"][key]]["correction"])


def test_flashoptim_goes_on_from_our_state_as_we_do(flashoptim):
    """The same six steps: three by flashoptim and three here, or the other way round; and all by flashoptim."""
    first = flashoptim["adamw", "float32"]
    own = runs.train(runs.ours("adamw", "softsign"), Job("adamw", first.weights, first.state, 3, 3))
    state, _ = from_ours(own.state, "flashoptim")
    whole, after = runs.run_flashoptim([Job("adamw", first.weights, first.state, 3, 3), Job("adamw", own.weights, state, 6, 1)])
    assert own.losses == pytest.approx(whole.losses, abs=1e-5)
    assert after.losses[0] == pytest.approx(
        runs.train(runs.ours("adamw", "softsign"), Job("adamw", own.weights, own.state, 6, 1)).losses[0], abs=1e-6
    )


@pytest.mark.parametrize("bits", [32, "auto"])
def test_wide_corrections_and_mixed_dtypes(bits, as_bits):
    """16-bit corrections are bytes under the weight's dtype; fp32 weights have none."""
    params = [nn.Parameter(torch.randn(40).bfloat16()), nn.Parameter(torch.randn(40))]
    optimizer = FlashAdamW(params, codec="softsign", master_bits=bits)
    for seed in range(3):
        for p in params:
            p.grad = torch.randn(40, generator=torch.Generator().manual_seed(seed)).to(p.dtype)
        optimizer.step()
    saved = optimizer.state_dict()
    there, _ = from_ours(saved, "flashoptim")
    saved["param_groups"][0]["weight_dtype"] = "mixed"  # then somebody has to say it
    with pytest.raises(ConfigurationError, match="weight_dtype"):
        from_ours(saved, "flashoptim")
    assert as_bits(from_ours(saved, "flashoptim", weight_dtype=torch.bfloat16)[0]) == as_bits(there)
    assert there["param_groups"][0]["master_bytewidth"] == (4 if bits == 32 else 3)
    assert there["state"][0]["error_bits"].dtype == there["state"][0]["exp_avg::scales"].dtype == torch.bfloat16
    assert there["state"][1]["exp_avg::scales"].dtype == torch.float16
    assert "error_bits" not in there["state"][1]
    again = FlashAdamW(params, codec="softsign", master_bits=bits)
    again.load_state_dict(there)
    assert as_bits(again.state_dict()["state"]) == as_bits(optimizer.state_dict()["state"])


# ---------------------------------------------------------------------- out


@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
def test_torch_goes_on_with_our_fp32_state_as_we_do(source, algorithm):
    own = source(algorithm, "none")
    state, notes = from_ours(own.state, {"adamw": "adamw_torch", "sgd": "sgd"}[algorithm])
    assert notes == []
    fresh = runs.torch_optimizer(algorithm)(parameters(own))
    assert set(state["param_groups"][0]) - {"params"} >= set(fresh.param_groups[0]) - {"params"}
    there = runs.train(runs.torch_optimizer(algorithm), Job(algorithm, own.weights, state, 5, 20))
    here = runs.train(runs.ours(algorithm, "none"), Job(algorithm, own.weights, own.state, 5, 20))
    assert there.losses == pytest.approx(here.losses, abs=2e-6)
    back, _ = to_ours(state)
    for key, values in back["state"].items():
        for one in STATES[algorithm]:
            assert torch.equal(values[one.name], own.state["state"][key][one.name])


@pytest.mark.parametrize("algorithm", OURS)
@pytest.mark.parametrize("bits", [8, 32])
def test_bitsandbytes_goes_on_with_our_state(source, algorithm, bits):
    own = source(algorithm, "none")
    state, _ = from_ours(own.state, "bitsandbytes", bits=bits)
    assert recognise(state) == ("bitsandbytes", algorithm)
    fresh = runs.bitsandbytes(algorithm, bits)(parameters(own))
    assert set(fresh.param_groups[0]) == set(state["param_groups"][0])
    there = runs.train(runs.bitsandbytes(algorithm, bits), Job(algorithm, own.weights, state, 5, 20))
    here = runs.train(runs.ours(algorithm, "none"), Job(algorithm, own.weights, own.state, 5, 20))
    assert there.losses == pytest.approx(here.losses, abs=2e-6 if bits == 32 else 5e-3)
    inner = state["state"][0][foreign.BNB_NESTED]
    assert inner["state1"].dtype == (torch.uint8 if bits == 8 else torch.float32)
    assert state["state"][2][foreign.BNB_NESTED]["state1"].dtype == torch.float32  # a bias is small


def test_the_dynamic_map_is_that_of_bitsandbytes():
    for signed in (True, False):
        assert torch.equal(foreign.dynamic_map(signed), bnb.functional.create_dynamic_map(signed=signed))


@pytest.mark.parametrize("numel", [4096, 5000])
def test_8_bit_codes_are_the_nearest_of_256(numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 2, numel)
    values[:256] = 0
    inner = foreign.write_bitsandbytes((values, values.square()), 7, 8)[foreign.BNB_NESTED]
    for number, value in enumerate((values, values.square()), 1):
        scale = inner[f"absmax{number}"].repeat_interleave(256)[:numel]
        table = inner[f"qmap{number}"]
        exact = value.double()[:, None] - table.double()[None] * scale.double()[:, None]
        off = (foreign.read_bitsandbytes(inner, number).double() - value.double()).abs()
        assert (off <= exact.abs().amin(1) + 1e-7 * scale).all()
        assert torch.equal(inner[f"absmax{number}"], torch.stack([part.abs().max() for part in value.split(256)]))


def test_what_a_target_cannot_hold_is_said_or_refused(source):
    p = nn.Parameter(torch.randn(4096).bfloat16())
    p.grad = torch.randn(4096).bfloat16()
    optimizer = FlashAdamW([p])
    optimizer.step()
    for target in ("adamw_torch", "bitsandbytes"):
        assert "no place for corrections" in from_ours(optimizer.state_dict(), target)[1][0]
    with pytest.raises(CheckpointError, match="FlashAdamW, and sgd runs another algorithm"):
        from_ours(optimizer.state_dict(), "sgd")
    with pytest.raises(CheckpointError, match=r"torchao.*read, not written"):
        from_ours(optimizer.state_dict(), "torchao")
    with pytest.raises(ConfigurationError, match="'apex' is not known"):
        from_ours(optimizer.state_dict(), "apex")
    with pytest.raises(CheckpointError, match="use to_ours first"):
        from_ours(source("adamw", "torch").state, "bitsandbytes")
    sgd = FlashSGD([p], momentum=0.9, nesterov=True)
    sgd.step()
    with pytest.raises(CheckpointError, match="nesterov=True"):
        from_ours(sgd.state_dict(), "bitsandbytes")
    assert "nesterov=True" in from_ours(sgd.state_dict(), "flashoptim")[1][0]


def test_sgd_without_momentum_has_nothing_to_carry():
    p = nn.Parameter(torch.randn(10).bfloat16())
    p.grad = torch.randn(10).bfloat16()
    optimizer = FlashSGD([p])
    optimizer.step()
    assert from_ours(optimizer.state_dict(), "sgd")[0]["state"] == {}
    other = torch.optim.SGD([p])
    other.load_state_dict(from_ours(optimizer.state_dict(), "sgd")[0])
    other.step()
    optimizer.load_state_dict(other.state_dict())
    there, _ = from_ours(optimizer.state_dict(), "flashoptim")
    assert set(there["state"]) <= {0}


def test_nothing_given_is_changed_and_everything_is_plain(source, as_bits, tmp_path):
    for algorithm, form in CASES:
        if form == "torchao":
            continue
        state = source(algorithm, form).state
        before = as_bits(state)
        mine, _ = to_ours(state)
        own = as_bits(mine)
        for target in ("bitsandbytes", "flashoptim", *({"adamw": ["adamw_torch"], "sgd": ["sgd"]}.get(algorithm, []))):
            written, _ = from_ours(mine, target, weight_dtype=torch.float32)
            torch.save(written, tmp_path / "o.pt")
            torch.load(tmp_path / "o.pt", weights_only=True)
        assert as_bits(state) == before
        assert as_bits(mine) == own
        assert all(isinstance(value, torch.Tensor) for values in mine["state"].values() for value in values.values())


def test_the_other_codecs_of_this_package(source, as_bits):
    state = source("adamw", "log").state
    there, _ = to_ours(state, [("softsign", True)])
    back, _ = to_ours(there, [("softsign", True)])
    assert as_bits(back) == as_bits(there)
    assert there["param_groups"][0]["codec"] == "softsign"
    optimizer = FlashAdamW(parameters(source("adamw", "log")), codec="softsign")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(there)
