"""The peers, where installed: that they really run in 8 bits, on the whole stream, and solve the problem that was given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashoptim_hf.bench import peers
from flashoptim_hf.bench.metrics import update_error
from flashoptim_hf.bench.streams import Problem, drifting
from flashoptim_hf.bench.subjects import ALGORITHMS, Outcome, codec_subject, exact
from flashoptim_hf.errors import ConfigurationError, UnsupportedError

SIZES = (70, 300)  # below and above a block of 256, multiples of no group
BYTES = {
    "flashoptim": 2 + 2 * 2 / 32,
    "bitsandbytes": 2 + 2 * 4 / 70,  # one block of 256, of which 70 elements are there
    "torchao": 2 + 2 * 4 / 256,
}


def solve(name: str) -> tuple[list[Problem], list[Outcome]]:
    problems = [Problem(f"w{n}", drifting(0.5, 1.0, seed=n, steps=12, elements=n), lr=2e-3, betas=(0.8, 0.99)) for n in SIZES]
    problems.append(problems[0].scaled(0.5))
    return problems, list(peers.PEERS[name](problems))


@pytest.mark.parametrize("name", list(peers.PEERS))
def test_peer_runs_in_8_bits(name):
    pytest.importorskip(name)
    problems, outcomes = solve(name)
    for problem, outcome in zip(problems, outcomes, strict=True):
        assert outcome.weights.shape == problem.grads.shape
        assert outcome.weights.dtype == torch.float64
        # fp32 states are at 1e-7; other betas, eps or lr than those given are far above 0.3
        assert 1e-4 < update_error(outcome.weights, exact(problem), problem.lr) < 0.3
    assert outcomes[0].bytes_per_param == pytest.approx(BYTES[name])


def test_flashoptim_problem_does_not_depend_on_its_neighbours():
    pytest.importorskip("flashoptim")
    problems = [Problem(f"w{n}", drifting(0.5, 1.0, seed=n, steps=4, elements=n)) for n in SIZES]
    # Another lr puts a problem into a launch of its own; twice the lr doubles every fp32 weight exactly
    outcomes = list(peers.flashoptim_kernel([*problems, replace(problems[1], lr=2e-3)]))
    assert torch.equal(2 * outcomes[1].weights, outcomes[2].weights)


@pytest.mark.parametrize("name", ["lion", "sgd"])
def test_flashoptims_momentum_is_its_format(name):
    """Its kernel and the codec `softsign`, which stores the same codes, move the weights alike."""
    pytest.importorskip("flashoptim")
    algorithm = ALGORITHMS[name]
    problems = [Problem(f"w{n}", drifting(0.5, 1.0, seed=n, steps=12, elements=n)) for n in SIZES]
    (subject,), _ = peers.choose("flashoptim", name)
    same = codec_subject("softsign", algorithm=algorithm)
    for problem, theirs, ours in zip(problems, subject.solve(problems), same.solve(problems), strict=True):
        assert theirs.bytes_per_param == 1 + 2 / 32
        assert update_error(theirs.weights, ours.weights, problem.lr) < 1e-5
        assert update_error(theirs.weights, algorithm.exact(problem), problem.lr) < 0.2
    with pytest.raises(ConfigurationError, match=f"'torchao' is not known for {name}; choose from flashoptim"):
        peers.choose("torchao", name)


def test_a_failing_process_is_reported_with_its_last_words(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(peers, "__package__", "no_such_package")
    with pytest.raises(UnsupportedError, match=r"--peers(.|\n)*no_such_package"):
        list(peers.flashoptim_kernel([Problem("w", torch.ones(1, 4))]))


def test_choice(monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda name: name != "torchao")
    subjects, missing = peers.choose("installed")
    assert [subject.name for subject in subjects] == ["flashoptim", "bitsandbytes"]
    assert missing == ["torchao"]
    assert peers.choose("none") == ([], [])
    assert [subject.name for subject in peers.choose("bitsandbytes")[0]] == ["bitsandbytes"]
    with pytest.raises(UnsupportedError, match="pip install torchao"):
        peers.choose("bitsandbytes,torchao")
    with pytest.raises(ConfigurationError, match=r"'galore'.*bitsandbytes"):
        peers.choose("galore")
