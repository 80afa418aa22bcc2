"""Sources: examples that are read by their index."""

import numpy as np
import pytest
import tensorflow as tf

import ctl


def test_arrays_gives_the_rows_of_every_array():
    source = ctl.data.arrays({"x": np.arange(12.0).reshape(6, 2), "label": list("abcdef")})
    batch = source.gather(tf.constant([4, 0, 4], tf.int64))
    assert len(source) == 6
    assert batch["x"].numpy().tolist() == [[8, 9], [0, 1], [8, 9]]
    assert batch["label"].numpy().tolist() == [b"e", b"a", b"e"]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.float16, np.float64, bool])
def test_arrays_keeps_types(dtype):
    source = ctl.data.arrays({"x": np.ones([2, 3], dtype)})
    assert source.gather(tf.constant([1], tf.int64))["x"].dtype == tf.as_dtype(dtype)


def test_arrays_takes_a_copy():
    array = np.arange(3)
    source = ctl.data.arrays({"x": array})
    array[:] = -1
    assert source.gather(tf.range(3, dtype=tf.int64))["x"].numpy().tolist() == [0, 1, 2]


def test_arrays_made_inside_a_function_outlive_it():
    made = []

    @tf.function
    def build():
        made.append(ctl.data.arrays({"x": np.arange(3)}))
        return tf.constant(0)

    build()
    assert made[0].gather(tf.constant([2], tf.int64))["x"].numpy().tolist() == [2]


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({}, "at least one array"),
        (np.zeros(3), "want"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "{'x': 3, 'y': 4} examples: want the same number"),
        ({"x": np.zeros([0, 3])}, "{'x': 0} examples"),
        ({"x": 3.0}, "one value as 'x'"),
        ({"x": [[1], [2, 3]]}, "'x', a list"),
        ({"x": object()}, "'x', a object"),
    ],
    ids=["none", "no dict", "counts", "empty", "scalar", "ragged", "object"],
)
def test_what_is_no_dict_of_arrays_is_refused_in_one_line(features, words):
    with pytest.raises(ctl.UsageError) as caught:
        ctl.data.arrays(features)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_source_of_ones_own_needs_a_length_and_gather():
    class Unfinished(ctl.data.Source):
        def __len__(self):
            return 3

    with pytest.raises(TypeError, match="gather"):
        Unfinished()
