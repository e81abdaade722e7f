"""Samples for supervised fine-tuning: from a file or a hub id to `input_ids` and `labels`, with the usual mistakes made impossible.

Every sample that is not cut off ends in exactly one EOS token, and the model learns it, also where the padding token is the EOS token;
no sample begins with two BOS tokens; and what is learned of a conversation comes from the chat template's own generation markers or,
since most templates have none, from the text that the template adds for each turn. Padding and packing are trl's.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sft_files
import sft_formats
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase
from trl import get_training_chat_template, is_conversational

from flashoptim_hf.errors import ConfigurationError

IGNORED = -100  # the label that the loss leaves out
LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".text": "text"}
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
Example = dict[str, Any]
Encoded = tuple[list[int], list[bool]]  # token ids, and which of them are learned


@dataclass(frozen=True)
class Plan:
    """What is learned. `max_length` in tokens, None for no limit; the two switches are trl's `assistant_only_loss` and
    `completion_only_loss` (None: on for samples with a prompt and a completion); `text_field` names the column of plain text; `form` is
    the samples' format (`sft_formats`), "auto" for the one that the columns tell; `text_as_chat`: text in prompt and completion, and
    alpaca, become messages where the tokenizer has a chat template."""

    max_length: int | None = 1024
    assistant_only: bool = False
    completion_only: bool | None = None
    text_field: str = "text"
    form: str = sft_formats.AUTO
    text_as_chat: bool = True

    def standard(self, example: Example, tokenizer: PreTrainedTokenizerBase) -> Example:
        """A sample with the columns of its format alone."""
        form = sft_formats.recognise(example, self.form, self.text_field)
        chat = self.text_as_chat and tokenizer.chat_template is not None
        return sft_formats.standard(example, form, chat, self.text_field)

    def settled(self, data: Dataset, tokenizer: PreTrainedTokenizerBase) -> tuple[Plan, str]:
        """This plan for these samples, and a sentence for the user, empty where there is nothing to choose.

        Prompts with special tokens in them were rendered before: they are not rendered again.
        """
        form = sft_formats.recognise(data.column_names, self.form, self.text_field)
        example: Example = next(iter(data), {})
        sides = [example.get(side) for side in ("prompt", "completion")]
        if form not in ("prompt_completion", "alpaca") or (form == "prompt_completion" and not any(isinstance(s, str) for s in sides)):
            return self, ""
        plain = "under headings" if form == "alpaca" else "one right after the other"
        if tokenizer.chat_template is None:
            return self, f"the samples are learned as text, {plain}: the tokenizer has no chat template (chat_template_path gives it one)"
        if not self.text_as_chat:
            return self, f"the samples are learned as text, {plain}, without the chat template (text_as_chat=false)"
        if form == "prompt_completion" and isinstance(sides[0], str):
            special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
            seen = next((token for token in special if token in sides[0]), None)
            if seen is not None:
                return replace(
                    self, text_as_chat=False
                ), f"the samples are learned as they are: prompts hold {seen!r}, so they are rendered already"
        return self, "the samples are learned as a user's and an assistant's turn of the chat template (text_as_chat=false: as plain text)"


@dataclass(frozen=True)
class Counts:
    """What became of a data set: samples kept, cut off at the maximum length, dropped because nothing in them is learned; tokens."""

    samples: int
    truncated: int
    dropped: int
    tokens: int
    trained: int

    @property
    def share(self) -> float:
        """Share of the tokens that are learned, 0 to 1."""
        return self.trained / max(self.tokens, 1)

    def __str__(self) -> str:
        return (
            f"{self.samples} samples, {self.tokens} tokens, {self.share:.1%} of them trained on; "
            f"{self.truncated} cut off at the maximum length (no EOS), {self.dropped} dropped with nothing to learn"
        )


def load(source: str, default_split: str = "train") -> Dataset:
    """A local .jsonl, .json, .csv or .parquet file, a .txt file whose samples are parted by empty lines, or a hub id, whose split may
    follow a colon (`org/name:train_sft`).

    Raises:
        ConfigurationError: there is no such file or data set, or a line of it cannot be read; names the line.
    """
    suffix = Path(source).suffix.lower()
    if suffix in LOADERS:
        if not Path(source).is_file():
            raise ConfigurationError(
                f"dataset={source!r}: no such file (from {os.getcwd()}). A hub id has none of {sorted(LOADERS)} at its end."
            )
        more = {"sample_by": "paragraph"} if LOADERS[suffix] == "text" else {}
        try:
            return load_dataset(LOADERS[suffix], data_files=source, split="train", **more)
        except (DatasetGenerationError, ValueError) as error:
            found = sft_files.fault(source) if LOADERS[suffix] == "json" else None
            said = found or f"dataset={source!r} cannot be read as {suffix}: {error.__cause__ or error}"
            raise ConfigurationError(said) from error
    if Path(source).exists():
        raise ConfigurationError(f"dataset={source!r} is not one of the formats {sorted(LOADERS)}.")
    name, _, split = source.partition(":")
    try:
        return load_dataset(name, split=split or default_split)
    except (FileNotFoundError, ConnectionError, ValueError) as error:  # no such data set or split, no access, no network
        raise ConfigurationError(f"dataset={source!r} is no file here, and as a hub id: {' '.join(str(error).split())}") from error


def load_splits(dataset: str, eval_dataset: str | None, eval_fraction: float, seed: int) -> tuple[Dataset, Dataset | None]:
    """Training and held-out samples; without `eval_dataset` a fixed share of `dataset` is held out (0: nothing is evaluated)."""
    train = load(dataset)
    if eval_dataset is not None:
        return train, load(eval_dataset, default_split="test")
    if eval_fraction == 0:
        return train, None
    parts = train.train_test_split(test_size=eval_fraction, seed=seed)
    return parts["train"], parts["test"]


def prepare(
    data: Dataset, tokenizer: PreTrainedTokenizerBase, plan: Plan, name: str = "train", num_proc: int | None = None
) -> tuple[Dataset, Counts]:
    """Tokenize a data set into the columns `input_ids` and `labels`, and count.

    Raises:
        ConfigurationError: no sample has anything to learn, the columns are of no known format, or the tokenizer has no EOS token.
    """
    sft_formats.recognise(data.column_names, plan.form, plan.text_field)
    if tokenizer.eos_token_id is None:
        raise ConfigurationError("the tokenizer has no EOS token, so the model could not learn to stop; name one with eos_token.")
    rows = data.map(
        encode,
        fn_kwargs={"tokenizer": tokenizer, "plan": plan},
        remove_columns=data.column_names,
        desc=f"Tokenizing {name} samples",
        num_proc=num_proc,
    )
    kept = rows.filter(lambda trained: trained > 0, input_columns="trained", desc=f"Checking {name} samples")
    counts = Counts(len(kept), sum(kept["truncated"]), len(rows) - len(kept), sum(map(len, kept["input_ids"])), sum(kept["trained"]))
    if counts.trained == 0:
        raise ConfigurationError(
            f"not one of the {len(rows)} {name} samples has a token to learn: no assistant turn, no completion, or prompts that fill "
            f"max_length={plan.max_length}. Check the columns ({', '.join(data.column_names)}) and the maximum length."
        )
    return kept.remove_columns(["truncated", "trained"]), counts


def encode(example: Example, tokenizer: PreTrainedTokenizerBase, plan: Plan) -> Example:
    """One sample as `input_ids` and `labels` (the same ids, or -100 where nothing is learned), `truncated` and `trained` (a count)."""
    example = plan.standard(example, tokenizer)
    tools = example.get("tools")
    if "prompt" in example and "completion" in example:
        completion_only = plan.completion_only is not False
        start = len(example["prompt"]) if completion_only else 0  # characters, or messages
        whole = example["prompt"] + example["completion"]
        if is_conversational(example):
            ids, mask = encode_chat(whole, tokenizer, completion_only or plan.assistant_only, start, tools)
        else:
            ids, mask = _tokenize(tokenizer, whole, [(start, len(whole))], special=True)
    elif "messages" in example:
        ids, mask = encode_chat(example["messages"], tokenizer, plan.assistant_only, 0, tools)
    else:
        text = example[plan.text_field]
        ids, mask = _tokenize(tokenizer, text, [(0, len(text))], special=True)
    ids, mask = _one_bos(ids, mask, tokenizer.bos_token_id)
    ids, mask = _one_eos(ids, mask, tokenizer)
    truncated = plan.max_length is not None and len(ids) > plan.max_length
    ids, mask = ids[: plan.max_length], mask[: plan.max_length]
    labels = [token if learned else IGNORED for token, learned in zip(ids, mask, strict=True)]
    # The first token is never predicted, so it does not count as trained.
    return {"input_ids": ids, "labels": labels, "truncated": truncated, "trained": sum(mask[1:])}


def encode_chat(
    messages: list[Example], tokenizer: PreTrainedTokenizerBase, assistant_only: bool, first: int = 0, tools: Any = None
) -> Encoded:
    """Token ids of a conversation and which of them are learned: all, or the assistant's turns from message `first` on.

    The chat template alone decides about BOS, as it does when the model is used. What follows the last assistant turn is left out
    where only assistant turns are learned.

    Raises:
        ConfigurationError: the template has no usable generation markers, and its turns cannot be told apart either.
    """
    text = _render(tokenizer, messages, tools)
    if not assistant_only:
        return _tokenize(tokenizer, text, [(0, len(text))], special=False)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    if not turns:
        return _tokenize(tokenizer, text, [], special=False)
    messages = messages[: turns[-1] + 1]
    # Markers cannot tell an assistant turn of the prompt from one of the completion; the rendered text can.
    marked = None if first else _marked(tokenizer, messages, tools, None)
    if marked is not None:
        return marked
    text = _render(tokenizer, messages, tools)
    spans = [_turn(tokenizer, messages, i, tools, text) for i in turns]
    if None not in spans:
        return _tokenize(tokenizer, text, spans, special=False)
    try:
        marked = _marked(tokenizer, messages, tools, get_training_chat_template(tokenizer))
    except ValueError:  # trl has no training template for this one either
        marked = None
    if marked is None:
        raise ConfigurationError(
            "the chat template has no {% generation %} markers and renders earlier turns differently once a later one follows, so what the "
            "assistant said cannot be found in it. Give a template with markers (chat_template_path), one turn per sample, or "
            "assistant_only_loss=false to train on every token."
        )
    return marked


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Example], tools: Any, generation: bool = False) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generation)


def _turn(tokenizer: PreTrainedTokenizerBase, messages: list[Example], i: int, tools: Any, text: str) -> tuple[int, int] | None:
    """Where in `text` the assistant's message `i` stands, its end-of-turn mark included; None where the template hides it."""
    through = _render(tokenizer, messages[: i + 1], tools)
    content = messages[i]["content"].strip() if isinstance(messages[i]["content"], str) else ""
    if i == 0:  # nothing comes before it, and templates may refuse an empty conversation
        before = start = through.find(content)
    else:
        before = len(_render(tokenizer, messages[:i], tools))
        start = _common(_render(tokenizer, messages[:i], tools, generation=True), through)
    # A template may end the last turn alone with EOS; then the two texts part after the content, which is still found.
    end = _common(through, text)
    if not 0 <= before <= start < end or not (end == len(through) or (content and content in text[start:end])):
        return None
    # The white space that many templates put after the end-of-turn mark is nothing that the model should write.
    body, mark, rest = text[start:end].rpartition(tokenizer.eos_token)
    return start, end if not mark or rest.strip() else start + len(body) + len(mark)


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _marked(tokenizer: PreTrainedTokenizerBase, messages: list[Example], tools: Any, template: str | None) -> Encoded | None:
    """The conversation with the mask of the template's generation markers; None where the mask is empty, or full although others speak."""
    template = template or tokenizer.get_chat_template(tools=tools)
    if not MARKER.search(template):
        return None
    out = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True)
    mask = [bool(bit) for bit in out["assistant_masks"]]
    if not any(mask) or (all(mask) and any(message["role"] != "assistant" for message in messages)):
        return None
    ids = out["input_ids"]
    # Markers around the content alone would leave the end of the turn unlearned.
    for i in range(1, len(ids)):
        mask[i] = mask[i] or (mask[i - 1] and ids[i] == tokenizer.eos_token_id)
    return ids, mask


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]], special: bool) -> Encoded:
    """Token ids of `text`, with the tokenizer's own special tokens if `special`, and a mask: True where a token ends within a span."""
    out = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, return_attention_mask=False)
    mask = [any(start < end and first < end <= last for first, last in spans) for start, end in out["offset_mapping"]]
    return list(out["input_ids"]), mask


