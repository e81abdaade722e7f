"""The runner: unmodified programs, as a script and as a module, with this package's names; and axolotl's hooks."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashoptim_hf import run
from flashoptim_hf.axolotl import FlashOptimArgs, FlashOptimPlugin
from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.trainer import stand_in

ROOT = Path(__file__).resolve().parents[1]
RECIPE_TESTS = ROOT / "tests" / "recipes"
HANG = 600  # seconds: no limit on speed, only the end of a run that waits for ever

# A training script as they are written everywhere: transformers alone, its parser, its Trainer. Nothing in it knows of this package.
CLM = """
import json, sys
from dataclasses import dataclass, field
from itertools import chain

import helper_beside_it
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments, default_data_collator, set_seed,
)

@dataclass
class ModelArguments:
    model_name_or_path: str

@dataclass
class DataArguments:
    train_file: str
    block_size: int = field(default=32)

def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    raw = load_dataset("text", data_files=data_args.train_file, split="train")
    tokens = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])
    def blocks(rows):
        whole = {key: list(chain(*rows[key])) for key in rows}
        size = data_args.block_size
        end = len(whole["input_ids"]) // size * size
        cut = {key: [values[i : i + size] for i in range(0, end, size)] for key, values in whole.items() if key != "token_type_ids"}
        return {**cut, "labels": [list(ids) for ids in cut["input_ids"]]}
    data = tokens.map(blocks, batched=True)
    trainer = Trainer(model=model, args=training_args, train_dataset=data, processing_class=tokenizer, data_collator=default_data_collator)
    result = trainer.train()
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    print("optimizer", type(trainer.optimizer.optimizer).__name__, trainer.optimizer.optimizer.defaults["paged"], sys.argv[0])

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(RECIPE_TESTS))
    from recipe_tiny import build_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("run") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=264, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def launch(*words: str) -> str:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "MASTER_", "WORLD_", "RANK", "LOCAL_"))}
    env.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "-m", "flashoptim_hf.run", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=HANG)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def options(model: Path, output: Path) -> list[str]:
    return [
        *("--model_name_or_path", str(model), "--output_dir", str(output), "--optim", "flashoptim_paged_adamw", "--max_steps", "3"),
        *("--logging_steps", "1", "--per_device_train_batch_size", "2", "--learning_rate", "0.01", "--report_to", "none"),
        *("--optim_args", "page_bytes=64KiB", "--use_cpu", "true", "--bf16", "false"),
    ]


def logged(output: Path) -> list[dict[str, float]]:
    (state,) = output.glob("checkpoint-*/trainer_state.json")
    return [row for row in json.loads(state.read_text())["log_history"] if "loss" in row]


