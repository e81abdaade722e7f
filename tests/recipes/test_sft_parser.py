"""Mistakes on the command line and in files: one sentence each, before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import accelerate_loop
import full_sft
import pytest
import qlora_dpo
import qlora_sft
import sft_options
import sft_parser

from flashoptim_hf.errors import ConfigurationError

GIVEN = ["--model_name_or_path", "org/name", "--dataset", "d.jsonl", "--output_dir", "o", "--use_cpu", "true"]


def refused(words: list[str], recipe: Any = qlora_sft) -> str:
    """The sentence with which a recipe's options are refused."""
    parser = recipe.make_parser()
    with pytest.raises(ConfigurationError) as caught:
        sft_options_read(parser, words)
    return str(caught.value)


def sft_options_read(parser: Any, words: list[str]) -> Any:
    """`sft_options.read` of these words, in place of those of the test's own command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["recipe.py", *words])
        return sft_options.read(parser)


TYPOS = {
    "an optimizer's name": (
        ["--optim", "flashoptim_pagd_adamw"],
        r"^optim='flashoptim_pagd_adamw' is not known; did you mean flashoptim_paged_adamw\?$",
    ),
    "a name unlike all": (["--optim", "xyz"], r"choose one of flashoptim_adamw, .* or a name of transformers"),
    "a choice of two spellings": (["--lr_scheduler_type", "cosin"], r"^lr_scheduler_type='cosin' is not known; did you mean cosine\?$"),
    "another choice": (["--dtype", "bfloat"], r"^dtype='bfloat' is not known; did you mean bfloat16\?$"),
    "no number": (["--max_steps", "many"], r"^--max_steps: invalid int value: 'many'\.$"),
    "a flag": (["--learning_rat", "1"], r"^the command line has the flag --learning_rat, .*; did you mean --learning_rate\?\.$"),
    "optim_args": (["--optim_args", "codex=log"], r"Did you mean codec\?"),
    "optim_args, a value": (["--optim_args", "page_bytes=3 parsecs"], r"page_bytes"),
    "optim_args, a codec": (["--optim_args", "codec=lag"], r"codec='lag'"),
    "optim_args of bitsandbytes": (["--optim_args", "optim_bits=8"], r"in 8 bits already: codec chooses how"),
    "what transformers refuses": (
        ["--eval_strategy", "steps", "--load_best_model_at_end", "true", "--save_strategy", "epoch"],
        r"save and eval",
    ),
}


@pytest.mark.parametrize(("words", "message"), TYPOS.values(), ids=TYPOS.keys())
@pytest.mark.parametrize("recipe", [qlora_sft, full_sft, qlora_dpo])
def test_a_mistake_is_one_sentence(recipe: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused([*GIVEN, *words], recipe)
    assert re.search(message, said), said
    assert "usage" not in "".join(capsys.readouterr())


GOOD = ["codec=none", "gradient_release=true,page_bytes=1MiB", "device_budget_bytes=0.5", "offload_dir=no/such/folder,offload_keep=true"]


@pytest.mark.parametrize("text", GOOD)
def test_good_optim_args_are_taken(text: str) -> None:
    _, args, _ = sft_options_read(qlora_sft.make_parser(), [*GIVEN, "--optim_args", text])
    assert args.optim_args == text


def test_other_optimizers_keep_their_own_arguments() -> None:
    _, args, _ = sft_options_read(qlora_sft.make_parser(), [*GIVEN, "--optim", "adamw_torch", "--optim_args", "codex=log"])
    assert args.optim_args == "codex=log"


# ---------------------------------------------------------------------- the config file


def test_without_a_config_and_a_dataset_a_config_is_named() -> None:
    assert re.search(r"required: --dataset\. Usually .* --config configs/qlora/", refused(["--max_steps", "3"]))


def test_with_a_config_the_missing_key_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("max_steps: 3\n")
    assert refused(["--config", str(tmp_path / "run.yaml")]) == "the following arguments are required: --dataset."


def test_a_config_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "name.yaml").write_text("dataset: d.jsonl\n")
    for words in (["--config", str(tmp_path / "nave.yaml")], [f"--config={tmp_path}/nave.yaml"]):
        assert refused(words).endswith(f"did you mean {tmp_path / 'name.yaml'}?")
    assert "for example, configs/qlora/" in refused(["--config", str(tmp_path / "none" / "x.yaml")])
    assert "no file after it" in refused(["--config"])


@pytest.mark.parametrize(
    ("text", "message"), [("a: [1\n", "is no YAML: .*line 2"), ("- a\n", "this is a list"), ("", "this is a NoneType")]
)
def test_a_config_that_is_no_config(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert re.search(message, refused(["--config", str(tmp_path / "run.yaml")]))


def test_one_word_with_an_equals_sign_is_a_config_too(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("max_steps: 3\ndataset: d.jsonl\nmodel_name_or_path: org/name\n")
    _, args, _ = sft_options_read(qlora_sft.make_parser(), [f"--config={tmp_path}/run.yaml", "--use_cpu", "true"])
    assert args.max_steps == 3


# ---------------------------------------------------------------------- the model


@pytest.mark.parametrize("name", ["./model", "/no/model", "~/model", "runs/mine/model", "../x", ".demo2/model"])
def test_a_path_that_is_no_folder_is_said(name: str) -> None:
    assert f"model_name_or_path='{name}': no such folder" in refused([*GIVEN, "--model_name_or_path", name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["loop.py", "--model_name_or_path", name, "--dataset", "d.jsonl"])
        with pytest.raises(ConfigurationError, match="no such folder"):
            accelerate_loop.main()


def test_the_demos_model_is_made_by_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "`make demo-assets`" in refused([*GIVEN, "--model_name_or_path", ".demo/model"])
    (tmp_path / ".demo/model").mkdir(parents=True)
    sft_parser.check_model(".demo/model")
    sft_parser.check_model("org/name")
    with pytest.raises(ConfigurationError, match="is not set"):
        sft_parser.check_model(None)
