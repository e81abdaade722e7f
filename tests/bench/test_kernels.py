"""The static report: how instructions are counted, and that the numbers it hands over are those of the kernels."""

from __future__ import annotations

import json
import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets, so it compiles nothing", allow_module_level=True)

from flashoptim_hf.bench import kernels, sass
from flashoptim_hf.errors import ConfigurationError


def binary(*names: str) -> sass.Binary:
    """A program of instructions 16 bytes apart; "BRA 2" is a branch to the third."""
    made = []
    for i, text in enumerate(names):
        name, _, target = text.partition(" ")
        made.append(sass.Instruction(16 * i, name, f"0x{16 * int(target):x}" if target else ""))
    return sass.Binary(tuple(made), registers=8, stack_bytes=0)


PROGRAM = binary(
    *("MOV", "MUFU.RCP", "BRA 8"),  # entry; the branch skips the loop
    *("LDG.E.128", "FFMA", "MUFU.EX2", "STG.E.64", "BRA 3"),  # the hot loop
    *("IADD3", "EXIT"),
    *("LDG.E.U8", "I2F", "STG.E.U8", "BRA 10"),  # a second loop, of narrow accesses
    *("EXIT", "BRA 15", "NOP"),  # padding
)


def test_the_hot_loop_is_the_one_that_moves_the_most_bytes() -> None:
    assert [i.name for i in PROGRAM.hot] == ["LDG.E.128", "FFMA", "MUFU.EX2", "STG.E.64", "BRA"]
    assert [list(loop) for loop in PROGRAM.loops] == [[3, 4, 5, 6, 7], [10, 11, 12, 13]]


def test_special_instructions_are_counted_wherever_they_stand() -> None:
    assert sass.special(PROGRAM.hot) == 1
    assert sass.special(PROGRAM.instructions) == 3


def test_narrow_accesses_of_elements_are_found_and_those_of_groups_left_out() -> None:
    loop = binary("LDG.E.128", "LDG.E.64", "LDG.E", "LDG.E.U16", "STG.E.U8", "STG.E.64", "BRA 0")
    assert loop.narrowest("LDG", 16) == 128
    assert loop.narrowest("LDG", 24) == 64
    assert loop.narrowest("LDG", 26) == 32
    assert loop.narrowest("STG", 8) == 64
    assert loop.narrowest("STG", 9) == 8
    with pytest.raises(AssertionError, match="moves 9 bytes"):
        loop.narrowest("STG", 10)


def test_names_and_bytes_of_a_variant() -> None:
    adamw = kernels.rules()["adamw"]
    variant = kernels.Variant(adamw, "log", torch.bfloat16, 24)
    assert variant.name == "adamw/log/bf16+24"
    # weight 2, gradient 2, two codes, correction 1
    assert variant.element_bytes == (7, 5)
    assert kernels.Variant(adamw, "none", torch.float32, 0, dither=False).name == "adamw/none/fp32/nearest"
    assert kernels.Variant(adamw, "none", torch.float32, 0).element_bytes == (16, 12)


def test_every_name_stands_for_one_kernel() -> None:
    names = [variant.name for variant in kernels.variants()]
    assert len(names) == len(set(names))
    assert {variant.name for variant in kernels.headline()} < set(names)


@pytest.mark.parametrize("text", ["", "h100", "9.0", "75"])
def test_an_unknown_architecture_is_named(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--archs"):
        kernels.parse_archs(text)


def test_the_report_holds_both_subjects_and_reproduces_the_peer(tmp_path) -> None:
    """By the same count, all that is in its binary, flashoptim 0.1.4 is known to come to 152 and 105 on sm_90."""
    pytest.importorskip("flashoptim")
    file = tmp_path / "kernels.json"
    kernels.run(archs="90", json_file=file)
    rows = json.loads(file.read_text())["rows"]
    found = {(row["case"], row["subject"], row["metric"]): row["value"] for row in rows}
    assert len(found) == len(rows) == 2 * 2 * len(kernels.METRICS)
    for case, known in (("adamw/log/bf16+24/sm_90", 152), ("adamw/log/fp32/sm_90", 105)):
        assert found[case, "flashoptim", "instructions_per_param"] == pytest.approx(known, rel=0.03)
        for subject in ("ours", "flashoptim"):
            whole, loop = (found[case, subject, f"{kind}instructions_per_param"] for kind in ("", "loop_"))
            assert whole > loop > 0
        assert found[case, "ours", "instructions_per_param"] < 0.7 * found[case, "flashoptim", "instructions_per_param"]
        assert found[case, "ours", "min_access_bits"] == 128
        assert found[case, "ours", "spill_bytes"] == 0


def test_the_peer_stands_beside_the_kernels_that_it_has(monkeypatch) -> None:
    """Of all that `--every` compiles, flashoptim's kernel is counted beside AdamW with bf16 and 24 bits, and with fp32 weights."""
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(kernels._triton, "require", lambda: None)
    monkeypatch.setattr(kernels, "compile_variant", lambda *_: None)
    monkeypatch.setattr(kernels, "compile_peer", lambda *_: None)
    counted = []
    monkeypatch.setattr(kernels, "add_rows", lambda *what: counted.append((what[1], what[2], what[5])))
    kernels.measure([90], list(kernels.variants()), peers=True)
    peers = [(case, moved) for case, subject, moved in counted if subject == "flashoptim"]
    assert sorted(peers) == [("adamw/log/bf16+24/sm_90", (7, 5)), ("adamw/log/fp32/sm_90", (10, 6))]
    assert len(counted) > 50
