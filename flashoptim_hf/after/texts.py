"""Files of texts: prompts and held-out samples, one a line, or JSON lines in the forms that the recipes train on.

text                text, or a line of a file that is no JSON
prompt, completion  text, or lists of messages; a prompt may be alone
messages            messages, or conversations: lists of {"role", "content"} or {"from", "value"}
alpaca              instruction, output, and perhaps input, system

Forms with an answer are rendered as the recipes render them for training: with the chat template where the tokenizer has one.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError

NEEDED = "messages (or conversations), prompt (and completion), instruction (and output), or text"
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
Message = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """A row in one of two shapes: a conversation (`messages`), or text and the answer that follows it.

    Attributes:
        messages: None for text.
        first: assistant turns from this message on are answers.
        text, answer: the prompt, and what follows it; None where a row has no answer.
        tools: as the chat template takes them.
    """

    messages: list[Message] | None = None
    first: int = 0
    text: str = ""
    answer: str | None = None
    tools: Any = None

    @property
    def question(self) -> str:
        """What is asked, for people: the user's last message before the last answer, or the text."""
        if self.messages is None:
            return self.text
        asked = [message["content"] for message in self.messages if message["role"] == "user"]
        return str(asked[-1] if asked else self.messages[-1]["content"])


@dataclass(frozen=True)
class Encoded:
    """Token ids. `answers`: which of them belong to an answer, its end mark included; None where there is none, or where the template
    hides it (`hidden`)."""

    ids: list[int]
    answers: list[bool] | None = None
    hidden: bool = False


