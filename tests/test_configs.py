"""Every file in configs/ opens with its launch command and is loaded by the parser that will load it; no file is left out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env

from flashoptim_hf.trainer import processes

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
FILES = sorted(path for path in CONFIGS.rglob("*") if path.is_file() and path.parent.name != "architectures")
RECIPES = ROOT / "recipes"
sys.path.insert(0, str(RECIPES))


def command(text: str) -> list[str]:
    """The words of the launch command in a file's first line."""
    first = text.splitlines()[0] if text else ""
    assert first.startswith("# accelerate launch "), "a config opens with its launch command"
    return shlex.split(first.removeprefix("# "))


def script_and_options(words: list[str]) -> tuple[str, list[str], list[str]]:
    """The script of a launch command, the launcher's options and the script's, read by accelerate's own parser."""
    args = launch_command_parser().parse_args(words[2:])
    return args.training_script, words[2 : words.index(args.training_script)], list(args.training_script_args)


def test_there_are_configs_and_all_are_yaml() -> None:
    assert FILES
    assert {path.suffix for path in FILES} == {".yaml"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_opens_with_its_launch_command(path: Path) -> None:
    words = command(path.read_text(encoding="utf-8"))
    script, launcher, options = script_and_options(words)
    named = [word for word in (script, *launcher, *options) if word.endswith((".yaml", ".py"))]
    assert str(path.relative_to(ROOT)) in named
    for name in named:
        assert (ROOT / name).is_file(), f"{name} does not exist"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_loads_through_its_own_parser(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.parent.name == "accelerate":
        config = load_config_from_file(str(path))  # refuses keys that it does not know
        assert config.to_dict().items() >= {key: value for key, value in settings.items() if value != {}}.items()
        return
    script, _, options = script_and_options(command(path.read_text(encoding="utf-8")))
    monkeypatch.chdir(ROOT)
    recipe = __import__(Path(script).stem)
    # Precision that this machine's device lacks would be refused before anything is parsed, so the CPU stands in for it.
    parsed = recipe.make_parser().parse_args_and_config([*options, "--use_cpu", "true"])
    values = {key: value for part in parsed for key, value in vars(part).items()}
    assert settings
    for key, value in settings.items():
        found = values[key]
        assert str(getattr(found, "value", found)) == str(value), key


FSDP = [path for path in FILES if path.name.startswith("fsdp2")]


@pytest.mark.parametrize("path", FSDP, ids=lambda path: path.name)
def test_what_accelerate_makes_of_an_fsdp_config(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through its launcher into the environment, and from there into the plugin that shards: every value arrives."""
    args = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    args, _, _ = _validate_launch_command(args)
    for key, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    asked = yaml.safe_load(path.read_text(encoding="utf-8"))["fsdp_config"]
    assert asked["fsdp_version"] == plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is asked["fsdp_reshard_after_forward"] is True
    assert plugin.cpu_ram_efficient_loading is asked["fsdp_cpu_ram_efficient_loading"]
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert plugin.state_dict_type.name == asked["fsdp_state_dict_type"]
    assert type(plugin.cpu_offload).__name__ == "OffloadPolicy"  # which keeps weights on the device
    assert args.mixed_precision == "no"
    assert not {
        name for name in asked if not hasattr(plugin, name.removeprefix("fsdp_")) and name not in ("fsdp_version", "fsdp_offload_params")
    }
    assert len(FSDP) == 2
    processes.check(SimpleNamespace(deepspeed=None, fsdp_plugin_args=None))  # what the package refuses, this is not


BROKEN = {
    "no command": "learning_rate: 1.0e-4\n",
    "a comment before it": "# Settings\n# accelerate launch recipes/qlora_sft.py\n",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_the_check_of_the_command_fails_on(text: str) -> None:
    with pytest.raises(AssertionError, match="launch command"):
        command(text)


def test_an_unknown_key_fails(tmp_path: Path) -> None:
    import qlora_sft

    file = tmp_path / "typo.yaml"
    file.write_text("learning_rat: 1.0e-4\ndataset: d.jsonl\n")
    with pytest.raises(ValueError, match="learning_rat"):
        qlora_sft.make_parser().parse_args_and_config(["--config", str(file)])
    file.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_proceses: 1\n")
    with pytest.raises(ValueError, match="num_proceses"):
        load_config_from_file(str(file))
