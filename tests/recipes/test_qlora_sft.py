"""The recipe through its real command line: resumption, precision, processes, and what the options turn into."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import qlora_sft
import recipe_launch
import sft_run
import torch
from recipe_launch import HANG, ROOT, state, tensors
from safetensors.torch import load_file

from flashoptim_hf.errors import CheckpointError, ConfigurationError
from flashoptim_hf.trainer import complete

SCRIPT = ROOT / "recipes" / "qlora_sft.py"
STEPS, HALF = 6, 3


def launch(*options: str, launcher: tuple[str, ...] = (), expect: int = 0) -> str:
    return recipe_launch.launch("qlora_sft.py", *options, launcher=launcher, expect=expect)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Number {i}?"}, {"role": "assistant", "content": "Yes, " * (i % 4 + 1) + str(i)}]}
        for i in range(24)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def options(model: Path, data: Path, output: Path, adapter: str) -> list[str]:
    settings = {
        "model_name_or_path": model,
        "dataset": data,
        "eval_fraction": 0.2,
        "output_dir": output,
        "adapter_name": adapter,
        "optim": "flashoptim_paged_adamw",
        "assistant_only_loss": True,
        "max_steps": STEPS,
        "save_steps": HALF,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "lora_dropout": 0.1,  # so that the state of the random numbers matters too
        "max_length": 96,
        "sample_tokens": 2,
        "disable_tqdm": True,
    }
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="session", params=["default", "mine"])
def run(
    request: pytest.FixtureRequest, tiny_model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[str], str]:
    """An uninterrupted run: the adapter's name, its folder, its options, and what it printed."""
    output = tmp_path_factory.mktemp(request.param) / "whole"
    settings = options(tiny_model, data, output, request.param)
    return request.param, output, settings, launch(*settings)


def test_resumed_run_equals_uninterrupted_run(run: tuple[str, Path, list[str], str], tmp_path: Path) -> None:
    name, whole, settings, _ = run
    parts = tmp_path / "parts"  # holds what a run killed after its first checkpoint leaves behind
    shutil.copytree(whole / f"checkpoint-{HALF}", parts / f"checkpoint-{HALF}")
    settings = [str(parts) if word == str(whole) else word for word in settings]
    launch(*settings, "--resume_from_checkpoint", "true")

    last, resumed = whole / f"checkpoint-{STEPS}", parts / f"checkpoint-{STEPS}"
    keys = ("loss", "grad_norm", "learning_rate")
    losses = [[{key: row[key] for key in keys} for row in state(folder)["log_history"] if "loss" in row] for folder in (last, resumed)]
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1]
    folder = "." if name == "default" else name
    adapter, again = (load_file(path / folder / "adapter_model.safetensors") for path in (last, resumed))
    assert adapter.keys() == again.keys()
    assert all(adapter[key].dtype == again[key].dtype and torch.equal(adapter[key], again[key]) for key in adapter)
    optimizer, again = (tensors(torch.load(path / "optimizer.pt", weights_only=True)) for path in (last, resumed))
    assert len(optimizer) > 20
    assert optimizer.keys() == again.keys()
    assert all(torch.equal(optimizer[key], again[key]) for key in optimizer)
    # The final adapter is the last checkpoint's, and it is not the first one's.
    final = load_file(parts / folder / "adapter_model.safetensors")
    early = load_file(parts / f"checkpoint-{HALF}" / folder / "adapter_model.safetensors")
    assert all(torch.equal(final[key], adapter[key]) for key in adapter)
    assert not all(torch.equal(early[key], adapter[key]) for key in adapter)


def test_run_tells_what_is_in_force_and_leaves_its_results(run: tuple[str, Path, list[str], str]) -> None:
    _, output, _, printed = run
    assert "in force: 1 process(es), cpu, mixed precision bf16, trainable weights in bfloat16, optimizer flashoptim_paged_adamw" in printed
    assert "of them trained on" in printed
    assert "device map {'': 'cpu'}" in printed
    for row in (
        "held-out loss before / after",
        "perplexity",
        "tokens per second",
        "optimizer state",
        "fp32 AdamW would hold",
        "pages in / out",
    ):
        assert row in printed
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    history = state(output / f"checkpoint-{STEPS}")["log_history"]
    assert next(row["step"] for row in history if "eval_loss" in row) == 0


