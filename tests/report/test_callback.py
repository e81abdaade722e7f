"""The callback in real trainings: what it writes, when, and that the training does not notice it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import flashoptim_hf
from flashoptim_hf.report import planned
from flashoptim_hf.report.callback import ReportCallback

MakeTrainer = Callable[..., Trainer]


class Stop(TrainerCallback):
    """Ends the training after step 2, as early stopping does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        control.should_training_stop = state.global_step == 2


class Warn(TrainerCallback):
    """Warns in both ways, twice."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        warnings.warn("through warnings <i>", stacklevel=1)
        logging.get_logger("flashoptim_hf.somewhere").warning("through logging")


@pytest.fixture
def make(tmp_path: Path) -> MakeTrainer:
    def make_trainer(*callbacks: TrainerCallback, **changes: Any) -> Trainer:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, attention_dropout=0.2
        )
        values = {
            "output_dir": str(tmp_path),
            "optim": "flashoptim_paged_adamw",
            "use_cpu": True,
            "report_to": "none",
            "per_device_train_batch_size": 2,
            "max_steps": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        rows = [(torch.arange(16) * (1 + start % 3) + start) % 64 for start in range(16)]
        data = [{"input_ids": row, "labels": row} for row in rows]
        args = TrainingArguments(**{**values, **changes})
        return Trainer(LlamaForCausalLM(config), args, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks))

    return make_trainer


def cells(found: Any, label: str) -> list[str]:
    """The cells of the row that begins with a label."""
    return next([found.text(cell) for cell in row] for row in found.all("tr") if found.text(row[0]) == label)


def test_a_finished_run(make: MakeTrainer, tmp_path: Path, read: Any, agrees: Any) -> None:
    made = make(ReportCallback(), eval_strategy="steps", eval_steps=2, optim_args="page_bytes=64KiB", seed=3, hub_token="secret-of-mine")
    made.train()
    found = read(tmp_path / "report.html")
    assert agrees(found.log(), made.state.log_history)
    assert len(found.log()) == 7
    assert "finished, 4 steps" in found.text(found.all("p")[0])
    assert {"Loss", "Learning rate", "Gradient norm, before clipping", "Time of a step", "Memory of the process on the host"} <= {
        *found.titles()
    }
    assert "Moved by a step" not in found.titles()  # there is no device
    assert "No page was moved" in found.text()
    weights = sum(weight.numel() for weight in made.model.parameters())
    for label, values in {
        "name": ["flashoptim_paged_adamw"],
        "page_bytes": ["65536"],
        "codec": ["log"],
        "flashoptim-hf": [flashoptim_hf.__version__],
        "torch": [torch.__version__],
        "parameters": [f"{weights:,}"],
        "optim_args": ["page_bytes=64KiB"],
        "seed": ["3"],
    }.items():
        assert cells(found, label)[1:] == values
    assert "secret-of-mine" not in found.source + (tmp_path / "report.json").read_text()
    # what the planner says of the same run, to the byte
    for label, measured in {
        "weights that are trained": weights * 4,
        "optimizer state in use": made.state.log_history[0]["optim_state_bytes"],
    }.items():
        assert cells(found, label)[2:] == [f"{measured:,} bytes", "equal"]
    assert not found.all("li")


def test_with_a_device_traffic_and_host_memory_are_compared(make: MakeTrainer, tmp_path: Path, read: Any) -> None:
    made = make(ReportCallback(), optim_args="simulate=1,page_bytes=16KiB")
    made.train()
    found = read(tmp_path / "report.html")
    moved = made.state.log_history[0]["optim_page_in_bytes"]
    assert cells(found, "moved in by a step")[2] == f"{moved:,} bytes"
    assert {"Moved by a step", "Device memory for optimizer state"} <= {*found.titles()}


def test_stopped_early_and_skipped_steps_and_warnings(make: MakeTrainer, tmp_path: Path, read: Any) -> None:
    report = ReportCallback()
    made = make(report, Stop(), Warn())
    with torch.no_grad():
        made.model.model.embed_tokens.weight[:] = float("nan")
    before = warnings.showwarning
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made.train()
    assert warnings.showwarning is before
    assert sum(str(w.message) == "through warnings <i>" for w in seen) == 2  # they still arrive where they would
    found = read(tmp_path / "report.html")
    assert "stopped early, after step 2 of 4" in found.text(found.all("p")[0])
    said = [found.text(node) for node in found.all("li")]
    assert "2 steps were skipped because a gradient was not finite." in said
    assert said.count("through warnings <i>") == said.count("through logging") == 1
    logging.get_logger("flashoptim_hf.somewhere").warning("after the training")
    assert "after the training" not in "".join(report.run.warnings)


def test_an_evaluation_after_the_training_is_in_it(make: MakeTrainer, tmp_path: Path, read: Any) -> None:
    made = make(ReportCallback())
    made.train()
    assert "eval_loss" not in read(tmp_path / "report.html").text()
    loss = made.evaluate()["eval_loss"]
    assert read(tmp_path / "report.html").log()[-1]["eval_loss"] == loss


def test_the_training_does_not_notice(make: MakeTrainer) -> None:
    """Dropout draws from the generator that the planner's model would draw from, too."""
    models = []
    for callbacks in ([], [ReportCallback()]):
        made = make(*callbacks)  # which sets the seed
        made.train()
        models.append(made.model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_resumed_runs_have_one_report(make: MakeTrainer, tmp_path: Path, read: Any) -> None:
    make(ReportCallback(), Stop(), Warn(), save_strategy="steps", save_steps=2).train()
    make(ReportCallback(), save_strategy="steps", save_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    found = read(tmp_path / "report.html")
    assert [row["step"] for row in found.log() if "loss" in row] == [1, 2, 3, 4]
    assert [mark.partition(":")[0] for mark in found.marks("Time of a step")] == ["step 1", "step 2", "step 3", "step 4"]
    assert "through logging" in found.text()
    make(ReportCallback(), max_steps=1).train()  # a new run in the same folder begins anew
    found = read(tmp_path / "report.html")
    assert len(found.marks("Time of a step")) == 1
    assert "through logging" not in found.text()


def test_other_optimizers_and_models_without_a_plan(make: MakeTrainer, tmp_path: Path, read: Any) -> None:
    make(ReportCallback(), optim="sgd").train()
    found = read(tmp_path / "report.html")
    assert cells(found, "class")[1] == "LlamaForCausalLM"
    assert "The planner does not know such a run: ConfigurationError" in found.text()
    assert "Optimizer state, and host memory for it" not in found.titles()


def test_a_report_that_cannot_be_written_ends_no_training(make: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").mkdir()
    monkeypatch.setattr(planned, "rows", lambda *_: [][0])
    report = ReportCallback()
    made = make(report, save_strategy="steps", save_steps=2)
    made.train()
    assert made.state.global_step == 4
    assert any("report.html could not be written: IsADirectoryError" in said for said in report.run.warnings)
    assert "IndexError" in report.run.plan_remark


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    report = ReportCallback()
    args: Any = SimpleNamespace(output_dir=str(tmp_path), push_to_hub=False, device=torch.device("cpu"))
    state: Any = SimpleNamespace(is_world_process_zero=False, global_step=1, max_steps=1, log_history=[])
    for event in ("on_train_begin", "on_step_begin", "on_step_end", "on_log", "on_save", "on_evaluate", "on_train_end"):
        getattr(report, event)(args, state, None)
    report.write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_warnings_are_shown_on_after_two_reports(order: tuple[int, int], make: MakeTrainer) -> None:
    """Whichever ends first, also while another has put its own function over ours, and when it begins again below that one."""
    shown: list[str] = []
    reports = [ReportCallback(), ReportCallback()]
    made = make()
    state: Any = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=1, log_history=[])
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
        for report in reports:
            report.on_train_begin(made.args, state, made.control, model=made.model)
        first, second = (reports[number] for number in order)
        first.on_train_end(made.args, state, made.control)
        warnings.warn("between", stacklevel=1)
        first.on_train_begin(made.args, state, made.control, model=made.model)
        for report in (second, first):
            report.on_train_end(made.args, state, made.control)
        warnings.warn("after", stacklevel=1)
    assert shown == ["between", "after"]
    assert second.run.warnings == ["between"]
    assert first.run.warnings == []


def test_what_is_pushed_to_the_hub_does_not_hold_the_report(make: MakeTrainer, tmp_path: Path) -> None:
    made = make(ReportCallback())
    made.args.push_to_hub = True
    made.train()
    assert {path.name for path in tmp_path.glob("*report*")} == {"_report.html", "_report.json"}


FAILS = """
import sys
sys.path.insert(0, {folder!r})
from test_callback import *
class Boom(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            raise ValueError("boom <b>")
make.__wrapped__(Path({out!r}))(ReportCallback(), Boom(), save_strategy="steps", save_steps=2{more}).train()
"""


def test_an_exception_leaves_a_report_that_names_it(tmp_path: Path, read: Any, agrees: Any) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS.format(folder=str(Path(__file__).parent), out=str(tmp_path), more=""))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=600)
    assert "ValueError: boom <b>" in done.stderr, done.stderr[-3000:]
    assert done.returncode == 1
    found = read(tmp_path / "report.html")
    assert "ended by ValueError: boom <b> after step 3 of 4" in found.text(found.all("p")[0])
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert agrees(found.log()[:2], saved["log_history"])
    assert (tmp_path / "report.json").is_file()
