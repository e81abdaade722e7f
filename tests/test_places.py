"""Names that can only be folders are refused where there is none, with what is there; hub ids pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashoptim_hf import cli, places
from flashoptim_hf.errors import ConfigurationError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with two runs in it."""
    for name in ("runs/kettle/checkpoint-9", "runs/kettle/checkpoint-10", "runs/lamp"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["gpt2", "org/name", "org/name-7b.v2", "runs/lamp", "./runs", "runs"])
@pytest.mark.usefixtures("here")
def test_hub_ids_and_folders_pass(name: str) -> None:
    places.check(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runs/ketle", "runs holds kettle: is one of them meant?"),
        ("runs/nope", "runs holds the folders kettle, lamp."),
        ("runs/nope/deeper/still", "runs holds the folders kettle, lamp."),
        ("runs/kettle/checkpoint-11", "checkpoint-10"),
        ("rnus/kettle/x", "the current folder holds runs:"),
        ("./gone", "the current folder holds the folders runs."),
        ("runs/lamp/x/", "runs/lamp holds no folders."),
        (".demo/model", "make demo-assets"),
        ("/nowhere/at/all", "/ holds"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_can_only_be_a_folder_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        places.check(name)
    assert f"there is no folder {name!r}" in str(caught.value)
    assert said in str(caught.value)


def test_a_tilde_that_no_shell_has_seen(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    with pytest.raises(ConfigurationError, match=f"Write '{here}/runs'"):
        places.check("~/runs")


@pytest.mark.parametrize(
    "words",
    [
        ("sample", "runs/ketle", "--prompt", "x"),
        ("eval", "runs/ketle", "texts.txt"),
        ("merge", "runs/ketle", "out"),
        ("plan", "runs/ketle"),
    ],
)
def test_every_command_that_loads_says_so_before_a_hub_is_asked(words: tuple[str, ...], here: Path) -> None:
    (here / "texts.txt").write_text("one\n")
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2
    assert "there is no folder 'runs/ketle'" in result.stderr
    assert "runs holds kettle" in result.stderr
