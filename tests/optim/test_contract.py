"""What every user of `torch.optim` relies on."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flashoptim_hf.errors import ConfigurationError, UnsupportedError
from flashoptim_hf.optim.adamw import FlashAdamW

CLOSE = 0.03  # relative error of the total update: a few times what the codec `log` reaches on real gradients


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def test_follows_adamw(opt, reference, set_gradients):
    params = [parameter(33, 65), parameter(7, seed=1), parameter(1, seed=2)]
    optimizer, ref = opt(params, weight_decay=0.1), reference(params, weight_decay=0.1)
    other = reference(params, weight_decay=0.1, betas=(0.5, 0.999))  # a negative control: another beta1 must show
    for step in range(30):
        set_gradients(params, step)
        ref.step()
        other.step()
        optimizer.step()
    assert max(ref.error(i) for i in range(3)) < CLOSE
    assert other.error(0) > 2 * CLOSE


def test_is_an_optimizer_with_defaults_that_rebuild_it():
    w = parameter(10)
    optimizer = FlashAdamW([w], lr=3e-4, betas=(0.8, 0.95), paged=True, page_bytes="1MiB", codec="none")
    assert isinstance(optimizer, torch.optim.Optimizer)
    again = type(optimizer)([w], **optimizer.defaults)
    assert again.defaults == optimizer.defaults
    assert again.defaults["page_bytes"] == 2**20
    assert FlashAdamW([w]).defaults["weight_decay"] == torch.optim.AdamW([w]).defaults["weight_decay"]
    for name in ("lr", "betas", "eps"):
        assert FlashAdamW([w]).defaults[name] == torch.optim.AdamW([w]).defaults[name]


def test_step_returns_the_closures_loss(opt):
    w = parameter(70)

    def closure():
        w.grad = None
        loss = (w**2).sum()
        loss.backward()
        return loss

    optimizer = opt([w], lr=0.1)
    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert optimizer.step() is None


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=20),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    ],
    ids=["lambda", "cosine", "one_cycle", "plateau"],
)
def test_schedulers_drive_every_page(opt, make):
    """The lr and betas that a scheduler writes are used at the next step, for parameters on every page."""
    params = [parameter(3000, seed=i) for i in range(3)]
    optimizer = opt(params, lr=1e-2, weight_decay=0.0)
    plain = [nn.Parameter(p.detach().clone()) for p in params]
    torch_optimizer = torch.optim.AdamW(plain, lr=1e-2, weight_decay=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [make(optimizer), make(torch_optimizer)]
        for _ in range(8):
            for p, q in zip(params, plain, strict=True):
                p.grad = torch.full_like(p, 0.5)
                q.grad = torch.full_like(q, 0.5)
            optimizer.step()
            torch_optimizer.step()
            for s in schedulers:
                s.step(*([1.0] if isinstance(s, lr_scheduler.ReduceLROnPlateau) else []))
    assert optimizer.param_groups[0]["lr"] == torch_optimizer.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["betas"] == torch_optimizer.param_groups[0]["betas"]
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-4)  # constant gradients: each step moves by lr, 1e-2


def test_lr_as_a_tensor(opt, reference, set_gradients):
    w = parameter(500)
    lr = torch.tensor(1e-2)
    optimizer, ref = opt([w], lr=lr), reference([w], lr=1e-2)
    for step in range(6):
        lr.fill_(1e-2 / (step + 1))
        ref.lr = 1e-2 / (step + 1)
        set_gradients([w], step)
        ref.step()
        optimizer.step()
    assert ref.error() < CLOSE
    with pytest.raises(ConfigurationError, match="one number"):
        FlashAdamW([w], lr=torch.ones(3))


def test_step_hooks_and_patched_step(opt, set_gradients):
    w = parameter(5)
    optimizer, calls = opt([w]), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    set_gradients([w], 0)
    optimizer.step()
    original = optimizer.step
    optimizer.step = lambda *a, **k: (calls.append("patched"), original(*a, **k))[1]
    optimizer.step()
    assert calls == ["pre", "post", "patched", "pre", "post"]


def test_hooks_of_all_optimizers_and_profilers_see_the_step(opt, set_gradients):
    """What torch puts around a step is left out only where nobody is there to notice."""
    w = parameter(5)
    optimizer, calls = opt([w]), []
    set_gradients([w], 0)
    optimizer.step()

    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post")),
    ]
    for handle in handles:
        optimizer.step()
        handle.remove()
    optimizer.step()
    assert calls == ["pre", "post", "post"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#FlashAdamW.step" in {event.key for event in profile.key_averages()}


def test_a_step_leaves_gradients_on_as_they_were(opt, set_gradients):
    w = parameter(5)
    optimizer, seen = opt([w]), []
    set_gradients([w], 0)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert optimizer.step(lambda: seen.append(torch.is_grad_enabled())) is None
            assert torch.is_grad_enabled() == enabled
    assert seen == [True, True]
    w.grad = torch.ones(5).to_sparse()
    with pytest.raises(UnsupportedError):
        optimizer.step()
    assert torch.is_grad_enabled()


def test_frozen_and_late_parameters_keep_their_own_step_count(opt, reference, set_gradients):
    a, b, c = parameter(100), parameter(100, seed=1), parameter(100, seed=2)
    c.requires_grad_(False)
    optimizer, ref = opt([a, b, c]), reference([a, b, c])
    for step, active in enumerate([[a], [a, b], [b], [a, b, c], [c]]):
        c.requires_grad_(step >= 3)
        for p in (a, b, c):
            p.grad = None
        set_gradients(active, step)
        before = {p: (p.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])) for p in (a, b, c)}
        ref.step()
        optimizer.step()
        for i, p in enumerate((a, b, c)):
            if p.grad is None:  # no decay, no state
                assert torch.equal(p, before[p][0])
                assert str(optimizer.state_dict()["state"].get(i)) == str(before[p][1].get(i))
    assert [int(optimizer.state[p]["step"]) for p in (a, b, c)] == ref.t == [3, 3, 2]
    assert max(ref.error(i) for i in range(3)) < CLOSE


def test_never_stepped(opt):
    optimizer = opt([parameter(5)])
    optimizer.step()  # no gradients: nothing happens
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.memory_report().state_bytes == 0


def test_add_param_group_leaves_existing_state_alone(opt, reference, set_gradients, as_bits):
    a, b = parameter(5000), parameter(300, seed=1)
    optimizer, ref_a = opt([a]), reference([a])
    for step in range(3):
        set_gradients([a], step)
        ref_a.step()
        optimizer.step()
    before = as_bits(optimizer.state_dict()["state"][0])
    optimizer.add_param_group({"params": [b], "lr": 1e-4})
    ref_b = reference([b], lr=1e-4)
    assert as_bits(optimizer.state_dict()["state"][0]) == before
    set_gradients([b], 7)
    ref_b.step()
    a.grad = None
    optimizer.step()
    assert as_bits(optimizer.state_dict()["state"][0]) == before
    for step in range(3):
        set_gradients([a, b], step + 10)
        ref_a.step()
        ref_b.step()
        optimizer.step()
    assert ref_a.error() < CLOSE
    assert ref_b.error() < CLOSE

    other = opt([{"params": [nn.Parameter(a.detach().clone())]}, {"params": [nn.Parameter(b.detach().clone())], "lr": 1e-4}])
    other.load_state_dict(optimizer.state_dict())
    for x, y in zip((a, b), (other.param_groups[0]["params"][0], other.param_groups[1]["params"][0]), strict=True):
        y.grad = x.grad.clone()
    optimizer.step()
    other.step()
    assert torch.equal(a, other.param_groups[0]["params"][0])
    assert torch.equal(b, other.param_groups[1]["params"][0])


def test_a_refused_group_is_not_added():
    optimizer = FlashAdamW([parameter(5)])
    with pytest.raises(ConfigurationError, match="float64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=torch.float64))]})
    with pytest.raises(ConfigurationError, match="paged"):
        optimizer.add_param_group({"params": [parameter(3)], "paged": True})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_model_that_was_converted_to_fp64_is_refused_by_name(first, opt, set_gradients):
    w = parameter(10)
    optimizer = opt([w])
    if not first:
        set_gradients([w], 0)
        optimizer.step()
    w.data = w.data.double()
    before, w.grad = w.detach().clone(), torch.ones_like(w)
    with pytest.raises(ConfigurationError, match=r"shape \(10,\) has dtype torch.float64.*model.float\(\)"):
        optimizer.step()
    assert torch.equal(w, before)
    w.data, w.grad = w.data.float(), None
    set_gradients([w], 1)
    optimizer.step()
    assert optimizer.state[w]["step"] == 2 - first


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_a_gradient_of_before_the_parameter_was_replaced_is_refused(dtypes, stepped):
    """Compiled kernels would read on behind its end."""
    first, second = (nn.Parameter(torch.ones(64, dtype=dtype)) for dtype in dtypes)
    optimizer = FlashAdamW([first, second])
    first.grad = torch.ones_like(first)
    if stepped:
        optimizer.step()
    before, second.grad = first.detach().clone(), torch.ones_like(second)
    second.data = torch.zeros(2, 64, dtype=second.dtype)
    with pytest.raises(UnsupportedError, match=r"shape \(64,\), and its parameter has \(2, 64\) now"):
        optimizer.step()
    assert torch.equal(first, before)
    assert not second.any()
    optimizer.zero_grad()
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert second.all()


def test_empty_groups_and_empty_tensors(opt, set_gradients):
    w, nothing = parameter(10), nn.Parameter(torch.empty(0, 4))
    optimizer = opt([{"params": [w], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}, {"params": [nothing]}])
    set_gradients([w, nothing], 0)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"][1]["exp_avg"].shape == (0, 4)
    other = opt([{"params": [nn.Parameter(torch.zeros(10))]}, {"params": []}, {"params": [nn.Parameter(torch.empty(0, 4))]}])
    other.load_state_dict(saved)
    assert [g["weight_decay"] for g in other.param_groups] == [0.1, 0.0, 1e-2]
    other.step()


def test_no_parameters_is_an_error_that_says_why():
    for nothing in ([], [{"params": []}], [{"params": []}, {"params": [], "weight_decay": 0.0}]):
        with pytest.raises(ConfigurationError, match="is_trainable=True"):
            FlashAdamW(nothing)


def test_groups_may_be_generators():
    model = nn.Linear(3, 4)
    assert len(FlashAdamW([{"params": model.parameters()}]).param_groups[0]["params"]) == 2
    assert len(FlashAdamW(model.parameters()).param_groups[0]["params"]) == 2
    with pytest.raises(TypeError, match="ordered collections"):
        FlashAdamW([{"params": set(model.parameters())}])


def test_a_parameter_listed_twice_is_stepped_once(reference, set_gradients, opt):
    w = parameter(100)
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = opt([{"params": [w, w]}])
    ref = reference([w])
    set_gradients([w], 0)
    ref.step()
    optimizer.step()
    assert ref.error() < CLOSE
    assert int(optimizer.state[w]["step"]) == 1
    assert optimizer.memory_report().num_params == 100


def test_tying_after_construction_updates_one_tensor(opt, set_gradients):
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8, bias=False))
    optimizer = opt(model.parameters())
    lost = model[1].weight
    model[1].weight = model[0].weight
    set_gradients([model[0].weight], 0)
    before = lost.detach().clone()
    optimizer.step()
    assert optimizer.memory_report().num_params == 8 * 16
    assert torch.equal(lost, before)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_are_independent_and_equal(opt, clone, set_gradients, as_bits):
    w = parameter(300, dtype=torch.bfloat16)
    optimizer = opt([w], lr=1e-3)
    set_gradients([w], 0)
    optimizer.step()
    twin = clone(optimizer)
    (v,) = twin.param_groups[0]["params"]
    assert v is not w
    assert as_bits(twin.state_dict()) == as_bits(optimizer.state_dict())
    before = as_bits(optimizer.state_dict())
    v.grad = torch.ones_like(v)
    twin.step()
    assert as_bits(optimizer.state_dict()) == before
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert torch.equal(v, w)
    assert as_bits(twin.state_dict()) == as_bits(optimizer.state_dict())
    assert type(twin)([w], **twin.defaults).defaults == optimizer.defaults


def test_replaced_parameters(opt, set_gradients):
    """Wrapping a model swaps tensors in `param_groups`: before the first step that is free, afterwards it is said, and nothing leaks."""
    a = parameter(100)
    optimizer = opt([a])
    b = nn.Parameter(a.detach().clone())
    optimizer.param_groups[0]["params"] = [b]
    set_gradients([a, b], 0)
    optimizer.step()
    assert not torch.equal(a, b)
    assert set(optimizer.state) == {b}
    c = nn.Parameter(b.detach().clone())
    optimizer.param_groups[0]["params"] = [c]
    set_gradients([c], 1)
    with pytest.warns(UserWarning, match="no longer in any parameter group"):
        optimizer.step()
    assert set(optimizer.state) == {c}
    assert optimizer.memory_report().num_params == 100
    assert len({id(piece.block) for pool in optimizer._layout.pools.values() for page in pool.store.pages for piece in page.pieces}) == 1


def test_change_of_dtype_after_the_first_step(opt, set_gradients):
    model = nn.Linear(20, 30)
    optimizer = opt(model.parameters(), lr=1e-3)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    before = optimizer.decoded_state(model.weight)
    model.to(torch.bfloat16)
    set_gradients(model.parameters(), 1)
    optimizer.step()
    assert int(optimizer.state[model.weight]["step"]) == 2
    assert optimizer.state[model.weight]["correction"].dtype == torch.int8
    after = optimizer.decoded_state(model.weight)
    assert (after["exp_avg"] - before["exp_avg"]).abs().max() < 0.2
    assert after["exp_avg_sq"].abs().sum() > 0.9 * before["exp_avg_sq"].abs().sum()


def test_a_resized_parameter_is_refused(opt, set_gradients):
    w = parameter(8, 4)
    optimizer = opt([w])
    set_gradients([w], 0)
    optimizer.step()
    w.data = torch.zeros(10, 4)
    w.grad = torch.zeros(10, 4)
    with pytest.raises(RuntimeError, match=r"\(8, 4\).*\(10, 4\)"):
        optimizer.step()


def test_clearing_state_starts_anew(opt, set_gradients):
    w = parameter(50)
    optimizer = opt([w])
    for step in range(3):
        set_gradients([w], step)
        optimizer.step()
    optimizer.state.clear()
    optimizer.step()
    assert int(optimizer.state[w]["step"]) == 1
    assert optimizer.memory_report().num_params == 50


@pytest.mark.parametrize("empty", [lambda o, p: o.state[p].clear(), lambda o, p: o.state.update({p: {}}), lambda o, p: o.state.pop(p)])
def test_emptying_one_parameters_state_starts_it_anew(opt, empty, set_gradients):
    a, b = parameter(50), parameter(50, seed=1)
    optimizer = opt([a, b])
    for step in range(3):
        set_gradients([a, b], step)
        optimizer.step()
    empty(optimizer, a)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in (a, b)] == [1, 4]
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (50,)


def test_a_default_device_does_not_move_state(opt, set_gradients):
    w = parameter(300, dtype=torch.bfloat16)
    optimizer = opt([w])
    set_gradients([w], 0)
    with torch.device("meta"):
        optimizer.step()
        saved = optimizer.state_dict()
    assert {value.device.type for value in (*optimizer.state[w].values(), *saved["state"][0].values())} == {"cpu"}


@pytest.mark.parametrize("change", ["dtype", "codec", "master_bits"])
def test_moving_state_waits_for_its_write_back(change, set_gradients):
    """A parameter changes its pool while copies of the last step are under way: paged through a device equals unpaged, for every order."""
    results = []
    for seed in (None, *range(12)):
        w = parameter(2048, dtype=torch.bfloat16 if change == "master_bits" else torch.float32)
        paged = {} if seed is None else {"paged": True, "simulate": seed, "page_bytes": 2048}
        optimizer = FlashAdamW([w], lr=1e-3, **paged)
        for step in range(4):
            if step == 2 and change == "dtype":
                w.data = w.data.bfloat16()
            elif step == 2:
                optimizer.param_groups[0][change] = {"codec": "none", "master_bits": 32}[change]
            w.grad = None
            set_gradients([w], step)
            optimizer.step()
        results.append((w.detach().clone(), optimizer.decoded_state(w)["exp_avg"]))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_decoded_state_after_a_change_of_dtype(opt, set_gradients):
    w = parameter(64, dtype=torch.bfloat16)
    optimizer = opt([w])
    set_gradients([w], 0)
    optimizer.step()
    w.data = w.data.float()
    assert torch.equal(optimizer.decoded_state(w)["master_weight"], w)


def test_a_transposed_view_of_the_same_memory_is_noticed(opt, set_gradients):
    w = parameter(8, 8)
    optimizer = opt([w], lr=0.1, weight_decay=0.0)
    set_gradients([w], 0)
    optimizer.step()
    w.data = w.data.t()
    before = w.detach().clone()
    w.grad = torch.zeros(8, 8)
    w.grad[0, 1] = 1.0
    optimizer.param_groups[0]["betas"] = (0.0, 0.0)
    optimizer.step()
    assert ((w - before) != 0).nonzero().tolist() == [[0, 1]]


def test_compiled_step_does_not_recompile(set_gradients):
    """`step` is not traced: a changing learning rate is no reason to compile again, and the numbers are those of the plain step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    a, b = parameter(100), parameter(100)
    plain, compiled = FlashAdamW([a]), FlashAdamW([b])
    step = torch.compile(compiled.step, backend="eager")
    for i in range(12):
        for o in (plain, compiled):
            o.param_groups[0]["lr"] = 1e-3 / (i + 1)
        set_gradients([a, b], i)
        b.grad = a.grad.clone()
        plain.step()
        step()
    assert torch.equal(a, b)
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) <= 1


