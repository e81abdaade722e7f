"""Fresh processes: the names work whatever is imported first, nothing heavy is imported for them, and files load without this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flashoptim_hf.trainer import hook

TRAIN = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

def train(out, **changes):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    rows = [torch.arange(16) + start for start in range(8)]
    args = TrainingArguments(
        output_dir=out, optim="flashoptim_paged_adamw", use_cpu=True, report_to="none", max_steps=2, logging_steps=1, disable_tqdm=True,
        save_steps=2, **changes,
    )
    trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    return trainer
"""

LOGGED = """
entry = trainer.state.log_history[0]
print(json.dumps({"optim": trainer.args.optim, "logged": sorted(key for key in entry if key.startswith("optim_"))}))
"""


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter and return what it did; it must end well."""
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    result: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def test_importing_costs_nothing() -> None:
    code = """
import sys
sys.modules["triton"] = None  # as where Triton is not installed
before = set(sys.modules)
import flashoptim_hf
flashoptim_hf.register(), dir(flashoptim_hf), flashoptim_hf.__version__
new = {name.partition(".")[0] for name in set(sys.modules) - before}
import json
print(json.dumps({"heavy": sorted(new & {"torch", "transformers", "accelerate", "numpy", "triton", "peft", "bitsandbytes"}),
                  "own": sorted(name for name in sys.modules if name.startswith("flashoptim_hf"))}))
"""
    result = last_line(run(code))
    assert result["heavy"] == []
    assert result["own"] == [
        "flashoptim_hf",
        *(f"flashoptim_hf.{name}" for name in ("errors", "trainer", "trainer.hook", "trainer.options", "trainer.register")),
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plugin first, transformers afterwards, Triton missing: a training with a checkpoint, whose arguments a spawned process can read."""
    folder = tmp_path_factory.mktemp("plugin_first")
    code = f"""
import json, multiprocessing, sys
import flashoptim_hf
assert "transformers" not in sys.modules
{TRAIN}
trainer = train(sys.argv[1], optim_args="betas=(0.9, 0.95)")
with multiprocessing.get_context("spawn").Pool(1) as pool:  # as the workers of a data loader get it
    assert pool.apply(getattr, (trainer.args, "optim")) == "flashoptim_paged_adamw"
{LOGGED}
"""
    assert last_line(run(code, str(folder))) == {"optim": "flashoptim_paged_adamw", "logged": LOGGED_KEYS}
    return folder / "checkpoint-2"


LOGGED_KEYS = [f"optim_{key}" for key in ("host_bytes", "page_in_bytes", "page_out_bytes", "skipped_steps", "state_bytes")]


def test_plugin_first(checkpoint: Path) -> None:
    assert (checkpoint / "optimizer.pt").exists()


def test_trainer_first_then_plugin(tmp_path: Path) -> None:
    code = f"""
import json, sys
from transformers.trainer import DEFAULT_CALLBACKS
{TRAIN}
import flashoptim_hf
from flashoptim_hf import FlashOptimCallback
assert FlashOptimCallback in DEFAULT_CALLBACKS
trainer = train(sys.argv[1], optim_args="betas=(0.9, 0.95)")
{LOGGED}
"""
    assert last_line(run(code, str(tmp_path))) == {"optim": "flashoptim_paged_adamw", "logged": LOGGED_KEYS}


def test_arguments_first_then_plugin_and_a_name_that_is_taken(tmp_path: Path) -> None:
    code = f"""
import json, sys
from transformers.training_args import OptimizerNames, TrainingArguments
from transformers import trainer_optimizer
assert "transformers.trainer" not in sys.modules

# as if transformers had this name itself
OptimizerNames._value2member_map_["flashoptim_adamw"] = OptimizerNames.SGD
trainer_optimizer._OPTIMIZER_HANDLERS["flashoptim_adamw"] = "theirs"
import flashoptim_hf
assert "transformers.trainer" not in sys.modules
assert OptimizerNames("flashoptim_adamw") is OptimizerNames.SGD
assert trainer_optimizer._OPTIMIZER_HANDLERS["flashoptim_adamw"] == "theirs"
assert not hasattr(OptimizerNames, "FLASHOPTIM_ADAMW")
{TRAIN}
trainer = train(sys.argv[1], optim_args="betas=(0.9, 0.95)")
flashoptim_hf.unregister()
assert OptimizerNames("flashoptim_adamw") is OptimizerNames.SGD
assert trainer_optimizer._OPTIMIZER_HANDLERS["flashoptim_adamw"] == "theirs"
{LOGGED}
"""
    assert last_line(run(code, str(tmp_path))) == {"optim": "flashoptim_paged_adamw", "logged": LOGGED_KEYS}


