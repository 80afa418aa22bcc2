"""What `build_dataset` may return, and the spec of its batches."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data.element_spec import check_data, element_spec
from tests.data.reading import numbers


class Squares(ctl.data.Source):
    """A source that computes its examples."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def gather(self, indexes):
        return {"x": tf.cast(indexes, tf.float32)[:, tf.newaxis], "label": indexes**2}


def two_features(count):
    return tf.data.Dataset.range(count).map(lambda i: {"x": tf.ones([1]), "label": i})


@pytest.mark.parametrize(
    "make_data",
    [
        lambda: Squares(3),
        lambda: two_features(3),
        lambda: ctl.data.PerReplica(two_features(8).batch(4)),
        lambda: ctl.data.GlobalBatches(two_features(8).batch(4, drop_remainder=True)),
    ],
    ids=["source", "dataset", "per replica", "global batches"],
)
def test_spec_has_an_unknown_number_of_rows(make_data):
    check_data(make_data(), "train")
    assert element_spec(make_data()) == {
        "x": tf.TensorSpec([None, 1], tf.float32),
        "label": tf.TensorSpec([None], tf.int64),
    }


class Pairs(Squares):
    def gather(self, indexes):
        return indexes, indexes


class NoFeatures(Squares):
    def gather(self, indexes):
        return {}


class Totals(Squares):
    def gather(self, indexes):
        return {"x": tf.reduce_sum(indexes)}


def example(value):
    """A dataset of one element."""
    return tf.data.Dataset.from_tensors(value)


def unknown_rank():
    return example(b"").map(lambda file: {"image": tf.io.decode_image(file)})


def sparse():
    features = {"x": tf.io.VarLenFeature(tf.int64)}
    return example(b"").map(lambda record: tf.io.parse_single_example(record, features))


REJECTED = {
    "None": (lambda: None, "returned NoneType, but must return a ctl.data.Source"),
    "arrays": (lambda: (np.zeros(3), np.zeros(3)), "returned tuple, but must return"),
    "a dict": (lambda: {"x": np.zeros(3)}, "returned dict, but must return a ctl.data.Source"),
    "a class": (lambda: Squares, "must return a ctl.data.Source"),
    "no examples": (lambda: numbers(0), "no examples, but must return at least one"),
    "a source without examples": (lambda: Squares(0), "no examples, but must return at least one"),
    "no batches": (lambda: ctl.data.GlobalBatches(numbers(0).batch(2)), "no examples"),
    "numbers": (lambda: tf.data.Dataset.range(3), "must be dicts"),
    "pairs": (lambda: example((1, 2)), "must be dicts, as from `dataset.map("),
    "batches of pairs": (lambda: ctl.data.PerReplica(example((1, 2)).batch(2)), "must be dicts"),
    "a source of pairs": (lambda: Pairs(3), "must be dicts"),
    "a source without features": (lambda: NoFeatures(3), "must be dicts"),
    "a source of totals": (lambda: Totals(3), "whose first axis is the batch axis"),
    "unbatched global batches": (
        lambda: ctl.data.GlobalBatches(numbers(3)),
        "first axis is the batch axis",
    ),
    "unknown rank": (unknown_rank, "known rank (tf.ensure_shape"),
    "sparse tensors": (sparse, "must be dense tensors"),
}


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(("make_data", "message"), REJECTED.values(), ids=REJECTED)
def test_unsupported_data_is_rejected_in_one_line(make_data, message, split):
    with pytest.raises(ctl.UsageError) as error:
        check_data(make_data(), split)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
