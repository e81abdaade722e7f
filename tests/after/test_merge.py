"""Merging: the merged model says what the adapter said, and a merge in 4 bits says it less well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flashoptim_hf import cli
from flashoptim_hf.after import load, merge


def invoke(*words: object):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def test_merged_in_16_bits_is_near_and_in_4_bits_is_not(base: Path, adapter: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"Number {i}?"}, {"role": "assistant", "content": "x"}]} for i in range(5)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    out, figures = tmp_path / "merged", tmp_path / "figures.json"
    result = invoke("merge", adapter, out, "--prompts", prompts, "--json", figures)
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    assert found["prompts"] == 5
    assert found["base"] == str(base)
    near, far = found["differences"]["16 bit"], found["differences"]["4 bit"]
    assert near["rms"] < 0.25 * far["rms"]
    assert near["kl"] < 0.1 * far["kl"]
    assert f"{near['rms']:.4f}" in result.output

    # against a sum written out: what NF4 gives back, plus B A times its scale, rounded once
    merged = load.load(str(out))
    assert merged.adapter is None
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert merged.model.lm_head.weight is merged.model.model.embed_tokens.weight
    tuned = load.load(str(adapter)).model
    layer = tuned.base_model.model.model.layers[1].mlp.down_proj
    functional = load.need("bitsandbytes", "bitsandbytes").functional
    weight = functional.dequantize_4bit(layer.base_layer.weight.data, layer.base_layer.weight.quant_state).float()
    (name,) = tuned.active_adapters
    delta = layer.scaling[name] * (layer.lora_B[name].weight.float() @ layer.lora_A[name].weight.float())
    got = merged.model.model.layers[1].mlp.down_proj.weight.float()
    torch.testing.assert_close(got, weight + delta, rtol=2**-7, atol=2**-9)
    assert (got - weight).abs().max() > 0.1 * delta.abs().max()  # the adapter is in it


def test_an_adapter_on_16_bits_merges_without_a_comparison_in_4(adapter: Path, tmp_path: Path) -> None:
    result = invoke("merge", adapter / "mine", tmp_path / "merged", "--no-load-in-4bit", "--json", tmp_path / "f.json")
    assert result.exit_code == 0, result.output
    assert list(json.loads((tmp_path / "f.json").read_text())["differences"]) == ["16 bit"]


def test_what_cannot_be_merged_is_said(base: Path, adapter: Path, tmp_path: Path) -> None:
    result = invoke("merge", base, tmp_path / "merged")
    assert result.exit_code == 2
    assert "it is not the folder of an adapter" in result.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    result = invoke("merge", adapter, tmp_path / "full")
    assert result.exit_code == 2
    assert "is there already" in result.stderr
    result = invoke("merge", adapter, tmp_path / "merged", "--base", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere' (from" in result.stderr
    assert "--base names the place of the adapter's base" in result.stderr


def test_the_adapter_that_was_taken_is_named(adapter: Path, tmp_path: Path) -> None:
    result = invoke("merge", adapter, tmp_path / "merged")
    assert result.exit_code == 0, result.output
    assert f"the adapter is {adapter / 'mine'}, the only one in {adapter}" in result.stderr


def test_a_folder_of_runs_is_refused_with_what_is_in_it(tmp_path: Path) -> None:
    for name in ("runs/lamp/checkpoint-9", "runs/lamp/checkpoint-10"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / load.ADAPTER_CONFIG).write_text("{}")
    result = invoke("merge", tmp_path / "runs" / "lamp", tmp_path / "merged")
    assert result.exit_code == 2
    assert "holds neither a model (config.json) nor an adapter" in result.stderr
    assert "lamp/checkpoint-9, " in result.stderr
    assert "lamp/checkpoint-10." in result.stderr
    assert "Name the folder that a run" in invoke("sample", tmp_path / "runs", "--prompt", "x").stderr


def test_differences_against_a_plain_count() -> None:
    a, b = [torch.tensor([[0.0, 1.0], [2.0, 0.0]])], [torch.tensor([[0.0, 1.0], [0.0, 2.0]])]
    found = merge.difference(a, b)
    assert found["largest"] == 2
    assert found["rms"] == pytest.approx(2**0.5)
    assert found["same"] == 0.5
    p = torch.tensor([2.0, 0.0]).softmax(0)
    assert found["kl"] == pytest.approx(float((p * (p.log() - p.flip(0).log())).sum()) / 2)
    assert merge.difference(a, a) == {"rms": 0, "largest": 0, "kl": 0, "same": 1}
