"""Answers and perplexity of models and adapters, and what is said where something is missing."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from recipe_tiny import build_tokenizer
from typer.testing import CliRunner

from flashoptim_hf import cli
from flashoptim_hf.after import load, texts
from flashoptim_hf.errors import ConfigurationError


def invoke(*words: object):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def test_perplexity_is_that_of_the_models_own_loss(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "held_out.txt"
    file.write_text("It is blue.\n\nSo is this.\n")
    result = invoke("eval", base, file, "--json", tmp_path / "f.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "f.json").read_text())
    loaded = load.load(str(base))
    total, count = 0.0, 0
    for line in ("It is blue.", "So is this."):
        ids = torch.tensor([loaded.tokenizer(line)["input_ids"]])
        with torch.no_grad():
            total += loaded.model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert (found["texts"], found["tokens"]) == (2, count)
    assert found["loss"] == pytest.approx(total / count, rel=1e-3)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert f"perplexity {found['perplexity']:.3f}" in result.output


def test_an_adapter_answers_on_its_base(adapter: Path) -> None:
    result = invoke("sample", adapter, "--prompt", "What is it?", "--prompt", "And?", "--tokens", 3)
    assert result.exit_code == 0, result.output
    assert "What is it?" in result.output
    assert "And?" in result.output


def test_nothing_to_do_is_said(base: Path, tmp_path: Path) -> None:
    for words, message in (
        (("sample", base), "give --prompt TEXT"),
        (("eval", base), "give a file of texts, or --tasks"),
        (("eval", base, "--tasks", "mmlu"), "this needs lm_eval"),
    ):
        result = invoke(*words)
        assert result.exit_code == 2
        assert message in result.stderr
    assert "pip install lm-eval" in result.stderr
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert "is empty" in invoke("eval", base, empty).stderr


def test_tasks_go_to_lm_eval(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def evaluate(model: Any, tasks: list[str]) -> dict[str, Any]:
        seen.update(model=model, tasks=tasks)
        return {"results": {"mmlu": {"acc,none": 0.25, "alias": "mmlu"}}}

    harness, inner, models = ModuleType("lm_eval"), ModuleType("lm_eval.models.huggingface"), ModuleType("lm_eval.models")
    harness.simple_evaluate = evaluate  # type: ignore[attr-defined]
    inner.HFLM = lambda pretrained, tokenizer: SimpleNamespace(pretrained=pretrained, tokenizer=tokenizer)  # type: ignore[attr-defined]
    for module in (harness, models, inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    result = invoke("eval", base, "--tasks", "mmlu, hellaswag", "--json", tmp_path / "f.json")
    assert result.exit_code == 0, result.output
    assert seen["tasks"] == ["mmlu", "hellaswag"]
    assert seen["model"].pretrained.config.model_type == "llama"
    assert json.loads((tmp_path / "f.json").read_text())["tasks"] == {"mmlu": {"acc,none": 0.25}}


def test_rows_become_tokens_with_one_bos() -> None:
    tokenizer = build_tokenizer()
    chat = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "Blue."}]}
    for row in ("What?", chat, {"prompt": "What?", "completion": "Blue."}, {"text": "What?"}):
        ids = texts.tokens(row, tokenizer, True, 100)
        assert ids.count(tokenizer.bos_token_id) == 1
    assert "Blue" in tokenizer.decode(texts.tokens(chat, tokenizer, True, 100))
    assert tokenizer.decode(texts.tokens(chat, tokenizer, False, 100)).endswith("assistant\n")
    assert len(texts.tokens("What?", tokenizer, True, 3)) == 3
    with pytest.raises(ConfigurationError, match="columns question; needed are messages"):
        texts.tokens({"question": "?"}, tokenizer, True, 3)
    with pytest.raises(ConfigurationError, match="no chat template"):
        texts.tokens(chat, build_tokenizer(template=None), True, 3)


def test_two_adapters_in_one_folder_must_be_told_apart(adapter: Path, tmp_path: Path) -> None:
    assert load.adapter_folder(adapter) == adapter / "mine"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / load.ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(ConfigurationError, match="adapters one, two"):
        load.adapter_folder(tmp_path)
    with pytest.raises(ConfigurationError, match="--base"):
        load.base_of(tmp_path / "one")
