"""Files that cannot be read: the line is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sft_data
import sft_files

from flashoptim_hf.errors import ConfigurationError

GOOD = '{"text": "a"}\n'
BROKEN = {
    "a quote is missing": (".jsonl", GOOD + GOOD + '{"text": "b}\n' + GOOD, r"line 3: no JSON, unterminated string"),
    "after an empty line": (".json", GOOD + "\n" + '{"text": b}\n', r"line 3: no JSON, expecting value \(column 10\): \{\"text\": b\}$"),
    "no object": (".jsonl", GOOD + "3\n", r"line 2: a sample is a JSON object, .* and this is a number: 3$"),
    "a list of samples": (".json", '[{"text": "a"},\n {"text": }]\n', r"line 2: no JSON, expecting value \(column 11\)$"),
}


@pytest.mark.parametrize(("suffix", "text", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_the_line_is_named(suffix: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        sft_data.load(str(path))
    assert str(caught.value).startswith(f"{path}, line ")
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("text", [GOOD + GOOD, '[{"text": "a"}]', GOOD + '{"text": null}\n', '{"n": 1}\n{"n": 1.5}\n', '{"text": "a b"}\n'])
def test_nothing_is_found_in_a_good_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text, encoding="utf-8-sig")
    assert sft_files.fault(path) is None


def test_a_column_of_two_types_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(GOOD + '{"text": ["b"]}\n')
    assert sft_files.fault(path) == f"{path}, line 2: 'text' is a list, and in line 1 it is text"


def test_another_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_text("no parquet")
    with pytest.raises(ConfigurationError, match=r"data\.parquet' cannot be read as \.parquet"):
        sft_data.load(str(path))


def test_a_data_set_that_no_hub_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, **_: str) -> None:
        raise FileNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")

    monkeypatch.setattr(sft_data, "load_dataset", absent)
    with pytest.raises(ConfigurationError, match=r"^dataset='org/nothing:a' is no file here, and as a hub id: .*doesn't exist"):
        sft_data.load("org/nothing:a")