def test_a_script_that_knows_nothing_of_us(model: Path, tmp_path: Path) -> None:
    (tmp_path / "helper_beside_it.py").write_text("")
    script, text = tmp_path / "run_clm_style.py", tmp_path / "train.txt"
    script.write_text(CLM)
    text.write_text("One line of text.\nAnother line of it.\n" * 20)
    printed = launch(str(script), *options(model, tmp_path / "out"), "--train_file", str(text))
    assert f"optimizer FlashAdamW True {script}" in printed
    rows = logged(tmp_path / "out")
    assert len(rows) == 3
    assert all(row["optim_state_bytes"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_trl_sft(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("\n".join(json.dumps({"text": f"sample {i} of some"}) for i in range(12)))
    words = [*options(model, tmp_path / "out"), "--dataset_name", str(data), "--gradient_checkpointing", "false", "--max_length", "32"]
    launch("trl", "sft", *words)
    rows = logged(tmp_path / "out")
    assert len(rows) == 3
    assert all(row["optim_state_bytes"] > 0 for row in rows)


# A loop with Accelerate, its optimizer made by itself, under both of torch's ways to name it.
LOOP = """
import argparse
import torch
from accelerate import Accelerator
from torch.optim import AdamW
from torch.optim.adamw import AdamW as Same
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

class Derived(AdamW):
    pass

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--output_dir")
    args = parser.parse_args()
    assert Same is AdamW is torch.optim.AdamW
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    rows = [(torch.arange(16) * (1 + i % 3) + i) % 200 for i in range(16)]
    loader = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=2)
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99), fused=True)
    assert isinstance(optimizer, AdamW) and isinstance(optimizer, torch.optim.Optimizer)
    theirs = Derived([torch.nn.Parameter(torch.zeros(2))])
    assert isinstance(theirs, AdamW) and type(theirs).__mro__[1].__module__ == "torch.optim.adamw"
    schedule = get_linear_schedule_with_warmup(optimizer, 0, 8)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step(); schedule.step(); optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
        accelerator.save_state(f"{args.output_dir}/epoch_{epoch}")
    accelerator.load_state(f"{args.output_dir}/epoch_0")
    inner = optimizer.optimizer
    accelerator.print("made", type(inner).__name__, inner.defaults["paged"], inner.defaults["page_bytes"], inner.defaults["betas"])

if __name__ == "__main__":
    main()
"""


def test_a_loop_that_makes_its_own_adamw(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    ours = ("--adamw", "flashoptim_paged_adamw", "--adamw_args=page_bytes=64KiB")
    printed = launch(*ours, str(script), "--model_name_or_path", str(model), "--output_dir", str(tmp_path / "out"))
    assert "made FlashAdamW True 65536 (0.9, 0.99)" in printed
    assert printed.count("the program's torch.optim.AdamW is FlashAdamW, paged=True") == 1
    first, last = (float(line.rpartition(" ")[2]) for line in printed.splitlines() if line.startswith("epoch "))
    assert last < first
    state = torch.load(tmp_path / "out" / "epoch_1" / "optimizer.bin", weights_only=True)
    assert all(values["exp_avg"].dtype == torch.int8 for values in state["state"].values())


def test_programs_see_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "assert __name__ == '__main__'\n"
        "import flashoptim_hf\n"
        f"pathlib.Path({str(tmp_path / 'seen.json')!r}).write_text(json.dumps([sys.argv, sys.path[0], __file__]))\n"
    )
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    run.main([str(script), "-m", "--flag", "value"])
    argv, first, file = json.loads((tmp_path / "seen.json").read_text())
    assert argv == [str(script), "-m", "--flag", "value"]
    assert first == str(tmp_path)
    assert file == str(script)

    seen = {}
    monkeypatch.setattr(runpy, "run_module", lambda name, **how: seen.update(name=name, argv=sys.argv, path=sys.path[0], **how))
    run.main(["-m", "trl.scripts.sft", "--optim", "x"])
    assert seen == {
        "name": "trl.scripts.sft",
        "argv": ["trl.scripts.sft", "--optim", "x"],
        "path": "",
        "run_name": "__main__",
        "alter_sys": True,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no program"),
        (["-m"], "no program"),
        (["--optim", "x"], "before --optim"),
        (["trll", "sft"], "trll: no such file"),
        (["trll", "sft"], "did you mean trl?"),
        (["no/such.py"], "no/such.py: no such file"),
        (["--adamw"], "--adamw needs a value"),
        (["--adamw", "flashoptim_adamw"], "no program is named"),
        (["--adamw_args", "codec=log", "x.py"], "--adamw_args goes with --adamw"),
        (
            ["--adamw", "flashoptim_lion", __file__],
            "'flashoptim_lion' cannot stand in for torch.optim.AdamW; choose one of flashoptim_adamw, ",
        ),
        (["--adamw", "flashoptim_adamw", "--adamw_args", "codecc=log", __file__], "Did you mean codec"),
    ],
)
def test_no_program_is_said(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run.main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_command_is_its_packages_script_or_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: seen.append((name, sys.argv)))
    run.main(["trl", "dpo", "--optim", "x"])
    assert seen == [("trl.scripts.dpo", ["trl.scripts.dpo", "--optim", "x"])]
    with pytest.raises(SystemExit) as caught:
        run.main(["flashoptim-hf", "--version"])  # a command without scripts: its function, in this process
    assert caught.value.code in (0, None)
    assert sys.argv == ["flashoptim-hf", "--version"]


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "--nproc_per_node=2", "x.py"],
        ["accelerate", "launch", "x.py"],
        ["-m", "torch.distributed.run", "x.py"],
        ["deepspeed", "x.py"],
    ],
)
def test_a_launcher_comes_before_the_runner(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What it starts would know of nothing, and train with another optimizer without a word."""
    with pytest.raises(SystemExit) as caught:
        run.main(["--adamw", "flashoptim_adamw", *words])
    assert caught.value.code == 2
    assert " -m flashoptim_hf.run ..." in capsys.readouterr().err


@pytest.mark.parametrize("option", ["amsgrad", "maximize", "differentiable"])
def test_another_algorithm_than_adamw_is_refused(option: str) -> None:
    original = torch.optim.AdamW
    remove = stand_in.install("flashoptim_adamw", None)
    weight = torch.nn.Parameter(torch.zeros(4))
    try:
        assert not torch.optim.AdamW([weight], **{option: False}, foreach=True, fused=None).defaults["paged"]
        with pytest.raises(ConfigurationError, match=f"{option}=True"):
            torch.optim.AdamW([weight], **{option: True})
        with pytest.raises(TypeError, match="surprise"):
            torch.optim.AdamW([weight], surprise=1)
        assert issubclass(original, torch.optim.AdamW)
        assert not isinstance(torch.optim.SGD([weight]), torch.optim.AdamW)
    finally:
        remove()
    assert torch.optim.AdamW is original


def test_what_stands_in_is_a_class_as_the_original_is(tmp_path: Path) -> None:
    """Type hints, signatures and subclasses of programs, and the Trainer's own AdamW, which tells classes from functions."""
    original = torch.optim.AdamW
    remove = stand_in.install("flashoptim_paged_adamw", None)
    try:
        new = torch.optim.AdamW
        assert isinstance(new, type)
        assert issubclass(new, original)
        assert issubclass(FlashAdamW, new)
        assert isinstance(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4))]), new | None)
        assert inspect.signature(new) == inspect.signature(original)
        assert pickle.loads(pickle.dumps(new)) is new

        class Derived(new):
            def __init__(self, params: list[torch.nn.Parameter], speed: float) -> None:
                super().__init__(params, lr=speed)

        derived = Derived([torch.nn.Parameter(torch.zeros(4))], speed=0.5)
        assert isinstance(derived, new)
        assert isinstance(derived, Derived)
        assert not isinstance(derived, FlashAdamW)
        assert not issubclass(FlashAdamW, Derived)
        assert list(inspect.signature(Derived).parameters) == ["params", "speed"]
        made = trainer(tmp_path).create_optimizer()
        assert type(made) is FlashAdamW
        assert made.defaults["paged"]
    finally:
        remove()


