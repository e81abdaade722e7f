"""Figures in the documentation are those of benchmarks/results, to the digits that are shown, and bytes are those of the codecs."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
import torch

from flashoptim_hf.codecs.base import get_codec
from flashoptim_hf.optim.adamw import RULE as ADAMW
from flashoptim_hf.optim.lion import RULE as LION
from tests.docs import commands
from tests.docs.blocks import ROOT, read


@cache
def results(bench: str) -> dict[tuple[str, str, str], float]:
    """(case, subject, metric) -> value."""
    rows = json.loads((ROOT / f"benchmarks/results/{bench}.json").read_text(encoding="utf-8"))["rows"]
    return {(row["case"], row["subject"], row["metric"]): row["value"] for row in rows}


def number(cell: str) -> str:
    """The first number of a cell."""
    found = re.search(r"-?\d+(\.\d+)?(e-?\d+)?", cell)
    assert found, f"no number in {cell!r}"
    return found[0]


def agrees(shown: str, value: float) -> bool:
    """Whether a number as it is written is `value`, rounded to the digits that it has."""
    digits = len(shown.partition(".")[2])
    return float(shown) == round(value, digits) or float(shown) == float(f"{value:.4g}")


def row(page: str, *begins: str) -> list[str]:
    """The row of a page's tables whose first cells begin with these words."""
    found = [
        cells
        for cells in read(ROOT / page).tables
        if all(cell.strip("*` ").startswith(words) for cell, words in zip(cells, begins, strict=False))
    ]
    assert found, f"{page} has no row {begins}"
    return found[0]


SUBJECTS = {"torchao": "torchao AdamW8bit", "flashoptim": "FlashOptim 0.1.4", "bitsandbytes": "bitsandbytes AdamW8bit"}


@pytest.mark.parametrize("subject", ["log", "joint", *SUBJECTS])
def test_errors_and_bytes_in_the_readme(subject: str) -> None:
    ours = {"log": "flashoptim_paged_adamw", "joint": "the same with"}
    cells, found = row("README.md", {**ours, **SUBJECTS}[subject]), results("fidelity")
    shown = [number(cells[column]) for column in (1, 3, 4)]
    measured = [found["all", subject, metric] for metric in ("bytes_per_param", "update_error_mean", "update_error_worst")]
    assert all(agrees(*pair) for pair in zip(shown, measured, strict=True)), (shown, measured)


def test_errors_of_joint_and_learned() -> None:
    found, tables = results("fidelity"), read(ROOT / "docs/codecs.md").tables
    real = list(dict.fromkeys(case for case, _, _ in found if case.startswith(("full/", "lora/"))))
    metrics = {"mean": "update_error_mean", "worst": "update_error_worst", "largest step": "worst_step"}
    for subjects in (("joint", "log"), ("learned", "joint", "log")):
        shown = [cells for cells in tables if len(cells) == 1 + len(subjects)]
        for begins, case, metric in [
            *((name, name, "update_error") for name in real),
            *((name, "all", metric) for name, metric in metrics.items()),
        ]:
            rows = [cells for cells in shown if cells[0].startswith(begins)]
            wanted = [found[case, subject, metric] for subject in subjects]
            assert any(all(agrees(number(cell), v) for cell, v in zip(cells[1:], wanted, strict=True)) for cells in rows), (begins, wanted)


@pytest.mark.parametrize("subject", ["log", *SUBJECTS])
def test_errors_in_the_comparison(subject: str) -> None:
    page = "docs/comparison.md"
    begins = SUBJECTS.get(subject, "this package, `log`")
    cells = next(cells for cells in read(ROOT / page).tables if cells[0].startswith(begins) and len(cells) == 4)
    found = results("fidelity")
    measured = [found["all", subject, metric] for metric in ("update_error_mean", "update_error_worst", "worst_step")]
    assert all(agrees(number(cell), value) for cell, value in zip(cells[1:], measured, strict=True)), (cells, measured)