def test_adapter_and_optimizer_of_two_steps_are_refused(run: tuple[str, Path, list[str], str], tmp_path: Path) -> None:
    name, whole, settings, _ = run
    adapter = Path("." if name == "default" else name) / "adapter_model.safetensors"
    for file in (adapter, Path("optimizer.pt"), Path("trainer_state.json")):
        mixed = tmp_path / file.name / f"checkpoint-{HALF}"
        shutil.copytree(whole / f"checkpoint-{HALF}", mixed)
        assert sft_run.resume_folder("true", str(mixed.parent)) == str(mixed)
        shutil.copy(whole / f"checkpoint-{STEPS}" / file, mixed / file)
        with pytest.raises(CheckpointError, match=f"{file.name} is corrupt"):
            sft_run.resume_folder(str(mixed), "unused")
        (mixed / file).unlink()
        with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
            sft_run.resume_folder(str(mixed), "unused")
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            sft_run.resume_folder("true", str(mixed.parent))
    unsealed = tmp_path / "unsealed"
    shutil.copytree(whole / f"checkpoint-{HALF}", unsealed)
    (unsealed / complete.MARK).unlink()
    with pytest.raises(CheckpointError, match=complete.MARK):
        sft_run.resume_folder(str(unsealed), "unused")
    if name == "default":  # once through the command line: it stops before anything is trained
        mixed = tmp_path / "optimizer.pt" / f"checkpoint-{HALF}"
        shutil.copy(whole / f"checkpoint-{STEPS}" / "optimizer.pt", mixed)
        printed = launch(*settings, "--output_dir", str(tmp_path / "never"), "--resume_from_checkpoint", str(mixed), expect=1)
        assert "\nerror: " in printed
        assert "Traceback" not in printed.partition("\nerror: ")[0]
        assert "optimizer.pt is corrupt" in printed
        assert not (tmp_path / "never").exists()


def test_resume_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    for value in ("true", True):
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            sft_run.resume_folder(value, str(tmp_path))
    with pytest.raises(CheckpointError, match="trainer_state"):
        sft_run.resume_folder(str(tmp_path), "unused")
    for value in (None, "", "false", False):
        assert sft_run.resume_folder(value, str(tmp_path)) is None


# ---------------------------------------------------------------------- precision and processes

CONTRADICTIONS = {
    "precision": (
        ("--mixed_precision", "fp16", "--num_processes", "1"),
        (),
        "accelerate launch says mixed precision fp16, the recipe says bf16",
    ),
    "processes": (("--cpu", "--num_processes", "2", "--mixed_precision", "bf16"), (), "told of several processes"),
    "launcher's option after the script": (("--num_processes", "1"), ("--mixed_precision", "bf16"), "--mixed_precision"),
    "missing launcher config": (("--config_file", "no/such/file.yaml"), (), "no/such/file.yaml"),
}


