"""Files of texts: prompts and held-out samples, one a line, or JSON lines with messages, prompt and completion, or text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError


def read(path: Path) -> list[Any]:
    """Rows of a file: mappings of a .jsonl or .json file, else its lines that are not empty.

    Raises:
        ConfigurationError: there is nothing in it, or it is not what its name says.
    """
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        rows = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else json.loads(text) if path.suffix == ".json" else lines
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON{' lines' if path.suffix == '.jsonl' else ''}: {error}.") from error
    if not rows:
        raise ConfigurationError(f"{path} is empty: one text a line, or JSON lines, is needed.")
    return rows if isinstance(rows, list) else [rows]


def tokens(row: Any, tokenizer: Any, answer: bool, limit: int) -> list[int]:
    """Token ids of a row, at most `limit`, with one BOS where the tokenizer or its template has one.

    Args:
        answer: True: with the answer. False: what the model is given to answer.

    Raises:
        ConfigurationError: the row has none of the known columns, or messages meet a tokenizer without a chat template.
    """
    if isinstance(row, str):
        return list(tokenizer(row)["input_ids"][:limit])
    messages = row.get("messages")
    if messages is None and isinstance(row.get("prompt"), list):
        messages = [*row["prompt"], *row.get("completion", [])]
    if messages is not None:
        if tokenizer.chat_template is None:
            raise ConfigurationError("the file has messages, and the tokenizer has no chat template: give texts, or another tokenizer.")
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        given = messages if answer or not turns else messages[: turns[-1]]
        text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=not answer)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"][:limit])
    if "prompt" in row:
        return list(tokenizer(row["prompt"] + (row.get("completion", "") if answer else ""))["input_ids"][:limit])
    if "text" in row:
        return list(tokenizer(row["text"])["input_ids"][:limit])
    raise ConfigurationError(f"a row has the columns {', '.join(sorted(row))}; needed are messages, prompt (and completion), or text.")
