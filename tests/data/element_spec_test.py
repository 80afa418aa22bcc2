"""What `build_dataset` may return, and the spec of its batches."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data.elements import check_data, element_spec
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


def batches(count=4, **options):
    return two_features(8).batch(count, **options)


def sequences():
    """Characters in sequences of four, input and target, as in TensorFlow's text tutorial."""
    characters = tf.data.Dataset.range(50).batch(5, drop_remainder=True)
    return characters.map(lambda x: {"x": x[:-1], "label": x[1:]})


REJECTED = {
    "None": (lambda: None, "returned NoneType, but must return a ctl.data.Source"),
    "arrays": (lambda: (np.zeros(3), np.zeros(3)), "returned tuple, but must return"),
    "a dict": (lambda: {"x": np.zeros(3)}, "returned dict, but must return a ctl.data.Source"),
    "a class": (lambda: Squares, "must return a ctl.data.Source"),
    "no examples": (lambda: numbers(0), "no examples, but must return at least one"),
    "a source without examples": (lambda: Squares(0), "no examples, but must return at least one"),
    "no batches": (lambda: ctl.data.GlobalBatches(numbers(0).batch(2)), "no examples"),
    "numbers": (lambda: tf.data.Dataset.range(3), "must be dicts"),
    "pairs": (lambda: example((1, 2)), "must be dicts, such as"),
    "batches of pairs": (lambda: ctl.data.PerReplica(example((1, 2)).batch(2)), "must be dicts"),
    "a source of pairs": (lambda: Pairs(3), "must be dicts"),
    "a source without features": (lambda: NoFeatures(3), "must be dicts"),
    "a source of totals": (lambda: Totals(3), "whose first axis is the batch axis"),
    "unbatched global batches": (
        lambda: ctl.data.GlobalBatches(numbers(3)),
        "first axis is the batch axis",
    ),
    "batches": (batches, "are batches, (None,) and (None, 1), but must be single examples"),
    "batches, prefetched": (lambda: batches().repeat().prefetch(2), "are batches"),
    "batches, mapped": (
        lambda: batches().map(lambda e: {**e, "label": -e["label"]}),
        "are batches",
    ),
    "batches in parallel": (lambda: batches(num_parallel_calls=2), "are batches"),
    "full batches": (lambda: batches(drop_remainder=True), "are batches, (4,) and (4, 1)"),
    "padded batches": (lambda: two_features(8).padded_batch(4), "are batches"),
    "ragged batches": (lambda: two_features(8).ragged_batch(4), "are batches"),
    "unknown rank": (unknown_rank, "known rank (tf.ensure_shape"),
    "sparse tensors": (sparse, "must be dense tensors"),
}


SINGLE_EXAMPLES = {
    "sequences made by batch": sequences,
    "rows of a batch": lambda: batches().unbatch(),
    "windows": lambda: (
        tf.data.Dataset.range(9).window(3).flat_map(lambda w: w.batch(3)).map(lambda x: {"x": x})
    ),
    "an image without a label, of unknown size": lambda: example(b"").map(
        lambda file: {"image": tf.io.decode_jpeg(file)}
    ),
    "a batch with a static shape": lambda: batches(2).map(
        lambda e: {k: tf.ensure_shape(v, [2, *v.shape[1:]]) for k, v in e.items()}
    ),
    "two datasets": lambda: tf.data.Dataset.zip({"x": batches(), "label": batches()}).map(
        lambda e: {"x": e["x"]["x"], "label": e["label"]["label"]}
    ),
}


def test_augmented_batches_are_rejected():
    with pytest.raises(ctl.UsageError, match="are batches"):
        check_data(ctl.data.augmented(batches(), lambda example, seed: example), "train")


@pytest.mark.parametrize("make_data", SINGLE_EXAMPLES.values(), ids=SINGLE_EXAMPLES)
def test_examples_whose_first_axis_is_not_that_of_a_batch_are_accepted(make_data):
    check_data(make_data(), "train")


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(("make_data", "message"), REJECTED.values(), ids=REJECTED)
def test_unsupported_data_is_rejected_in_one_line(make_data, message, split):
    with pytest.raises(ctl.UsageError) as error:
        check_data(make_data(), split)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