def test_without_the_plugin_files_load_and_the_error_is_transformers_own(checkpoint: Path) -> None:
    code = """
import json, pathlib, sys, warnings
import torch
from transformers import TrainerState, TrainingArguments
from transformers.trainer_pt_utils import safe_globals
folder = pathlib.Path(sys.argv[1])
args = torch.load(folder / "training_args.bin", weights_only=False)
assert type(args.optim) is str and args.optim == "flashoptim_paged_adamw", args.optim
assert json.loads(args.to_json_string())["optim"] == "flashoptim_paged_adamw"

needed = torch.serialization.get_unsafe_globals_in_checkpoint(folder / "training_args.bin")
assert not [name for name in needed if "flashoptim" in name], needed
found = [__import__(name.rpartition(".")[0], fromlist=["_"]) for name in needed]
with torch.serialization.safe_globals([getattr(module, name.rpartition(".")[2]) for module, name in zip(found, needed)]):
    assert torch.load(folder / "training_args.bin", weights_only=True).optim == "flashoptim_paged_adamw"

for name in ("optimizer.pt", "scheduler.pt"):
    torch.load(folder / name, weights_only=True)
with safe_globals():  # numpy's random state, as the Trainer itself loads it
    torch.load(folder / "rng_state.pth", weights_only=True)
json.loads((folder / "flashoptim_complete.json").read_text())
assert TrainerState.load_from_json(str(folder / "trainer_state.json")).log_history[0]["optim_state_bytes"] > 0
try:
    TrainingArguments(output_dir=str(folder), optim="flashoptim_paged_adamw")
except ValueError as error:
    message = str(error)
assert not [name for name in sys.modules if name.startswith("flashoptim_hf.") or name == "flashoptim_hf"]

# a transformers that has no table of optimizers
sys.modules["transformers.trainer_optimizer"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    import flashoptim_hf
    flashoptim_hf.register()
try:
    TrainingArguments(output_dir=str(folder), optim="flashoptim_paged_adamw")
except ValueError as error:
    assert str(error) == message
print(json.dumps({"message": message, "warnings": [str(entry.message) for entry in caught if "flashoptim" in str(entry.message)]}))
"""
    result = last_line(run(code, str(checkpoint)))
    assert str(result["message"]).startswith("flashoptim_paged_adamw is not a valid OptimizerNames")
    (warning,) = result["warnings"]  # type: ignore[misc]
    assert "flashoptim_paged_adamw" in warning
    assert "are not registered" in warning
    assert "optimizer_cls_and_kwargs" in warning


# ---------------------------------------------------------------------- the finder itself


@pytest.fixture
def late_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that nobody has imported yet."""
    name = "module_that_comes_late"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_an_action_runs_once_the_module_is_complete(late_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    finder = hook.AfterImport({late_module: lambda module: seen.append(module.value)})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    module: ModuleType = __import__(late_module)
    assert seen == [1]
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"  # type: ignore[union-attr]
    __import__(late_module)
    assert seen == [1]
    __import__("importlib").reload(module)
    assert seen == [1, 1]


def test_a_finder_that_looks_first_and_asks_the_others_is_no_obstacle(late_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    class Nosy:
        asking = False

        def find_spec(self, fullname: str, *_: object) -> object:
            if self.asking or fullname != late_module:
                return None
            self.asking = True
            return importlib.util.find_spec(fullname)

    seen: list[str] = []
    finder = hook.AfterImport({late_module: lambda module: seen.append(module.__name__)})
    monkeypatch.setattr(sys, "meta_path", [Nosy(), finder, *sys.meta_path])
    __import__(late_module)
    assert seen == [late_module]


def test_a_module_that_does_not_exist_still_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = hook.AfterImport({"module_that_never_comes": lambda _: None})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="module_that_never_comes"):
        __import__("module_that_never_comes")