@pytest.mark.parametrize(("launcher", "added", "message"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_contradictory_launch_stops(
    launcher: tuple[str, ...], added: tuple[str, ...], message: str, tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    printed = launch(*options(tiny_model, data, tmp_path / "never", "default"), *added, launcher=launcher, expect=1)
    assert message in printed
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("environ", "precision", "world_size"),
    [
        ({}, "bf16", 1),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "bf16", 1),  # what the launcher says when it was told nothing
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16", 1),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "fp16", 1),
        ({"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "h", "MASTER_PORT": "1", "WORLD_SIZE": "2"}, "bf16", 2),
        ({"MASTER_ADDR": "h", "MASTER_PORT": "1"}, "bf16", 1),  # a cluster's leftovers, no launcher
    ],
)
def test_launches_that_agree_pass(environ: dict[str, str], precision: str, world_size: int) -> None:
    sft_run.check_launch(SimpleNamespace(mixed_precision=precision, world_size=world_size), environ)  # type: ignore[arg-type]


def test_two_processes_each_load_on_their_own_device(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    settings = [*options(tiny_model, data, tmp_path / "two", "default"), "--max_steps", "2", "--save_strategy", "no"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), *settings]
    done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=HANG)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    for rank in (0, 1):
        assert f"[rank {rank}] loading {tiny_model} with device map {{'': 'cpu'}}" in done.stdout
    assert done.stdout.count("in force: 2 process(es)") == 1
    page = (tmp_path / "two" / "report.html").read_text()
    assert "2 per process, 1 micro batches, 2 processes" in page
    assert page.count(">equal<") == 3  # weights and state of this process, as planned


@pytest.mark.parametrize(
    ("device", "index", "fsdp", "expected"),
    [("cuda", 1, "false", "cuda:1"), ("xpu", 0, "false", "xpu:0"), ("cpu", 1, "false", "cpu"), ("cuda", 1, "true", "cpu")],
)
def test_device_map_comes_from_the_local_process_index(
    device: str, index: int, fsdp: str, expected: str, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", fsdp)
    seen: dict[str, Any] = {}

    def load(*_: Any, **kwargs: Any) -> None:
        seen.update(kwargs)
        raise KeyboardInterrupt  # what follows needs the device

    monkeypatch.setattr(qlora_sft.AutoModelForCausalLM, "from_pretrained", load)
    _, _, model_args = parse(tiny_model, "unused")
    args = SimpleNamespace(
        fp16=False, device=torch.device(device), local_process_index=index, process_index=index + 2, trust_remote_code=False, seed=0
    )
    with pytest.raises(KeyboardInterrupt):
        qlora_sft.load_model(model_args, args, "default")  # type: ignore[arg-type]
    assert seen["device_map"] == {"": expected}
    assert seen["trust_remote_code"] is False


@pytest.mark.parametrize(
    ("launched", "options", "expected"),
    [
        ("false", [], torch.uint8),
        ("true", [], torch.bfloat16),
        ("true", ["--bnb_4bit_quant_storage", "float32"], torch.float32),
    ],
)
def test_fsdp_stores_weights_in_what_it_can_cut(
    launched: str, options: list[str], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", launched)
    _, args, model_args = parse(tiny_model, "unused", "--use_cpu", "true", *options)
    model = qlora_sft.load_model(model_args, args, "default")
    stored = {weight.dtype for weight in model.parameters() if type(weight).__name__ == "Params4bit"}
    assert stored == {expected}


# ---------------------------------------------------------------------- the model


def parse(model: Path, output: Path | str, *more: str) -> Any:
    words = ["--model_name_or_path", str(model), "--dataset", "d.jsonl", "--output_dir", str(output), *more]
    return qlora_sft.make_parser().parse_args_and_config(words)


def test_defaults_are_qlora_and_not_those_of_trl(tiny_model: Path, tmp_path: Path) -> None:
    _, args, model_args = parse(tiny_model, tmp_path)
    assert args.optim == "flashoptim_paged_adamw"
    assert args.bf16
    assert not args.trust_remote_code
    model = qlora_sft.load_model(model_args, args, "mine")
    config = model.config.quantization_config
    assert config.load_in_4bit
    assert config.bnb_4bit_quant_type == "nf4"
    assert config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    adapted = {name.split(".")[-4] for name, weight in model.named_parameters() if weight.requires_grad}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert model.active_adapters == ["mine"]


def test_flags_win_over_the_file(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("learning_rate: 0.5\nlora_r: 4\nlora_target_modules: all-linear\n")
    _, args, model_args = parse(tiny_model, tmp_path, "--config", str(file), "--lora_r", "2")
    assert (args.learning_rate, model_args.lora_r, model_args.lora_target_modules) == (0.5, 2, "all-linear")
    file.write_text("learning_rat: 0.5\n")
    with pytest.raises(ValueError, match="learning_rat"):
        parse(tiny_model, tmp_path, "--config", str(file))


def test_without_an_adapter_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    _, args, model_args = parse(tiny_model, tmp_path, "--use_peft", "false")
    with pytest.raises(ConfigurationError, match="use_peft=false"):
        qlora_sft.load_model(model_args, args, "default")


def test_gradients_are_the_same_after_an_evaluation(tiny_model: Path, tmp_path: Path) -> None:
    _, args, model_args = parse(tiny_model, tmp_path, "--lora_dropout", "0")
    model = qlora_sft.load_model(model_args, args, "default")
    ids = torch.arange(5, 25)[None]
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(1))

    def gradients() -> dict[str, torch.Tensor]:
        model.train()
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    before = gradients()
    model.eval()
    with torch.no_grad():
        model(input_ids=ids)
    after = gradients()
    assert len(before) == 28
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_trainable_fp16_weights_become_fp32_and_can_be_unscaled() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4).half(), torch.nn.Linear(4, 4).half(), torch.nn.Linear(4, 4).bfloat16())
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="FP16 gradients"):
        scaler.unscale_(optimizer)

    model.zero_grad()
    kept = [model[1].weight.clone(), *model[0].parameters()]
    assert sft_run.lift_fp16(model, scaled=False) == ["1.weight", "1.bias"]
    assert [weight.dtype for weight in model.parameters()] == [torch.float16] * 2 + [torch.float32] * 2 + [torch.bfloat16] * 2
    assert torch.equal(model[1].weight, kept[0].float())
    assert sft_run.lift_fp16(model, scaled=False) == []
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    scaler.unscale_(optimizer)
    assert sft_run.lift_fp16(model, scaled=True) == ["2.weight", "2.bias"]


def test_recipe_is_short_and_uses_public_names_only() -> None:
    source = SCRIPT.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 200
    for path in SCRIPT.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
            private = [part for name in names for part in name.split(".") if part.startswith("_") and part != "__future__"]
            assert not private, f"{path.name}: {private}"
