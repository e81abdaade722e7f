"""The page in a real browser, where one is installed (Debian: apt-get install chromium): it draws, light and dark, and asks for nothing."""

from __future__ import annotations

import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashoptim_hf.report import page
from flashoptim_hf.report.history import Run

BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=1000,900"),
)
LINE = {"light": "#2a78d6", "dark": "#3987e5"}  # of a chart's first line


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The page's address on this machine, and everything that is asked of the server."""
    log = [{"step": step, "loss": 2.0 / step, "eval_loss": 2.2 / step} for step in range(1, 30)]
    samples = [{"label": "a", "prompt": "<img src='/fetched.png'>", "answer": "<script src='/fetched.js'></script>"}]
    page.write(Run(name="seen", ended="finished", step=29, log=log, samples=samples), tmp_path / "report.html")
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(tmp_path))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            asked.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/report.html", asked
    server.shutdown()


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_drawn(scheme: str, served: tuple[str, list[str]], tmp_path: Path) -> None:
    import matplotlib.image
    import numpy as np

    address, asked = served
    shot = tmp_path / "shot.png"
    dark = ("--force-dark-mode",) if scheme == "dark" else ()
    words = [str(BROWSER), *OPTIONS, *dark, f"--user-data-dir={tmp_path / 'browser'}", f"--screenshot={shot}", address]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert shot.is_file(), done.stderr[-2000:]
    pixels = (matplotlib.image.imread(shot)[..., :3] * 255).round().astype(int)
    assert (pixels[5, 5].mean() < 60) == (scheme == "dark")  # the page's ground
    wanted = np.array([int(LINE[scheme][i : i + 2], 16) for i in (1, 3, 5)])
    assert (np.abs(pixels - wanted).sum(-1) < 12).sum() > 300  # a line two pixels wide across the chart
    assert set(asked) <= {"/report.html", "/favicon.ico"}
