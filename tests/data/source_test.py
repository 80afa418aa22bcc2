"""Sources: examples that can be read by their index."""

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


def test_arrays_copies_its_input():
    array = np.arange(3)
    source = ctl.data.arrays({"x": array})
    array[:] = -1
    assert source.gather(tf.range(3, dtype=tf.int64))["x"].numpy().tolist() == [0, 1, 2]


def test_arrays_created_inside_a_tf_function_outlive_it():
    sources = []

    @tf.function
    def build():
        sources.append(ctl.data.arrays({"x": np.arange(3)}))
        return tf.constant(0)

    build()
    assert sources[0].gather(tf.constant([2], tf.int64))["x"].numpy().tolist() == [2]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({}, "at least one array"),
        (np.zeros(3), "requires a dict"),
        (
            {"x": np.zeros(3), "y": np.zeros(4)},
            "{'x': 3, 'y': 4} examples, but each must have the same number",
        ),
        ({"x": np.zeros([0, 3])}, "{'x': 0} examples"),
        ({"x": 3.0}, "single value for 'x'"),
        ({"x": [[1], [2, 3]]}, "'x', a list"),
        ({"x": object()}, "'x', an object"),
    ],
    ids=["no array", "not a dict", "counts", "empty", "scalar", "ragged", "object"],
)
def test_unsupported_features_are_rejected_in_one_line(features, message):
    with pytest.raises(ctl.UsageError) as error:
        ctl.data.arrays(features)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_custom_source_must_define_gather():
    class Unfinished(ctl.data.Source):
        def __len__(self):
            return 3

    with pytest.raises(TypeError, match="gather"):
        Unfinished()
