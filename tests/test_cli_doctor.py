"""The doctor: every section, as text and as JSON, and that a broken path is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flashoptim_hf import cli, cli_doctor
from flashoptim_hf.kernels import cpu

SECTIONS = ("flashoptim-hf", "versions", "host memory", "devices", "compilers", "paths", "transformers", "environment", "verdict")


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
    assert report["paths"]["lists of tensors"].startswith("read by compiled C") == (cpu.where("_tensors") is not None)
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


def report(**sections: dict[str, str]) -> dict[str, dict[str, str]]:
    """A machine where everything is well, but for what is given."""
    whole = {
        "versions": dict.fromkeys(cli_doctor.RECIPES, "1"),
        "devices": {"cuda:0": "a GPU; pinning: works"},
        "paths": {"cuda:0": "fused Triton kernel; a step differs", "cpu": "compiled C; a step differs"},
        "transformers": {"optimizer names": "6 of 6 registered: a", "safe checkpoints": "5 of 5 methods"},
    }
    return {name: {**section, **sections.get(name, {})} for name, section in whole.items()}


@pytest.mark.parametrize(
    ("found", "devices", "lines"),
    [
        (report(), ["cuda:0"], {"works": "training on cuda:0, cpu", "next": "plan MODEL"}),
        (report(), [], {"works": "small models", "next": "make demo"}),
        (
            report(paths={"cpu": "the compiled path was not built"}),
            [],
            {"works": "cpu", "look at": "no compiled path", "next": "make demo"},
        ),
        (report(paths={"cuda:0": "a step FAILS"}), ["cuda:0"], {"works": "cpu", "look at": "a step on cuda:0 fails", "next": "report it"}),
        (report(devices={"cuda:0": "pinning: no"}), ["cuda:0"], {"works": "cuda:0", "look at": "copies are slower", "next": "plan"}),
        (report(transformers={"optimizer names": "5 of 6 registered: a"}), [], {"works": "cpu", "look at": "5 of 6", "next": "make"}),
        (report(versions={"trl": "absent"}), [], {"works": "cpu", "next": "(trl absent"}),
    ],
)
def test_the_verdict_is_what_works_what_does_not_and_what_is_next(
    found: dict[str, dict[str, str]], devices: list[str], lines: dict[str, str]
) -> None:
    said = cli_doctor.verdict(found, devices)
    assert list(said) == list(lines)
    for name, part in lines.items():
        assert part in said[name]


def test_the_verdict_comes_last_and_locked_memory_is_put_in_its_place() -> None:
    result = CliRunner().invoke(cli.app, ["doctor"])
    lines = result.stdout.splitlines()
    assert 2 <= len(lines) - lines.index("verdict") - 1 <= 3
    if not torch.accelerator.is_available():
        assert "which does not matter here" in next(line for line in lines if "locked memory" in line)


@pytest.mark.parametrize("gap", [0.5, float("nan")])
def test_a_step_that_is_wrong_is_a_failure(gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "_step_against_eager", lambda _: gap)
    assert "FAILS: it differs" in cli_doctor._path(torch.device("cpu"))
