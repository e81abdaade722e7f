"""Several processes under the Trainer: what is refused when it is made, and what is said of memory. Real runs are in tests/distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from transformers import Trainer
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS  # noqa: F401  (registers the names)

from flashoptim_hf import FlashAdamW
from flashoptim_hf.errors import UnsupportedError
from flashoptim_hf.trainer import processes

MakeTrainer = Callable[..., Trainer]

LAUNCHERS = {
    "fsdp, no version": ({"ACCELERATE_USE_FSDP": "true"}, "FSDP1 .* fsdp_version: 2"),
    "fsdp1": ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP1 .* fsdp_version: 2"),
    "deepspeed": ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed is not supported.* FSDP2"),
}


@pytest.mark.parametrize(("environ", "sentence"), LAUNCHERS.values(), ids=list(LAUNCHERS))
def test_what_the_launcher_asks_for_is_refused(
    make_args: Any, make_trainer: MakeTrainer, environ: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = make_args()
    other = make_args(optim="adamw_torch")
    made = make_trainer(optim="adamw_torch", optimizer_cls_and_kwargs=(FlashAdamW, {}))
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UnsupportedError, match=sentence):
        processes.check(args)
    # the callback of a Trainer asks only for the optimizers here
    callback = next(c for c in made.callback_handler.callbacks if type(c).__name__ == "FlashOptimCallback")
    with pytest.raises(UnsupportedError, match=sentence):
        callback.on_init_end(args, made.state, made.control, optimizer=None)
    callback.on_init_end(other, made.state, made.control, optimizer=None)
    made.create_optimizer()
    with pytest.raises(UnsupportedError, match=sentence):
        callback.on_train_begin(other, made.state, made.control, optimizer=made.optimizer)


@pytest.mark.parametrize(("version", "fits"), [(1, False), (2, True)])
def test_fsdp_of_the_arguments(make_args: Any, version: int, fits: bool) -> None:
    args = make_args(fsdp="full_shard", fsdp_config={"version": version})
    if fits:
        processes.check(args)
    else:
        with pytest.raises(UnsupportedError, match="FSDP1"):
            processes.check(args)


def test_deepspeed_of_the_arguments(make_args: Any) -> None:
    args = make_args()
    args.deepspeed = "zero2.json"
    with pytest.raises(UnsupportedError, match="DeepSpeed"):
        processes.check(args)


def test_memory_per_machine_is_said_before_training(make_trainer: MakeTrainer, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    made = make_trainer()
    made.train()
    host = made.optimizer.optimizer.memory_report().host_bytes
    lines = [line for line in said if line.startswith("Optimizer state")]
    assert len(lines) == 1
    assert f"{host:,} bytes of host memory in each of 3 processes on this machine, {3 * host:,} bytes in all" in lines[0]


def test_memory_that_will_not_suffice_is_a_warning(make_trainer: MakeTrainer, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_trainer()
    made.train()
    assert not said  # one process, and enough memory: info only
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"available": 1000})())
    made.train()
    assert len(said) == 1
    assert "of 1,000 free" in said[0]
    assert "more than there is" in said[0]


@pytest.mark.parametrize("options", [{}, {"paged": True}, {"paged": True, "simulate": 1}, {"simulate": 1}], ids=str)
@pytest.mark.parametrize("master_bits", [24, None])
def test_planned_bytes_are_what_is_allocated(options: dict[str, Any], master_bits: int | None) -> None:
    params = [
        torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        for shape in ((5, 7), (300,), (1,), (0,))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    frozen = torch.nn.Parameter(torch.ones(1000), requires_grad=False)
    optimizer = FlashAdamW([*params, frozen], master_bits=master_bits, **options)
    planned = optimizer.planned_bytes()
    assert optimizer.memory_report().host_bytes == 0
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    report = optimizer.memory_report()
    assert planned == (report.host_bytes, (report.device_bytes or 0) - report.staging_bytes)
    assert optimizer.planned_bytes() == planned
