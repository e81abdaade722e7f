"""`flashoptim-hf convert` and `inspect`: files and folders, whole or not at all, and what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from typer.testing import CliRunner

from flashoptim_hf import cli
from flashoptim_hf.bench import conversion_model as runs
from flashoptim_hf.bench.conversions import maker
from flashoptim_hf.codecs.base import State, get_codec
from flashoptim_hf.optim import files
from flashoptim_hf.optim.adamw import FlashAdamW
from flashoptim_hf.optim.convert import recognise
from flashoptim_hf.optim.statistics import encode_errors
from flashoptim_hf.trainer import complete


def call(*arguments, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return re.sub(r"\s+", " ", result.output)


def saved(path: Path, form: str = "log", algorithm: str = "adamw", dtype: str = "float32") -> Path:
    outcome = runs.train(maker(form, algorithm), runs.Job(algorithm, {}, None, 0, 3, dtype))
    torch.save(outcome.state, path)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint folder of fp32 and bf16 weights, marked complete."""
    path = tmp_path / "checkpoint-3"
    path.mkdir()
    params = {"a": nn.Parameter(torch.randn(40, 2).bfloat16()), "b": nn.Parameter(torch.randn(70))}
    optimizer = FlashAdamW(params.items(), codec="softsign")
    for _ in range(3):
        for p in params.values():
            p.grad = torch.randn_like(p)
        optimizer.step()
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    save_file({name: p.detach() for name, p in params.items()}, path / "adapter_model.safetensors")
    for name in ("scheduler.pt", "rng_state.pth"):
        torch.save({}, path / name)
    (path / "trainer_state.json").write_text("{}")
    complete.seal(path, 3, 3)
    return path


@pytest.mark.parametrize("form", ["torch", "bitsandbytes8", "torchao", "softsign"])
def test_a_file_into_every_form_and_back(tmp_path, form):
    source = saved(tmp_path / "o.pt", form)
    for to in ("adamw_torch", "bitsandbytes", "flashoptim", "flashoptim_hf"):
        extra = ["--codec", "log"] if to == "flashoptim_hf" else ["--weight-dtype", "float32"]
        call("convert", source, tmp_path / f"{to}.pt", "--to", to, *extra)
        package = {"adamw_torch": "torch"}.get(to, to)
        assert recognise(torch.load(tmp_path / f"{to}.pt", weights_only=True)) == (package, "adamw")
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]
    exact = torch.load(tmp_path / "adamw_torch.pt", weights_only=True)["state"]
    call("convert", tmp_path / "adamw_torch.pt", tmp_path / "none.pt", "--to", "flashoptim_hf", "--codec", "none")
    back = torch.load(tmp_path / "none.pt", weights_only=True)["state"]
    assert all(torch.equal(back[key][name], exact[key][name]) for key in exact for name in ("exp_avg", "exp_avg_sq"))


