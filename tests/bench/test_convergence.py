"""Whole trainings beside fp32: what all optimizers share, what is kept, and what is said about it."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flashoptim_hf.bench import convergence, convergence_file
from flashoptim_hf.bench.convergence import choose_tasks, footnotes, run, settle, table, train, work
from flashoptim_hf.bench.convergence_optimizers import NAMES, OPTIMIZERS, OURS, PEERS, Stepper, choose
from flashoptim_hf.bench.convergence_plot import figure
from flashoptim_hf.bench.convergence_records import (
    Comparison,
    Record,
    add_rows,
    check_settings,
    compare,
    half_width,
    read,
    student,
    thinned,
    write,
)
from flashoptim_hf.bench.convergence_tasks import LONG, TASKS, Assets, Task
from flashoptim_hf.bench.report import Report
from flashoptim_hf.errors import ConfigurationError, UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "recipes"))  # recipe_tiny


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A text, and a random two-layer Llama with a byte-level tokenizer."""
    from recipe_tiny import build_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("assets")
    for part, lines in (("train", 12), ("eval", 3)):
        rows = [
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{k}: a text of its own. " * 12}]}
            for k in range(lines)
        ]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    return Assets(folder)


def small(name: str, steps: int = 3) -> Task:
    """A task of the bench that takes a blink."""
    task = TASKS[name]
    if task.model in ("resnet", "vit"):
        return replace(task, steps=steps, batch=8, width=16, layers=1, evaluations=3)
    width, layers = (32, 1) if task.model == "gpt" else (0, 0)
    return replace(task, steps=steps, batch=2, length=32, held_out=4, evaluations=3, width=width, layers=layers)


# ---------------------------------------------------------------------- the runs


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if not task.model.endswith(LONG)])
def test_all_optimizers_of_a_seed_start_alike(name: str, assets: Assets) -> None:
    """The same weights and the same first batch: equal bits before the first step, and training from there."""
    task = small(name)
    if task.model in ("resnet", "vit"):
        pytest.importorskip("sklearn")
    names = [other for other in OPTIMIZERS[task.algorithm] if other in choose(None)[0] and other != "fp32_nudged"]
    runs = {other: train(task, other, 0, assets) for other in names}
    first = runs["fp32"]
    assert len(first.curve) == task.steps
    for record in runs.values():
        assert record.evaluations[0] == first.evaluations[0]
        assert record.curve[0] == first.curve[0]
        assert all(math.isfinite(value) for value in record.curve)
        assert [entry["step"] for entry in record.evaluations] == [0, 1, 2, 3]
        assert record.evaluations[-1] != first.evaluations[0], "nothing was trained"
        assert record.evaluations[-1]["loss"] == pytest.approx(first.evaluations[-1]["loss"], rel=0.05)
    assert train(task, "fp32", 0, assets).evaluations == first.evaluations, "a run is not repeatable, so that differences mean nothing"
    assert train(task, "fp32", 1, assets).curve[0] != first.curve[0], "another seed saw the same batch"


