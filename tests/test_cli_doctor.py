"""The doctor: every section, as text and as JSON, and that a broken path is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flashoptim_hf import cli, cli_doctor
from flashoptim_hf.kernels import cpu

SECTIONS = ("flashoptim-hf", "versions", "host memory", "devices", "compilers", "paths", "transformers", "environment")


def test_report_as_text_and_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_TOKEN", "secret")
    file = tmp_path / "doctor.json"
    result = CliRunner().invoke(cli.app, ["doctor", "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert tuple(report) == SECTIONS
    assert report["versions"]["torch"] == torch.__version__
    assert report["environment"] == {"OMP_NUM_THREADS": "1", **{k: v for k, v in report["environment"].items() if k != "OMP_NUM_THREADS"}}
    assert "secret" not in result.output
    assert "6 of 6 registered" in result.output
    assert "5 of 5 methods" in report["transformers"]["safe checkpoints"]
    path = report["paths"]["cpu"]
    assert ("compiled C" in path) == (cpu.library() is not None)
    assert ("adamw with codec='log' or 'joint'" in path) == (cpu.library() is not None)
    gap = float(path.rpartition("by ")[2].partition(" ")[0])
    assert gap < 1e-3


def test_json_alone_goes_to_the_terminal() -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--json", "-"])
    assert tuple(json.loads(result.stdout)) == SECTIONS


def test_a_path_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.device) -> float:
        raise RuntimeError("no kernel image\nmore")

    monkeypatch.setattr(cli_doctor, "_step_against_eager", fail)
    assert cli_doctor._path(torch.device("cpu")).endswith("a step FAILS: RuntimeError: no kernel image")


def test_programs_that_are_absent_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli_doctor._tool("gcc") == "absent"
    (tmp_path / "gcc").write_text("not a program")
    (tmp_path / "gcc").chmod(0o755)
    assert "does not run" in cli_doctor._tool("gcc")
