"""The cost of observing that is computed from the measured windows."""

import argparse

import numpy as np
import pytest

from benchmarks import observing

# Pairs of a bare and an observed window, in wall time; in CPU time they are twice as long.
WALL = np.array([[1.0, 1.0], [1.0, 1.02], [1.0, 1.04]])
SECONDS = np.stack([WALL, 2 * WALL], axis=-1)


def test_ratio_is_that_of_the_examples_per_second():
    table = observing.table(SECONDS, argparse.Namespace(steps=100))
    assert "| MNIST, 3 pairs of 100 steps | |" in table
    assert "| ms per step, bare; observed | 10.00; 10.20 |" in table
    assert "| the same in CPU time | 0.980 (0.971 to 0.990) |" in table
    assert "| examples/s, observed / bare (quartiles) | 0.980 (0.971 to 0.990) |" in table


def test_fails_above_the_limit(monkeypatch):
    monkeypatch.setattr(observing, "measure", lambda folder, flags: SECONDS)
    observing.main([])
    with pytest.raises(SystemExit, match=r"Observing costs 1\.96 %, more than 1 %"):
        observing.main(["--limit=1"])
