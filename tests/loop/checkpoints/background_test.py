"""What the benchmark of saving makes of its windows."""

import argparse

import numpy as np
import pytest

from benchmarks import saving

# Two processes with three pairs each: 100 steps take 1 s, and 1.1 s with a checkpoint.
SECONDS = np.tile([1.1, 1.0], (2, 3, 1))


def test_a_checkpoint_costs_what_its_window_took_longer_spread_over_the_interval():
    assert saving.share(SECONDS, 100, 1000) == pytest.approx([0.01] * 3)
    assert saving.share(SECONDS, 100, 500) == pytest.approx([0.02] * 3)
    told = saving.table(
        SECONDS,
        SECONDS / 2,
        np.array([1.0, 0.5, 2.0]),
        argparse.Namespace(steps=100, interval=1000),
    )
    assert "| MNIST, batch 64, 6 pairs of 100 steps | |" in told
    assert "| ms a step without saving | 10.00 |" in told
    assert "| ms that a checkpoint costs; of the processor | 100; 50 |" in told
    assert "| % lost at every 1000 steps (95 %) | 1.00 (0.50 to 2.00) |" in told


def test_it_fails_above_its_limit(monkeypatch, capsys):
    monkeypatch.setattr(saving, "measured", lambda flags: np.stack([SECONDS, SECONDS], axis=2))
    saving.main(["--limit=1.5"])
    with pytest.raises(SystemExit, match=r"Saving costs 1\.00 %, more than 0\.5 %"):
        saving.main(["--limit=0.5"])
    assert capsys.readouterr().out.count("% lost at every 1000 steps") == 2


def test_a_window_with_a_checkpoint_leaves_one_whole(monkeypatch):
    seen = []
    one_window = saving.one_window

    def watched(controller, steps, *, saves):
        before = controller.checkpoints.latest_step()
        seconds = one_window(controller, steps, saves=saves)
        seen.append((saves, controller.checkpoints.latest_step() != before))
        return seconds

    monkeypatch.setattr(saving, "one_window", watched)
    (pair,) = saving.measure(windows=1, steps=2)
    assert np.shape(pair) == (2, 2) and np.min(pair) > 0
    assert sorted(seen) == [(False, False)] * 3 + [(True, True)] * 3
