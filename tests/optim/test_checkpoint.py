"""State in and out: every bit, no aliases, refused whole where it does not fit."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from flashoptim_hf.errors import CheckpointError
from flashoptim_hf.optim.sgd import FlashSGD


def model(dtype: torch.dtype = torch.bfloat16, width: int = 40) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 65), nn.Linear(65, 3)).to(dtype)


def trained(opt, steps: int = 5, net: nn.Module | None = None, **options):
    net = model() if net is None else net
    optimizer = opt(net.parameters(), **options)
    train(net, optimizer, range(steps))
    return net, optimizer


def train(net: nn.Module, optimizer, seeds) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def through_file(state: dict, path) -> dict:
    torch.save(state, path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", ["log", "softsign", "none", "joint", "learned"])
@pytest.mark.parametrize("bits", [24, 32, None])
def test_resumed_equals_uninterrupted(opt, tmp_path, as_bits, dtype, codec, bits):
    options = {"lr": 1e-5, "codec": codec, "master_bits": bits}
    whole, uninterrupted = trained(opt, 20, model(dtype), **options)
    first, optimizer = trained(opt, 10, model(dtype), **options)
    saved = through_file(optimizer.state_dict(), tmp_path / "optimizer.pt")

    second = model(dtype)
    second.load_state_dict(first.state_dict())
    resumed = opt(second.parameters(), **options)
    resumed.load_state_dict(saved)
    assert as_bits(resumed.state_dict()) == as_bits(optimizer.state_dict())
    train(second, resumed, range(10, 20))
    assert as_bits(dict(second.state_dict())) == as_bits(dict(whole.state_dict()))
    assert as_bits(resumed.state_dict()) == as_bits(uninterrupted.state_dict())
    for p, q in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(resumed.decoded_state(p)["master_weight"], uninterrupted.decoded_state(q)["master_weight"])


def test_only_the_model_saved_loses_the_low_bits_and_no_more(opt):
    net, optimizer = trained(opt, 10, lr=1e-5)
    weights = [p.detach().clone() for p in net.parameters()]
    masters = [optimizer.decoded_state(p)["master_weight"] for p in net.parameters()]
    assert any(not torch.equal(m, w.float()) for m, w in zip(masters, weights, strict=True))
    assert all(torch.equal(m.to(torch.bfloat16), w) for m, w in zip(masters, weights, strict=True))


def test_file_holds_only_plain_data_and_loads_without_the_package(opt, tmp_path):
    _, optimizer = trained(opt)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    script = f"""
        import sys
        import torch
        state = torch.load({str(tmp_path / "optimizer.pt")!r}, weights_only=True)
        assert not any(name.startswith("flashoptim") for name in sys.modules)
        for values in state["state"].values():
            assert all(isinstance(v, torch.Tensor) for v in values.values()), values
        for group in state["param_groups"]:
            for key, value in group.items():
                assert isinstance(value, (int, float, str, bool, tuple, list, type(None))), (key, value)
            assert group["flashoptim_format"] == 1 and group["codec"] == "log" and group["master_bits"] == 24
            assert not {{"paged", "page_bytes", "kernel", "simulate", "transport"}} & set(group)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, cwd=tmp_path)


def test_dtypes_survive(opt, tmp_path):
    """torch's own loader casts state to the parameter's dtype; codes and constants must keep theirs."""
    _, optimizer = trained(opt)
    other = opt(model().parameters())
    other.load_state_dict(through_file(optimizer.state_dict(), tmp_path / "o.pt"))
    for values in other.state.values():
        assert {name: value.dtype for name, value in values.items()} == {
            "step": torch.int64,
            "exp_avg": torch.int8,
            "exp_avg_sq": torch.uint8,
            "exp_avg_sq_max": torch.float32,
            "exp_avg_sq_step": torch.float32,
            "exp_avg_max": torch.bfloat16,
            "correction": torch.int8,
        }


