"""The cost of saving that is computed from the measured windows."""

import argparse

import numpy as np
import pytest

from benchmarks import saving

# Two processes with three pairs each: 100 steps take 1 s, and 1.1 s with a checkpoint.
SECONDS = np.tile([1.1, 1.0], (2, 3, 1))


def test_cost_of_a_checkpoint_is_the_additional_time_of_its_window_over_the_interval():
    assert saving.saving_fraction(SECONDS, 100, 1000) == pytest.approx([0.01] * 3)
    assert saving.saving_fraction(SECONDS, 100, 500) == pytest.approx([0.02] * 3)
    flags = argparse.Namespace(steps=100, interval=1000)
    table = saving.table(SECONDS, SECONDS / 2, np.array([1.0, 0.5, 2.0]), flags)
    assert "| MNIST, batch 64, 6 pairs of 100 steps | |" in table
    assert "| ms per step without saving | 10.00 |" in table
    assert "| ms per checkpoint: wall; CPU | 100; 50 |" in table
    assert "| % of the time, saving every 1000 steps (95 %) | 1.00 (0.50 to 2.00) |" in table


def test_fails_above_the_limit(monkeypatch, capsys):
    seconds = np.stack([SECONDS, SECONDS], axis=2)
    monkeypatch.setattr(saving, "measure_processes", lambda flags: seconds)
    saving.main(["--limit=1.5"])
    with pytest.raises(SystemExit, match=r"Saving takes 1\.00 %, more than 0\.5 %"):
        saving.main(["--limit=0.5"])
    assert capsys.readouterr().out.count("% of the time, saving every 1000 steps") == 2


@pytest.mark.slow
@pytest.mark.long
def test_window_with_a_checkpoint_ends_when_the_checkpoint_is_complete(monkeypatch):
    windows = []
    one_window = saving.one_window

    def recorded(controller, steps, *, saves):
        latest = controller.checkpoints.latest_step()
        seconds = one_window(controller, steps, saves=saves)
        windows.append((saves, controller.checkpoints.latest_step() != latest))
        return seconds

    monkeypatch.setattr(saving, "one_window", recorded)
    (pair,) = saving.measure(windows=1, steps=2)
    assert np.shape(pair) == (2, 2) and np.min(pair) > 0
    assert sorted(windows) == [(False, False)] * 3 + [(True, True)] * 3
