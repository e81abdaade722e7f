"""Resumed equals uninterrupted, bit for bit: losses, weights, master weights, codes. One process; two ranks are in `test_ranks.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import resume


@pytest.mark.parametrize("mode", resume.MODES_OF_ONE)
@pytest.mark.parametrize("case", resume.CASES)
def test_resumed_equals_uninterrupted(mode: str, case: str, tmp_path: Path) -> None:
    resume.check_resume(resume.MODES_OF_ONE[mode], resume.CASES[case], tmp_path)


@pytest.mark.parametrize("case", resume.CASES)
def test_prepare_of_an_optimizer_that_has_state(case: str) -> None:
    resume.check_prepare_with_state(resume.CASES[case])


LOSSES = {
    "nothing": lambda _: None,
    "the weights alone": lambda saved: saved.pop("optimizer"),
    "the corrections": lambda saved: [values.pop("correction") for values in saved["optimizer"]["state"].values()],
    "the step counts": lambda saved: [values["step"].add_(1) for values in saved["optimizer"]["state"].values()],
    "one code": lambda saved: saved["optimizer"]["state"][0]["exp_avg"].view(-1)[5].add_(20),
}


@pytest.mark.filterwarnings("ignore:.*correction to 24:UserWarning")
@pytest.mark.parametrize("loss", LOSSES)
def test_the_check_sees_what_is_lost(loss: str, tmp_path: Path) -> None:
    import torch

    class Lossy(resume.Plain):
        def load(self, folder: Path) -> None:
            saved = torch.load(folder / "all.pt", weights_only=True)
            LOSSES[loss](saved)
            self.model.load_state_dict(saved["model"])
            if "optimizer" in saved:
                self.optimizer.load_state_dict(saved["optimizer"])

    case = resume.CASES["adamw 24-bit masters"]
    if loss == "nothing":
        resume.check_resume(Lossy, case, tmp_path)
    else:
        with pytest.raises(AssertionError):
            resume.check_resume(Lossy, case, tmp_path)
