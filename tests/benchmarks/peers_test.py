"""The programs of the comparison train alike, answer each window, and end in a table."""

import numpy as np
import pytest

from benchmarks import windows
from benchmarks.peers import ctl_loop, keras_fit, tensorflow_loop, workloads
from benchmarks.peers.task import CHECK_LOOPS, Losses, Task


def losses_of(train, folder, variant):
    task = Task("mnist", batch=64, steps_per_loop=1, dropout=0.0, check=True, folder=folder)
    losses = Losses()
    with pytest.raises(windows.Done):
        train(task, losses, variant)
    return losses.values


@pytest.mark.slow
@pytest.mark.long
def test_ctl_tensorflow_and_tf_keras_have_the_same_losses(tmp_path):
    workloads.WORKLOADS["mnist"].write(tmp_path)
    expected = losses_of(ctl_loop.train, tmp_path, "auto")
    assert len(expected) == CHECK_LOOPS and expected[0] > expected[-1]
    for program, variant in ((tensorflow_loop, "off"), (keras_fit, "tf_keras")):
        losses = losses_of(program.train, tmp_path, variant)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
