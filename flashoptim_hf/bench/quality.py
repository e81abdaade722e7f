"""Quality: does a real fine-tuning run end where it ends with fp32 AdamW?

    flashoptim-hf bench quality --seeds 0,1,2 --json quality.json
    flashoptim-hf bench quality --optimizers lion_32bit,flashoptim_paged_lion --learning-rate 1e-4 --json quality-lion.json

Runs the same recipe with each optimizer and each seed, through `accelerate launch` as a user does, and compares the final evaluation loss.
Finished runs are kept in `--work` and not repeated, so that the bench can be stopped and started again.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigurationError, UnsupportedError
from .fidelity import items, whole
from .report import JsonOption, Report, check_outputs, cpu_name, show, table


def run(
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "0,1,2",
    optimizers: Annotated[
        str,
        typer.Option(
            help="Values of --optim, each with one of --optim_args after a slash if wanted; the first is what the others are compared with."
        ),
    ] = "adamw_torch,flashoptim_paged_adamw",
    recipe: Annotated[Path, typer.Option(exists=True, help="The recipe's script.")] = Path("recipes/qlora_sft.py"),
    config: Annotated[Path, typer.Option(exists=True, help="Its YAML file.")] = Path("configs/qlora/smollm2-135m_demo.yaml"),
    work: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path(".demo/quality"),
    max_steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 60,
    learning_rate: Annotated[float | None, typer.Option(help="Of every run; left out: the config's.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Final evaluation loss of a real run with each optimizer, over several seeds, through `accelerate launch`."""
    check_outputs(json_file, None)
    names, numbers = items(optimizers), whole(seeds, "--seeds")
    if not names or not numbers:
        raise ConfigurationError(f"--optimizers {optimizers!r} and --seeds {seeds!r} must name at least one of each.")
    report = Report("quality", cpu_name())
    losses: dict[str, list[float]] = {name: [] for name in names}
    for seed in numbers:
        for name in names:
            history = one_run(recipe, config, work, name, seed, max_steps, learning_rate)
            evaluations = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
            losses[name].append(evaluations[-1])
            report.add(f"seed={seed}", name, "eval_loss_first", evaluations[0])
            report.add(f"seed={seed}", name, "eval_loss", evaluations[-1])
    for name in names:
        report.add("all", name, "eval_loss_mean", statistics.fmean(losses[name]))
        report.add("all", name, "difference_of_means", statistics.fmean(losses[name]) - statistics.fmean(losses[names[0]]))
        apart = [abs(a - b) for a, b in zip(losses[name], losses[names[0]], strict=True)]
        report.add("all", name, "largest_difference_of_a_seed", max(apart))
    final = [row for row in report.rows if row.metric == "eval_loss"]
    show(
        table(final, f"final evaluation loss: {config}, {max_steps} steps"),
        table([row for row in report.rows if row.case == "all"], "over all seeds", down="metric"),
    )
    if json_file is not None:
        report.write_json(json_file)


def one_run(
    recipe: Path, config: Path, work: Path, optimizer: str, seed: int, max_steps: int, learning_rate: float | None
) -> list[dict[str, Any]]:
    """The log history of one run; read from its folder under `work` when it has finished there before.

    Raises:
        UnsupportedError: the run failed; the message names the log.
    """
    name, _, arguments = optimizer.partition("/")
    rate = "" if learning_rate is None else f"-{learning_rate:g}"
    folder = work / f"{optimizer.replace('/', '-')}-{seed}-{max_steps}{rate}"
    state = folder / f"checkpoint-{max_steps}" / "trainer_state.json"
    if not state.exists():
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "log.txt"
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch", str(recipe), "--config", str(config)),
            *("--optim", name, "--seed", str(seed), "--output_dir", str(folder), "--max_steps", str(max_steps)),
            *("--eval_steps", str(max_steps), "--save_steps", str(max_steps), "--save_total_limit", "1", "--sample_tokens", "0"),
            *(("--optim_args", arguments.replace(";", ",")) if arguments else ()),
            *(("--learning_rate", str(learning_rate)) if learning_rate is not None else ()),
        ]
        with log.open("w", encoding="utf-8") as out:
            failed = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
        if failed or not state.exists():
            raise UnsupportedError(f"the run with --optim {optimizer} --seed {seed} failed (exit status {failed}); its output is in {log}.")
    history: list[dict[str, Any]] = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    return history
