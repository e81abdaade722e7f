"""Data for supervised fine-tuning: EOS, BOS, what is learned of a conversation, truncation, files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import recipe_tiny as tiny
import sft_data
from datasets import Dataset
from recipe_tiny import BOS, EOS, PAD, build_tokenizer
from sft_data import IGNORED, Plan
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from flashoptim_hf.errors import ConfigurationError

CHAT = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is blue."}]}
TURNS = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "First."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Second."},
    ]
}
PLAIN = {"prompt": "What is it? ", "completion": "It is blue."}
TEXT = {"text": "It is blue."}
TEMPLATES = {
    "stock": tiny.STOCK,
    "without EOS": tiny.WITHOUT_EOS,
    "EOS after the last answer only": tiny.LAST_EOS_ONLY,
    "markers": tiny.MARKED,
    "markers around the content alone": tiny.MARKED_CONTENT_ONLY,
    "markers around everything": tiny.MARKED_FULL,
    "markers around nothing": tiny.MARKED_EMPTY,
}


def encode(example: dict[str, Any], plan: Plan | None = None, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A tokenizer built with `options` and one sample encoded with it, by default learning the assistant's turns."""
    tokenizer = build_tokenizer(**options)
    return tokenizer, sft_data.encode(dict(example), tokenizer, plan or Plan(assistant_only="messages" in example))


def learned(tokenizer: Any, row: dict[str, Any]) -> list[str]:
    """The text of each run of learned tokens."""
    runs: list[list[int]] = [[]]
    for label in row["labels"]:
        if label == IGNORED:
            runs.append([])
        else:
            runs[-1].append(label)
    return [tokenizer.decode(run) for run in runs if run]


# ---------------------------------------------------------------------- the end of a sample


