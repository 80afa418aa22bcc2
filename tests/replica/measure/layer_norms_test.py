"""Norms of each variable and shares of the gradients are those computed by hand."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from ctl import testing
from ctl.data import sampler
from tests import faulty_trainers, reference_model

RATE = 0.1


def by_hand(weights, batch, steps):
    """quantity -> [variables] mean norms of SGD's first steps, and the mean share of zeros."""
    norms, zeros = [], []
    for step in range(steps):
        positions = tf.range(step * batch, (step + 1) * batch, dtype=tf.int64)
        order = sampler.example_indexes(
            positions, count=reference_model.EXAMPLES, seed=0, span=batch
        ).numpy()
        _, gradients, _ = reference_model.loss_and_gradients(
            weights, reference_model.pick(reference_model.examples(), order)
        )
        weights = [w - RATE * g for w, g in zip(weights, gradients, strict=True)]
        sizes = [np.linalg.norm(g) for g in gradients]
        norms.append([sizes, [np.linalg.norm(w) for w in weights], [RATE * size for size in sizes]])
        zeros.append(sum((g == 0).sum() for g in gradients) / sum(g.size for g in gradients))
    names = ("gradient_norm", "parameter_norm", "update_norm")
    return dict(zip(names, np.mean(norms, axis=0), strict=True)), np.mean(zeros)


def make_trainer(replicas, batch, **options):
    return reference_model.make_trainer(
        testing.make_strategy(replicas), batch,
        optimizer=lambda: tf_keras.optimizers.SGD(RATE), **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (2, {"gradient_accumulation_steps": 2}),
        pytest.param(1, {"xla": "loop"}, marks=pytest.mark.slow),
    ],
)
def test_each_variable_has_the_norms_of_the_global_batch(replicas, options):
    trainer = make_trainer(replicas, 7, layer_norms=True, gradient_shares=True, **options)
    first = trainer.model.get_weights()
    for _ in range(2):  # the means of the second loop do not contain the first loop
        trainer.global_step.assign(0)
        trainer.model.set_weights(first)
        outputs = trainer.train(tf.constant(3))
        expected, zeros = by_hand(first, 7, 3)
        names = [v.name.removesuffix(":0") for v in trainer.model.trainable_variables]
        for quantity, values in outputs["layers"].items():
            assert list(values) == names
            actual = [float(value) for value in values.values()]
            np.testing.assert_allclose(actual, expected[quantity], rtol=1e-10, atol=1e-14)
        # Seven rows do not have all six tokens in each step.
        assert 0 < zeros < 1 and float(outputs["gradient_zero_share"]) == pytest.approx(zeros)
        assert float(outputs["gradient_non_finite_share"]) == 0
    assert "gradient_norm" not in outputs  # only if train.norms is set, too


def test_skipped_step_counts_in_the_share_of_non_finite_gradients_alone():
    cls = type("Planted", (faulty_trainers.Overflowing,), {"replica": 0, "position": 0, "at": 1})
    trainer = reference_model.make_trainer(
        testing.make_strategy(1), 8, cls=cls, precision="float16",
        layer_norms=True, gradient_shares=True,
    )  # fmt: skip
    one = trainer.train(tf.constant(1))
    skipped = trainer.train(tf.constant(1))
    assert float(one["gradient_non_finite_share"]) == 0
    assert 0 < float(skipped["gradient_non_finite_share"]) <= 1
    assert all(np.isnan(float(v)) for v in skipped["layers"]["gradient_norm"].values())


def test_nothing_is_measured_by_default():
    outputs = make_trainer(1, 7).train(tf.constant(1))
    assert not {"layers", "gradient_zero_share"} & set(outputs)
