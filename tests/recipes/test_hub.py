"""What a run uploads with `push_to_hub`: seen at the hub's own interface, which is replaced by one that keeps lists."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import qlora_sft
import sft_card
import transformers.trainer
from huggingface_hub import get_token
from huggingface_hub.utils import filter_repo_objects
from recipe_launch import ROOT, run_here

SECRET = "hf_" + "x" * 30


class Hub:
    """Repositories made and folders uploaded: (path in the repository, the files' contents)."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.uploads: list[tuple[str, dict[str, bytes]]] = []

    def create_repo(self, name: str, **options: Any) -> Any:
        self.made.append({"name": name, **options})
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, *, repo_id: str, folder_path: str, ignore_patterns: Any = None, path_in_repo: str = "", **options: Any) -> Any:
        assert repo_id == "me/out"
        files = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
        kept = filter_repo_objects(files, ignore_patterns=ignore_patterns)
        self.uploads.append((path_in_repo, {name: Path(folder_path, name).read_bytes() for name in kept}))
        return SimpleNamespace(is_done=lambda: True, done=lambda: True, result=lambda: None) if options.get("run_as_future") else None


@pytest.fixture
def push(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*more: str) -> Hub:
        hub = Hub()
        monkeypatch.setattr(transformers.trainer, "hf_api", lambda *_, **__: hub)
        monkeypatch.setenv("HF_TOKEN", "")
        data = tmp_path / "train.jsonl"
        data.write_text("\n".join(json.dumps({"prompt": f"private {i}? ", "completion": "yes"}) for i in range(16)))
        settings = {
            "model_name_or_path": tiny_model,
            "dataset": data,
            "output_dir": tmp_path / "out",
            "eval_fraction": 0.2,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "sample_every_evals": 1,
            "max_steps": 2,
            "save_steps": 1,
            "logging_steps": 1,
            "per_device_train_batch_size": 2,
            "max_length": 64,
            "sample_tokens": 2,
            "first_look": 0,
            "disable_tqdm": True,
            "push_to_hub": True,
            "hub_token": SECRET,
        }
        run_here(qlora_sft, monkeypatch, [*(word for key, value in settings.items() for word in (f"--{key}", str(value))), *more])
        return hub

    return run


def test_adapter_tokenizer_and_card_are_uploaded_and_nothing_else(push: Any, tmp_path: Path) -> None:
    hub = push()
    assert [made["name"] for made in hub.made] == ["out"]
    assert len(hub.uploads) >= 2  # while it trains, and at the end
    allowed = {
        *("adapter_model.safetensors", "adapter_config.json", "README.md", "training_args.bin"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    }
    for place, files in hub.uploads:
        assert place == ""
        assert set(files) <= allowed
        assert not any(b"private " in data for name, data in files.items())  # no sample of the data
        assert not any(SECRET.encode() in data for data in files.values())
    assert get_token() == SECRET  # what the hub's client uses where it is given none
    files = hub.uploads[-1][1]
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= set(files)
    assert files["adapter_model.safetensors"] == (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    card = files["README.md"].decode()
    head = card.split("---")[1]
    for part in ("- flashoptim-hf", "- trl", "library_name: peft"):
        assert part in head, head
    assert "None" not in card
    assert "None" not in (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in card  # neither the data's path nor the output's
    assert "| optimizer | flashoptim_paged_adamw |" in card
    assert "| steps | 2 of 2 |" in card
    assert "| held-out loss, before and after |" in card
    assert (tmp_path / "out" / "_report.html").is_file()
    assert (tmp_path / "out" / "_samples.jsonl").is_file()


@pytest.mark.parametrize(
    ("dataset", "found"),
    [
        (None, None),
        ("org/name", "org/name"),
        ("org/name:train_sft", "org/name"),
        ("data/my.jsonl", None),
        ("/abs/x.parquet", None),
        (str(Path(__file__).parent), None),
    ],
)
def test_a_card_names_hub_ids_alone(dataset: str | None, found: str | None) -> None:
    assert sft_card.hub_id(dataset) == found


@pytest.mark.parametrize("recipe", ["qlora_sft", "full_sft", "qlora_dpo"])
def test_every_recipe_hides_the_token_before_a_trainer_is_made(recipe: str) -> None:
    source = (ROOT / "recipes" / f"{recipe}.py").read_text(encoding="utf-8")
    assert 0 < source.index("sft_options.hide_token(args)") < source.index("trainer = ")


def test_optimizer_state_goes_up_only_when_asked_for(push: Any) -> None:
    hub = push("--hub_strategy", "checkpoint")
    by_place: dict[str, set[str]] = {}
    for place, files in hub.uploads:
        by_place.setdefault(place, set()).update(files)
    assert "optimizer.pt" in by_place["last-checkpoint"]
    assert "optimizer.pt" not in by_place[""]
