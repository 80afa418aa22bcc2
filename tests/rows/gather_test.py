"""The rows of the global batch on every replica: values, gradients, and losses over pairs of rows."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.compile import xla as xla_modes
from ctl.rows import row_mask
from ctl.update import microbatches
from tests.support import one_batch

# (rows that exist, replicas): even shares; uneven and empty ones, 2 + 2 + 1 + 0.
SPLITS = [(8, 2), (5, 4)]


def shares(rows, replicas):
    """The row numbers of each replica, padded by the last row, and the mask (docs/step.md, 2)."""
    size = -(-rows // replicas)
    numbers = np.arange(size * replicas).reshape(replicas, size)
    return np.minimum(numbers, rows - 1), (numbers < rows).astype(np.float64)


def run(function, rows, replicas, *, masked=True):
    """Runs `function(row numbers)` in the context of each replica's rows; one result per replica.

    The function returns a dict.
    """
    where = one_batch.strategy(replicas)
    numbers, masks = shares(rows, replicas)
    has_mask = masked and rows % replicas != 0

    def step(numbers, mask):
        with row_mask.examples(mask if has_mask else None, count=numbers.shape[0]):
            return function(numbers)

    def distribute(values):
        return where.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[context.replica_id_in_sync_group])
        )

    results = tf.function(lambda *args: where.run(step, args=args))(
        distribute(numbers), distribute(masks)
    )
    copies = {name: where.experimental_local_results(result) for name, result in results.items()}
    return [{name: copies[name][i].numpy() for name in copies} for i in range(replicas)]


def table(rows, dtype):
    """[rows, 2, 3] numbers that differ from each other, negative ones and the largest one included."""
    values = np.random.default_rng(0).normal(size=(rows, 2, 3)) * 100
    if dtype.is_bool:
        return values > 0
    if dtype.is_integer:
        values = values.astype(np.int64)
        values[0, 0, 0] = min(dtype.max, 2**63 - 1)
    return values.astype(dtype.as_numpy_dtype)


DTYPES = ["float16", "bfloat16", "float32", "float64", "bool", "int8", "uint8", "int16", "uint16"]
DTYPES += ["int32", "uint32", "int64", "uint64"]


# The static shape is kept if no row can be missing.
@pytest.mark.parametrize(
    ("rows", "replicas", "shape", "dtypes"),
    [(8, 1, [8, 2, 3], ["float32"]), (8, 2, [8, 2, 3], DTYPES),
     (5, 4, [None, 2, 3], ["bool", "float64", "int8"])],
)  # fmt: skip
def test_every_replica_has_all_rows_in_order_without_padding_and_the_positions_of_its_own(
    rows, replicas, shape, dtypes
):
    values = {name: table(rows, tf.as_dtype(name)) for name in dtypes}

    def gather(i):
        everything = ctl.replica.all_gather({n: tf.gather(v, i) for n, v in values.items()})
        assert all(value.shape.as_list() == shape for value in everything.values())
        places = ctl.replica.positions(i)
        assert places.shape == i.shape
        return {**everything, "positions": places, "rows": i}

    for copy in run(gather, rows, replicas):
        for name, value in values.items():
            assert copy[name].dtype == name
            np.testing.assert_array_equal(copy[name], value)
        np.testing.assert_array_equal(copy["positions"], copy["rows"])
        assert copy["positions"].dtype == np.int32


@pytest.mark.parametrize(("rows", "replicas"), SPLITS)
def test_gradient_is_the_sum_of_the_gradients_of_all_replicas(rows, replicas):
    """sum_i p_i sum_j (x_i . x_j)^3 c_j, and rows selected by tf.gather, whose gradient is sparse."""
    x = np.random.default_rng(0).normal(size=(rows, 3))
    scale = np.arange(1, rows + 1, dtype=np.float64)

    def losses(own, everything, places):
        products = tf.matmul(own, everything, transpose_b=True) ** 3
        opposite = tf.gather(everything, tf.shape(everything)[0] - 1 - places)
        return tf.linalg.matvec(products, scale) + tf.reduce_sum(opposite**2 * own, axis=1)

    def contribution(i):
        own = tf.gather(x, i)
        with tf.GradientTape() as tape:
            tape.watch(own)
            value = losses(own, ctl.replica.all_gather(own), ctl.replica.positions(own))
            mask = ctl.replica.present()
            value = tf.reduce_sum(value if mask is None else value * mask)
        return {"gradient": tape.gradient(value, own), "value": value}

    reference = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(reference)
        value = tf.reduce_sum(losses(reference, reference, tf.range(rows)))
    expected = tape.gradient(value, reference).numpy()
    results = run(contribution, rows, replicas)
    gradients = np.concatenate([result["gradient"] for result in results])
    np.testing.assert_allclose(
        gradients[:rows], expected, rtol=0, atol=1e-12 * np.abs(expected).max()
    )
    np.testing.assert_array_equal(gradients[rows:], 0)  # padding
    assert sum(r["value"] for r in results) == pytest.approx(float(value), rel=1e-13)


@pytest.mark.parametrize("counts", [[3, 2], [0, 3]])
def test_replicas_with_different_numbers_of_rows_without_padding(counts):
    x = np.arange(1.0, 1.0 + sum(counts))

    def step(i):
        # A slice of a size that is known only when the step runs, as in GlobalBatches.
        start, size = tf.constant([0, counts[0]])[i[0]], tf.constant(counts)[i[0]]
        own = tf.constant(x)[start : start + size]
        with row_mask.examples(count=tf.shape(own)[0]), tf.GradientTape() as tape:
            tape.watch(own)
            everything, places = ctl.replica.all_gather(own), ctl.replica.positions(own)
            loss = tf.reduce_sum(own * tf.reduce_sum(everything) ** 2)
        assert everything.shape == places.shape == [None]
        return {"all": everything, "places": places, "gradient": tape.gradient(loss, own)}

    results = run(step, 2, 2)
    for result in results:
        np.testing.assert_array_equal(result["all"], x)
    places = np.concatenate([result["places"] for result in results])
    np.testing.assert_array_equal(places, np.arange(len(x)))
    gradient = np.concatenate([result["gradient"] for result in results])
    np.testing.assert_allclose(gradient, 3 * x.sum() ** 2, rtol=1e-14)


def test_model_that_gathers_can_be_built_outside_of_a_replica():
    with one_batch.strategy(2).scope():
        assert ctl.replica.all_gather(tf.ones([3, 2])).shape == [3, 2]
        np.testing.assert_array_equal(ctl.replica.positions(tf.ones([3, 2])), [0, 1, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda i: tf.concat([i, i], axis=0)[1:],
            r"got shape \(7,\), .*\[4, ...\].*ctl.replica.views",
        ),
        (lambda i: tf.reduce_sum(i), r"got shape \(\), but requires \[4, ...\]"),
        (lambda i: tf.as_string(i), "got dtype string, but requires floats, integers or bools"),
        (lambda i: tf.RaggedTensor.from_row_lengths(i, [1] * 4), "got a RaggedTensor"),
    ],
)
@pytest.mark.parametrize("function", [ctl.replica.all_gather, ctl.replica.positions])
def test_values_that_are_not_one_entry_per_row_are_rejected(function, make, message):
    with pytest.raises(
        ctl.UsageError, match=f"^ctl.replica.{function.__name__} {message}"
    ) as error:
        run(lambda i: {"x": function(make(i))}, 8, 2)
    assert "\n" not in str(error.value)


def test_conditional_is_rejected():
    with pytest.raises(ctl.UsageError, match="inside of a conditional") as error:
        run(lambda i: {"x": tf.cond(i[0] > 0, lambda: ctl.replica.all_gather(i), lambda: i)}, 8, 2)
    assert "\n" not in str(error.value)


VIEWS = {
    "views": np.random.default_rng(0).normal(size=(11, 2, 4)),
    "label": np.random.default_rng(1).integers(0, 3, 11),
}


class Pairs(one_batch.Trainer):
    """The cross entropy of each row among all rows."""

    EXAMPLES = VIEWS

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [layers.Dense(5, "tanh", input_shape=(2, 4)), layers.Dense(3), layers.Flatten()]
        )

    def per_example_loss(self, batch, outputs):
        logits = tf.matmul(outputs, ctl.replica.all_gather(outputs), transpose_b=True)
        place = ctl.replica.positions(outputs)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(place, logits)

    @staticmethod
    def reference(model, rows):
        outputs = model(rows["views"])
        products = tf.exp(tf.matmul(outputs, outputs, transpose_b=True))
        share = tf.linalg.diag_part(products) / tf.reduce_sum(products, axis=1)
        return -tf.math.log(share), tf.ones_like(share)


@pytest.mark.parametrize(
    ("replicas", "options", "message"),
    [
        (1, {"micro_batches": 2}, "optimizer.micro_batches=1"),
        (2, {"logical_shards": 2}, "logical_shards computes one shard at a time: set it to 0"),
        (2, {"xla": "gradients"}, r"xla=gradients .* choose runtime.xla=autocluster or off"),
    ],
)
def test_part_of_a_batch_cannot_see_the_other_parts(replicas, options, message):
    trainer = one_batch.make(Pairs, 8, replicas, **options)
    with pytest.raises(ctl.UsageError, match=message) as error:
        trainer.train(tf.constant(1))
    assert "\n" not in str(error.value)


class Mixed(one_batch.Trainer):
    """Mixes each row with the one that mirrors it in the global batch, in `preprocess`."""

    EXAMPLES = VIEWS

    build_model = Pairs.build_model

    def preprocess(self, batch):
        views = ctl.replica.all_gather(batch["views"])
        place = tf.shape(views)[0] - 1 - ctl.replica.positions(batch["views"])
        return {**batch, "views": 0.7 * batch["views"] + 0.3 * tf.gather(views, place)}

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum(outputs**2, axis=1) * tf.cast(batch["label"] + 1, outputs.dtype)

    @staticmethod
    def reference(model, rows):
        outputs = model(0.7 * rows["views"] + 0.3 * rows["views"][::-1])
        losses = tf.reduce_sum(outputs**2, axis=1) * tf.cast(rows["label"] + 1, tf.float64)
        return losses, tf.ones_like(losses)


@pytest.mark.slow
def test_rows_may_be_mixed_before_they_are_accumulated():
    one_batch.check_first_step(one_batch.make(Mixed, 11, 2, micro_batches=3))


class GlobalBatchesOfPairs(Pairs):
    def build_dataset(self, split, input_context):
        return ctl.data.GlobalBatches(super().build_dataset(split, input_context).batch(8))


@pytest.mark.parametrize(
    ("replicas", "xla"),
    [
        (2, "auto"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(4, "off"), (1, "step")]),
    ],
)
def test_loss_over_pairs_is_that_of_the_global_batch(replicas, xla, monkeypatch, caplog):
    """The second global batch has 3 rows: 2 + 1 + 0 + 0."""
    if xla == "auto":
        as_on_gpus = "gradients", "auto: as on several GPUs"
        monkeypatch.setattr(xla_modes, "choose", lambda *args, **kwargs: as_on_gpus)
    microbatches._warn_of_communication.cache_clear()
    trainer = one_batch.make(GlobalBatchesOfPairs, 8, replicas, xla=xla)
    one_batch.check_first_step(trainer)
    rows = {name: tf.constant(values[8:]) for name, values in VIEWS.items()}
    loss, _ = one_batch.reference(trainer, rows)
    assert float(trainer.train(tf.constant(1))["loss"]) == pytest.approx(float(loss), rel=1e-12)
    one_batch.check_evaluation(trainer, 8)
    lines = {message for message in caplog.messages if "runtime.xla" in message}
    if xla == "auto":
        assert trainer._ctl_loop.plan.xla == "gradients"
        (line,) = lines
        assert line.startswith(
            "runtime.xla=auto compiles nothing, because the trainer calls ctl.replica."
        )


def test_gradients_of_16_bit_rows_are_rounded_once():
    def gradient(i):
        own = tf.cast(i, tf.float16)
        with tf.GradientTape() as tape:
            tape.watch(own)
            factor = tf.where(i[0] == 0, 2048.0, 1.0)
            rows = tf.cast(ctl.replica.all_gather(own), tf.float32)
            loss = factor * tf.reduce_sum(rows)
        return {"gradient": tape.gradient(loss, own)}

    # 2048 + 1 + 1 + 1 = 2051 is between two float16 numbers; added one by one it would stay 2048.
    assert {float(r["gradient"][0]) for r in run(gradient, 4, 4)} == {2052.0}
