"""The norms that a loop reports are those computed by hand."""

import math

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from tests.support import faulty_trainers, reference_model

RATE = 0.1
NAMES = ("gradient_norm", "parameter_norm", "update_norm")


def by_hand(weights, batch, steps, clip):
    """The mean norms of SGD's first steps: of all variables, of each variable; the share of zeros."""
    totals, layers, zeros = [], [], []
    for step in range(steps):
        indexes = faulty_trainers.batch_of(step, batch)
        rows = reference_model.pick(reference_model.examples(), indexes)
        _, gradients, _ = reference_model.loss_and_gradients(weights, rows)
        norm = math.sqrt(sum((g**2).sum() for g in gradients))
        factor = RATE * min(1.0, clip / norm)
        weights = [w - factor * g for w, g in zip(weights, gradients, strict=True)]
        sizes = [np.linalg.norm(g) for g in gradients]
        layers.append([sizes, [np.linalg.norm(w) for w in weights], [factor * n for n in sizes]])
        totals.append(np.linalg.norm(layers[-1], axis=1))
        zeros.append(sum((g == 0).sum() for g in gradients) / sum(g.size for g in gradients))
    return np.mean(totals, axis=0), np.mean(layers, axis=0), np.mean(zeros)


@pytest.mark.parametrize(
    ("batch", "replicas", "options"),
    [
        (7, 2, {}),
        pytest.param(8, 1, {"xla": "loop"}, marks=pytest.mark.slow),
        pytest.param(8, 2, {"logical_shards": 4}, marks=pytest.mark.slow),
    ],
)
def test_norms_are_those_of_the_global_batch(batch, replicas, options):
    clip = 0.05
    trainer = reference_model.make_trainer(
        testing.make_strategy(replicas), batch, norms="layers",
        clip=ctl.Clip(global_norm=clip), optimizer=lambda: tf_keras.optimizers.SGD(RATE), **options,
    )  # fmt: skip
    first = trainer.model.get_weights()
    names = [v.name.removesuffix(":0") for v in trainer.model.trainable_variables]
    for steps in (3, 3):  # the means of the second loop do not contain the first loop
        trainer.global_step.assign(0)
        trainer.model.set_weights(first)
        outputs = trainer.train(tf.constant(steps))
        totals, layers, zeros = by_hand(first, batch, steps, clip)
        np.testing.assert_allclose([outputs[n].numpy() for n in NAMES], totals, rtol=1e-12)
        for quantity, expected in zip(NAMES, layers, strict=True):
            values = outputs["layers"][quantity]
            assert list(values) == names
            actual = [float(value) for value in values.values()]
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-14)
        # So few rows do not have all six tokens in each step.
        assert 0 < zeros < 1 and float(outputs["gradient_zero_share"]) == pytest.approx(zeros)
        assert float(outputs["gradient_non_finite_share"]) == 0


def test_norms_are_rejected_if_the_step_never_calls_minimize():
    class Own(reference_model.ReferenceTrainer):
        def replica_step(self, batch):
            return tf.zeros([], tf.float64)

    trainer = reference_model.make_trainer(testing.make_strategy(1), 8, cls=Own, norms="global")
    with pytest.raises(ctl.UsageError, match=r"norms has no effect.*never calls self\.minimize"):
        trainer.train(tf.constant(1))