def test_torchao_is_read_in_a_process_that_has_not_imported_it(tmp_path):
    """weights_only loading knows torchao's classes only when torchao has been imported."""
    saved(tmp_path / "o.pt", "torchao")
    command = [Path(sys.executable).with_name("flashoptim-hf"), "inspect", tmp_path / "o.pt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torchao AdamW" in done.stdout


def bits(state: dict) -> dict:
    return {key: {name: value.reshape(-1).view(torch.uint8).tolist() for name, value in values.items()} for key, values in state.items()}


def test_a_folder_tells_the_dtype_of_its_weights_and_stays_marked(folder, tmp_path):
    target = tmp_path / "there" / "checkpoint-3"
    call("convert", folder, target, "--to", "flashoptim")
    assert complete.defect(target) is None
    assert complete.read_mark(target)["step"] == 3
    state = torch.load(target / "optimizer.pt", weights_only=True)["state"]
    assert state[0]["error_bits"].dtype == state[0]["exp_avg::scales"].dtype == torch.bfloat16
    assert state[1]["exp_avg::scales"].dtype == torch.float16
    call("convert", target, tmp_path / "back", "--to", "flashoptim_hf", "--codec", "softsign")
    old = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    assert bits(torch.load(tmp_path / "back" / "optimizer.pt", weights_only=True)["state"]) == bits(old)


def test_what_is_refused(folder, tmp_path):
    source = folder / "optimizer.pt"
    assert "exists already" in call("convert", source, source, "--to", "adamw_torch", code=2)
    assert "is not known" in call("convert", source, tmp_path / "x", "--to", "adagrad", code=2)
    assert "goes with --to flashoptim_hf" in call("convert", source, tmp_path / "x", "--to", "sgd", "--codec", "log", code=2)
    assert "--codec stores it" in call("convert", source, tmp_path / "x", "--to", "flashoptim_hf", code=2)
    assert "runs another algorithm" in call("convert", source, tmp_path / "x", "--to", "sgd", code=2)
    assert "--weight-dtype" in call("convert", saved(tmp_path / "t.pt", "torch"), tmp_path / "x", "--to", "flashoptim", code=2)
    assert "codec='square' stores one momentum" in call(
        "convert", source, tmp_path / "x", "--to", "flashoptim_hf", "--codec", "square", code=2
    )
    (tmp_path / "empty").mkdir()
    assert "neither optimizer.pt nor optimizer.bin" in call("convert", tmp_path / "empty", tmp_path / "x", "--to", "sgd", code=2)
    torch.save([1, 2], tmp_path / "list.pt")
    assert "holds no optimizer's state dict" in call("inspect", tmp_path / "list.pt", code=2)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("size", [0, 100, 0.5, -1])
def test_a_damaged_source_is_named_and_nothing_is_written(folder, tmp_path, size):
    path = folder / "optimizer.pt"
    data = path.read_bytes()
    path.write_bytes(data[: int(size * len(data)) if size == 0.5 else size])
    said = call("convert", folder, tmp_path / "x", "--to", "adamw_torch", code=2)
    assert str(path) in said.replace(" ", "") or str(path) in said
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-3"]


def test_another_file_of_a_marked_source_is_damaged(folder, tmp_path):
    with (folder / "scheduler.pt").open("r+b") as file:
        file.seek(50)
        file.write(b"x")
    assert "scheduler.pt is corrupt" in call("convert", folder, tmp_path / "x", "--to", "adamw_torch", code=2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-3"]
    assert "complete: no: " in call("inspect", folder)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_and_leaves_nothing(folder, tmp_path, monkeypatch):
    opened = Path.open

    def full(self, mode="r", *args, **kwargs):
        if mode != "wb":
            return opened(self, mode, *args, **kwargs)
        os.symlink("/dev/full", self)  # the temporary file's name
        return opened(self, mode, *args, **kwargs)

    monkeypatch.setattr(files.Path, "open", full)
    said = call("convert", folder / "optimizer.pt", tmp_path / "x.pt", "--to", "adamw_torch", code=2)
    assert "x.pt could not be written" in said
    assert re.search(r"about [\d.]+ (B|KiB) are needed, and .* are free", said)
    said = call("convert", folder, tmp_path / "y", "--to", "adamw_torch", code=2)
    assert "could not be written" in said
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-3"]


def test_inspect_tells_what_is_in_it(folder):
    said = call("inspect", folder)
    assert "complete: yes, marked" in said
    assert "format: flashoptim_hf FlashAdamW, format 1; codec softsign; master_bits 24; weights bfloat16+float32" in said
    assert "steps: 3" in said
    assert re.search(r"correction │ 80 ", said)
    assert re.search(r"exp_avg_sq │ 150 ", said)
    assert re.search(r"│ a │ 40x2 │ 3 │ exp_avg │ [\d.e-]+ │ [\d.e-]+ │ [\d.]+% │ [\d.]+% │", said)
    call("inspect", folder / "optimizer.pt", "--tensors", "0")
    (folder / complete.MARK).unlink()
    assert "complete: not marked" in call("inspect", folder)


@pytest.mark.parametrize("codec", ["log", "softsign", "square", "none"])
def test_the_estimated_error_is_that_of_an_encode(codec):
    """Within a third of the error that encoding these numbers makes, for every codec."""
    states = [State("exp_avg", signed=True)] + ([State("exp_avg_sq", signed=False)] if codec in ("log", "none") else [])
    made = get_codec(codec, states)
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(torch.randn(6400, generator=generator)) * 1e-3
    values = [size * torch.randn(6400, generator=generator), size.square()][: len(states)]
    planes = [torch.zeros(plane.entries(6400), dtype=plane.dtype) for plane in made.planes]
    made.encode(values, planes, step=3)
    for one, value, again, estimate in zip(states, values, made.decode(planes, 6400), encode_errors(made, planes), strict=True):
        old, new = (value, again) if one.signed else (value.sqrt(), again.sqrt())
        true = float((new - old).norm() / old.norm())
        assert estimate == pytest.approx(true, rel=1 / 3, abs=1e-12), one.name


def test_every_optimizer_of_an_accelerate_folder_is_converted(tmp_path):
    """Accelerate numbers them; one that stayed in another format would be loaded for floats later."""
    place = tmp_path / "two optimizers"
    place.mkdir()
    for name in ("optimizer.bin", "optimizer_1.bin"):
        saved(place / name)
    said = call("convert", place, tmp_path / "there", "--to", "adamw_torch")
    assert "optimizer_1.bin: flashoptim_hf FlashAdamW -> torch AdamW" in said
    for name in ("optimizer.bin", "optimizer_1.bin"):
        assert recognise(files.read(tmp_path / "there" / name)) == ("torch", "adamw")
    assert "optimizer_1.bin; name one of them" in call("inspect", place)
    assert "converted" not in call("convert", place / "optimizer_1.bin", tmp_path / "one.bin", "--to", "adamw_torch")
    assert recognise(files.read(tmp_path / "one.bin")) == ("torch", "adamw")


def test_a_newer_format_is_refused_by_number(tmp_path):
    source = saved(tmp_path / "o.pt")
    state = torch.load(source)
    state["param_groups"][0]["flashoptim_format"] = 7
    torch.save(state, source)
    assert "format 7" in call("convert", source, tmp_path / "x.pt", "--to", "adamw_torch", code=2)
    assert "format 7, and this version reads formats up to 1" in call("inspect", source, code=2)


def test_places_that_cannot_be_written(tmp_path):
    source = saved(tmp_path / "o.pt")
    assert "could not be written" in call("convert", source, source / "x.pt", "--to", "adamw_torch", code=2)
    (tmp_path / "bytes").write_bytes(b"hello")
    assert "KeyError" in call("inspect", tmp_path / "bytes", code=2)


def test_parameters_without_elements_are_shown(tmp_path):
    params = [nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(70))]
    optimizer = FlashAdamW(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    said = call("inspect", tmp_path / "o.pt")
    assert "0x3" in said
    assert "nan" not in said


def test_a_sharded_checkpoint_by_way_of_the_command_that_the_message_names(tmp_path):
    """What `accelerator.save_state` and the Trainer write under FSDP2 with SHARDED_STATE_DICT."""
    net = nn.Linear(70, 3).bfloat16()
    optimizer = FlashAdamW(net.parameters(), codec="none")
    net(torch.ones(1, 70).bfloat16()).sum().backward()
    optimizer.step()
    place = tmp_path / "checkpoint 1" / "optimizer_0"
    dcp.save({"optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=str(place), no_dist=True)
    said = call("inspect", place.parent, code=2)
    arguments = shlex.split(re.search(r"python (-m .*) optimizer.pt", said)[1])
    subprocess.run([sys.executable, *arguments, str(tmp_path / "o.pt")], check=True, capture_output=True)
    assert "3x70" in call("inspect", tmp_path / "o.pt")
    call("convert", tmp_path / "o.pt", tmp_path / "torch.pt", "--to", "adamw_torch")
    moments = files.read(tmp_path / "torch.pt")["state"]["weight"]
    assert torch.equal(moments["exp_avg"], optimizer.state[net.weight]["exp_avg"])
