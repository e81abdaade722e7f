"""The forms that samples come in: recognised by their columns or named, and brought to the few that are tokenized.

text                text (or the column that dataset_text_field names)
prompt_completion   prompt, completion: text (a question and its answer), or lists of messages
messages            messages, or conversations: lists of {"role", "content"} or {"from", "value"}
alpaca              instruction, output, and perhaps input, system
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flashoptim_hf.after.texts import chat_messages, text_of, turn_of
from flashoptim_hf.errors import ConfigurationError

AUTO = "auto"
NEEDED = {"prompt_completion": ("prompt", "completion"), "messages": ("messages",), "alpaca": ("instruction", "output"), "text": ("text",)}
"""Format -> the columns that it must have. Where several fit, the first is meant."""

Example = dict[str, Any]


def recognise(columns: Iterable[str], named: str = AUTO, text_field: str = "text") -> str:
    """The format of samples with these columns.

    Args:
        columns: of the data set.
        named: a format, which the columns must fit, or "auto".
        text_field: the column of plain text.

    Raises:
        ConfigurationError: no format fits, or the named one does not; says which columns there are and which are needed.
    """
    have = set(columns) | ({"messages"} if "conversations" in columns else set())
    needed = {**NEEDED, "text": (text_field,)}
    found = ", ".join(sorted(columns))
    if named == AUTO:
        fitting = next((name for name, names in needed.items() if have.issuperset(names)), None)
        if fitting is not None:
            return fitting
        preference = " Columns chosen and rejected are for preference training: recipes/qlora_dpo.py." if "chosen" in have else ""
        raise ConfigurationError(
            f"the samples have the columns {found}; needed are messages (or conversations), or prompt and completion, or instruction and "
            f"output, or {text_field} (dataset_text_field names the column of plain text). Rename the columns in the file, or name the one "
            f"with the text.{preference}"
        )
    if named not in needed:
        raise ConfigurationError(f"dataset_format={named!r} is not known; choose one of {', '.join([AUTO, *needed])}.")
    missing = [name for name in needed[named] if name not in have]
    if missing:
        raise ConfigurationError(
            f"dataset_format={named} needs the column{'s' * (len(missing) > 1)} {' and '.join(missing)}, and the samples have {found}. "
            f"Rename the columns in the file, or choose another dataset_format ({', '.join([AUTO, *needed])})."
        )
    return named


def standard(example: Example, form: str, chat: bool, text_field: str = "text") -> Example:
    """A sample with the columns of its format alone; alpaca, and pairs of text, as prompt and completion.

    Args:
        example: with every column of the data set.
        form: its format, as `recognise` gives it.
        chat: whether text becomes messages, which the tokenizer must have a chat template for. Otherwise alpaca becomes text under
            headings, and pairs of text stay as they are.
        text_field: the column of plain text.
    """
    if form == "text":
        return {text_field: text_of(example[text_field])}
    tools = {"tools": example["tools"]} if example.get("tools") else {}
    if form == "messages":
        return {"messages": chat_messages(example.get("messages") or example.get("conversations") or []), **tools}
    if form == "alpaca":
        return _alpaca(example, chat)
    sides = {side: example[side] for side in NEEDED["prompt_completion"]}
    if all(isinstance(value, list) for value in sides.values()):
        return {**{side: chat_messages(value) for side, value in sides.items()}, **tools}
    text = {side: text_of(value) for side, value in sides.items()}
    if not chat or not text["completion"].strip():  # a turn without a word would teach to say nothing
        return text
    return {side: [{"role": role, "content": turn_of(text[side])}] for side, role in zip(sides, ("user", "assistant"), strict=True)}


def _alpaca(example: Example, chat: bool) -> Example:
    instruction, given, output = (text_of(example.get(name)) for name in ("instruction", "input", "output"))
    if chat:
        system = [{"role": "system", "content": example["system"]}] if example.get("system") else []
        question = f"{instruction}\n\n{given}" if given.strip() else instruction
        return {"prompt": [*system, {"role": "user", "content": question}], "completion": [{"role": "assistant", "content": output}]}
    parts = [("Instruction", instruction), *([("Input", given)] if given.strip() else [])]
    heads = "".join(f"### {head}:\n{text}\n\n" for head, text in parts)
    return {"prompt": f"{heads}### Response:\n", "completion": output}
