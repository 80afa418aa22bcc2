"""The runs that several files compare with."""

import pytest

from ctl import main
from tests.end_to_end.launching import flags
from tests.support import experiments
from tests.support.experiments import read_result, read_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    experiments.write(folder, {"small.py": experiments.MNIST})
    return folder


@pytest.fixture(scope="module")
def one_replica(folder):
    """Global batch size -> the weights and the result of training on one replica."""
    runs = {}

    def train(batch):
        if batch not in runs:
            name = f"one-{batch}"
            size = f"--config.data.global_batch_size={batch}"
            assert main.run(["ctl", *flags(folder, name, size)]) == 0
            runs[batch] = read_weights(folder / name), read_result(folder / name)
        return runs[batch]

    return train
