"""Statistics, outputs and gradients are those of the global batch, however it is split."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.layers.batch_norm import SyncBatchNormalization, convert_sync_batch_norm
from ctl.replica import examples
from tests.support.checks import close, one_line

EPSILON, MOMENTUM = 1e-3, 0.9
KINDS = {  # shape of an example, arguments
    "dense": ([3], {}),
    "channels first": ([4, 2, 3], {"axis": 1}),
    "two axes": ([2, 3, 4], {"axis": [1, 3]}),
    "neither": ([3], {"center": False, "scale": False}),
}


def reference(x, gamma, beta, pull, axis, counts=None):
    """Textbook batch normalization in numpy float64; the loss is sum(pull y + y^2 / 2).

    Args:
        x, pull: the global batch.
        gamma, beta: shaped to broadcast.
        axis: the normalized axes.
        counts: mask of the elements in the statistics, shaped to broadcast; None for all.

    Returns:
        A dict of y, dx, d_gamma, d_beta, mean, variance; the latter four shaped to broadcast.
    """
    over = tuple(i for i in range(x.ndim) if i not in [a % x.ndim for a in np.atleast_1d(axis)])
    w = np.broadcast_to(np.ones([1] * x.ndim) if counts is None else counts, x.shape).astype(float)
    n = w.sum(over, keepdims=True)
    mean = (w * x).sum(over, keepdims=True) / n
    variance = (w * (x - mean) ** 2).sum(over, keepdims=True) / n
    deviation = np.sqrt(variance + EPSILON)
    xhat = (x - mean) / deviation
    y = gamma * xhat + beta
    dy = pull + y
    d_beta, d_gamma = dy.sum(over, keepdims=True), (dy * xhat).sum(over, keepdims=True)
    dx = gamma / deviation * (dy - w * (d_beta / n + xhat * d_gamma / n))
    return dict(y=y, dx=dx, d_gamma=d_gamma, d_beta=d_beta, mean=mean, variance=variance)


def split_rows(values, replicas):
    """The rows of each replica, padded by NaN, their masks and their counts."""
    count, rows = len(values), -(-len(values) // replicas)
    taken = [min(max(count - r * rows, 0), rows) for r in range(replicas)]
    parts = [
        np.concatenate([values[r * rows : r * rows + t], np.full_like(values[: rows - t], np.nan)])
        for r, t in enumerate(taken)
    ]
    masks = [(np.arange(rows) < t).astype(float) for t in taken]
    return parts, masks, taken


def make_layer(strategy, shape, dtype="float64", **arguments):
    """A built layer with random gamma and beta, and moving statistics of 0.5 and 2."""
    with strategy.scope():
        layer = SyncBatchNormalization(
            epsilon=EPSILON,
            momentum=MOMENTUM,
            dtype=dtype,
            moving_mean_initializer=tf_keras.initializers.Constant(0.5),
            moving_variance_initializer=tf_keras.initializers.Constant(2.0),
            **arguments,
        )
        layer.build([None, *shape])
        draw = np.random.default_rng(0)
        for variable in layer.trainable_variables:
            variable.assign(draw.uniform(0.5, 2, variable.shape))
    return layer


def train(strategy, layer, x, pull, *, replicas=2, padded=None, empty=False, jit=False):
    """Runs the layer once, forward and backward.

    Args:
        x, pull: the global batch; a row of padding is NaN.
        padded: whether the layer gets a mask; by default if there is padding.
        empty: remove the padding when the step runs instead, so that a replica may have no rows.
        jit: whether to compile with XLA.

    Returns:
        y, dx of the rows that exist; the sums over replicas of the gradients of gamma and beta.
    """
    parts, masks, taken = split_rows(x, replicas)
    pulls = [np.nan_to_num(part) for part in split_rows(pull, replicas)[0]]
    padded = min(taken) < len(masks[0]) if padded is None else padded

    def replica_step(x, pull, present, rows):
        if empty:
            x, pull = x[:rows], pull[:rows]
        with examples(present if padded and not empty else None):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True)
                wide = tf.cast(y, pull.dtype)
                loss = tf.reduce_sum(pull * wide + tf.square(wide) / 2)
            return y, tape.gradient(loss, [x, *layer.trainable_variables])

    def local(values):
        values = [tf.constant(v) for v in values]
        if replicas == 1:
            return values[0]
        return strategy.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group]
        )

    arguments = tuple(local(v) for v in (parts, pulls, masks, taken))
    y, (dx, *rest) = tf.function(
        lambda *a: strategy.run(replica_step, args=a), jit_compile=jit or None
    )(*arguments)

    def rows(value):
        each = strategy.experimental_local_results(value)
        result = np.concatenate([e[:t] for e, t in zip(each, taken, strict=True)])
        assert np.isfinite(result).all()
        return result

    for each, count in zip(strategy.experimental_local_results(dx), taken, strict=True):
        assert not np.any(each[count:])  # padding has no gradient
    sums = [np.sum(strategy.experimental_local_results(g), axis=0) for g in rest]
    return rows(y), rows(dx), sums


def check(strategy, layer, x, pull, got, counts=None, tolerance=1e-10):
    """Compares one training call of a layer made by `make_layer` with the reference."""
    axis = layer.axis
    shape = [n if i in axis else 1 for i, n in enumerate(x.shape)]
    gamma = layer.gamma.numpy().reshape(shape) if layer.scale else 1.0
    beta = layer.beta.numpy().reshape(shape) if layer.center else 0.0
    expected = reference(*(np.asarray(v, np.float64) for v in (x, gamma, beta, pull)), axis, counts)
    y, dx, sums = got
    gradients = [expected["d_gamma"]] * layer.scale + [expected["d_beta"]] * layer.center
    for one, other in [
        (y, expected["y"]),
        (dx, expected["dx"]),
        *zip(sums, gradients, strict=True),
    ]:
        np.testing.assert_allclose(one.ravel(), other.ravel(), rtol=0, atol=tolerance)
    for variable, start, name in (
        (layer.moving_mean, 0.5, "mean"),
        (layer.moving_variance, 2.0, "variance"),
    ):
        moved = start * MOMENTUM + expected[name].ravel() * (1 - MOMENTUM)
        first, *others = testing.copies(strategy, variable)
        np.testing.assert_allclose(first.ravel(), moved, rtol=0, atol=tolerance)
        assert all(np.array_equal(first, other) for other in others)


def batch_of(count, shape):
    draw = np.random.default_rng(1)
    return draw.normal(3, 2, [count, *shape]), draw.normal(size=[count, *shape])


# Even shares, 2 + 2 + 1 + 0 rows, each shape of an example in uneven shares, and a program of XLA.
@pytest.mark.parametrize(
    ("kind", "batch", "replicas", "options"),
    [("dense", 8, 2, {}), ("dense", 5, 4, {}), ("two axes", 6, 1, {"jit": True, "padded": True}),
     *((kind, 5, 2, {}) for kind in KINDS if kind != "dense")],
)  # fmt: skip
def test_every_split_trains_as_the_global_batch(kind, batch, replicas, options):
    where, (shape, arguments) = testing.make_strategy(replicas), KINDS[kind]
    layer, (x, pull) = make_layer(where, shape, **arguments), batch_of(batch, shape)
    check(where, layer, x, pull, train(where, layer, x, pull, replicas=replicas, **options))


def test_replicas_with_different_numbers_of_rows_without_padding():
    where = testing.make_strategy(4)
    layer, (x, pull) = make_layer(where, [2, 3]), batch_of(5, [2, 3])
    check(where, layer, x, pull, train(where, layer, x, pull, replicas=4, empty=True))


@pytest.mark.parametrize("empty", [True, False])
def test_global_batch_without_rows_changes_nothing(empty):
    where = testing.make_strategy(2)
    layer = make_layer(where, [3])
    before = layer.get_weights()

    def replica_step():
        x = tf.ones([2, 3], tf.float64)
        x = x[: tf.cast(layer.gamma[0] * 0, tf.int32)] if empty else x
        with examples(None if empty else tf.zeros([2])), tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(tf.square(y))
        return y, tape.gradient(loss, [x, layer.gamma, layer.beta])

    for value in tf.nest.flatten(tf.function(lambda: where.run(replica_step))()):
        for y in where.experimental_local_results(value):
            assert np.isfinite(y).all()
    close(before, layer.get_weights())


class Masked:
    """A layer under a Keras mask of the steps that are not zero."""

    def __init__(self, layer):
        self.layer, self.trainable_variables = layer, layer.trainable_variables

    def __call__(self, x, training):
        return self.layer(x, training=training, mask=tf.reduce_any(x != 0, axis=-1))


def test_keras_mask_excludes_positions_from_the_statistics():
    where = testing.make_strategy(2)
    layer, (x, pull) = make_layer(where, [3, 2]), batch_of(5, [3, 2])
    mask = np.random.default_rng(5).uniform(size=[5, 3]) < 0.7
    x = x * mask[:, :, np.newaxis]
    got = train(where, Masked(layer), x, pull)
    check(where, layer, x, pull, got, counts=mask[:, :, np.newaxis])


HARD = {
    "mean 1000, variance 0.01": lambda draw, n: draw.normal(1000, 0.1, n),
    "mean 3000": lambda draw, n: draw.normal(3000, 1, n),
    "mean -3000, variance 0.01": lambda draw, n: draw.normal(-3000, 0.1, n),
    "constant": lambda draw, n: np.full(n, 3000.1),
    "usual": lambda draw, n: draw.normal(0, 1, n),
    "replicas apart": lambda draw, n: draw.normal(0, 1, n) + 3000 * (np.indices(n)[0] < n[0] // 2),
}


def test_float32_is_accurate_for_large_means_and_small_variances():
    where, draw = testing.make_strategy(2), np.random.default_rng(3)
    n = [61, 4, 4]
    x = np.stack([make(draw, n) for make in HARD.values()], axis=-1).astype(np.float32)
    pull = draw.normal(size=x.shape).astype(np.float32)
    layer = make_layer(where, x.shape[1:], "float32")
    y, dx, _ = train(where, layer, x, pull)
    gamma, beta = layer.gamma.numpy(), layer.beta.numpy()
    expected = reference(*(v.astype(np.float64) for v in (x, gamma, beta, pull)), -1)
    for channel, name in enumerate(HARD):
        for got, right in ((y, expected["y"]), (dx, expected["dx"])):
            got, right = got[..., channel], right[..., channel]
            assert np.abs(got - right).max() <= 1e-5 * np.abs(right).max(), name


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float16"])
def test_statistics_are_float32_under_16_bit_policies(policy):
    where = testing.make_strategy(2)
    layer = make_layer(where, [3], policy)
    kind = tf.as_dtype(tf_keras.mixed_precision.Policy(policy).compute_dtype).as_numpy_dtype
    x, pull = batch_of(40, [3])
    x = (x * 100 + 900).astype(kind)  # the sum of squares overflows in float16
    y, dx, sums = train(where, layer, x, pull.astype(np.float32))
    assert y.dtype == dx.dtype == kind
    assert layer.moving_variance.dtype == layer.gamma.dtype == tf.float32
    assert all(s.dtype == np.float32 for s in sums)
    gamma, beta = layer.gamma.numpy(), layer.beta.numpy()
    expected = reference(*(v.astype(np.float64) for v in (x, gamma, beta, pull)), -1)
    moved = 0.5 * MOMENTUM + expected["mean"].ravel() * (1 - MOMENTUM)
    np.testing.assert_allclose(layer.moving_mean.numpy(), moved, rtol=1e-6)
    moved = 2 * MOMENTUM + expected["variance"].ravel() * (1 - MOMENTUM)
    np.testing.assert_allclose(layer.moving_variance.numpy(), moved, rtol=1e-5)
    half = 2.0**-8 if "bfloat" in policy else 2.0**-11  # rounding of the result
    np.testing.assert_allclose(y.astype(np.float64), expected["y"], rtol=half * 1.01, atol=1e-4)


def test_layer_reduces_once_forward_and_once_backward(monkeypatch):
    sizes = []
    original = tf.distribute.ReplicaContext.all_reduce

    def counted(self, op, value, options=None):
        sizes.append(value.shape.as_list())
        return original(self, op, value, options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, "all_reduce", counted)
    # Twice on two replicas.
    for replicas, expected in ((1, []), (2, [[2, 10]] * 2 + [[2, 1, 3]] * 2)):
        sizes.clear()
        where = testing.make_strategy(replicas)
        layer, (x, pull) = make_layer(where, [3]), batch_of(5, [3])
        train(where, layer, x, pull, replicas=replicas)
        assert sorted(sizes, key=len) == expected


# The layer in a model.


def test_inference_variables_and_checkpoints_are_those_of_tf_keras(tmp_path):
    plain = tf_keras.Sequential([tf_keras.layers.BatchNormalization(name="norm")])
    ours = tf_keras.Sequential([SyncBatchNormalization(name="norm")])
    x = np.random.default_rng(0).normal(size=[4, 3, 3, 2]).astype(np.float32)
    plain(x, training=True)
    ours(x, training=False)
    path = tf.train.Checkpoint(model=plain).save(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(model=ours).restore(path).assert_consumed()
    assert [v.name for v in plain.variables] == [v.name for v in ours.variables]
    np.testing.assert_array_equal(ours(x), plain(x))
    ours.layers[0].trainable = False  # frozen: inference, as in tf_keras
    np.testing.assert_array_equal(ours(x, training=True), plain(x))
    again = tf_keras.Sequential.from_config(ours.get_config())
    assert type(again.layers[0]) is SyncBatchNormalization


def test_functional_model_is_built_in_cross_replica_context():
    where = testing.make_strategy(2)
    with where.scope():
        inputs = tf_keras.Input([3])
        model = tf_keras.Model(inputs, SyncBatchNormalization()(inputs))
        before = model.get_weights()
        y = model(tf.constant([[0.0, 0, 0], [2, 2, 2]]), training=True)
    np.testing.assert_allclose(y, [[-1] * 3, [1] * 3], atol=1e-2)
    assert not np.array_equal(model.get_weights()[2], before[2])
    one, two = testing.copies(where, model.layers[1].moving_mean)
    np.testing.assert_array_equal(one, two)


def test_training_must_be_known_while_tracing():
    layer, x = SyncBatchNormalization(), tf.constant([[1.0], [3.0]])
    np.testing.assert_allclose(layer(x, training=tf.constant(True)), [[-1], [1]], atol=1e-2)
    with pytest.raises(ctl.UsageError, match="pass True or False"):
        tf.function(lambda training: layer(x, training=training))(tf.constant(True))


class Nested(tf_keras.Model):
    def __init__(self):
        super().__init__()
        layers = tf_keras.layers
        image = layers.Input([4, 4, 2])
        self.body = tf_keras.Model(image, layers.BatchNormalization(name="a")(image))
        self.tail = [tf_keras.Sequential([layers.Flatten(), layers.BatchNormalization(name="b")])]
        self.last = layers.experimental.SyncBatchNormalization(name="c", renorm=False)

    def call(self, inputs):
        return self.last(self.tail[0](self.body(inputs)))


def test_conversion_keeps_weights_outputs_and_derived_classes():
    model = Nested()
    x = np.random.default_rng(0).normal(size=[6, 4, 4, 2]).astype(np.float32)
    model(x, training=True)
    names, weights, outputs = [v.name for v in model.variables], model.get_weights(), model(x)
    assert convert_sync_batch_norm(model) == ["a", "b", "c"]
    assert convert_sync_batch_norm(model) == []
    assert names == [v.name for v in model.variables]
    close(weights, model.get_weights())
    np.testing.assert_array_equal(model(x), outputs)
    derived = type("Derived", (tf_keras.layers.BatchNormalization,), {})
    unbuilt = tf_keras.Sequential([tf_keras.layers.BatchNormalization(name="d"), derived()])
    assert convert_sync_batch_norm(unbuilt) == ["d"]
    assert unbuilt(tf.ones([2, 3]), training=True).shape == (2, 3)
    with examples(tf.constant([1.0, 1, 1, 0, 0, 0])):
        padded = model(x, training=True)
    np.testing.assert_allclose(padded[:3], model(x[:3], training=True), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"synchronized": False}, "synchronized=False"),
        ({"fused": True}, "fused=True"),
        ({"renorm": True}, "renorm"),
        ({"virtual_batch_size": 4}, "virtual_batch_size"),
        ({"adjustment": lambda shape: (1, 0)}, "adjustment"),
        ({"axis": 0}, "axis 0"),
    ],
)
def test_unsupported_arguments_are_rejected(arguments, message):
    with one_line(message):
        SyncBatchNormalization(**arguments)


def test_unsupported_uses_are_rejected():
    layer = SyncBatchNormalization(axis=-2)
    with pytest.raises(ctl.UsageError, match="axis 0"):
        layer(tf.ones([4, 3]), training=True)
    plain = tf_keras.Sequential(
        [tf_keras.layers.BatchNormalization(), tf_keras.layers.BatchNormalization(renorm=True)]
    )
    with pytest.raises(ctl.UsageError, match="renorm"):
        convert_sync_batch_norm(plain)
    assert type(plain.layers[0]) is tf_keras.layers.BatchNormalization
    layer = SyncBatchNormalization()
    rejected = pytest.raises(ctl.UsageError, match="got another number of rows")
    with rejected, examples(tf.ones([3])):
        layer(tf.ones([6, 3]), training=True)
    layer = SyncBatchNormalization(axis=1)
    with pytest.raises(ctl.UsageError, match="which its Keras mask of shape"):
        layer(tf.ones([6, 3, 2]), training=True, mask=tf.ones([6, 3], tf.bool))


def test_second_derivative_is_rejected():
    layer, x = SyncBatchNormalization(), tf.random.normal([4, 3])
    with pytest.raises(ctl.UsageError, match="second derivative"), tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(layer(x, training=True) ** 3)
        outer.gradient(inner.gradient(y, x), x)
