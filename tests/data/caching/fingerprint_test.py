"""A fingerprint changes with the code and the values that examples depend on, and with nothing else."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data.caching import fingerprint
from ctl.data.elements import element_spec
from tests.support import child

VARIABLE = tf.Variable(1.0, trainable=False)


class Parsed(ctl.data.RowSource):
    """Eight rows of numbers, parsed by a function as records are."""

    def __init__(self, parse):
        self._parse = parse

    def __len__(self):
        return 8

    def read(self, indexes):
        number = tf.cast(indexes, tf.float32)
        return {"a": number, "b": number + 1}

    def parse(self, row):
        return self._parse(row["a"], row["b"])


def of(parse):
    source = Parsed(parse)
    return fingerprint.of_source(source, element_spec(source))


def select(is_first, first, second):
    return {"x": tf.cond(is_first, lambda: first, lambda: second)}


def repeat(first, second):
    """Two loop variables, one of which is returned."""
    return tf.while_loop(lambda i, j: i + j < 9, lambda i, j: (i + 1, j + 2), [first, second])


def after(first, second, *, number):
    """Returns a value that is computed after one of two others."""
    values = [tf.sqrt(first), tf.sqrt(second)]
    with tf.control_dependencies([values[number]]):
        return {"x": tf.identity(first)}


@tf.function
def difference(a, b):
    return a - b


@tf.function
def reversed_difference(a, b):
    return b - a


# Two functions that differ in one respect.
CHANGED = {
    "order": (lambda a, b: {"x": a / 255.0 - 0.5}, lambda a, b: {"x": (a - 0.5) / 255.0}),
    "operands": (lambda a, b: {"x": a - b}, lambda a, b: {"x": b - a}),
    "branches": (lambda a, b: select(a > b, a, b), lambda a, b: select(a > b, b, a)),
    "features": (lambda a, b: {"x": a, "label": b}, lambda a, b: {"x": b, "label": a}),
    "function": (
        lambda a, b: {"x": difference(a, b)}, lambda a, b: {"x": reversed_difference(a, b)}
    ),
    "output": (lambda a, b: {"x": repeat(a, b)[0]}, lambda a, b: {"x": repeat(a, b)[1]}),
    "output of an operation": (
        lambda a, b: {"x": tf.split(tf.stack([a, b]), 2)[0]},
        lambda a, b: {"x": tf.split(tf.stack([a, b]), 2)[1]},
    ),
    "loop": (
        lambda a, b: {"x": tf.map_fn(lambda v: v - a, tf.stack([a, b]))},
        lambda a, b: {"x": tf.map_fn(lambda v: a - v, tf.stack([a, b]))},
    ),
    "control": (lambda a, b: after(a, b, number=0), lambda a, b: after(a, b, number=1)),
    "constant": (lambda a, b: {"x": a * 2.0, "y": b}, lambda a, b: {"x": a * 3.0, "y": b}),
}  # fmt: skip


@pytest.mark.parametrize(("parse", "other"), CHANGED.values(), ids=CHANGED)
def test_a_fingerprint_changes_with_the_code(parse, other):
    assert of(parse) != of(other)


def test_a_fingerprint_changes_with_the_order_of_stateful_operations():
    operations = {
        "add": lambda: VARIABLE.assign_add(1.0),
        "double": lambda: VARIABLE.assign(VARIABLE * 2.0),
    }

    def in_order(*names):
        def parse(a, b):
            for name in names:
                operations[name]()
            return {"x": a + VARIABLE}

        return of(parse)

    assert in_order("add", "double") == in_order("add", "double")
    assert in_order("add", "double") != in_order("double", "add")


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(400_000, np.float32),  # 1.6 MB
        np.zeros([200, 3], np.int64),
        np.array([b"a", b"bc", b""] * 100, object),
    ],
    ids=["large", "small", "strings"],
)
def test_a_fingerprint_changes_with_a_captured_tensor(values):
    def with_last(value):
        changed = values.copy()
        changed[-1] = value
        captured = tf.constant(changed)
        return of(lambda a, b: {"x": tf.gather(captured, tf.cast(a, tf.int64))})

    first, second = (b"d", b"e") if values.dtype == object else (1, 2)
    assert with_last(first) == with_last(first)
    assert with_last(first) != with_last(second)


def test_a_fingerprint_distinguishes_captured_strings_with_the_same_bytes():
    def joined(*strings):
        captured = tf.constant(list(strings) * 100)
        return of(lambda a, b: {"x": tf.gather(captured, tf.cast(a, tf.int64))})

    assert joined("ab", "c") != joined("a", "bc")


def test_a_fingerprint_distinguishes_captured_tensors_by_their_use():
    low, high = tf.constant(np.zeros(200)), tf.constant(np.ones(200))

    def difference_of(first, second):
        return of(lambda a, b: {"x": tf.reduce_sum(first - second)})

    assert difference_of(low, high) != difference_of(high, low)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.string])
def test_a_fingerprint_changes_with_a_variable(dtype):
    mean = tf.Variable(tf.cast([1, 2], dtype) if dtype != tf.string else ["1", "2"])

    def parse(a, b):
        return {"x": a, "mean": mean + mean}

    before = of(parse)
    assert of(parse) == before
    mean[1].assign(tf.cast(3, dtype) if dtype != tf.string else "3")
    assert of(parse) != before


def parse_by_many_functions(a, b):
    """Calls functions of every kind: their names differ each time that they are traced."""
    table = tf.constant(np.arange(1000, dtype=np.float32))
    tf.debugging.assert_less(a, b)
    doubled = tf.data.Dataset.range(3).map(lambda i: i * 2).batch(3).get_single_element()
    chosen = tf.switch_case(tf.cast(a, tf.int32) % 2, [lambda: a * VARIABLE, lambda: b + table[3]])
    return {
        "chosen": chosen,
        "cond": select(a > b, a + 1.0, b + 2.0)["x"],
        "difference": tf.function(lambda v: v - 1.0)(a),
        "loop": repeat(a, b)[1],
        "map": tf.map_fn(lambda v: v * a, table[:5]),
        "python": tf.ensure_shape(tf.numpy_function(lambda v: v, [a], tf.float32), []),
        "random": tf.random.stateless_uniform([2], [1, 2]),
        "dataset": doubled,
    }


PRINT = """
import tensorflow as tf
for _ in range(20):
    tf.function(lambda v: tf.cond(v > 0, lambda: v, lambda: -v))(tf.constant(1.0))
from tests.data.caching import fingerprint_test
print(fingerprint_test.of(fingerprint_test.parse_by_many_functions))
"""


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_fingerprint_is_the_same_in_every_process_and_trace(processes):
    fingerprints = {of(parse_by_many_functions) for _ in range(2)}
    assert len(fingerprints) == 1
    if processes == 1:
        return
    run = child.run(["-c", PRINT], PYTHONHASHSEED="7")
    assert run.returncode == 0, run.stderr
    assert fingerprints == {run.stdout.strip()}