def read(path: Path) -> list[Any]:
    """Rows of a file: mappings of a .jsonl, .json or .csv file, else its lines that are not empty.

    Raises:
        ConfigurationError: there is nothing in it, or it is not what its name says.
    """
    if path.suffix == ".parquet":
        raise ConfigurationError(f"{path} is Parquet, which is not read here: write it as JSON lines (to_json of a datasets.Dataset does).")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8 text: {error}.") from error
    if path.suffix == ".jsonl":
        rows: Any = [_parse(line, f"{path}, line {i},") for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    elif path.suffix == ".json":
        rows = _parse(text, str(path)) if text.strip() else []
    elif path.suffix == ".csv":
        rows = list(csv.DictReader(text.splitlines(keepends=True)))
    else:
        rows = [line for line in text.splitlines() if line.strip()]
    if not rows:
        raise ConfigurationError(f"{path} is empty: one text a line, or JSON lines, is needed.")
    return rows if isinstance(rows, list) else [rows]


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{place} is not JSON: {error}.") from error


def sample(row: Any, tokenizer: Any, raw: bool = False) -> Sample:
    """A row in one of the two shapes.

    Args:
        row: a line, or a mapping in one of the forms.
        tokenizer: if it has a chat template, prompts and instructions become messages, but for prompts with special tokens in them, which
            were rendered before, and for answers without a word.
        raw: prompts and instructions stay text, instructions under headings.

    Raises:
        ConfigurationError: it has none of the known columns.
    """
    if isinstance(row, str):
        return Sample(text=row)
    if not isinstance(row, dict):
        raise ConfigurationError(f"a row is {row!r:.60}; needed is text, or an object with {NEEDED}.")
    tools = row.get("tools") or None
    if isinstance(row.get("prompt"), list) or isinstance(row.get("completion"), list):
        asked, said = (_as_messages(row.get(name), role) for name, role in (("prompt", "user"), ("completion", "assistant")))
        return Sample([*asked, *said], len(asked), tools=tools)
    talk = row.get("messages") or row.get("conversations")
    if talk and not {"prompt", "completion"} <= row.keys():
        return Sample(chat_messages(talk), tools=tools)
    if "prompt" in row and ("completion" in row or "instruction" not in row):
        return _pair(row, None if raw else tokenizer)
    if "instruction" in row:
        return _alpaca(row, not raw and tokenizer.chat_template is not None)
    if "text" in row:
        return Sample(text=text_of(row["text"]))
    raise ConfigurationError(f"a row has the columns {', '.join(sorted(row))}; needed are {NEEDED}.")


def encode(row: Any, tokenizer: Any, limit: int, raw: bool = False) -> Encoded:
    """A row with its answer, at most `limit` tokens. `raw`: prompts and instructions without the chat template.

    Raises:
        ConfigurationError: see `sample`; or messages meet a tokenizer without a chat template.
    """
    found = sample(row, tokenizer, raw)
    if found.messages is None:
        text = found.text + (found.answer or "")
        spans = None if found.answer is None else [(len(found.text), len(text))]
        out = _tokenize(tokenizer, text, spans, special=True)
    else:
        out = _chat(found, tokenizer)
    out = _one_bos(out, tokenizer)
    ids, answers, eos = out.ids, out.answers, tokenizer.eos_token_id
    if answers and eos is not None and ids[-1] != eos and answers[-1]:
        ids, answers = [*ids, eos], [*answers, True]  # as it is learned: an answer ends
    elif answers and found.messages is None and ids[-1] == eos:  # the tokenizer has added it
        answers = [*answers[:-1], True]
    return Encoded(ids[:limit], None if answers is None else answers[:limit], out.hidden)


def given(row: Any, tokenizer: Any, limit: int, raw: bool = False) -> list[int]:
    """Token ids of what the model is given to answer, at most `limit`, with one BOS where the tokenizer or its template has one.

    Raises:
        ConfigurationError: see `encode`.
    """
    found = sample(row, tokenizer, raw)
    if found.messages is None:
        return _one_bos(Encoded(list(tokenizer(found.text)["input_ids"])), tokenizer).ids[:limit]
    turns = _turns(found)
    before = found.messages[: turns[-1]] if turns else found.messages
    return list(tokenizer(_render(tokenizer, before, found.tools, True), add_special_tokens=False)["input_ids"][:limit])


def _chat(found: Sample, tokenizer: Any) -> Encoded:
    """A conversation as its template renders it, with the assistant's turns where they can be told apart."""
    messages, turns = found.messages or [], _turns(found)
    text = _render(tokenizer, messages, found.tools)
    if not turns:
        return _tokenize(tokenizer, text, None, special=False)
    if not found.first and MARKER.search(tokenizer.get_chat_template(tools=found.tools)):
        marked = _marked(found, tokenizer)
        if marked is not None:
            return marked
    spans = [_span(tokenizer, messages, i, found.tools, text) for i in turns]
    known = [span for span in spans if span is not None]
    if len(known) < len(spans):
        return replace(_tokenize(tokenizer, text, None, special=False), hidden=True)
    return _tokenize(tokenizer, text, known, special=False)


def _marked(found: Sample, tokenizer: Any) -> Encoded | None:
    """With the mask of the template's own generation markers; None where it has none, or they mark nothing or everything."""
    out = tokenizer.apply_chat_template(found.messages, tools=found.tools, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = list(out["input_ids"]), [bool(bit) for bit in out["assistant_masks"]]
    if not any(mask) or all(mask):
        return None
    for i in range(1, len(ids)):  # markers around the content alone leave out the end of the turn
        mask[i] = mask[i] or (mask[i - 1] and ids[i] == tokenizer.eos_token_id)
    return Encoded(ids, mask)


def _span(tokenizer: Any, messages: list[Message], i: int, tools: Any, text: str) -> tuple[int, int] | None:
    """Where in `text` the assistant's message `i` stands, to the end of its end mark; None where the template hides it."""
    through = _render(tokenizer, messages[: i + 1], tools)
    content = str(messages[i]["content"]).strip()
    # Templates may refuse an empty conversation.
    start = _common(_render(tokenizer, messages[:i], tools, True), through) if i else through.find(content)
    end = _common(through, text)
    if not 0 <= start < end or (content and content not in text[start:end]):
        return None
    body, mark, rest = text[start:end].rpartition(tokenizer.eos_token or "\n")
    # The white space that templates put after the end mark is no part of an answer.
    return start, start + len(body) + len(mark) if mark and not rest.strip() else end


def _tokenize(tokenizer: Any, text: str, spans: list[tuple[int, int]] | None, special: bool) -> Encoded:
    """Token ids, and which of them end within a span."""
    if spans is None or not tokenizer.is_fast:  # only fast ones tell where a token stands in the text
        return Encoded(list(tokenizer(text, add_special_tokens=special)["input_ids"]), hidden=spans is not None)
    out = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    inside = [any(a < b and start < b <= end for start, end in spans) for a, b in out["offset_mapping"]]
    return Encoded(list(out["input_ids"]), inside)


def _one_bos(out: Encoded, tokenizer: Any) -> Encoded:
    """Without the second of two BOS tokens: the tokenizer has added one to a text that had it."""
    twice = tokenizer.bos_token_id is not None and out.ids[:2] == [tokenizer.bos_token_id] * 2
    return replace(out, ids=out.ids[1:], answers=out.answers and out.answers[1:]) if twice else out


def _render(tokenizer: Any, messages: list[Message], tools: Any, generation: bool = False) -> str:
    if tokenizer.chat_template is None:
        raise ConfigurationError("the file has messages, and the tokenizer has no chat template: give texts, or another tokenizer.")
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generation))


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _turns(found: Sample) -> list[int]:
    return [i for i, message in enumerate(found.messages or []) if message["role"] == "assistant" and i >= found.first]