def test_snapshot_and_load_never_alias(opt, as_bits):
    net, optimizer = trained(opt)
    snapshot = optimizer.state_dict()
    before = as_bits(snapshot)
    train(net, optimizer, [50])
    assert as_bits(snapshot) == before
    assert as_bits(optimizer.state_dict()) != before

    other_net = model()
    other = opt(other_net.parameters())
    source = optimizer.state_dict()
    kept = as_bits(source)
    other.load_state_dict(source)
    train(other_net, other, [51])
    assert as_bits(source) == kept
    assert as_bits(optimizer.state_dict()) == kept


def pool_ranges(optimizer) -> list[tuple[int, int]]:
    """Address ranges of the pages, with neighbours joined: a parameter's plane may lie in several pages, but in one run of memory."""
    views = [view for pool in optimizer._layout.pools.values() for page in pool.store.pages for view in page.views]
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted((view.data_ptr(), view.data_ptr() + view.numel() * view.itemsize) for view in views):
        if ranges and ranges[-1][1] >= start:
            start, stop = ranges.pop()[0], stop
        ranges.append((start, stop))
    return ranges


def test_state_lives_in_the_pages_after_every_kind_of_load(opt, tmp_path):
    """Paging is not lost: each tensor of `state` lies inside the optimizer's own pages, also after prepare and load_state."""
    from accelerate import Accelerator

    net, optimizer = trained(opt)

    def check(o):
        ranges = pool_ranges(o)
        for values in o.state.values():
            for name, value in values.items():
                if name != "step":
                    assert any(a <= value.data_ptr() and value.data_ptr() + value.numel() * value.itemsize <= b for a, b in ranges), name
        return o.memory_report().pages

    pages = check(optimizer)
    accelerator = Accelerator(cpu=True)
    net, prepared = accelerator.prepare(net, optimizer)
    assert check(prepared.optimizer) == pages
    accelerator.save_state(str(tmp_path / "ckpt"))
    train(net, prepared, [3])
    accelerator.load_state(str(tmp_path / "ckpt"))
    assert check(prepared.optimizer) == pages
    train(net, prepared, [4])
    assert check(prepared.optimizer) == pages


def test_accelerate_prepare_keeps_existing_state(opt, as_bits):
    from accelerate import Accelerator

    net, optimizer = trained(opt)
    before = as_bits(optimizer.state_dict())
    _, prepared = Accelerator(cpu=True).prepare(net, optimizer)
    assert as_bits(prepared.state_dict()) == before


def test_file_size_is_that_of_the_state(opt, tmp_path):
    """Views of a pool would write the whole pool; free room, padding and dropped parameters are not saved."""
    net = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 300)).bfloat16()
    _, optimizer = trained(opt, 2, net, page_bytes="32MiB")
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    size, state = os.path.getsize(tmp_path / "o.pt"), optimizer.memory_report().state_bytes
    assert state < size < 1.05 * state + 8192
    torch.save(optimizer.state_dict()["state"][1], tmp_path / "one.pt")
    assert os.path.getsize(tmp_path / "one.pt") < 5000


def test_groups_are_restored_and_placement_is_kept(opt, tmp_path):
    def build(**defaults):
        a, b = nn.Parameter(torch.ones(70)), nn.Parameter(torch.ones(5))
        return [a, b], opt([{"params": [a], "name": "decayed"}, {"params": [b], "weight_decay": 0.0, "initial_lr": 7.0}], **defaults)

    params, optimizer = build(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 5e-3
    saved = through_file(optimizer.state_dict(), tmp_path / "o.pt")

    others, other = build(page_bytes="8KiB", nonfinite="off")
    other.load_state_dict(saved)
    for group, loaded in zip(optimizer.param_groups, other.param_groups, strict=True):
        for key in ("lr", "betas", "eps", "weight_decay", "name", "initial_lr"):
            assert group.get(key) == loaded.get(key), key
        assert not {"flashoptim_format", "page_bytes", "nonfinite"} & set(loaded)
    assert other.defaults["page_bytes"] == 8192
    assert other.defaults["nonfinite"] == "off"
    for p, q in zip(params, others, strict=True):
        with torch.no_grad():
            q.copy_(p)
        p.grad, q.grad = torch.full_like(p, 0.5), torch.full_like(q, 0.5)
    optimizer.step()
    other.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def test_a_stale_step_count_is_overwritten(opt):
    net, optimizer = trained(opt, 10)
    other_net = model()
    other = opt(other_net.parameters())
    train(other_net, other, [77])
    other.load_state_dict(optimizer.state_dict())
    other_net.load_state_dict(net.state_dict())
    assert {int(values["step"]) for values in other.state.values()} == {10}
    train(net, optimizer, [5])
    train(other_net, other, [5])
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other_net.parameters(), strict=True))


