"""The forms of samples: recognised, named, refused; alpaca through to the labels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import sft_data
import sft_formats
import sft_look
from datasets import Dataset
from recipe_tiny import EOS, build_tokenizer
from rich.console import Console
from sft_data import IGNORED, Plan

from flashoptim_hf.errors import ConfigurationError

ALPACA = {"instruction": "Add.", "input": "1 + 1", "output": "2"}
RECOGNISED = {
    "messages": ({"messages"}, "messages"),
    "conversations": ({"conversations", "id"}, "messages"),
    "prompt and completion": ({"prompt", "completion"}, "prompt_completion"),
    "alpaca beside a text column": ({"instruction", "input", "output", "text"}, "alpaca"),
    "alpaca without input": ({"instruction", "output"}, "alpaca"),
    "text": ({"text"}, "text"),
    "messages beside a prompt": ({"prompt", "prompt_id", "messages"}, "messages"),
}


@pytest.mark.parametrize(("columns", "form"), RECOGNISED.values(), ids=RECOGNISED.keys())
def test_recognised_by_columns(columns: set[str], form: str) -> None:
    assert sft_formats.recognise(columns) == form


def test_the_text_column_can_be_named() -> None:
    assert sft_formats.recognise({"body"}, text_field="body") == "text"
    assert sft_formats.standard({"body": 7, "id": 1}, "text", True, "body") == {"body": "7"}


REFUSED = {
    "unknown columns": (({"question", "answer"},), r"answer, question; needed are .*dataset_text_field"),
    "preferences": (({"prompt", "chosen", "rejected"},), "qlora_dpo"),
    "named and missing": (({"instruction", "text"}, "alpaca"), "dataset_format=alpaca needs the column output, and the samples have"),
    "named and unknown": (({"text"}, "alpaka"), "dataset_format='alpaka' is not known; choose one of auto"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_the_way_out(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        sft_formats.recognise(*arguments)


def learned(tokenizer: Any, row: dict[str, Any]) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED])


@pytest.mark.parametrize("given", ["1 + 1", "", None])
def test_alpaca_learns_the_output_alone(given: str | None) -> None:
    for chat in (True, False):
        tokenizer = build_tokenizer() if chat else build_tokenizer(template=None)
        row = sft_data.encode({**ALPACA, "input": given, "text": "of another kind"}, tokenizer, Plan())
        assert learned(tokenizer, row) == "2" + EOS
        assert tokenizer.bos_token_id in row["input_ids"][:1]
        assert row["input_ids"].count(tokenizer.bos_token_id) == 1
        whole = tokenizer.decode(row["input_ids"])
        assert ("1 + 1" in whole) == bool(given)
        assert ("### Response:" in whole) == (not chat)
        assert "kind" not in whole
        prompt = tokenizer.decode(sft_data.prompt_ids({**ALPACA, "input": given}, tokenizer))
        assert prompt.endswith("assistant\n" if chat else "### Response:\n")


# ---------------------------------------------------------------------- pairs of text

PAIR = {"prompt": "What is it?\n", "completion": " Blue.\n"}
TURNS = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "Blue."}]}


def test_pairs_of_text_are_two_turns_of_the_template() -> None:
    tokenizer = build_tokenizer()
    row = sft_data.encode(dict(PAIR), tokenizer, Plan())
    assert row["input_ids"] == sft_data.encode(TURNS, tokenizer, Plan(assistant_only=True))["input_ids"]
    assert learned(tokenizer, row) == "Blue." + EOS
    assert tokenizer.decode(sft_data.prompt_ids(PAIR, tokenizer)).endswith("What is it?</s>\n<|turn|>assistant\n")
    given = sft_data.encode({**PAIR, "completion": "Blue." + EOS}, tokenizer, Plan())
    assert given["input_ids"] == row["input_ids"]


@pytest.mark.parametrize(("completion", "content"), [("    return x\n", "    return x"), (" a", "a"), ("\na\n b", "a\n b"), ("12", "12")])
def test_an_indentation_stays(completion: str, content: str) -> None:
    made = sft_formats.standard({"prompt": "q ", "completion": completion}, "prompt_completion", True)
    assert made == {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": content}]}


FORMS = {
    "pairs": ([PAIR], {}, True, "turn of the chat template .text_as_chat=false"),
    "pairs, as text": ([PAIR], {"text_as_chat": False}, False, "one right after the other, without the chat template"),
    "alpaca": ([ALPACA], {}, True, "turn of the chat template"),
    "rendered already": ([{"prompt": "<s>What?", "completion": "Blue."}], {}, False, "prompts hold '<s>', so they are rendered already"),
    "messages": ([TURNS], {}, True, "^$"),
    "messages in two columns": ([{"prompt": TURNS["messages"][:1], "completion": TURNS["messages"][1:]}], {}, True, "^$"),
}


@pytest.mark.parametrize(("rows", "options", "chat", "said"), FORMS.values(), ids=FORMS.keys())
def test_what_was_taken_is_said(rows: list[dict[str, Any]], options: dict[str, Any], chat: bool, said: str) -> None:
    plan, sentence = Plan(**options).settled(Dataset.from_list(rows), build_tokenizer())
    assert plan.text_as_chat == chat
    assert re.search(said, sentence)
    if options == {} and not chat:
        assert sft_data.encode(dict(rows[0]), build_tokenizer(), plan)["input_ids"].count(build_tokenizer().bos_token_id) == 1


def test_without_a_template_pairs_stay_text() -> None:
    tokenizer = build_tokenizer(template=None)
    assert "no chat template" in Plan().settled(Dataset.from_list([PAIR]), tokenizer)[1]
    row = sft_data.encode(dict(PAIR), tokenizer, Plan())
    assert tokenizer.decode(row["input_ids"]) == "<s>What is it?\n Blue.\n</s>"


def test_the_named_format_wins() -> None:
    sample = {"text": "Blue.", "messages": [{"role": "user", "content": "?"}]}
    tokenizer = build_tokenizer()
    row = sft_data.encode(sample, tokenizer, Plan(form="text"))
    assert learned(tokenizer, row).endswith("Blue." + EOS)


def test_roles_of_the_other_common_form_are_found() -> None:
    sample = {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "Blue."}]}
    tokenizer = build_tokenizer()
    assert learned(tokenizer, sft_data.encode(sample, tokenizer, Plan(assistant_only=True))) == "Blue." + EOS


def test_cells_that_are_numbers_or_empty() -> None:
    tokenizer = build_tokenizer()
    assert learned(tokenizer, sft_data.encode({"prompt": 12, "completion": 24}, tokenizer, Plan())) == "24" + EOS
    data = Dataset.from_list([{"prompt": "a", "completion": None}, {"prompt": "a", "completion": "b"}])
    rows, counts = sft_data.prepare(data, tokenizer, Plan())
    assert (len(rows), counts.dropped) == (1, 1)


def test_a_text_file_is_cut_at_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("One line\nand its second.\n\nAnother sample.\n")
    assert [row["text"] for row in sft_data.load(str(path))] == ["One line\nand its second.", "Another sample.\n"]


def test_missing_columns_stop_before_tokenizing(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    with pytest.raises(ConfigurationError, match="answer, question"):
        sft_data.prepare(sft_data.load(str(path)), build_tokenizer(), Plan())


# ---------------------------------------------------------------------- the first look


def test_lengths_are_those_of_a_plain_count() -> None:
    rows = Dataset.from_list([{"input_ids": [0] * n, "labels": [0] * n} for n in range(1, 101)])
    assert sft_look.lengths(rows) == {"median": 50, "p95": 95, "max": 100}
    assert sft_look.lengths(rows.select([4])) == {"median": 5, "p95": 5, "max": 5}


def test_trained_tokens_are_marked() -> None:
    tokenizer = build_tokenizer()
    row = sft_data.encode({"prompt": "What? ", "completion": "Blue."}, tokenizer, Plan(text_as_chat=False))
    assert sft_look.rendered(row, tokenizer).plain == "<s>What? ⟦Blue.</s>⟧"


def test_a_long_sample_is_shown_from_both_ends() -> None:
    tokenizer = build_tokenizer()
    row = sft_data.encode({"prompt": "a" * 500, "completion": "b"}, tokenizer, Plan())
    text = sft_look.rendered(row, tokenizer).plain
    assert f"[... {len(row['input_ids']) - sft_look.HEAD - sft_look.TAIL} tokens ...]" in text
    assert text.endswith("⟦b</s>⟧")


def test_the_table_has_the_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft_look, "Console", lambda: Console(width=160))
    tokenizer = build_tokenizer()
    data = Dataset.from_list([ALPACA, {**ALPACA, "input": "x" * 300}, ALPACA, ALPACA])
    rows, counts = sft_data.prepare(data, tokenizer, Plan(max_length=100))
    sft_look.show({"train": rows, "eval": None}, {"train": counts}, "alpaca", tokenizer)
    printed = capsys.readouterr().out
    assert printed.count("⟦2</s>⟧") == 3
    assert "format alpaca" in printed
    line = next(line for line in printed.splitlines() if "│ train" in line)
    assert f"{counts.share:.1%}" in line
    assert [cell.strip() for cell in line.split("│")][-3:-1] == ["0", "1"]  # none cut off and kept, one dropped
