"""The Trainer's way of saving and resuming, made safe where the optimizer is one of this package; all other runs go the Trainer's own way.

Saving: the optimizer's and the scheduler's files get their names when they are whole. When everything is written, and before older
checkpoints are deleted, the checkpoint is marked (`complete.py`). What a failed save has written is taken away again.

Resuming: `resume_from_checkpoint=True` means the newest complete checkpoint, and every checkpoint is checked before anything is loaded.

`SEAMS` lists the methods of `Trainer` that are wrapped for this.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import is_sagemaker_mp_enabled, is_torch_xla_available, logging

from ..errors import CheckpointError, CheckpointWriteError
from . import complete
from .callbacks import flash_optimizer
from .register import handler_of

logger = logging.get_logger(__name__)

OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"

_OURS = "_flashoptim_hf_saving"


def steps_of(optimizer: Any) -> list[int]:
    """The step counts in an optimizer's state, however it is wrapped, of whatever package; empty where it has none."""
    flash = flash_optimizer(optimizer)
    if flash is not None:
        flash.synchronize()  # a step that the device has skipped is counted from here on
    return [int(entry["step"]) for entry in optimizer.state.values() if isinstance(entry, dict) and "step" in entry]


# ---------------------------------------------------------------------- saving


def _save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the whole save: sealed at its end, or taken back."""

    @functools.wraps(original)
    def wrapper(self: Any, model: Any, trial: Any, *args: Any, **kwargs: Any) -> Any:
        if flash_optimizer(self.optimizer) is None or not self.args.should_save:
            return original(self, model, trial, *args, **kwargs)
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        with _taken_back_unless_sealed(self, folder):
            return original(self, model, trial, *args, **kwargs)

    return wrapper


@contextmanager
def _taken_back_unless_sealed(trainer: Any, folder: Path) -> Iterator[None]:
    """Seal `folder` when the Trainer writes its own state, the last of its files; take back what was written if it does not come to that.

    That moment comes before the upload to a hub and before the rotation, which so never deletes the last complete checkpoint.
    """
    complete.unseal(folder)
    before = complete.snapshot(folder)
    write = trainer.state.save_to_json
    sealed = False

    def save_to_json(json_path: str) -> None:
        nonlocal sealed
        write(f"{json_path}.partial")
        os.replace(f"{json_path}.partial", json_path)
        if Path(json_path).parent == folder:
            complete.seal(folder, trainer.state.global_step, max(steps_of(trainer.optimizer), default=None))
            sealed = True

    trainer.state.save_to_json = save_to_json
    try:
        yield
    except BaseException as error:
        if sealed:  # the upload or the rotation failed, not the save
            raise
        failure = _failure(trainer, folder, error) if _is_write_error(error) else None
        complete.discard_since(folder, before)
        if failure is None:
            raise
        raise failure from error
    finally:
        del trainer.state.save_to_json


def _save_optimizer_and_scheduler(original: Callable[..., Any]) -> Callable[..., Any]:
    """Into a folder beside their place first, whichever files the Trainer makes of them; then renamed."""

    @functools.wraps(original)
    def wrapper(self: Any, output_dir: str, *args: Any, **kwargs: Any) -> Any:
        if flash_optimizer(self.optimizer) is None:
            return original(self, output_dir, *args, **kwargs)
        stage = Path(output_dir, complete.STAGE)
        if self.args.should_save:
            shutil.rmtree(stage, ignore_errors=True)  # of a save that was killed
            stage.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        result = original(self, str(stage), *args, **kwargs)
        self.accelerator.wait_for_everyone()  # sharded state is written by every process
        if self.args.should_save:
            complete.move_into_place(stage, Path(output_dir))
        return result

    return wrapper


def _save_rng_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Each process writes its own file; the one that seals the checkpoint waits for all."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if flash_optimizer(self.optimizer) is not None:
            self.accelerator.wait_for_everyone()
        return result

    return wrapper


def _is_write_error(error: BaseException) -> bool:
    """Whether a file could not be written. torch and safetensors do not raise `OSError` then, and torch does not say why."""
    text = str(error)
    torch_says = any(word in text for word in ("inline_container", "PytorchStreamWriter"))
    return isinstance(error, OSError) or torch_says or (type(error).__name__ == "SafetensorError" and "I/O error" in text)


def _failure(trainer: Any, folder: Path, error: BaseException) -> CheckpointWriteError:
    """The error that says what could not be written and how much room there is. Called while the halves are still there."""
    weights = list(trainer.model.parameters())
    if getattr(trainer.model, "peft_config", None):  # an adapter's checkpoint holds the adapter alone
        weights = [weight for weight in weights if weight.requires_grad]
    state = flash_optimizer(trainer.optimizer).memory_report().state_bytes  # type: ignore[union-attr]
    needed = int(state) + sum(weight.numel() * weight.element_size() for weight in weights)
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime_ns)
    path = folder / files[-1].name.removesuffix(".partial") if files else folder
    return CheckpointWriteError(
        getattr(error, "errno", None) or (errno.ENOSPC if free < needed else errno.EIO),
        f"a checkpoint cannot be written ({error}). It takes about {needed:,} bytes, and {free:,} are free there. What this save had "
        "written was deleted; earlier checkpoints and the training state in memory are as before. Make room, or set save_total_limit or "
        "another output_dir",
        str(path),
    )


# ---------------------------------------------------------------------- resuming


def _train(original: Callable[..., Any]) -> Callable[..., Any]:
    """Settle which checkpoint is meant, and that it is whole, before the weights are loaded."""

    @functools.wraps(original)
    def wrapper(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint not in (None, False) and _will_be_ours(self):
            resume_from_checkpoint = _agreed(self, resume_from_checkpoint)
        return original(self, resume_from_checkpoint, *args, **kwargs)

    return wrapper


def _will_be_ours(trainer: Any) -> bool:
    """Whether the optimizer is of this package, or will be when the Trainer makes it."""
    if trainer.optimizer is not None:
        return flash_optimizer(trainer.optimizer) is not None
    given = getattr(trainer, "optimizer_cls_and_kwargs", None)
    if given is not None:
        return inspect.isclass(given[0]) and any(cls.__name__ == "FlashOptimizer" for cls in given[0].__mro__)
    return handler_of(trainer.args) is not None


def _agreed(trainer: Any, option: Any) -> Any:
    """`resume_folder` on the main process, its answer or its error on all: they must not resume from different checkpoints."""
    answer: list[Any] = [None, None]
    if trainer.args.process_index == 0:
        try:
            answer[0] = resume_folder(option, trainer.args.output_dir)
        except CheckpointError as error:
            answer[1] = str(error)
    if trainer.args.world_size > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(answer)
    if answer[1] is not None:
        raise CheckpointError(answer[1])
    return answer[0]


def resume_folder(option: Any, output_dir: str) -> Any:
    """The checkpoint that `resume_from_checkpoint` means.

    Args:
        option: True for the newest complete checkpoint in `output_dir` (where no checkpoint has a mark: the newest), or a folder.
        output_dir: the run's folder.

    Returns:
        the folder; True where `output_dir` holds no checkpoint, which the Trainer itself refuses.

    Raises:
        CheckpointError: the checkpoint is damaged or lacks a part; names the file.
    """
    if option is True:
        folder = complete.last_complete_checkpoint(output_dir)
        if folder is not None:
            return folder
        option = next(map(str, complete.checkpoints(output_dir)), True)
        if option is True:
            return True
    complete.require(option)
    if not Path(option, complete.MARK).is_file():
        logger.warning(
            f"{option} has no {complete.MARK}: its files are whole as far as their formats tell, but nothing shows that they were saved "
            "together."
        )
    return option


def _load_optimizer_and_scheduler(original: Callable[..., Any]) -> Callable[..., Any]:
    """After loading: the optimizer has a state, and it is that of the Trainer's step. Before: no other optimizer loads a state of ours."""

    @functools.wraps(original)
    def wrapper(self: Any, checkpoint: str | None, *args: Any, **kwargs: Any) -> Any:
        if checkpoint is None:
            return original(self, checkpoint, *args, **kwargs)
        if flash_optimizer(self.optimizer) is None:
            for name in (OPTIMIZER_NAME, "optimizer.bin"):  # the second under FSDP
                _refuse_codes(self.optimizer, Path(checkpoint, name))
            return original(self, checkpoint, *args, **kwargs)
        load = functools.partial(_load_on_the_host, self) if _is_plain(self, checkpoint) else functools.partial(original, self)
        try:
            result = load(checkpoint, *args, **kwargs)
        except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
            if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
                raise
            raise CheckpointError(f"optimizer.pt or scheduler.pt in {checkpoint} is corrupt, or cannot be read: {error}") from error
        from ..optim.groups import UNCOUNTED_KEY

        # counts begin anew where a state was converted from a package that keeps none
        fewer = self.args.fp16 or any(group.get(UNCOUNTED_KEY) for group in self.optimizer.param_groups)
        complete.check_steps(checkpoint, steps_of(self.optimizer), self.state.global_step, skips=fewer)
        return result

    return wrapper


