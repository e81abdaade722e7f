"""Executes the blocks of a page in order, in one temporary folder that looks like the repository, as a reader would.

The demo's model there is a tiny random one, recipes and the command line run in this process (which spares the seconds of their imports),
and training arguments take the CPU for the GPU that a snippet was written for.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import commands, snippets
from .blocks import ROOT, Block

SHARED = ("recipes", "configs", "constraints.txt", "benchmarks")


class Failed(Exception):
    """A block that does not run. The message is what it printed."""


class Session:
    """A folder in which a page's blocks run one after another."""

    def __init__(self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.model, self.patch = folder, model, monkeypatch
        for name in SHARED:
            (folder / name).symlink_to(ROOT / name)
        (folder / ".demo").mkdir()
        (folder / ".demo" / "model").symlink_to(model)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)

    def run(self, block: Block) -> None:
        """Execute one block.

        Raises:
            Failed: with the words of the program.
        """
        said, environ = io.StringIO(), dict(os.environ)
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                if block.language == "python":
                    exec(compile(block.text, block.name, "exec"), {"__name__": "snippet", **snippets.names(self.model)})
                elif block.language == "bash":
                    self._bash(block.text)
                elif block.language == "yaml":
                    Path(block.options["file"]).write_text(block.text, encoding="utf-8")
        except (Exception, SystemExit) as error:
            raise Failed(f"{type(error).__name__}: {error}\n{said.getvalue()[-3000:]}") from error
        finally:  # training arguments and accelerate leave their mark in the environment and in classes
            os.environ.clear()
            os.environ.update(environ)
            _forget()

    def _bash(self, text: str) -> None:
        if "<<" in text:  # a file that is written, and nothing else
            self._shell(text)
            return
        for words in commands.lines(text):
            if words[0] == "flashoptim-hf":
                self._command_line(words[1:])
            elif words[:2] == ["accelerate", "launch"]:
                self._launch(words[2:])
            else:
                self._shell(shlex.join(words))

    def _command_line(self, words: list[str]) -> None:
        from typer.testing import CliRunner

        from flashoptim_hf import cli

        done = CliRunner().invoke(cli.app, words)
        print(done.output)
        if done.exit_code:
            raise Failed(done.output + repr(done.exception))

    def _launch(self, words: list[str]) -> None:
        from accelerate.commands.launch import launch_command_parser

        args = launch_command_parser().parse_args(words)
        with self.patch.context() as patch:
            patch.setattr(sys, "argv", [args.training_script, *args.training_script_args])
            if args.module:
                runpy.run_module(args.training_script, run_name="__main__", alter_sys=True)
            elif args.training_script.startswith("recipes/"):
                commands.recipe_module(Path(args.training_script).stem).main()
            else:
                runpy.run_path(args.training_script, run_name="__main__")

    def _shell(self, text: str) -> None:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], capture_output=True, text=True)
        print(done.stdout, done.stderr)
        if done.returncode:
            raise Failed(f"exit status {done.returncode}: {done.stderr}")


def _forget() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()


def tiny_model(folder: Path) -> Any:
    """A random two-layer Llama in bf16 with a byte-level tokenizer, made offline."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sys.path.insert(0, str(ROOT / "tests" / "recipes"))
    from recipe_tiny import build_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