CPU = {
    "torch fused AdamW": ("adamw/fp32", "torch_fused"),
    "this package, bf16 weights with 24-bit": ("adamw/log/bf16+24", "ours"),
    "bitsandbytes AdamW8bit, fp32": ("adamw/8bit/fp32", "bitsandbytes"),
    "torchao AdamW8bit, fp32": ("adamw/8bit/fp32", "torchao"),
}
KERNELS_CPU = {
    "torch fused AdamW": ("adamw/fp32", "torch_fused"),
    "log`, bf16 weights with 24-bit": ("adamw/log/bf16+24", "ours"),
    "the same, gradients not looked at": ("adamw/log/bf16+24/nonfinite=off", "ours"),
    "log`, bf16 weights with 32-bit": ("adamw/log/bf16+32", "ours"),
    "log`, fp32 weights": ("adamw/log/fp32", "ours"),
    "torch foreach": ("adamw/fp32", "torch_foreach"),
    "bitsandbytes": ("adamw/8bit/fp32", "bitsandbytes"),
    "torchao": ("adamw/8bit/fp32", "torchao"),
    "log`, plain torch": ("adamw/log/bf16+24/eager", "ours"),
}


@pytest.mark.parametrize(("page", "table"), [("docs/comparison.md", CPU), ("docs/kernels.md", KERNELS_CPU)])
def test_seconds_on_the_cpu(page: str, table: dict[str, tuple[str, str]]) -> None:
    found = results("cpu-step")
    for begins, (case, subject) in table.items():
        cells = row(page, begins)
        assert agrees(number(cells[1]), found[case, subject, "seconds"]), cells
        if subject != "torch_fused":
            assert agrees(number(cells[2]), found[case, subject, "ratio_to_torch_fused_fp32"]), cells


def test_instructions_of_the_kernel() -> None:
    found, weights = results("kernels"), ""
    rows = [cells for cells in read(ROOT / "docs/kernels.md").tables if len(cells) == 6 and cells[1].startswith("sm_")]
    assert len(rows) == 6
    for cells in rows:
        weights = cells[0] or weights
        case = f"adamw/log/{'bf16+24' if weights.startswith('bf16') else 'fp32'}/{cells[1]}"
        for cell, subject, metric in zip(
            cells[2:],
            ("ours", "ours", "flashoptim", "flashoptim"),
            ("instructions_per_param", "special_pipe_per_param") * 2,
            strict=True,
        ):
            assert abs(float(number(cell)) - found[case, subject, metric]) <= 0.051, (cells, cell)


@pytest.mark.parametrize("page", ["docs/comparison.md", "docs/kernels.md"])
def test_milliseconds_of_python(page: str) -> None:
    text, found = (ROOT / page).read_text(encoding="utf-8"), results("host-overhead")
    for subject in ("ours", "flashoptim"):
        assert f"{found['lora420', subject, 'ms_per_step']:.2f} ms" in text
        assert f"{found['lora420', subject, 'launches_per_step']:.0f}".replace("1", "one") + " launch" in text


def test_tables_of_conversions() -> None:
    from flashoptim_hf.bench.conversions import Cell, as_markdown

    tables: dict[str, dict[tuple[str, str], Cell]] = {}
    found = results("conversions")
    for case in dict.fromkeys(case for case, _, _ in found):
        prefix, _, pair = case.rpartition("/")
        source, target = pair.split("->")
        value = {metric: found.get((case, "ours", metric)) for metric in ("state_error", "loss_difference", "masters_kept")}
        masters = None if value["masters_kept"] is None else bool(value["masters_kept"])
        tables.setdefault(prefix, {})[source, target] = Cell(value["state_error"], value["loss_difference"], "", masters)
    text = (ROOT / "docs/conversion.md").read_text(encoding="utf-8")
    assert len(tables) == 6
    for prefix, cells in tables.items():
        algorithm, _, weights = prefix.partition("/")
        table = as_markdown(algorithm, cells, "bfloat16" if weights else "float32").partition("\n\n")[0]
        assert not [line for line in table.splitlines() if line not in text], prefix


