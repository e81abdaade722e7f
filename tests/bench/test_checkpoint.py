"""The peaks of saving and loading, with a small model: live state and one file's worth at most, nothing on the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from flashoptim_hf.bench import checkpoint

PARAMS = 8_000_000
SLACK = 6 << 20
"""Bytes that Python, the ZIP writer and rounding to pages may take beside the state, whatever its size."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_peaks_are_one_file_at_most(tmp_path: Path) -> None:
    found = checkpoint.measure(PARAMS, torch.bfloat16, tmp_path / "optimizer.pt")
    size = found["file_bytes"][0]
    assert found["file_bytes_per_param_without_corrections"][0] < 2.2
    assert found["file_bytes_per_param"][0] < 3.2
    for name in ("save_peak", "load_peak"):
        peak = found[name][0]
        assert 0.5 * size < peak < size + SLACK, (name, peak, size)  # the lower limit: it was measured at all
    assert found["device_bytes"] == (0, "B")


def test_the_simulated_device_would_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of device memory can fail: a load that takes some there is seen."""
    load = checkpoint.FlashAdamW.load_state_dict

    def wasteful(self: checkpoint.FlashAdamW, state: dict) -> None:
        (engine,) = self._layout.engines.values()
        engine.backend.device_home(4096)
        load(self, state)

    assert checkpoint._device_bytes(1000, torch.bfloat16) == 0
    monkeypatch.setattr(checkpoint.FlashAdamW, "load_state_dict", wasteful)
    assert checkpoint._device_bytes(1000, torch.bfloat16) == 4096
