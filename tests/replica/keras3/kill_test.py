"""A run of a Keras 3 model that is killed has the bits of the undisturbed run."""

import pytest

from benchmarks import chaos
from tests.support import experiments

EXPERIMENT = """\
import keras

from benchmarks import counting


class Trainer(counting.CountingTrainer):
    def build_model(self):
        layers = keras.layers
        normalization = layers.BatchNormalization(synchronized=True)
        return keras.Sequential(
            [layers.Dense(16, activation="relu"), normalization, layers.Dropout(0.3), layers.Dense(3)]
        )


def get_config():
    config = counting.get_config()
    config.trainer = "experiment.py:Trainer"
    return config
"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_nine_kills_change_no_bit(tmp_path, capsys):
    experiments.write(tmp_path, {"experiment.py": EXPERIMENT})
    flags = ["--kills=9", "--strategy=mirrored", f"--config={tmp_path / 'experiment.py'}"]
    chaos.main([*flags, "--", "--config.runtime.logical_devices=2"])
    output = capsys.readouterr().out
    assert "| kills | 9 |" in output
    assert "| largest difference of all weights, slots and counters | 0 |" in output
