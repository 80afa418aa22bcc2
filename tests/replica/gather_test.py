"""The rows of the global batch on every replica: values, gradients, and losses over pairs of rows."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.replica import row_mask

# (rows that exist, replicas): even shares, uneven ones, empty ones, one replica.
SPLITS = [(8, 1), (8, 2), (8, 4), (7, 2), (7, 4), (5, 4), (3, 4), (1, 2)]
strategy = functools.cache(testing.make_strategy)


def shares(rows, replicas):
    """The row numbers of each replica, padded by the last row, and the mask (docs/step.md, 2)."""
    size = -(-rows // replicas)
    numbers = np.arange(size * replicas).reshape(replicas, size)
    return np.minimum(numbers, rows - 1), (numbers < rows).astype(np.float64)


def run(function, rows, replicas, *, masked=True):
    """Runs `function(row numbers)` in the context of each replica's rows; one result per replica.

    The function returns a dict.
    """
    where = strategy(replicas)
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


@pytest.mark.parametrize(("rows", "replicas"), SPLITS)
def test_every_replica_has_all_rows_in_order_without_padding(rows, replicas):
    values = {name: table(rows, tf.as_dtype(name)) for name in DTYPES}
    gathered = run(
        lambda i: ctl.replica.all_gather({k: tf.gather(v, i) for k, v in values.items()}),
        rows,
        replicas,
    )
    for copy in gathered:
        for name, value in values.items():
            assert copy[name].dtype == name
            np.testing.assert_array_equal(copy[name], value)


@pytest.mark.parametrize(("rows", "replicas"), SPLITS)
def test_positions_are_indexes_into_the_gathered_rows(rows, replicas):
    results = run(lambda i: {"own": ctl.replica.positions(i), "rows": i}, rows, replicas)
    for result in results:
        np.testing.assert_array_equal(result["own"], result["rows"])
    assert result["own"].dtype == np.int32


@pytest.mark.parametrize(("rows", "replicas"), SPLITS)
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_gradient_is_the_sum_of_the_gradients_of_all_replicas(rows, replicas, dtype):
    """sum_i p_i sum_j (x_i . x_j)^3 c_j, and rows selected by tf.gather, whose gradient is sparse."""
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(dtype)
    scale = np.arange(1, rows + 1, dtype=np.float64)

    def losses(own, everything, places):
        own, everything = tf.cast(own, tf.float64), tf.cast(everything, tf.float64)
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
    tolerance = 1e-12 if dtype == "float64" else 2e-3
    largest = np.abs(expected).max()
    np.testing.assert_allclose(gradients[:rows], expected, rtol=0, atol=tolerance * largest)
    np.testing.assert_array_equal(gradients[rows:], 0)  # padding
    assert sum(r["value"] for r in results) == pytest.approx(float(value), rel=1e-13)


@pytest.mark.parametrize("counts", [[4, 4], [3, 2], [4, 0], [0, 3]])
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


def test_static_shape_is_kept_if_no_row_can_be_missing():
    def check(i):
        assert ctl.replica.all_gather(tf.gather(tf.ones([8, 5]), i)).shape == [8, 5]
        assert ctl.replica.positions(i).shape == [i.shape[0]]
        return {"row": i}

    run(check, 8, 4)
    run(check, 8, 1)


def test_model_that_gathers_can_be_built_outside_of_a_replica():
    with strategy(2).scope():
        assert ctl.replica.all_gather(tf.ones([3, 2])).shape == [3, 2]
        np.testing.assert_array_equal(ctl.replica.positions(tf.ones([3, 2])), [0, 1, 2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i: tf.concat([i, i], axis=0), r"got shape \(8,\), but requires \[4, ...\].*axis 1"),
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