def test_the_control_differs_by_a_millionth(assets: Assets) -> None:
    task = small("gpt/adamw")
    plain, nudged = (train(task, name, 0, assets) for name in ("fp32", "fp32_nudged"))
    assert plain.curve != nudged.curve or plain.evaluations != nudged.evaluations
    assert nudged.evaluations[0]["loss"] == pytest.approx(plain.evaluations[0]["loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["fp32", "fp32_nudged", "log"])
def test_bf16_weights_have_more_bits_behind_them(name: str) -> None:
    """Steps far below a unit in the last place add up."""
    param = nn.Parameter(torch.full((64,), 1.0, dtype=torch.bfloat16))
    stepper = Stepper("adamw", name, [param], 1e-4, 0.0, seed=0)
    for _ in range(100):
        param.grad = torch.ones_like(param)
        stepper.step(1e-4)
        assert param.grad is None
    assert param.float().mean().item() == pytest.approx(0.99, abs=2e-3)


@pytest.mark.parametrize(("algorithm", "name"), [(algorithm, name) for algorithm, group in OPTIMIZERS.items() for name in group])
def test_every_optimizer_takes_the_rate_of_each_step(algorithm: str, name: str) -> None:
    """A first step has the size of its rate, a second one at rate 0 none; with gradients of 1 all three algorithms move by the rate."""
    if name not in choose(None)[0]:
        pytest.skip(f"{name} is not installed")
    param = nn.Parameter(torch.zeros(4096))
    stepper = Stepper(algorithm, name, [param], 1.0, 0.0, seed=0)
    for rate, expected in ((1e-3, -1e-3), (0.0, -1e-3)):
        param.grad = torch.ones_like(param)
        stepper.step(rate)
        assert param.detach().mean().item() == pytest.approx(expected, rel=0.02)


def test_a_long_task_is_the_short_one_with_more_steps(assets: Assets) -> None:
    long = [task for task in TASKS.values() if task.model.endswith(LONG)]
    assert [task.name for task in long] == ["qlora-long/adamw", "full-long/adamw"]
    for task in long:
        short = TASKS[f"{task.kind}/{task.algorithm}"]
        changed = {key for key, value in task.settings().items() if short.settings()[key] != value}
        assert changed == {"model", "steps", "held_out", "evaluations"}
        assert task.steps >= 3 * short.steps
        assert assets.missing(task.model) == assets.missing(task.kind) == []
    assert Assets(Path("nowhere")).missing("full-long") == Assets(Path("nowhere")).missing("full")
    assert [task.name for task in choose_tasks(["full"], assets)[0]] == ["full/adamw"]
    same = replace(small("full/adamw", steps=2), model="full-long")
    assert train(same, "log", 0, assets).curve == train(small("full/adamw", steps=2), "log", 0, assets).curve


def test_batches_pass_over_all_before_any_comes_again() -> None:
    task = replace(TASKS["vit/sgd"], steps=10, batch=4)
    order = task.batches(0, 20).flatten()
    assert sorted(order[:20].tolist()) == sorted(order[20:].tolist()) == list(range(20))
    assert torch.equal(task.batches(0, 20).flatten(), order)
    assert not torch.equal(task.batches(1, 20).flatten(), order)


def test_rate_and_evaluations_are_spread_over_the_run() -> None:
    for task in TASKS.values():
        rates = [task.rate(step) for step in range(task.steps)]
        peak = rates.index(max(rates))
        assert peak < task.steps / 8
        assert task.lr * 0.85 < max(rates) <= task.lr
        assert 0.1 * task.lr < rates[-1] < 0.2 * task.lr
        after = [step for step in range(1, task.steps + 1) if task.evaluates_after(step)]
        assert len(after) == task.evaluations
        assert after[-1] == task.steps


# ---------------------------------------------------------------------- the file


def never(task: Task, name: str, seed: int, assets: Assets) -> Record:  # noqa: ARG001
    raise AssertionError(f"{task.name} was trained with {name} of seed {seed}")


def record(optimizer: str, seed: int, losses: list[float], task: str = "gpt/adamw", curve: tuple[float, ...] = (3.0, 2.0)) -> Record:
    evaluations: list[dict[str, float]] = [{"step": float(k), "loss": loss} for k, loss in enumerate(losses)]
    return Record(task, optimizer, seed, TASKS[task].settings(), list(curve), evaluations, 1.0, 1, "abc", {"torch": "2"}, "2026-01-01")


def by_key(*records: Record) -> dict[tuple[str, str, int], Record]:
    return {entry.key: entry for entry in records}


def test_a_file_holds_what_was_put_there(tmp_path: Path) -> None:
    records = by_key(record("fp32", 0, [9.0, 1.0]), record("torchao", 0, [9.0, math.nan], curve=(3.0, math.inf)))
    write(tmp_path / "a.json", records, Report("convergence", "here"))
    raw = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert {"bench", "commit", "date", "versions", "device", "rows", "records"} == set(raw)
    found = read(tmp_path / "a.json")
    assert list(found) == list(records)
    assert found["gpt/adamw", "fp32", 0] == records["gpt/adamw", "fp32", 0]
    assert math.isnan(found["gpt/adamw", "torchao", 0].final("loss"))
    assert math.isnan(found["gpt/adamw", "torchao", 0].curve[1])
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    write(tmp_path / "a.json", {}, Report("convergence", "here"))
    assert read(tmp_path / "a.json") == read(tmp_path / "none.json") == {}


@pytest.mark.parametrize("text", ['{"rows": []}', "[]", "{", '{"records": [{"task": "x"}]}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"a\.json is there and is no result"):
        read(tmp_path / "a.json")


def test_other_settings_are_refused() -> None:
    records = by_key(record("fp32", 0, [9.0, 1.0]))
    check_settings(records, TASKS.values())
    with pytest.raises(ConfigurationError, match="gpt/adamw with fp32 has steps=240, and this one would have 7"):
        check_settings(records, [replace(TASKS["gpt/adamw"], steps=7)])


def test_a_run_that_has_ended_is_not_repeated(tmp_path: Path, assets: Assets, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Killed in the middle, then gone on with, then only shown."""
    monkeypatch.setattr(convergence, "TASKS", {"gpt/adamw": small("gpt/adamw")})
    options = {"tasks": "gpt", "optimizers": "log", "seeds": "0,1", "assets": assets.folder, "steps": 2, "max_minutes": 0}
    file, done = tmp_path / "new" / "a.json", []

    def dying(task: Task, name: str, seed: int, store: Assets) -> Record:
        if len(done) == 3:
            raise RuntimeError("killed")
        done.append((name, seed))
        return train(task, name, seed, store)

    monkeypatch.setattr(convergence, "train", dying)
    with pytest.raises(RuntimeError, match="killed"):
        run(**options, json_file=file, plot_file=None)
    assert [key[1:] for key in read(file)] == done == [("fp32", 0), ("log", 0), ("fp32", 1)]
    done.clear()
    run(**options, json_file=file, plot_file=tmp_path / "a.png")
    assert done == [("log", 1)]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(convergence, "train", never)
    capsys.readouterr()
    run(**options, json_file=file, plot_file=None)
    shown = capsys.readouterr().out
    assert "gpt/adamw" in shown
    assert "4 runs" in shown
    rows = json.loads(file.read_text())["rows"]
    assert {"seeds", "final_loss", "difference", "interval_of_difference", "curve_distance", "within", "within_own"} <= {
        row["metric"] for row in rows
    }


def test_another_commits_runs_are_repeated_where_that_is_asked_for(
    tmp_path: Path, assets: Assets, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Those of the optimizers that are named, once for a commit; of a changed tree, which no commit holds, each time."""
    monkeypatch.setattr(convergence, "TASKS", {"gpt/adamw": small("gpt/adamw")})
    options = {"tasks": "gpt", "optimizers": "log", "seeds": "0,1", "assets": assets.folder, "steps": 1}
    file = tmp_path / "a.json"

    def commits(tree: str, **more: Any) -> dict[str, list[str | None]]:
        monkeypatch.setattr(convergence, "commit", lambda: tree)
        run(**options, **more, max_minutes=0, json_file=file, plot_file=None)
        found = read(file)
        assert len(found) == 4
        return {name: [found["gpt/adamw", name, seed].commit for seed in (0, 1)] for name in ("fp32", "log")}

    assert commits("old") == commits("new") == {"fp32": ["old", "old"], "log": ["old", "old"]}
    capsys.readouterr()
    assert commits("new", again="log") == {"fp32": ["old", "old"], "log": ["new", "new"]}
    loss = read(file)["gpt/adamw", "log", 1].final("loss")
    assert f" to {loss:.4f} (was {loss:.4f} at commit old) in " in capsys.readouterr().out
    monkeypatch.setattr(convergence, "train", never)
    commits("new", again="log")
    monkeypatch.setattr(convergence, "train", train)
    assert commits("new+", again="all") == {"fp32": ["new+", "new+"], "log": ["new+", "new+"]}
    monkeypatch.setattr(convergence, "train", never)
    with pytest.raises(AssertionError, match="with fp32 of seed 0"):
        commits("new+", again="all")
    with pytest.raises(ConfigurationError, match=r"--again: 'joint' is none of the optimizers that are run here \(fp32, log\)"):
        commits("new", again="joint")


def test_two_commands_on_one_file_keep_each_others_runs(tmp_path: Path) -> None:
    """The second waits until the first has written, and adds to that; nothing but the file is left."""
    file, tasks = tmp_path / "a.json", list(TASKS.values())

    def added(entry: Record) -> None:
        convergence_file.add(file, entry, lambda found: settle(found, tasks))

    second = threading.Thread(target=added, args=(record("log", 0, [9.0, 1.5]),))

    def slowly(found: dict[tuple[str, str, int], Record]) -> Report:
        second.start()
        second.join(0.5)
        assert second.is_alive(), "the file was open to another one between reading and writing"
        return settle(found, tasks)

    convergence_file.add(file, record("fp32", 0, [9.0, 1.0]), slowly)
    second.join()
    assert [key[1] for key in read(file)] == ["fp32", "log"]
    assert {row["subject"] for row in json.loads(file.read_text())["rows"]} == {"fp32", "log"}

    many = [
        threading.Thread(target=lambda name=name: [added(record(name, seed, [9.0, 1.0])) for seed in range(4)])
        for name in ("fp32", "log", "joint", "torchao")
    ]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join()
    assert len(read(file)) == 4 * 4
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_runs_of_another_command_come_along_and_are_not_done_once_more(
    tmp_path: Path, assets: Assets, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, task, done = tmp_path / "a.json", small("gpt/adamw", steps=1), []

    def beside(this: Task, name: str, seed: int, store: Assets) -> Record:
        done.append((name, seed))
        if name == "fp32" and seed == 0:  # meanwhile
            for other in ("log", "joint"):
                convergence_file.add(file, train(this, other, 0, store), lambda found: settle(found, [task]))
        return train(this, name, seed, store)

    monkeypatch.setattr(convergence, "train", beside)
    records: dict[tuple[str, str, int], Record] = {}
    assert work([task], ["fp32", "log", "joint"], [0, 1], assets, records, file, most_seconds=0) == 0
    assert done == [("fp32", 0), ("fp32", 1), ("log", 1), ("joint", 1)]
    assert set(records) == set(read(file))
    assert len(records) == 6
    longer = replace(task, steps=2)
    with pytest.raises(ConfigurationError, match="gpt/adamw with log has steps=1, and this one would have 2"):
        work([longer], ["fp32"], [7], assets, {}, file, most_seconds=0)
    assert set(records) == set(read(file))


@pytest.mark.parametrize("why", ["no locks there", "no locks at all"])
def test_a_file_that_cannot_be_locked_is_refused_before_any_run(
    why: str, tmp_path: Path, assets: Assets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if why == "no locks there":
        monkeypatch.setattr(fcntl, "flock", refuse)
    else:
        monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(convergence, "train", never)
    with pytest.raises(UnsupportedError, match=r"--json .*a\.json cannot be locked \(.*(No locks available|fcntl).*leave --json out"):
        run(tasks="gpt", optimizers="log", seeds="0", assets=assets.folder, json_file=tmp_path / "a.json")


def test_time_ends_after_the_run_at_hand(assets: Assets) -> None:
    records: dict[tuple[str, str, int], Record] = {}
    left = work([small("gpt/adamw", steps=1)], ["fp32", "log"], [0, 1], assets, records, None, most_seconds=1e-9)
    assert (len(records), left) == (1, 3)


# ---------------------------------------------------------------------- what is said


def test_student_is_the_tables() -> None:
    for degrees, value in ((1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (30, 2.04227), (1000, 1.96234)):
        assert student(degrees) == pytest.approx(value, rel=1e-5)
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert math.isnan(half_width([1.0]))
    assert math.isnan(half_width([1.0, math.nan]))


def test_an_interval_finds_what_is_apart_and_not_what_is_noise() -> None:
    base = [2.0, 2.2, 2.4]
    noise, shift = [0.01, -0.02, 0.015], [0.10, 0.11, 0.105]
    runs = [record("fp32", seed, [9.0, base[seed]]) for seed in range(3)]
    runs += [record("log", seed, [9.0, base[seed] + noise[seed]], curve=(3.0, 2.25)) for seed in range(3)]
    runs += [record("torchao", seed, [9.0, base[seed] + shift[seed]]) for seed in range(3)]
    runs += [record("joint", 0, [9.0, 2.0]), record("bitsandbytes", 0, [9.0, math.nan]), record("bitsandbytes", 1, [9.0, 2.0])]
    runs += [record("joint", 7, [9.0, 1.0])]  # a seed that fp32 lacks says nothing
    found = {entry.optimizer: entry for entry in compare(by_key(*runs))}
    assert list(found) == ["fp32", "log", "joint", "bitsandbytes", "torchao"]
    assert (found["log"].verdict(), found["log"].within_own) == ("within", True)
    assert (found["log"].distance, found["log"].at) == (0.25, 0.75)
    assert (found["torchao"].verdict(), found["torchao"].within_own) == ("outside, worse", True)
    assert found["torchao"].difference == pytest.approx(0.105)
    assert (found["joint"].seeds, found["joint"].verdict()) == (1, "too few seeds")
    assert found["bitsandbytes"].verdict() == "not finite"
    assert found["fp32"].own_interval == pytest.approx(half_width(base))
    notes = " ".join(footnotes(list(found.values()), by_key(*runs)))
    assert "ours: 1 of 1 within" in notes
    assert "other packages: 0 of 2 within; outside: gpt/adamw bitsandbytes (+nan), gpt/adamw torchao (+0.10500)" in notes
    assert table(list(found.values())).row_count == 5


def test_final_figures_are_means_of_the_last_evaluations() -> None:
    assert record("fp32", 0, [100.0, 50.0, 1.0, 2.0, 3.0]).final("loss") == 2.0
    assert record("fp32", 0, [100.0, 3.0]).final("loss") == 3.0
    assert math.isnan(record("fp32", 0, [100.0, 3.0]).final("accuracy"))


def test_a_curve_is_thinned_to_means() -> None:
    assert thinned([1.0, 2.0]) == [1.0, 2.0]
    curve = thinned([float(k) for k in range(120)])
    assert (len(curve), curve[0], curve[-1]) == (40, 1.0, 118.0)


def test_the_picture_has_a_row_for_each_task() -> None:
    runs = [
        record(name, seed, [9.0, 1.0], task) for task in ("gpt/adamw", "vit/sgd") for name in ("fp32", "fp32_nudged") for seed in (0, 1)
    ]
    drawn = figure(by_key(*runs))
    assert [axis.get_title(loc="left").partition(":")[0] for axis in drawn.axes] == ["vit/sgd", "vit/sgd", "gpt/adamw", "gpt/adamw"]
    assert len(figure({}).axes) == 2


def test_curves_beside_each_other_are_of_the_same_seeds() -> None:
    """A seed that one optimizer lacks is in no curve; a difference is of pairs, and has all that there are."""
    runs = [record("fp32", seed, [9.0, 1.0], curve=(3.0 + seed, 2.0 + seed)) for seed in (0, 1, 2)]
    runs += [record("log", seed, [9.0, 1.0], curve=(3.5 + seed, 2.25 + seed)) for seed in (0, 1, 2)]
    runs += [record("joint", seed, [9.0, 1.0], curve=(3.0 + 2 * seed, 2.0 + seed)) for seed in (0, 1)]
    left, right = figure(by_key(*runs)).axes
    assert left.get_title(loc="left") == "gpt/adamw: training loss, mean of 2 seeds"
    assert [list(line.get_ydata()) for line in left.lines] == [[3.5, 2.5], [4.0, 2.75], [4.0, 2.5]]
    assert [list(line.get_ydata()) for line in right.lines] == [[0.5, 0.25], [0.5, 0.0], [0, 0]]


# ---------------------------------------------------------------------- what is asked for


def test_names_are_checked(tmp_path: Path, assets: Assets, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(NAMES) == {name for group in OPTIMIZERS.values() for name in group}
    with pytest.raises(ConfigurationError, match=r"--tasks: 'vgg' is not known; choose from resnet/sgd.*'all'"):
        choose_tasks(["vgg"], assets)
    with pytest.raises(ConfigurationError, match="--optimizers: 'adam' is not known; choose from fp32"):
        choose(["adam"])
    with pytest.raises(ConfigurationError, match="--seeds '' names none"):
        run(tasks="gpt", optimizers="log", seeds="", assets=assets.folder)
    assert choose(["square"])[0] == ["fp32", "square"]
    assert [task.name for task in choose_tasks(["gpt", "full/adamw"], assets)[0]] == ["gpt/adamw", "gpt/lion", "full/adamw"]
    with pytest.raises(UnsupportedError, match=r"gpt takes what is not there: .*demo_assets\.py"):
        choose_tasks(["gpt"], Assets(tmp_path))
    monkeypatch.setattr("flashoptim_hf.bench.convergence_tasks.installed", lambda name: name != "sklearn")
    chosen, notes = choose_tasks(None, assets)
    assert not {task.model for task in chosen} & {"resnet", "vit"}
    assert any("scikit-learn (pip install scikit-learn)" in note for note in notes)
    monkeypatch.setattr("flashoptim_hf.bench.convergence_optimizers.installed", lambda name: name != "torchao")
    assert choose(None) == ([name for name in NAMES if name != "torchao"], ["torchao"])
    with pytest.raises(UnsupportedError, match="torchao is not installed"):
        choose(["torchao"])


# ---------------------------------------------------------------------- the results that are shipped

RESULTS = ROOT / "benchmarks/results/convergence.json"


def test_the_shipped_rows_follow_from_the_shipped_runs() -> None:
    records = read(RESULTS)
    report = Report("convergence", "anywhere")
    add_rows(report, compare(records))
    assert json.loads(RESULTS.read_text())["rows"] == [row.to_dict() for row in report.rows]
    check_settings(records, TASKS.values())
    assert {record.task for record in records.values()} == set(TASKS)
    commits = {record.commit for record in records.values()}
    assert not [commit for commit in commits if not commit or commit.endswith("+")], "a run of a tree that no commit holds"


def test_the_page_shows_the_shipped_results() -> None:
    rows = [line.strip("| \n").split("|") for line in (ROOT / "docs/convergence.md").read_text(encoding="utf-8").splitlines()]
    shown = {(cells[0].strip(), cells[1].strip("` ")): [cell.strip() for cell in cells[2:]] for cells in rows if cells[0].strip() in TASKS}
    comparisons = compare(read(RESULTS))
    assert list(shown) == [(found.task, found.optimizer) for found in comparisons]
    for found in comparisons:
        cells = shown[found.task, found.optimizer]
        assert cells[0] == str(found.seeds)
        assert cells[1].partition(" ")[0] == f"{found.loss:.4f}"
        if found.optimizer != "fp32":
            assert cells[2].partition(" ")[0] == f"{found.difference:+.4f}"
            assert cells[2].rpartition(" ")[2] in (f"{found.interval:.4f}", cells[2])
            assert (cells[3], cells[5]) == (f"{found.distance:.4f}", found.verdict())


def stated_counts(comparisons: list[Comparison]) -> str:
    """The sentence that page and README have about how many pairs are within."""
    within = {}
    for title, names in (("ours", OURS), ("peers", PEERS), ("control", ("fp32_nudged",))):
        judged = [found for found in comparisons if found.optimizer in names and found.within is not None]
        within[title] = f"{sum(bool(found.within) for found in judged)} of {len(judged)}"
    return (
        f"Of ours {within['ours']} pairs have 0 in their interval, of bitsandbytes and torchao {within['peers']}, of the nudged control "
        f"{within['control']}."
    )


def test_the_page_counts_and_names_what_is_outside() -> None:
    comparisons = compare(read(RESULTS))
    text = " ".join((ROOT / "docs/convergence.md").read_text(encoding="utf-8").split())
    assert stated_counts(comparisons) in text
    outside = [found for found in comparisons if found.within is False]
    for found in outside:
        assert f"`{found.optimizer}` on {found.task}, {found.difference:+.4f} ± {found.interval:.4f}" in text
    sentence = text.partition("Outside: ")[2].partition(". ")[0]
    assert sentence.count(" on ") == len(outside)


def test_the_readme_shows_the_shipped_results() -> None:
    block = (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- convergence table: begin -->")[2]
    block = block.partition("<!-- convergence table: end -->")[0]
    heads, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("|"))
    comparisons = compare(read(RESULTS))
    found = {(entry.task, entry.optimizer): entry for entry in comparisons}
    shown = set()
    for task, seeds, loss, *cells in rows:
        assert (seeds, loss) == (str(found[task, "fp32"].seeds), f"{found[task, 'fp32'].loss:.4f}")
        for head, cell in zip(heads[3:], cells, strict=True):
            names = [name for name in NAMES if name in re.findall(r"\w+", head) and (task, name) in found]
            if not names:
                assert not cell
                continue
            entry = found[task, names[0]]
            shown.add((task, names[0]))
            assert cell.startswith(f"{entry.difference:+.4f}")
            assert (f" ± {entry.interval:.4f}" in cell) == (entry.seeds > 1)
            assert ("*" in cell) == (entry.within is False)
            assert ("seed" in cell) == (entry.seeds != found[task, "fp32"].seeds)
    assert shown == {key for key in found if key[1] != "fp32"}
    assert stated_counts(comparisons) in " ".join(block.split())
