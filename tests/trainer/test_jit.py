"""transformers' own checkpoint on a signal, with an optimizer of this package: what it leaves behind is complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import flashoptim_hf


class Signalled(TrainerCallback):
    """What the signal's handler does when its waiting time is over."""

    def __init__(self) -> None:
        self.manager: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.manager.is_checkpoint_requested = state.global_step == 2


def test_a_checkpoint_on_a_signal_is_complete_and_resumes(make_trainer: Callable[..., Any]) -> None:
    signalled = Signalled()
    trainer = make_trainer(callbacks=[signalled], enable_jit_checkpoint=True, optim="flashoptim_paged_adamw", max_steps=6)
    own = next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, JITCheckpointCallback))
    signalled.manager = own.jit_manager
    trainer.train()
    assert trainer.state.global_step < 6
    output = Path(trainer.args.output_dir)
    folder = flashoptim_hf.last_complete_checkpoint(output)
    assert folder == str(output / "checkpoint-2")
    again = make_trainer(optim="flashoptim_paged_adamw", max_steps=6, output_dir=str(output))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
