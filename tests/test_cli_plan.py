"""`flashoptim-hf plan` through the command line: flags, recipes' files, JSON, the chart, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashoptim_hf import cli, cli_plan
from flashoptim_hf.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[1]


def plan(*arguments: object):
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.json"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    file.write_text(json.dumps({"model_type": "llama", **sizes}))
    return file


def test_from_flags(model: Path, tmp_path: Path) -> None:
    out, chart = tmp_path / "new" / "plan.json", tmp_path / "new" / "plan.png"
    flags = ("--lora-r", 64, "--seq-len", 512, "--batch-size", 2, "--gpu", "24GiB", "--ram", "64GiB")
    result = plan(model, *flags, "--optim-args", "page_bytes=64KiB", "--json", out, "--plot", chart)
    assert result.exit_code == 0, result.output
    assert "fits" in result.output
    found = json.loads(out.read_text())
    assert found["setup"]["lora_r"] == 64
    assert found["setup"]["options"]["page_bytes"] == "64KiB"
    assert found["verdict"] == {"device": "fits", "host": "fits", "fits": True}
    assert found["phases"].keys() == {"load", "step", "save", "resume"}
    assert found["beside"].keys() == {"adamw_torch", "adamw_8bit", "paged_adamw_8bit", "adafactor"}
    assert found["traffic"]["bytes_in"] == found["state"]["travels"] > 0
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_from_a_recipe_and_flags_win(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    config = ROOT / "configs/qlora/qwen3-0.6b_6gb.yaml"
    result = plan("--config", config, "--seq-len", 128, "--gpu", "1GiB", "--ram", "64GiB", "--json", out)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["source"].endswith("Qwen3-0.6B.json")
    assert (found["setup"]["seq_len"], found["setup"]["batch"], found["setup"]["optimizer"]) == (128, 4, "flashoptim_adamw")
    assert found["verdict"]["fits"] is False
    assert found["changes"]
    assert "What to change" in result.output


def test_the_launch_command_says_how_many_processes() -> None:
    found = cli_plan.from_recipe(ROOT / "configs/qlora/llama-3.3-70b_2x24gb.yaml")
    assert (found["ranks"], found["fsdp"], found["offload"]) == (2, True, True)
    assert cli_plan.make_setup({key: value for key, value in found.items() if key != "model"}).ranks_per_host == 2
    alone = cli_plan.from_recipe(ROOT / "configs/full/llama-3.1-8b_24gb.yaml")
    assert (alone["ranks"], alone["fsdp"], alone["full"]) == (1, False, True)


def test_defaults_are_the_recipe_s(tmp_path: Path) -> None:
    """What a file leaves out is what the recipe's own parser puts there."""
    import sys

    sys.path.insert(0, str(ROOT / "recipes"))
    import qlora_sft

    file = tmp_path / "short.yaml"
    file.write_text("model_name_or_path: x\ndataset: y\n")
    parsed = qlora_sft.make_parser().parse_args_and_config(["--config", str(file), "--use_cpu", "true"])
    real = {key: value for part in parsed for key, value in vars(part).items()}
    values = cli_plan.from_recipe(file)
    values.pop("model")
    setup = cli_plan.make_setup(values)
    assert setup.seq_len == real["max_length"]
    assert setup.batch == real["per_device_train_batch_size"]
    assert setup.accumulation == real["gradient_accumulation_steps"]
    assert setup.checkpointing == real["gradient_checkpointing"]
    assert setup.optimizer == getattr(real["optim"], "value", real["optim"])
    assert (setup.lora_r, setup.lora_dropout, setup.lora_targets) == (real["lora_r"], real["lora_dropout"], real["lora_target_modules"])
    assert (setup.load_in_4bit, setup.double_quant) == (real["load_in_4bit"], real["use_bnb_nested_quant"])
    assert str(setup.dtype) == f"torch.{real['dtype']}"


def test_without_sizes_there_is_no_verdict(model: Path) -> None:
    result = plan(model, "--full", "--optim", "adamw_torch")
    assert result.exit_code == 0, result.output
    assert "No verdict" in result.output
    assert "16 bits and no" in result.output


@pytest.mark.parametrize("optim", ["flashoptim_lion", "flashoptim_paged_sgd", "adafactor", "paged_adamw_8bit"])
def test_every_optimizer(model: Path, optim: str) -> None:
    result = plan(model, "--full", "--optim", optim)
    assert result.exit_code == 0, result.output


WRONG = {
    "no model": ((), "no model"),
    "optimizer": (("--optim", "lamb"), "'lamb'"),
    "ours, misspelt": (("--optim", "flashoptim_adamm"), "flashoptim_adamm"),
    "option": (("--optim-args", "page_byte=1"), "page_bytes"),
    "link": (("--link", "usb"), "nvlink-c2c"),
    "size": (("--gpu", "lots"), "'lots'"),
    "hosts": (("--gpus", "3", "--hosts", "2"), "--hosts 2"),
    "dtype": (("--dtype", "int8"), "dtype='int8'"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_errors_are_sentences(arguments: tuple[str, ...], message: str, model: Path) -> None:
    result = plan(*(() if not arguments else (model, *arguments)))
    assert result.exit_code == 2
    assert message in result.output + result.stderr
    assert "Traceback" not in result.output


def test_what_is_not_planned_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "dora.yaml"
    file.write_text("model_name_or_path: x\nuse_dora: true\n")
    with pytest.raises(ConfigurationError, match="use_dora"):
        cli_plan.from_recipe(file)


@pytest.mark.parametrize(("flag", "text"), [("--gpu", "24"), ("--ram", "64"), ("--gpu", "80")])
def test_a_number_without_its_unit_is_not_planned_as_bytes(flag: str, text: str, model: Path) -> None:
    result = plan(model, flag, text)
    assert result.exit_code == 2
    assert f"{flag} {text} is {text} B" in result.stderr
    assert f"write {flag} {text}GiB" in result.stderr
    assert "GiB" not in plan(model, flag, "512KiB").stderr
    assert cli_plan.memory_size(flag, str(24 * 2**30)) == 24 * 2**30
