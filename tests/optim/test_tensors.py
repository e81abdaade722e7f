"""Tensors as users have them: strided, mixed in dtype, tiny, or not supported at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flashoptim_hf.errors import ConfigurationError, UnsupportedError
from flashoptim_hf.optim.adamw import FlashAdamW

LAYOUTS = {
    "transposed": lambda: torch.randn(6, 40).t(),
    "column_slice": lambda: torch.randn(12, 30)[:, 3:17],
    "every_other": lambda: torch.randn(200)[::2],
    "channels_last": lambda: torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last),
    "negative_free_permutation": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "scalar": lambda: torch.randn(()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_equals_contiguous(opt, layout, dtype):
    torch.manual_seed(0)
    base = LAYOUTS[layout]().to(dtype)
    if layout != "scalar" and layout not in ("channels_last",):
        base = base.as_strided(base.shape, base.stride()) if base.dtype == dtype else base
    strided = nn.Parameter(base)
    plain = nn.Parameter(base.detach().clone(memory_format=torch.contiguous_format))
    memory, strides = strided.data_ptr(), strided.stride()
    optimizers = [opt([strided], lr=1e-2), opt([plain], lr=1e-2)]
    for _ in range(4):
        grad = torch.randn(base.shape).to(dtype)
        strided.grad, plain.grad = grad.clone(), grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(strided, plain)
    assert not torch.equal(strided.detach(), LAYOUTS[layout]().to(dtype))
    assert (strided.data_ptr(), strided.stride()) == (memory, strides)
    for name, value in optimizers[0].decoded_state(strided).items():
        assert torch.equal(value, optimizers[1].decoded_state(plain)[name])


def test_slice_does_not_touch_its_neighbours(opt):
    whole = torch.randn(12, 30)
    before = whole.clone()
    w = nn.Parameter(whole[:, 3:17])
    w.grad = torch.ones_like(w)
    opt([w]).step()
    assert torch.equal(whole[:, :3], before[:, :3])
    assert torch.equal(whole[:, 17:], before[:, 17:])
    assert not torch.equal(whole[:, 3:17], before[:, 3:17])


@pytest.mark.parametrize("make", [lambda g: g.t().contiguous().t(), lambda g: g], ids=["transposed", "plain"])
def test_gradients_of_any_layout(opt, make):
    a, b = nn.Parameter(torch.zeros(9, 33)), nn.Parameter(torch.zeros(9, 33))
    grad = torch.randn(9, 33)
    a.grad, b.grad = make(grad.clone()), grad.clone()
    for p in (a, b):
        opt([p]).step()
    assert torch.equal(a, b)


def test_expanded_gradient(opt):
    w = nn.Parameter(torch.zeros(5, 70))
    w.sum().backward()  # the gradient is one number, expanded
    opt([w], lr=1e-2, weight_decay=0.0).step()
    torch.testing.assert_close(w.detach(), torch.full((5, 70), -1e-2), rtol=1e-4, atol=0)


def test_expanded_parameters_are_refused():
    with pytest.raises(ConfigurationError, match=r"expanded.*contiguous"):
        FlashAdamW([nn.Parameter(torch.zeros(1, 4).expand(3, 4))])


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_pairs_follow_fp32_arithmetic(opt, dtype, grad_dtype, reference):
    torch.manual_seed(1)
    w = nn.Parameter(torch.randn(300).to(dtype))
    w.grad_dtype = None
    optimizer, ref = opt([w], lr=1e-2), reference([w], lr=1e-2)
    for _ in range(10):
        w.grad = (torch.randn(300) * 0.1).to(grad_dtype)
        ref.step()
        optimizer.step()
    assert ref.error(weight=optimizer.decoded_state(w)["master_weight"]) < 0.03
    assert torch.equal(optimizer.decoded_state(w)["master_weight"].to(dtype), w.detach())


def test_one_page_of_mixed_dtypes_and_groups(opt, set_gradients):
    """Neither a neighbour's dtype nor its group's options change a parameter's result."""
    params = [nn.Parameter(torch.randn(77).to(dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32)]
    groups = [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "lr": 1e-3, "betas": (0.5, 0.9), "codec": "none"}]
    optimizer = opt(groups)
    alone = []
    for i, p in enumerate(params):
        q = nn.Parameter(p.detach().clone())
        alone.append((q, opt([{**groups[i // 2], "params": [q]}])))
    for step in range(5):
        set_gradients(params, step)
        optimizer.step()
        for p, (q, single) in zip(params, alone, strict=True):
            q.grad = p.grad.clone()
            single.step()
    for p, (q, _) in zip(params, alone, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32])
def test_unsupported_dtypes_are_refused_at_construction(dtype):
    w = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=dtype.is_floating_point)
    with pytest.raises(ConfigurationError, match=f"{dtype}.*bfloat16, float16 and float32"):
        FlashAdamW([w])


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = FlashAdamW(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)


def test_fp32_state_of_bf16_weights_is_fp32(opt, reference, set_gradients):
    """Uncompressed state keeps all its bits: nothing passes through the weight's dtype on the way."""
    w = nn.Parameter(torch.randn(1000).bfloat16())
    optimizer, ref = opt([w], codec="none"), reference([w])
    for step in range(50):
        set_gradients([w], step)
        ref.step()
        optimizer.step()
    state = optimizer.decoded_state(w)
    torch.testing.assert_close(state["exp_avg"].double(), ref.m[0], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(state["exp_avg_sq"].double(), ref.v[0], rtol=1e-5, atol=1e-12)
    low_bits = optimizer.state[w]["exp_avg"].view(torch.int32) & 0xFFFF
    assert (low_bits != 0).float().mean() > 0.99


@pytest.mark.parametrize("r", [1, 4, 8, 16])
def test_every_lora_matrix_is_quantized(r):
    """Bytes per trainable element are those of the format whatever the rank: no tensor is too small or too narrow."""
    params = [nn.Parameter(torch.zeros(shape)) for width in (576, 192, 1536) for shape in ((r, width), (width, r))]
    optimizer = FlashAdamW(params, paged=True)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    report = optimizer.memory_report()
    assert report.quantized_share == 1.0
    assert report.moment_bytes / report.num_params == 2.15625


def test_report_equals_a_hand_count():
    w, b = nn.Parameter(torch.zeros(100, 50, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(65))
    optimizer = FlashAdamW([w, b], paged=True)
    w.grad, b.grad = torch.ones_like(w), torch.ones_like(b)
    optimizer.step()
    groups = -(-5000 // 64) + 2
    report = optimizer.memory_report().to_dict()
    assert report["planes"] == {
        "exp_avg": 5065,
        "exp_avg_sq": 5065,
        "exp_avg_sq_max": 4 * groups,
        "exp_avg_sq_step": 4 * groups,
        "exp_avg_max": 2 * groups,
        "correction": 5000,
    }
    assert report["state_bytes"] == sum(report["planes"].values())
    assert report["num_params"] == 5065
    assert report["device_bytes"] is None
    assert report["host_bytes"] >= report["state_bytes"]


def test_weights_written_from_outside_are_respected(opt, set_gradients):
    w = nn.Parameter(torch.randn(200).bfloat16())
    optimizer = opt([w], lr=1e-3)
    for step in range(5):
        set_gradients([w], step)
        optimizer.step()
    fresh = torch.randn(200).bfloat16()
    w.data.copy_(fresh)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(w, fresh)
    assert not torch.equal(optimizer.decoded_state(w)["master_weight"], fresh.float())
    optimizer.reset_master()
    assert torch.equal(optimizer.decoded_state(w)["master_weight"], fresh.float())


def test_small_updates_reach_16_bit_weights():
    """lr too small to move a bf16 weight in one step moves it through the correction; without one it does not."""
    moved = {}
    for bits in (24, 32, None):
        w = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = FlashAdamW([w], lr=3e-5, weight_decay=0.0, master_bits=bits)
        for _ in range(100):
            w.grad = torch.ones_like(w)
            optimizer.step()
        moved[bits] = (1 - optimizer.decoded_state(w)["master_weight"]).mean().item()
    assert moved[None] == 0.0
    assert moved[24] == pytest.approx(3e-3, rel=0.1)
    assert moved[32] == pytest.approx(3e-3, rel=0.01)