def _refuse_codes(optimizer: Any, path: Path) -> None:
    """Keep torch's optimizers from taking our 8-bit codes for floats, which they would do without a word.

    Raises:
        CheckpointError: the file holds a state of this package; names both optimizers and the command that converts.
    """
    from ..optim import convert

    try:
        found = torch.load(path, map_location="meta", weights_only=True, mmap=True)  # the names alone, not the numbers
        source = convert.recognise(found)
    except Exception:
        return  # what is wrong with another package's file is for the Trainer to say
    if source is None or source.package != "flashoptim_hf":
        return
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    raise CheckpointError(
        f"{path} is a state of {source}, and {type(optimizer).__name__} of {type(optimizer).__module__.partition('.')[0]} cannot read it. "
        f"Convert the checkpoint first (flashoptim-hf convert {path.parent} NEW --to ...; {convert.ways_out(source.algorithm)}) and resume "
        "from NEW, or go on with an optimizer of flashoptim_hf."
    )


def _is_plain(trainer: Any, checkpoint: str) -> bool:
    """Whether the whole state lies in one file that each process loads, as on one device and under DDP."""
    elsewhere = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or is_sagemaker_mp_enabled() or is_torch_xla_available()
    return not elsewhere and Path(checkpoint, OPTIMIZER_NAME).is_file() and Path(checkpoint, SCHEDULER_NAME).is_file()


