"""The denominator of the loss, which is that of the global batch."""

from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.rows import assertions
from ctl.update import loss
from tests.support import one_batch
from tests.support.checks import one_line


def test_full_static_batch_divides_by_a_constant():
    def check():
        weights = loss.row_weights(None, None, tf.float64)
        assert tf.get_static_value(loss.global_weight(weights, 4, 8, tf.float64)) == 8.0

    tf.function(lambda: testing.make_strategy(2).run(check))()


def test_regularization_of_examples_is_rejected():
    with pytest.raises(ctl.UsageError, match="per_example_loss"):
        loss.regularization_contribution([tf.zeros([3])], 1, tf.float32)


def test_weights_may_be_an_array_or_a_list():
    for weights in (np.array([2, 3]), [2.0, 3.0]):
        found = loss.row_weights(weights, tf.constant([1.0, 0.0]), tf.float64)
        np.testing.assert_array_equal(found, [2.0, 0.0])


def test_weights_of_another_shape_are_rejected():
    with pytest.raises(ctl.UsageError, match=r"must be \[rows\]"):
        loss.row_weights(tf.ones([]), None, tf.float32)
    with pytest.raises(ctl.UsageError, match="one loss per example"):
        loss.contribution(tf.ones([2, 3]), None, tf.constant(1.0))
    for losses, weights, shapes in (
        ([3], [3, 1], r"shape \(3, 1\), but .* returned \(3,\)"),
        ([8, 6], [8, 1], r"shape \(8, 1\), but .* returned \(8, 6\)"),
        ([8, 6], [8], r"shape \(8, 6\).*return weights of this shape from sample_weight"),
    ):
        with pytest.raises(ctl.UsageError, match=shapes):
            loss.contribution(tf.ones(losses), tf.ones(weights), tf.constant(1.0))


def test_weights_do_not_broadcast_if_shapes_are_known_only_in_the_step():
    signature = [tf.TensorSpec([None, None])] * 2
    share = tf.function(
        lambda losses, weights: loss.contribution(losses, weights, tf.constant(1.0)),
        input_signature=signature,
    )
    assert float(share(tf.ones([2, 3]), 2 * tf.ones([2, 3]))) == 12.0
    with pytest.raises(tf.errors.InvalidArgumentError):
        share(tf.ones([2, 3]), tf.ones([2, 1]))


def test_negative_weights_of_tokens_are_rejected_with_the_example():
    compute = tf.function(lambda w: loss.row_weights(w, None, tf.float64))
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        compute(tf.constant([[1.0, 1.0], [0.0, -1.0], [2.0, 0.0]]))
    line = assertions.explain(raised.value, None)
    assert line.startswith("sample_weight is -1 for example 1 of the")


def test_check_of_weights_adds_few_ops_to_a_step():
    compute = tf.function(lambda w: loss.row_weights(w, None, tf.float32))
    graph = compute.get_concrete_function(tf.TensorSpec([4])).graph
    # The smallest weight, its comparison, and a branch that computes the message.
    assert [op.type for op in graph.get_operations() if op.type not in ("Const", "Identity")] == [
        "Placeholder", "Min", "Less", "LogicalNot", "If", "NoOp"
    ]  # fmt: skip


def test_negative_weights_are_not_finite_in_xla_and_weights_of_zero_are_right():
    compute = tf.function(lambda w: loss.row_weights(w, None, tf.float64), jit_compile=True)
    assert np.isnan(compute(tf.constant([1.0, -1.0]))).tolist() == [False, True]
    np.testing.assert_array_equal(compute(tf.zeros([2])), [0.0, 0.0])
    np.testing.assert_array_equal(loss.row_weights(tf.zeros([2]), None, tf.float64), [0.0, 0.0])


class Signed(one_batch.Trainer):
    EXAMPLES: ClassVar = {
        "x": np.ones((8, 2)), "label": np.ones(8), "weight": np.array([1.0] * 6 + [-3.0, 1.0])
    }  # fmt: skip

    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(3)])

    def per_example_loss(self, batch, outputs):
        return outputs[:, 0] ** 2


class Tokens(Signed):
    """The losses of the tokens that exist."""

    EXAMPLES: ClassVar = {
        "x": Signed.EXAMPLES["x"], "label": np.arange(24).reshape(8, 3) % 4 > 0
    }  # fmt: skip

    def per_example_loss(self, batch, outputs):
        return tf.boolean_mask(outputs**2, batch["label"])


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize(
    ("case", "line"),
    [
        (Signed, r"^sample_weight is -3 for example 6 of the global batch.* multiply the loss by"),
        (Tokens, r"^per_example_loss returned \d+ losses for [28] examples: return one loss per"),
    ],
)
def test_step_rejects_negative_weights_and_losses_of_tokens_in_one_line(case, line, replicas):
    with one_line(line):
        one_batch.make(case, 8, replicas).train(tf.constant(1))


def test_step_that_xla_compiles_rejects_negative_weights_in_one_line(caplog):
    with pytest.raises(ctl.UsageError, match=r"^sample_weight is -3 for example 6 .*in per_ex\S+$"):
        one_batch.make(Signed, 8, 1, xla="step").train(tf.constant(1))
    assert "combines rows" not in caplog.text  # no reduction of ctl's own is named


