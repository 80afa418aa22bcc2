"""Trains the experiments with small models, and compares two replicas with one device."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import main, testing
from tests.support import child, one_batch
from tests.support.experiments import read_result

DRAW = np.random.default_rng(0)
IMAGES = DRAW.integers(256, size=(23, 28, 28)).astype(np.uint8)
LABELS = DRAW.integers(10, size=23).astype(np.int32)


def small(cls, **features):
    """A trainer on a few images, and on other features of them."""

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"image": IMAGES, **features})

    return type("Small", (cls,), {"build_dataset": build_dataset})


def build(cls, replicas, optimizer, *, batch=7, **options):
    """Makes a trainer whose initial weights do not depend on the tests before it."""
    tf_keras.backend.reset_uids()
    tf_keras.utils.set_random_seed(1)
    options = ctl.TrainerOptions(**{"precision": "float64", **options})
    strategy = one_batch.strategy(replicas)
    return cls(
        strategy=strategy, global_batch_size=batch, optimizer=lambda: optimizer, options=options
    )


def variables(trainer):
    """Each replica's copies of the variables of all models of a trainer."""
    models = [value for value in vars(trainer).values() if isinstance(value, tf_keras.Model)]
    owned = {id(variable): variable for model in models for variable in model.variables}
    return [testing.copies(trainer.strategy, variable) for variable in owned.values()]


def train(trainer):
    """Returns the variables after 8 steps, and the outputs of the loops of two steps."""
    results = [trainer.train(tf.constant(2)) for _ in range(4)]
    return variables(trainer), [{k: float(v) for k, v in each.items()} for each in results]


def assert_same(one, two):
    """Compares what `train` returned for one device and for two replicas; returns the losses."""
    (expected, expected_results), (actual, results) = one, two
    for result, other in zip(results, expected_results, strict=True):
        assert result == pytest.approx(other, abs=1e-10)
    for (value,), copies in zip(expected, actual, strict=True):
        assert len(copies) == 2
        for copy in copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-10)
    return [result["loss"] for result in results]


def run_experiment(name, workdir, keys):
    """Runs an experiment with other values of config keys; returns its result.json."""
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(child.ROOT)
        code = main.run(["ctl", f"experiments/{name}.py", f"--workdir={workdir}", *flags])
    assert code == 0
    return read_result(workdir)


def use_few_images(patch, count):
    """Lets `ctl.data.idx` read only the first images of each split."""
    idx = ctl.data.idx

    def first(folder, split):
        return ctl.data.arrays(idx(folder, split).gather(tf.range(count, dtype=tf.int64)))

    patch.setattr(ctl.data, "idx", first)


def summaries(workdir):
    """The summaries of a run as (tag, value)."""
    return [
        (value.tag, value)
        for path in workdir.glob("summaries/**/events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