def test_table_of_resharding() -> None:
    found = results("reshard")
    heads = [f"{a}->{b}" for a, b in ("22", "21", "12", "24", "42")]
    rows = [cells for cells in read(ROOT / "docs/several-gpus.md").tables if re.match(r"\(\d+,", cells[0])]
    assert len(rows) == 8
    for cells in rows:
        shape = cells[0].removesuffix(" LoRA")
        for cell, ranks in zip(cells[1:], heads, strict=True):
            case = next(case for case, _, _ in found if case.startswith(ranks) and case.endswith(shape))
            codes, v, m = (found[case, "ours", metric] for metric in ("codes", "v_steps", "m_steps"))
            assert cell == ("exact" if codes == 0 else f"{codes:.0f} codes; v {v:.2f}, m {m:.2f}"), (case, cell)


def test_overhead_of_paging() -> None:
    found = results("paging")
    for begins, subject in (("nothing overlaps", "no_overlap"), ("pages in both", "ours"), ("updated during", "release")):
        cells = row("docs/paging.md", begins)
        for cell, link in zip(cells[1:], ("pcie3", "pcie4", "pcie5", "c2c"), strict=True):
            assert abs(float(number(cell)) - 100 * found[f"model/8b_full/{link}", subject, "overhead_ratio"]) <= 0.51, cells


@pytest.mark.parametrize(("begins", "case"), [("fp32", "adamw/log/fp32"), ("bf16, 24-bit masters", "adamw/log/bf16+24")])
def test_peaks_of_checkpoints(begins: str, case: str) -> None:
    cells, found = row("docs/trainer.md", begins), results("checkpoint")
    assert agrees(number(cells[1]), found[case, "ours", "file_bytes_per_param"])
    assert agrees(number(cells[2]), found[case, "ours", "save_peak_per_file"])


@pytest.mark.parametrize("codec", ["log", "joint", "learned", "square", "softsign", "none"])
def test_bytes_in_the_options(codec: str) -> None:
    cells = next(cells for cells in read(ROOT / "docs/options.md").tables if cells[1].startswith(f"`{codec}`"))
    rule = LION if codec == "square" else ADAMW
    elements = 2**20
    assert agrees(number(cells[2]), get_codec(codec, rule.states, True).nbytes(elements) / elements)


def test_the_plan_that_is_quoted() -> None:
    from typer.testing import CliRunner

    from flashoptim_hf import cli

    page = read(ROOT / "docs/planner.md")
    words = next(words for words in commands.lines(page.blocks[0].text) if words[0] == "flashoptim-hf")
    words = [str(ROOT / word) if word.startswith("configs/") else word for word in words]
    said = CliRunner().invoke(cli.app, words[1:]).output.replace("\n", " ")
    quoted = next(block for block in page.blocks if block.language == "text")
    for line in quoted.text.splitlines()[1:]:
        parts = [part.strip() for part in line.split("│") if part.strip()]
        assert re.search(r"[\s│]+".join(re.escape(part).replace(r"\ ", r"\s+") for part in parts), said), line


def test_every_option_is_in_the_table() -> None:
    from flashoptim_hf import FlashAdamW, FlashLion, FlashSGD

    weight = [torch.nn.Parameter(torch.zeros(4))]
    text = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    for optimizer in (FlashAdamW, FlashLion, FlashSGD):
        assert not [name for name in optimizer(weight).defaults if f"`{name}" not in text]


def test_pictures_are_as_they_are_drawn() -> None:
    from docs import figures

    for name, draw in figures.PICTURES.items():
        assert (ROOT / "docs/figures" / f"{name}.svg").read_text(encoding="utf-8") == draw(), f"run python docs/figures.py: {name}"


@pytest.mark.parametrize(("shown", "value"), [("0.013", 0.0145), ("2.156", 2.125), ("19", 20.1)])
def test_another_figure_is_noticed(shown: str, value: float) -> None:
    assert not agrees(shown, value)