TOKENS, VOCABULARY = 6, 5
RANDOM = np.random.default_rng(0)
LENGTHS = np.array([6, 1, 3, 0, 5, 2, 4, 6, 1, 2, 6, 3, 5])
SEQUENCES = {
    "x": np.random.default_rng(0).integers(1, VOCABULARY, (13, TOKENS)),
    "label": np.random.default_rng(1).integers(1, VOCABULARY, (13, TOKENS))
    * (np.arange(TOKENS) < LENGTHS[:, np.newaxis]),
}


NUMBERS = {"x": RANDOM.normal(size=(13, 2)), "label": RANDOM.normal(size=13)}


class VariableLoss(tf_keras.layers.Layer):
    """Adds losses in `call` that depend on a variable only, as a value and as functions."""

    def build(self, shape):
        self.scale = self.add_weight("scale", shape[-1:], initializer="ones")

    def call(self, inputs):
        self.add_loss(0.07 * tf.reduce_sum(tf.square(self.scale)))
        for factor in (0.01, 0.02):
            self.add_loss(lambda factor=factor: factor * tf.reduce_sum(tf.square(self.scale)))
        return self.scale * inputs


class LanguageModel(one_batch.Trainer):
    """Predicts the token of each place; 0 is padding. Sequences have different lengths, one has 0."""

    EXAMPLES = SEQUENCES

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [
                layers.Embedding(VOCABULARY, 4, input_length=TOKENS),
                layers.Dense(4, "tanh", kernel_regularizer=tf_keras.regularizers.L2(0.1)),
                VariableLoss(),
                layers.Dense(VOCABULARY),
            ]
        )

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        )

    def sample_weight(self, batch):
        return tf.cast(batch["label"] != 0, self.compute_dtype)

    @staticmethod
    def reference(model, rows):
        logits = model(rows["x"])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(rows["label"], logits)
        return losses, tf.cast(rows["label"] > 0, losses.dtype)

    @staticmethod
    def penalty(model):
        return 0.1 * sum(
            tf.reduce_sum(v**2) for v in (model.layers[1].kernel, model.layers[2].scale)
        )


@pytest.mark.parametrize(
    ("batch", "replicas", "options"),
    [
        (7, 2, {"micro_batches": 3}),
        pytest.param(5, 4, {}, marks=pytest.mark.slow),
        pytest.param(8, 2, {"logical_shards": 4}, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_weighted_over_the_global_batch_and_losses_of_variables_count_once(
    batch, replicas, options
):
    trainer = one_batch.make(LanguageModel, batch, replicas, **options)
    one_batch.check_first_step(trainer, penalty=LanguageModel.penalty)
    one_batch.check_evaluation(trainer, 7)


class Regression(one_batch.Trainer):
    """Squared errors; `layers` are added to the model."""

    EXAMPLES = NUMBERS
    layers = staticmethod(lambda: [])

    def build_model(self):
        dense = tf_keras.layers.Dense
        return tf_keras.Sequential([dense(3, "tanh", input_shape=(2,)), *self.layers(), dense(1)])

    def per_example_loss(self, batch, outputs):
        return tf.square(outputs[:, 0] - batch["label"])


class RowLoss(tf_keras.layers.Layer):
    """Adds a loss in `call`, as the KL divergence of a variational autoencoder often is."""

    def call(self, inputs):
        self.add_loss(tf.reduce_mean(tf.square(inputs)))
        return inputs


class WithRowLoss(Regression):
    layers = staticmethod(lambda: [RowLoss(name="divergence")])


class WithModelLoss(Regression):
    def build_model(self):
        x = tf_keras.Input([2])
        outputs = tf_keras.layers.Dense(1)(x)
        model = tf_keras.Model(x, outputs)
        model.add_loss(tf.reduce_mean(tf.abs(outputs)))
        return model


class WithOwnPenalty(Regression):
    def forward(self, batch, training):
        outputs = super().forward(batch, training)
        self.penalty = tf.reduce_mean(outputs)
        return outputs

    def regularization_losses(self):
        return [self.penalty]


@pytest.mark.parametrize(
    ("cls", "replicas", "options"),
    [
        (WithRowLoss, 1, {"micro_batches": 2, "xla": "gradients"}),
        (WithModelLoss, 2, {}),
        (WithOwnPenalty, 1, {}),
    ],
)
def test_added_loss_that_depends_on_rows_is_rejected(cls, replicas, options):
    trainer = one_batch.make(cls, 8, replicas, **options)
    with pytest.raises(
        ctl.UsageError, match=r"depends on the rows .* in per_example_loss"
    ) as error:
        trainer.train(tf.constant(1))
    assert "\n" not in str(error.value)
    assert cls is not WithRowLoss or "/divergence/" in str(error.value)


def test_weights_of_padding_and_weights_that_are_no_number_are_not_called_negative():
    weights = loss.row_weights(tf.constant([2.0, -1.0]), tf.constant([1.0, 0.0]), tf.float64)
    assert weights.numpy().tolist() == [2.0, 0.0]
    (weight,) = loss.row_weights(tf.constant([np.nan]), None, tf.float64).numpy()
    assert np.isnan(weight)  # the check for finite values reports it