def lora(r: int, names: str = "qv") -> nn.Module:
    return nn.ModuleDict({n: nn.Sequential(nn.Linear(32, r, bias=False), nn.Linear(r, 32, bias=False)) for n in names})


MISMATCHES = {
    "other rank, same count": (lambda: lora(16), r"\(16, 32\).*\(8, 32\)"),
    "more targets": (lambda: lora(8, "qkv"), r"4 parameters.*6"),
    "one layer frozen": (lambda: lora(8, "q"), r"4 parameters.*2"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_state_that_does_not_fit_changes_nothing(opt, case, as_bits):
    _, source = trained(opt, 2, lora(8))
    make, message = MISMATCHES[case]
    _, target = trained(opt, 3, make())
    target.param_groups[0]["lr"] = 0.125
    before, groups = as_bits(target.state_dict()), as_bits(target.param_groups)
    with pytest.raises(CheckpointError, match=message):
        target.load_state_dict(source.state_dict())
    assert as_bits(target.state_dict()) == before
    assert as_bits(target.param_groups) == groups


def test_names_are_used_where_both_sides_know_them(opt, as_bits):
    net, source = trained(opt, 2, lora(8)), None
    net = net[0]
    source = opt(net.named_parameters())
    train(net, source, range(2))
    with pytest.raises(CheckpointError, match=r"Only in the state: v\.0\.weight.*only here: k\.0\.weight"):
        opt(lora(8, "qk").named_parameters()).load_state_dict(source.state_dict())
    # another order of the same names is put right
    swapped = lora(8, "vq")
    target = opt(swapped.named_parameters())
    target.load_state_dict(source.state_dict())
    by_name = dict(net.named_parameters())
    for name, p in swapped.named_parameters():
        assert as_bits(target.state[p]) == as_bits(source.state[by_name[name]])


def test_foreign_and_damaged_states_are_refused(opt):
    net, optimizer = trained(opt)
    saved = optimizer.state_dict()
    del saved["state"][1]["exp_avg_sq_step"]
    with pytest.raises(CheckpointError, match="lacks exp_avg_sq_step"):
        optimizer.load_state_dict(saved)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["flashoptim_format"] = 99
    with pytest.raises(CheckpointError, match=r"format 99.*newer"):
        optimizer.load_state_dict(saved)
    plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    plain.step()
    with pytest.raises(CheckpointError, match="momentum_buffer"):
        optimizer.load_state_dict(plain.state_dict())


def test_another_codec_is_converted_once_with_a_message(opt):
    net, optimizer = trained(opt, 10, codec="none")
    before = [optimizer.decoded_state(p) for p in net.parameters()]
    target = opt(net.parameters(), codec="log")
    with pytest.warns(UserWarning, match="codec='none'.*'log'"):
        target.load_state_dict(optimizer.state_dict())
    assert target.param_groups[0]["codec"] == "log"
    for p, old in zip(net.parameters(), before, strict=True):
        new = target.decoded_state(p)
        assert torch.equal(new["master_weight"], old["master_weight"])
        assert ((new["exp_avg_sq"] / old["exp_avg_sq"]).log2().abs() / 2).max() <= target.state[p]["exp_avg_sq_step"].max() * 1.01


@pytest.mark.parametrize(("src", "dst"), [(24, 32), (32, 24)])
def test_another_width_of_master_weights(opt, src, dst):
    net, optimizer = trained(opt, 10, lr=1e-5, master_bits=src)
    target = opt(net.parameters(), master_bits=dst)
    with pytest.warns(UserWarning, match=r"corrections of 4 parameters.*another width"):
        target.load_state_dict(optimizer.state_dict())
    for p in net.parameters():
        ulp = torch.finfo(torch.bfloat16).eps * p.detach().float().abs()
        error = (target.decoded_state(p)["master_weight"] - optimizer.decoded_state(p)["master_weight"]).abs()
        assert (error <= ulp / (508 if dst == 24 else 2**15) + 1e-12).all()


def test_between_weights_of_other_dtype(opt):
    net, optimizer = trained(opt, 5)
    target = opt(model(torch.float32).parameters())
    with pytest.warns(UserWarning, match="master weights start from the weights as they are"):
        target.load_state_dict(optimizer.state_dict())
    for p, q in zip(net.parameters(), target.param_groups[0]["params"], strict=True):
        assert torch.equal(target.decoded_state(q)["exp_avg"], optimizer.decoded_state(p)["exp_avg"])
    assert "correction" not in target.state[q]


def test_corrections_of_another_dtype_are_not_applied(opt):
    _, optimizer = trained(opt, 5)
    other = model(torch.float16)
    target = opt(other.parameters())
    with pytest.warns(UserWarning, match="start from the weights as they are"):
        target.load_state_dict(optimizer.state_dict())
    for p in other.parameters():
        assert torch.equal(target.decoded_state(p)["master_weight"], p.float())


def test_names_that_repeat_fall_back_to_positions(opt):
    a, b = torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(5))
    optimizer = opt([("x", a), ("x", b)])
    a.grad, b.grad = torch.ones(5), torch.full((5,), 2.0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert set(optimizer.state) == {a, b}
    assert optimizer.decoded_state(b)["exp_avg"][0] == pytest.approx(2 * optimizer.decoded_state(a)["exp_avg"][0].item(), rel=0.02)


def test_hooks_run(opt):
    _, optimizer = trained(opt)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("pre save"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("post save"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("pre load"))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("post load"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre save", "post save", "pre load", "post load"]


def test_dcp_on_one_process(opt, tmp_path, as_bits):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    net, optimizer = trained(opt, 3)
    saved = get_optimizer_state_dict(net, optimizer)
    dcp.save({"optim": saved}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)

    fresh_net = model()
    fresh_net.load_state_dict(net.state_dict())
    fresh = opt(fresh_net.parameters())
    template = {"optim": get_optimizer_state_dict(fresh_net, fresh)}
    dcp.load(template, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    set_optimizer_state_dict(fresh_net, fresh, template["optim"])
    for p, q in zip(net.parameters(), fresh_net.parameters(), strict=True):
        assert as_bits(fresh.state[q]) == as_bits(optimizer.state[p])
    train(net, optimizer, [9])
    train(fresh_net, fresh, [9])
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), fresh_net.parameters(), strict=True))


def test_a_momentum_that_was_changed_is_in_what_is_saved(as_bits):
    """Before the next step: the file has what its group says that it has."""
    net, optimizer = trained(FlashSGD, 2)
    optimizer.param_groups[0]["momentum"] = 0.9
    other_net = copy.deepcopy(net)
    other = FlashSGD(other_net.parameters(), momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    for one, mine in ((net, optimizer), (other_net, other)):
        train(one, mine, [7, 8])
    assert as_bits(other.state_dict()["state"]) == as_bits(optimizer.state_dict()["state"])
    assert as_bits(dict(other_net.state_dict())) == as_bits(dict(net.state_dict()))