def test_a_compiled_function_runs_the_whole_step_untraced(set_gradients):
    torch._dynamo.reset()
    w, calls = parameter(5), []
    optimizer = FlashAdamW([w], kernel="eager")
    set_gradients([w], 0)
    optimizer.step()
    counters = torch._dynamo.utils.counters
    counters.clear()
    optimizer.register_step_post_hook(lambda *_: calls.append(torch.compiler.is_dynamo_compiling()))

    @torch.compile(backend="eager")
    def trained(x):
        y = x * 2
        optimizer.step()
        return y + 1

    for i in range(3):
        set_gradients([w], i)
        assert trained(torch.ones(2)).tolist() == [3, 3]
    assert int(optimizer.state[w]["step"]) == 4
    assert calls == [False] * 3
    assert len(counters["graph_break"]) == 1, "for one reason: a step is not traced"


def test_state_can_be_saved_by_torch_save(opt, set_gradients):
    w = parameter(10)
    optimizer = opt([w])
    set_gradients([w], 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["state"][0]["exp_avg"].dtype == torch.int8


BAD = [
    ({"codec": "lgo"}, "codec='lgo'.*log"),
    ({"master_bits": 16}, "master_bits=16.*24"),
    ({"lr": -1.0}, "lr=-1.0"),
    ({"lr": float("nan")}, "lr=nan"),
    ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
    ({"betas": (0.9,)}, r"betas=\(0.9,\)"),
    ({"eps": -1e-8}, "eps=-1e-08"),
    ({"weight_decay": -0.1}, "weight_decay=-0.1"),
    ({"page_bytes": "12 parsecs"}, "page_bytes: .*12 parsecs"),
    ({"page_bytes": 0}, "page_bytes"),
    ({"transport": "teleport"}, "transport='teleport'.*staged"),
    ({"nonfinite": "ignore"}, "nonfinite='ignore'.*skip"),
    ({"kernel": "cuda"}, "kernel='cuda'.*fused"),
    ({"paged": "yes"}, "paged='yes'"),
    ({"simulate": True}, "simulate=True"),
]


@pytest.mark.parametrize(("option", "message"), BAD, ids=[str(o) for o, _ in BAD])
def test_bad_options_are_named(option, message):
    with pytest.raises(ConfigurationError, match=message):
        FlashAdamW([parameter(3)], **option)
