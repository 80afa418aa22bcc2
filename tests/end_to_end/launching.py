"""Runs of the MNIST experiment of tests/support/experiments.py in one process or several."""

import numpy as np
import pytest

from tests.support.experiments import read_result, read_weights


def flags(folder, name, *arguments):
    """The flags of a run whose workdir has the given name."""
    return [f"--config={folder / 'small.py'}", f"--workdir={folder / name}", *arguments]


def launch(folder, name, *arguments, workers=2, servers=0):
    """The command that starts several processes."""
    processes = [f"--workers={workers}", f"--ps={servers}"]
    return ["-m", "ctl.launch", *processes, "--", *flags(folder, name, *arguments)]


def check_same(folder, name, one_replica, batch, *, same_loops=True):
    """Asserts that a run has the weights and losses of one replica.

    Args:
        folder: the folder of the runs.
        name: the run.
        one_replica: the fixture.
        batch: the global batch size.
        same_loops: whether the last inner loop is as long, of which the training loss is the mean.
    """
    expected, expected_result = one_replica(batch)
    weights, result = read_weights(folder / name), read_result(folder / name)
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(weights[key], value, rtol=0, atol=1e-10, err_msg=key)
    assert result["eval"]["examples"] == expected_result["eval"]["examples"] == 203
    assert result["eval"]["loss"] == pytest.approx(expected_result["eval"]["loss"], abs=1e-9)
    if same_loops:
        assert result["train"]["loss"] == pytest.approx(expected_result["train"]["loss"], abs=1e-9)
