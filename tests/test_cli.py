"""The command line: what it finds, how fast it starts, and the fidelity bench from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

import flashoptim_hf
from flashoptim_hf import cli
from flashoptim_hf.bench.streams import drifting

SCRIPT = Path(sys.executable).with_name("flashoptim-hf")


@pytest.fixture
def gradients(tmp_path) -> Path:
    path = tmp_path / "g.safetensors"
    save_file({"w": drifting(0.5, 1.0, 0, steps=8, elements=128)}, path)
    return path


def invoke(*arguments: str):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_version():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output.strip() == f"flashoptim-hf {flashoptim_hf.__version__}"


def test_help_and_version_import_nothing_heavy():
    program = (
        "import sys, flashoptim_hf; before = set(sys.modules)\n"  # what the package itself imports is its own affair
        "from flashoptim_hf.cli import app\n"
        "for arguments in (['--version'], ['--help'], ['bench', '--help']):\n"
        "    app(arguments, standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'triton', 'matplotlib', 'transformers', 'safetensors', 'flashoptim_hf.bench.fidelity'}\n"
        "assert not (set(sys.modules) - before) & heavy, (set(sys.modules) - before) & heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "fidelity" in result.stdout


def test_benches_are_the_files_that_define_run(tmp_path, monkeypatch):
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Measure things."""')
    (folder / "cpu_step.py").write_text('def run():\n    """Time a step."""\n')
    (folder / "plain.py").write_text("def run():\n    pass\n")
    (folder / "helper.py").write_text("def walk():\n    pass\nclass A:\n    def run(self): ...\n")
    (folder / "_private.py").write_text("def run():\n    pass\n")
    monkeypatch.setattr(cli, "PACKAGE", tmp_path)
    group = cli.FolderGroup("bench", "bench")
    assert group.help == "Measure things."
    assert group.list_commands(None) == ["cpu-step", "plain"]
    found = group.get_command(None, "cpu-step")
    assert (found.name, found.module, found.help) == ("cpu-step", "bench/cpu_step", "Time a step.")
    assert group.get_command(None, "helper") is None


def test_every_bench_of_the_package_can_be_called():
    for name in cli.FolderGroup("bench", "bench").list_commands(None):
        result = invoke("bench", name, "--help")
        assert result.exit_code == 0, result.output
        assert "--json" in result.output


@pytest.mark.parametrize("arguments", [("nope",), ("bench", "nope")])
def test_unknown_command_is_named(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "nope" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sampel",), "Is sample meant?"),
        (("evaluate", "x"), "Is eval meant?"),
        (("xyzzy",), "There are bench, convert, doctor"),
        (("bench", "fidelty"), "Is fidelity meant?"),
    ],
)
def test_the_nearest_command_is_named(arguments, said):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_usage_shows_arguments_by_name():
    assert "sample [OPTIONS] MODEL\n" in invoke("sample").stderr
    assert "plan [OPTIONS] [MODEL]" in invoke("plan", "--help").stdout
    assert "convert [OPTIONS] SOURCE TARGET" in invoke("convert", "--help").stdout


def test_fidelity_from_end_to_end(gradients, tmp_path):
    files = ("--json", tmp_path / "out" / "f.json", "--plot", tmp_path / "out" / "f.png")
    options = ("--gradients", gradients, "--no-synthetic", "--scales", "1e-8,1e8", "--peers", "none", "--codecs", "log,none")
    result = invoke("bench", "fidelity", *options, *files)
    assert result.exit_code == 0, result.output
    assert "all: mean" in result.output
    rows = json.loads((tmp_path / "out" / "f.json").read_text())["rows"]
    assert {row["subject"] for row in rows} == {"log", "none"}
    assert {"w", "all", "scale=1e-08/w", "scale=1e-08/all", "scale=1e+08/all"} <= {row["case"] for row in rows}
    metrics = {row["metric"] for row in rows if row["case"] == "all" and row["subject"] == "log"}
    assert {"update_error_mean", "update_error_worst", "bytes_per_param"} <= metrics
    assert (tmp_path / "out" / "f.png").read_bytes().startswith(b"\x89PNG")


def test_an_error_of_ours_is_a_sentence_and_not_a_traceback(gradients):
    result = invoke("bench", "fidelity", "--gradients", gradients, "--no-synthetic", "--codecs", "loog")
    assert result.exit_code == 2
    assert "error: codec='loog' is not known" in result.stderr
    assert "Traceback" not in result.output


def test_console_script(gradients, tmp_path):
    command = [SCRIPT, "bench", "fidelity", "--gradients", gradients, "--no-synthetic", "--peers", "none", "--codecs", "log"]
    result = subprocess.run([*command, "--json", tmp_path / "f.json"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "f.json").read_text())["bench"] == "fidelity"
