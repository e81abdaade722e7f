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
from flashoptim_hf.after import evaluate, load, texts
from flashoptim_hf.errors import ConfigurationError


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


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


def test_perplexity_is_of_the_answers_where_there_are_some(base: Path, tmp_path: Path) -> None:
    """Against losses gathered by hand: the characters of the answers and their end marks, each of which is a token here."""
    from recipe_tiny import EOS

    file = tmp_path / "held_out.jsonl"
    rows = [
        {"messages": [*turns("Colour?", "Blue."), *turns("And now?", "Red, too.")]},
        {"prompt": "Which?", "completion": "This."},
        {"instruction": "Add", "input": "1 1", "output": "2"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    result = invoke("eval", base, file, "--json", tmp_path / "f.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "f.json").read_text())

    loaded = load.load(str(base))
    losses: list[float] = []
    answers: list[float] = []
    for talk in (
        [("Colour?", "Blue."), ("And now?", "Red, too.")],
        [("Which?", "This.")],
        [("Add\n\n1 1", "2")],
    ):
        parts = [("<s>", False)]
        for question, answer in talk:
            parts += [(f"<|turn|>user\n{question}{EOS}\n<|turn|>assistant\n", False), (answer + EOS, True), ("\n", False)]
        pieces = [(loaded.tokenizer(part, add_special_tokens=False)["input_ids"], counted) for part, counted in parts]
        ids = torch.tensor([[token for piece, _ in pieces for token in piece]])
        with torch.no_grad():
            each = torch.nn.functional.cross_entropy(loaded.model(ids).logits[0, :-1].float(), ids[0, 1:], reduction="none").tolist()
        losses += each
        answers += [loss for loss, counted in zip(each, [c for piece, c in pieces for _ in piece][1:], strict=True) if counted]
    assert len(answers) == len("Blue.Red, too.This.2") + 4
    assert (found["counted"], found["texts"], found["tokens"]) == ("answers", 3, len(answers))
    assert found["loss"] == pytest.approx(sum(answers) / len(answers), rel=1e-3)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["all_tokens"]["tokens"] == len(losses)
    assert found["all_tokens"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-3)
    assert f"3 texts, {len(answers)} tokens of answers predicted" in result.output
    assert f"over all {len(losses)} tokens of 3 texts, prompts included" in result.output


def test_answers_that_a_template_hides_are_not_guessed(base: Path) -> None:
    from recipe_tiny import EMPTIED

    loaded = load.load(str(base))
    rows = [texts.encode({"messages": [*turns("a", "b"), *turns("c", "d")]}, build_tokenizer(EMPTIED), 200)]
    found = evaluate.perplexity(loaded.model, rows)
    assert (found["counted"], found["unmarked"], found["tokens"]) == ("all", 1, len(rows[0].ids) - 1)
    assert "hides where answers begin" in evaluate.lines("f", found)[-1]


@pytest.mark.parametrize(
    "name", ["STOCK", "WITHOUT_EOS", "LAST_EOS_ONLY", "MARKED", "MARKED_CONTENT_ONLY", "MARKED_FULL", "MARKED_EMPTY", None]
)
def test_answers_are_what_the_recipe_learns(name: str | None) -> None:
    import recipe_tiny
    import sft_data

    tokenizer = build_tokenizer(name and getattr(recipe_tiny, name))
    plan = sft_data.Plan(assistant_only=True)
    talk = [{"role": "system", "content": "Be short."}, *turns("Colour?", "Blue."), *turns("And?", "Red.")]
    chats = [
        {"messages": talk},
        {"conversations": [{"from": "human", "value": "Hm?"}, {"from": "gpt", "value": "Yes."}]},
        {"prompt": talk[:-1], "completion": talk[-1:]},
    ]
    plain = [
        {"prompt": "Which? ", "completion": " This."},
        {"prompt": "Which?\n", "completion": "    indented\n"},
        {"prompt": "Which?", "completion": " "},
        {"instruction": "Add", "input": "1 1", "output": "2", "system": "Count."},
        {"instruction": "Add", "input": "", "output": "2"},
    ]
    for row in [*(chats if name else []), *plain]:
        mine, theirs = texts.encode(row, tokenizer, 1024), sft_data.encode(row, tokenizer, plan)
        assert mine.answers is not None, row
        learned = [i for i, label in enumerate(theirs["labels"]) if label != sft_data.IGNORED]
        assert [i for i, counted in enumerate(mine.answers) if counted] == learned, row
        assert mine.ids[: len(theirs["input_ids"])] == theirs["input_ids"], row  # white space after the end mark may follow
        if "messages" not in row and "conversations" not in row:
            assert texts.given(row, tokenizer, 1024) == sft_data.prompt_ids(row, tokenizer, plan)


def test_files_are_what_their_names_say(tmp_path: Path) -> None:
    def file(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    row = {"prompt": "a\u2028b", "completion": "c"}  # a line separator that is none of JSON lines
    assert texts.read(file("a.jsonl", json.dumps(row, ensure_ascii=False) + "\n\n")) == [row]
    assert texts.read(file("a.json", json.dumps([row, row]))) == [row, row]
    assert texts.read(file("a.csv", 'prompt,completion\n"one, and\ntwo",2\n')) == [{"prompt": "one, and\ntwo", "completion": "2"}]
    with pytest.raises(ConfigurationError, match=r"b\.jsonl, line 2, is not JSON"):
        texts.read(file("b.jsonl", '{"text": "a"}\n{"text": \n'))
    with pytest.raises(ConfigurationError, match="is Parquet"):
        texts.read(file("a.parquet", "x"))
    (tmp_path / "latin.txt").write_bytes(b"\xe4\xf6")
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        texts.read(tmp_path / "latin.txt")


def test_prompts_that_are_rendered_already_stay_as_they_are() -> None:
    tokenizer = build_tokenizer()
    row = {"prompt": "<s><|turn|>user\nWhich?</s>\n<|turn|>assistant\n", "completion": "This."}
    assert tokenizer.decode(texts.given(row, tokenizer, 99)) == row["prompt"]
    assert tokenizer.decode(texts.encode(row, tokenizer, 99).ids) == row["prompt"] + "This.</s>"


def test_raw_leaves_prompts_as_text() -> None:
    tokenizer = build_tokenizer()
    for row, text in (
        ({"prompt": "Which? ", "completion": "This."}, "<s>Which? This.</s>"),
        ({"instruction": "Add", "input": "1 1", "output": "2"}, "<s>### Instruction:\nAdd\n\n### Input:\n1 1\n\n### Response:\n2</s>"),
    ):
        found = texts.encode(row, tokenizer, 1024, raw=True)
        assert tokenizer.decode(found.ids) == text
        assert sum(found.answers or []) == len(row.get("completion", "2")) + 1
    assert tokenizer.decode(texts.given({"prompt": "Which?"}, tokenizer, 99, raw=True)) == "<s>Which?"
    assert tokenizer.decode(texts.given({"prompt": "Which?"}, tokenizer, 99)) == "<s><|turn|>user\nWhich?</s>\n<|turn|>assistant\n"


def test_an_adapter_answers_on_its_base(adapter: Path) -> None:
    result = invoke("sample", adapter, "--prompt", "What is it?", "--prompt", "And?", "--tokens", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("> What is it?\n")
    assert "\n> And?\n" in result.stdout


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
    for row in ("What?", chat, {"prompt": "What?", "completion": "Blue."}, {"text": "What?"}, {"instruction": "What?"}):
        ids = texts.encode(row, tokenizer, 100).ids
        assert ids.count(tokenizer.bos_token_id) == 1
        assert texts.given(row, tokenizer, 100).count(tokenizer.bos_token_id) == 1
    assert "Blue" in tokenizer.decode(texts.encode(chat, tokenizer, 100).ids)
    assert tokenizer.decode(texts.given(chat, tokenizer, 100)).endswith("assistant\n")
    assert len(texts.encode("What?", tokenizer, 3).ids) == 3
    with pytest.raises(ConfigurationError, match="columns question; needed are messages"):
        texts.encode({"question": "?"}, tokenizer, 3)
    with pytest.raises(ConfigurationError, match="a row is 7"):
        texts.encode(7, tokenizer, 3)
    with pytest.raises(ConfigurationError, match="no chat template"):
        texts.encode(chat, build_tokenizer(template=None), 3)


def test_two_adapters_in_one_folder_must_be_told_apart(adapter: Path, tmp_path: Path) -> None:
    assert load.adapter_folder(adapter) == adapter / "mine"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / load.ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(ConfigurationError, match="adapters one, two"):
        load.adapter_folder(tmp_path)
    with pytest.raises(ConfigurationError, match="--base"):
        load.base_of(tmp_path / "one")