def _pair(row: dict[str, Any], tokenizer: Any) -> Sample:
    """A prompt of text and perhaps its answer: as messages where there is a tokenizer with a chat template."""
    prompt, answer = text_of(row["prompt"]), None if row.get("completion") is None else text_of(row["completion"])
    chat = tokenizer is not None and tokenizer.chat_template is not None
    if chat and (answer is None or answer.strip()):
        special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        if not any(token in prompt for token in special):
            return _asked([], turn_of(prompt), None if answer is None else turn_of(answer))
    return Sample(text=prompt, answer=answer)


def turn_of(text: str) -> str:
    """What a turn says: text without the line breaks and the one blank that joined it to the other. An indentation stays."""
    text = text.rstrip().lstrip("\r\n")
    return text[1:] if text.startswith(" ") and not text.startswith("  ") else text


def _asked(system: list[Message], question: str, answer: str | None) -> Sample:
    asked = [*system, {"role": "user", "content": question}]
    said = [] if answer is None else [{"role": "assistant", "content": answer}]
    return Sample([*asked, *said], len(asked))


def _alpaca(row: dict[str, Any], chat: bool) -> Sample:
    instruction, more = text_of(row["instruction"]), text_of(row.get("input"))
    output = None if row.get("output") is None else text_of(row["output"])
    if chat:
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        return _asked(system, f"{instruction}\n\n{more}" if more.strip() else instruction, output)
    heads = f"### Instruction:\n{instruction}\n\n" + (f"### Input:\n{more}\n\n" if more.strip() else "")
    return Sample(text=f"{heads}### Response:\n", answer=output)


def _as_messages(value: Any, role: str) -> list[Message]:
    """A list of messages as it is; text as one message of a role; nothing where there is nothing."""
    return chat_messages(value) if isinstance(value, list) else [{"role": role, "content": text_of(value)}] if value is not None else []


def chat_messages(messages: list[Message]) -> list[Message]:
    """Messages with `role` and `content`, under the roles' usual names."""
    named = [
        {"role": message["from"], "content": message["value"]} if "from" in message and "role" not in message else message
        for message in messages
    ]
    return [{**message, "role": ROLES.get(message["role"], message["role"])} for message in named]


def text_of(value: Any) -> str:
    """A cell as text: a CSV file's numbers are numbers, and an empty cell is None."""
    return "" if value is None else str(value)
