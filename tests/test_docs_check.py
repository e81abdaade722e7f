"""The check of the documentation notices what is wrong: every kind of mistake, put into a page on purpose, is reported with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import test_docs
from tests.docs.blocks import anchor, parse
from tests.docs.session import Failed, Session, tiny_model

FENCE = "```"


def page(language: str, text: str, marker: str = ""):
    """A page whose only block begins on line 5."""
    return parse(f"# Title\n\n{marker or '<p>'}\n\n{FENCE}{language}\n{text}\n{FENCE}\n", "docs/page.md")


LAUNCH = "accelerate launch --config_file configs/accelerate/single_gpu.yaml"
WRONG = {
    "flag of the launcher": ("bash", "accelerate launch --num_procs 2 recipes/qlora_sft.py", "num_procs"),
    "config of the launcher": ("bash", "accelerate launch --config_file configs/accelerate/one.yaml recipes/qlora_sft.py", "one.yaml"),
    "script": ("bash", f"{LAUNCH} recipes/qlora.py", "recipes/qlora.py"),
    "flag of a recipe": ("bash", f"{LAUNCH} recipes/full_sft.py --learning_rat 1", "learning_rat"),
    "value of a recipe": ("bash", f"{LAUNCH} recipes/qlora_sft.py --max_steps many", "max_steps"),
    "config of a recipe": ("bash", f"{LAUNCH} recipes/qlora_sft.py --config configs/qlora/none.yaml", "none.yaml"),
    "options of the optimizer": ("bash", f"{LAUNCH} recipes/qlora_sft.py --optim_args codek=log", "codek"),
    "flag of the loop": ("bash", f"{LAUNCH} recipes/accelerate_loop.py --steps 3", "--steps"),
    "continued line": ("bash", f"{LAUNCH} recipes/qlora_sft.py \\\n    --max_step 3", "max_step"),
    "command of ours": ("bash", "flashoptim-hf plann", "plann"),
    "command of a group": ("bash", "flashoptim-hf bench speed", "speed"),
    "flag of ours": ("bash", "flashoptim-hf plan MODEL --gpuu 24GiB", "gpuu"),
    "missing argument": ("bash", "flashoptim-hf convert a b", "to"),
    "target of make": ("bash", "make nothing", "nothing"),
    "extra": ("bash", "pip install -e '.[recipe]'", "recipe"),
    "module": ("bash", "python -m flashoptim_hf.ran", "flashoptim_hf.ran"),
    "command of nobody": ("bash", "python -m flashoptim_hf.run no-such-command --optim flashoptim_adamw", "no-such-command"),
    "optimizer of a program": ("bash", "python -m flashoptim_hf.run -m trl.scripts.sft --optim flashoptim_adam", "flashoptim_adam"),
    "stranger": ("bash", "frobnicate --all", "frobnicate"),
    "shell": ("bash", "for x in 1 2; do echo", "syntax error"),
    "syntax": ("python", "model.train(", "never closed"),
    "name in Python": ("python", "from flashoptim_hf import FlashAdam", "FlashAdam"),
    "key": ("yaml", "learning_rat: 1.0e-4", "learning_rat"),
    "value in YAML": ("yaml", "max_steps: many", "max_steps"),
    "no YAML": ("yaml", "a: [1", "expected"),
    "JSON": ("json", "{'a': 1}", "{'a': 1}"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_block_is_named(case: tuple[str, str, str], tmp_path: Path) -> None:
    language, text, said = case
    found = test_docs.faults(page(language, text), tmp_path)
    assert len(found) == 1, found
    assert found[0].startswith("docs/page.md:5")
    assert said in found[0]


ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_proceses: 1"


@pytest.mark.parametrize(
    ("recipe", "text", "said"), [("full_sft", "lora_drop: 1", "lora_drop"), ("accelerate", ACCELERATE, "num_proceses")]
)
def test_yaml_is_read_by_the_parser_that_its_comment_names(recipe: str, text: str, said: str, tmp_path: Path) -> None:
    found = test_docs.faults(page("yaml", text, f"<!-- check: parse recipe={recipe} -->"), tmp_path)
    assert len(found) == 1
    assert said in found[0]


SPANS = {
    "--no_such_flag 3": "no_such_flag",
    'optim="flashoptim_adam"': "flashoptim_adam",
    'optim_args="codek=log"': "codek",
    "flashoptim-hf plan --gpuu 1": "gpuu",
}


@pytest.mark.parametrize(("span", "said"), SPANS.items())
def test_running_text_too(span: str, said: str, tmp_path: Path) -> None:
    found = test_docs.faults(parse(f"# T\n\nSay `{span}` here.\n", "docs/page.md"), tmp_path)
    assert len(found) == 1
    assert found[0].startswith("docs/page.md:3")
    assert said in found[0]


@pytest.mark.parametrize(
    ("language", "text", "marker"),
    [
        ("rust", "x", ""),
        ("text", "loss 1.0\nmake demo", ""),
        ("bash", "x", "<!-- check: maybe -->"),
        ("python", "x", "<!-- check: slow -->"),
    ],
)
def test_a_block_of_which_nobody_says_what_it_is_fails(language: str, text: str, marker: str) -> None:
    assert len(test_docs.unclassified(page(language, text, marker))) == 1


def test_indented_blocks_hold_commands_or_formulas(tmp_path: Path) -> None:
    found = test_docs.faults(parse("# T\n\nRun\n\n    flashoptim-hf plann\n\nwhere\n\n    a ≤ b (c)\n", "docs/page.md"), tmp_path)
    assert len(found) == 1
    assert found[0].startswith("docs/page.md:5")


def test_what_is_right_passes(tmp_path: Path) -> None:
    right = [
        page("bash", f"{LAUNCH} recipes/qlora_sft.py \\\n    --config FILE.yaml --max_steps 3  # a comment\nflashoptim-hf plan MODEL"),
        page("bash", 'cat > a.jsonl <<\'END\'\n{"not": "a command"}\nEND'),
        page("text", "x", "<!-- check: output -->"),
        page("python", "import torch\nfrom flashoptim_hf import FlashAdamW"),
        page("yaml", "lora_r: 16"),
    ]
    assert not [fault for one in right for fault in test_docs.faults(one, tmp_path) + test_docs.unclassified(one)]


@pytest.mark.parametrize("link", ["nothing.md", "../recipes/none.py", "trainer.md#nothing", "#nothing"])
def test_a_broken_link_is_named(link: str) -> None:
    text = f"# Title\n\nSee [this]({link}), and [that](trainer.md#checkpoints).\n"
    found = test_docs.broken_links(parse(text, "docs/trainer.md"))
    assert len(found) == 1
    assert found[0].startswith("docs/trainer.md:3")


def test_an_invented_message_is_named() -> None:
    table = "| you see | why |\n| --- | --- |\n| `out of cheese` | |\n| `has dtype ...; bfloat16` | |\n| `out of luck` (torch) | |\n"
    assert test_docs.invented(parse(table, "docs/page.md"), test_docs.messages()) == ["out of cheese"]


@pytest.mark.parametrize(
    ("language", "text", "said"),
    [
        ("python", "assert batches == []", "AssertionError"),
        ("python", "FlashAdamW(model.parameters())", "FlashAdamW"),
        ("bash", "ls no-such-file", "no-such-file"),
        ("bash", "flashoptim-hf inspect nothing.pt", "nothing.pt"),
    ],
)
def test_a_block_that_does_not_run_fails(
    language: str, text: str, said: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(tmp_path, tiny_model(tmp_path_factory.mktemp("docs") / "model"), monkeypatch)
    with pytest.raises(Failed, match=said):
        session.run(page(language, text).blocks[0])


def test_anchors() -> None:
    assert anchor("Bytes on the GPU for each parameter, beyond activations") == "bytes-on-the-gpu-for-each-parameter-beyond-activations"
    assert anchor("`optim_args`".strip("`")) == "optim_args"