def _one_bos(ids: list[int], mask: list[bool], bos: int | None) -> Encoded:
    """Without the second of two BOS tokens at the start: the tokenizer added one to a text that had it."""
    while bos is not None and ids[:2] == [bos, bos]:
        ids, mask = ids[1:], mask[1:]
    return ids, mask


def _one_eos(ids: list[int], mask: list[bool], tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """With exactly one EOS as the last token, learned if what it ends is learned. White space that a template puts after it goes."""
    eos = tokenizer.eos_token_id
    last = len(ids) - 1
    while last >= 0 and ids[last] != eos and not tokenizer.decode([ids[last]]).strip():
        last -= 1
    if last < 0 or ids[last] != eos:
        return [*ids, eos], [*mask, any(mask)]
    while last > 0 and ids[last - 1] == eos:
        last -= 1
    # Whatever is learned reaches to the end of a sample, so its EOS is learned too, whoever put it there.
    return ids[: last + 1], [*mask[:last], any(mask)]


def prompt_ids(example: Example, tokenizer: PreTrainedTokenizerBase, plan: Plan | None = None) -> list[int]:
    """The part of a sample that the model is given when it is used: up to the last assistant turn, the prompt, or the first words."""
    example = (plan or Plan()).standard(example, tokenizer)
    if "messages" in example or ("prompt" in example and is_conversational(example)):
        messages = example.get("messages") or [*example["prompt"], *example["completion"]]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = _render(tokenizer, messages[: turns[-1]] if turns else messages, example.get("tools"), generation=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer(example.get("prompt") or " ".join(next(iter(example.values())).split()[:12]))["input_ids"]