# ---------------------------------------------------------------------- axolotl


def trainer(tmp_path: Path) -> SimpleNamespace:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", learning_rate=3e-4, weight_decay=0.1, adam_beta2=0.95, optim="adamw_torch"
    )
    return Trainer(LlamaForCausalLM(config), args)


def test_the_plugins_optimizer_has_axolotls_values(tmp_path: Path) -> None:
    plugin = FlashOptimPlugin()
    plugin.register({})
    made = plugin.create_optimizer({"flashoptim": "flashoptim_paged_adamw", "flashoptim_args": "page_bytes=2MiB"}, trainer(tmp_path))
    assert isinstance(made, FlashAdamW)
    assert (made.defaults["lr"], made.defaults["betas"], made.defaults["paged"]) == (3e-4, (0.9, 0.95), True)
    assert made.defaults["page_bytes"] == 2 * 2**20
    decay = {group["weight_decay"]: sum(p.dim() < 2 for p in group["params"]) for group in made.param_groups}
    assert decay[0.1] == 0
    assert decay[0.0] == 3  # the norms
    assert FlashOptimPlugin().create_optimizer({}, trainer(tmp_path)) is None
    with pytest.raises(ConfigurationError, match="flashoptim='adamw' is not known; choose one of flashoptim_adamw"):
        plugin.create_optimizer({"flashoptim": "adamw"}, trainer(tmp_path))


def test_the_plugins_other_hooks_do_nothing() -> None:
    plugin = FlashOptimPlugin()
    module, _, name = plugin.get_input_args().rpartition(".")
    assert getattr(sys.modules[module], name) is FlashOptimArgs
    assert FlashOptimArgs(flashoptim="flashoptim_adamw").flashoptim_args is None
    for hook in (
        "pre_model_load",
        "post_model_load",
        "post_trainer_create",
        "load_datasets",
        "create_lr_scheduler",
        "post_train",
        "new_hook",
    ):
        assert getattr(plugin, hook)(None, None) is None
    assert plugin.add_callbacks_pre_trainer(None, None) == plugin.add_callbacks_post_trainer(cfg=None, trainer=None) == []