def _load_on_the_host(trainer: Any, checkpoint: str) -> None:
    """What the Trainer does, but never by way of the device: under DDP it would put the whole file there, which paged state need not fit.

    The file is mapped, so that the processes of a machine share its pages and nothing but the live state stays in memory.
    """
    from ..optim import files

    trainer.optimizer.load_state_dict(files.load(Path(checkpoint, OPTIMIZER_NAME)))
    trainer.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))


# ---------------------------------------------------------------------- the seams

SEAMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "train": _train,
    "_save_checkpoint": _save_checkpoint,
    "_save_optimizer_and_scheduler": _save_optimizer_and_scheduler,
    "_save_rng_state": _save_rng_state,
    "_load_optimizer_and_scheduler": _load_optimizer_and_scheduler,
}


def install(trainer_class: Any) -> None:
    """Wrap the methods. May be called any number of times."""
    absent = [name for name in SEAMS if not inspect.isfunction(inspect.getattr_static(trainer_class, name, None))]
    if absent:
        logger.warning(
            f"This version of transformers has no Trainer.{', Trainer.'.join(absent)}: checkpoints are saved and loaded unchecked."
        )
        return
    for name, wrap in SEAMS.items():
        method = inspect.getattr_static(trainer_class, name)
        if not hasattr(method, _OURS):  # functools.wraps passes the attribute on, so a wrapper around ours has it too
            wrapper = wrap(method)
            setattr(wrapper, _OURS, wrapper)
            setattr(trainer_class, name, wrapper)


def remove(trainer_class: Any) -> None:
    """Take the wrappers off again. One that another package has wrapped since stays inside."""
    for name in SEAMS:
        method = vars(trainer_class).get(name)
        original = getattr(method, "__wrapped__", None)
        if original is not None and getattr(method, _OURS, None) is method:
            setattr(trainer_class, name, original)