@pytest.mark.parametrize("pad", [EOS, PAD], ids=["pad is EOS", "own pad"])
@pytest.mark.parametrize("adds_eos", [False, True], ids=["plain", "tokenizer adds EOS"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("example", [CHAT, PLAIN, TEXT], ids=["messages", "prompt and completion", "text"])
def test_last_label_is_the_only_learned_eos(example: dict[str, Any], template: str, adds_eos: bool, pad: str) -> None:
    tokenizer, row = encode(example, template=template, adds_eos=adds_eos, pad=pad)
    eos = tokenizer.eos_token_id
    assert row["labels"][-1] == row["input_ids"][-1] == eos
    assert row["labels"].count(eos) == 1
    assert not row["truncated"]
    # The user's turn of a chat may end in EOS too; twice in a row is what a doubled EOS looks like.
    assert [eos, eos] not in [row["input_ids"][i : i + 2] for i in range(len(row["input_ids"]))]


def test_text_that_ends_in_eos_gets_no_second_one() -> None:
    for example in ({"text": "It is blue.</s>"}, {"prompt": "What? ", "completion": "Blue.</s>"}):
        tokenizer, row = encode(example, Plan(text_as_chat=False), adds_eos=True)
        assert row["input_ids"].count(tokenizer.eos_token_id) == row["labels"].count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("pad", [EOS, PAD], ids=["pad is EOS", "own pad"])
def test_padding_is_ignored_and_eos_is_not(pad: str) -> None:
    tokenizer = build_tokenizer(pad=pad)
    data = Dataset.from_list([CHAT, TURNS, {"messages": [*CHAT["messages"], *CHAT["messages"]]}])
    rows, _ = sft_data.prepare(data, tokenizer, Plan(assistant_only=True))
    batch = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)(list(rows))
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        assert batch["labels"][i, length - 1] == tokenizer.eos_token_id
        assert (batch["labels"][i, length:] == IGNORED).all()
        assert (batch["attention_mask"][i].sum()) == length


def test_maximum_length_exactly_keeps_eos_and_one_less_counts_as_cut_off() -> None:
    tokenizer, row = encode(CHAT)
    length = len(row["input_ids"])
    data = Dataset.from_list([CHAT])
    whole, counts = sft_data.prepare(data, tokenizer, Plan(max_length=length, assistant_only=True))
    assert whole[0]["labels"][-1] == tokenizer.eos_token_id
    assert counts.truncated == 0
    cut, counts = sft_data.prepare(data, tokenizer, Plan(max_length=length - 1, assistant_only=True))
    assert len(cut[0]["input_ids"]) == length - 1
    assert tokenizer.eos_token_id not in cut[0]["labels"]
    assert counts.truncated == 1
    assert "1 cut off" in str(counts)


def test_samples_cut_off_within_the_prompt_are_dropped_and_counted() -> None:
    tokenizer = build_tokenizer()
    data = Dataset.from_list([{"messages": [{"role": "user", "content": "x" * 200}, CHAT["messages"][1]]}, CHAT])
    rows, counts = sft_data.prepare(data, tokenizer, Plan(max_length=60, assistant_only=True))
    assert (len(rows), counts.samples, counts.dropped) == (1, 1, 1)
    with pytest.raises(ValueError, match="max_length=20"):
        sft_data.prepare(data, tokenizer, Plan(max_length=20, assistant_only=True))


def test_a_tokenizer_without_eos_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos_token"):
        sft_data.prepare(Dataset.from_list([TEXT]), tokenizer, Plan())


# ---------------------------------------------------------------------- the start of a sample


@pytest.mark.parametrize("adds_bos", [True, False], ids=["tokenizer adds BOS", "tokenizer does not"])
@pytest.mark.parametrize("assistant_only", [True, False], ids=["answers", "everything"])
@pytest.mark.parametrize("template", [tiny.STOCK, tiny.MARKED], ids=["stock", "markers"])
def test_one_bos_with_a_template_that_has_it(template: str, assistant_only: bool, adds_bos: bool) -> None:
    tokenizer, row = encode(TURNS, Plan(assistant_only=assistant_only), template=template, adds_bos=adds_bos)
    assert row["input_ids"][0] == tokenizer.bos_token_id
    assert row["input_ids"].count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("text", ["It is blue.", "<s>It is blue."], ids=["text without BOS", "text with BOS"])
def test_one_bos_in_plain_text(text: str) -> None:
    for example in ({"text": text}, {"prompt": text, "completion": "Yes."}):
        tokenizer, row = encode(example, Plan(text_as_chat=False))
        assert row["input_ids"].count(tokenizer.bos_token_id) == 1
        assert row["input_ids"][0] == tokenizer.bos_token_id


def test_the_prompt_of_the_sample_answer_has_one_bos_and_no_answer() -> None:
    tokenizer = build_tokenizer()
    for example in (CHAT, PLAIN, TEXT, {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}):
        ids = sft_data.prompt_ids(example, tokenizer)
        assert ids.count(tokenizer.bos_token_id) == 1
    assert "blue" not in tokenizer.decode(sft_data.prompt_ids(CHAT, tokenizer))
    assert tokenizer.decode(sft_data.prompt_ids(CHAT, tokenizer)).endswith("<|turn|>assistant\n")


# ---------------------------------------------------------------------- what is learned of a conversation


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_every_assistant_turn_is_learned_and_nothing_else(template: str) -> None:
    tokenizer, row = encode(TURNS, template=template)
    runs = learned(tokenizer, row)
    ends = [EOS, EOS]
    if template == tiny.WITHOUT_EOS:
        ends = ["<|end|>\n", "<|end|>\n" + EOS]
    elif template == tiny.LAST_EOS_ONLY:
        ends = ["", EOS]
    assert runs == ["First." + ends[0], "Second." + ends[1]]
    assert 0 < row["trained"] < len(row["input_ids"]) - 1
    # Per turn in tokens: one byte each, and the end.
    assert row["trained"] == len(tokenizer("".join(runs), add_special_tokens=False)["input_ids"])


def test_ids_are_those_of_the_template_itself() -> None:
    for template in (tiny.STOCK, tiny.MARKED, tiny.WITHOUT_EOS):
        tokenizer, row = encode(TURNS, template=template)
        expected = tokenizer.apply_chat_template(TURNS["messages"])["input_ids"]
        assert row["input_ids"][:-1] == expected[: len(row["input_ids"]) - 1]


def test_all_tokens_are_learned_when_asked_for() -> None:
    _, row = encode(TURNS, Plan(assistant_only=False))
    assert row["labels"] == row["input_ids"]


def test_a_conversation_that_ends_with_the_user_ends_with_the_last_answer() -> None:
    tokenizer, row = encode({"messages": [*CHAT["messages"], {"role": "user", "content": "Thanks."}]})
    assert learned(tokenizer, row) == ["It is blue." + EOS]
    assert "Thanks" not in tokenizer.decode(row["input_ids"])


def test_a_conversation_that_begins_with_the_assistant() -> None:
    tokenizer, row = encode({"messages": [{"role": "assistant", "content": "Hello."}, *CHAT["messages"]]})
    assert learned(tokenizer, row) == ["Hello." + EOS, "It is blue." + EOS]


def test_no_assistant_turn_is_dropped_and_never_learned_silently() -> None:
    tokenizer = build_tokenizer()
    users_only = {"messages": CHAT["messages"][:1]}
    rows, counts = sft_data.prepare(Dataset.from_list([users_only, CHAT]), tokenizer, Plan(assistant_only=True))
    assert (len(rows), counts.dropped) == (1, 1)
    with pytest.raises(ValueError, match="no assistant turn"):
        sft_data.prepare(Dataset.from_list([users_only]), tokenizer, Plan(assistant_only=True))


@pytest.mark.parametrize("template", [tiny.FORGETFUL, tiny.EMPTIED])
def test_a_template_that_hides_earlier_answers_stops_with_the_way_out(template: str) -> None:
    tokenizer, row = encode(CHAT, template=template)  # one turn is no problem
    assert learned(tokenizer, row)[0].endswith("It is blue." + EOS)
    with pytest.raises(ValueError, match=r"generation.*chat_template_path.*assistant_only_loss=false"):
        encode(TURNS, template=template)


def test_prompt_and_completion_as_messages_learn_the_completion_alone() -> None:
    example = {"prompt": TURNS["messages"][:4], "completion": TURNS["messages"][4:]}
    for template in (tiny.STOCK, tiny.MARKED):
        tokenizer, row = encode(example, Plan(), template=template)
        assert learned(tokenizer, row) == ["Second." + EOS]
    tokenizer, row = encode(example, Plan(completion_only=False, assistant_only=True))
    assert learned(tokenizer, row) == ["First." + EOS, "Second." + EOS]


def test_prompt_and_completion_as_text() -> None:
    tokenizer, row = encode(PLAIN, Plan(text_as_chat=False))
    assert learned(tokenizer, row) == ["It is blue." + EOS]
    tokenizer, row = encode(PLAIN, Plan(completion_only=False, text_as_chat=False))
    assert learned(tokenizer, row) == ["What is it? It is blue." + EOS]


def test_conversations_in_the_other_common_form() -> None:
    example = {"conversations": [{"from": "user", "value": "What is it?"}, {"from": "assistant", "value": "It is blue."}]}
    tokenizer, row = encode(example, Plan(assistant_only=True))
    assert learned(tokenizer, row) == ["It is blue." + EOS]


def test_unknown_columns_are_named() -> None:
    with pytest.raises(ValueError, match=r"question.*dataset_text_field"):
        encode({"question": "What?"}, Plan())


def test_share_counts_what_the_loss_sees() -> None:
    tokenizer = build_tokenizer()
    rows, counts = sft_data.prepare(Dataset.from_list([CHAT, TURNS]), tokenizer, Plan(assistant_only=True))
    seen = sum(label != IGNORED for row in rows for label in row["labels"][1:])
    assert counts.trained == seen
    assert counts.tokens == sum(len(row["input_ids"]) for row in rows)
    assert f"{seen / counts.tokens:.1%}" in str(counts)


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_files(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": f"p{i}", "completion": f"c{i}"} for i in range(20)]
    path = tmp_path / f"data{suffix}"
    if suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif suffix == ".csv":
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["prompt", "completion"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows)))
    assert sft_data.load(str(path)).to_list() == rows
    train, held_out = sft_data.load_splits(str(path), None, 0.25, seed=1)
    assert held_out is not None
    assert (len(train), len(held_out)) == (15, 5)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert sft_data.load_splits(str(path), None, 0.25, seed=1)[1].to_list() == held_out.to_list()
    assert sft_data.load_splits(str(path), None, 0, seed=1)[1] is None
    assert len(sft_data.load_splits(str(path), str(path), 0.25, seed=1)[0]) == 20


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing\.jsonl"):
        sft_data.load(str(tmp_path / "nothing.jsonl"))
    (tmp_path / "data.xml").write_text("x")
    with pytest.raises(ConfigurationError, match="formats"):
        sft_data.load(str(tmp_path / "data.xml"))


def test_bos_token_is_what_the_tests_think() -> None:
    assert build_tokenizer()("a")["input_ids"][0] == build_tokenizer().convert_tokens_to_ids(BOS)
