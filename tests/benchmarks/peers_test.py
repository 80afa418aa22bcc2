"""The programs of the comparison train alike, answer each window, and end in a table."""

import numpy as np
import pytest

from benchmarks import windows
from benchmarks.peers import ctl_loop, keras_fit, tensorflow_loop, workloads
from benchmarks.peers.task import CHECK_LOOPS, Losses, Task


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mnist")
    workloads.WORKLOADS["mnist"].write(path)
    return path


def make_task(folder, *, check):
    return Task(name="mnist", batch=64, steps_per_loop=1, dropout=0.0, check=check, folder=folder)


def losses_of(train, task, variant):
    losses = Losses()
    with pytest.raises(windows.Done):
        train(task, losses, variant)
    return losses.values


@pytest.mark.slow
@pytest.mark.long
def test_ctl_tensorflow_and_tf_keras_have_the_same_losses(folder):
    programs = (
        (ctl_loop.train, "auto"),
        (tensorflow_loop.train, "off"),
        (keras_fit.train, "tf_keras"),
    )
    expected, *others = (
        losses_of(train, make_task(folder, check=True), variant) for train, variant in programs
    )
    assert len(expected) == CHECK_LOOPS and expected[0] > expected[-1]
    for losses in others:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
