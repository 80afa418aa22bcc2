"""What `build_dataset` may return: names and specs of features, what is rejected, errors of reading."""

import collections
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.data.data_errors import report_data_errors
from ctl.data.elements import name_elements, name_features
from ctl.data.input_pipeline import InputPipeline
from ctl.data.kinds import kind_of
from tests.data.reading import check_data, numbers, one_line
from tests.data.record_files import FEATURES, write

Example = collections.namedtuple("Example", ["label", "image"])

NAMED = {
    "a dict": ({"image": 1}, {"image": 1}),
    "x and label": ((1, 2), {"x": 1, "label": 2}),
    "x, label and weight": ((1, 2, 3), {"x": 1, "label": 2, "weight": 3}),
    "features and label": (({"a": 1, "b": 2}, 3), {"a": 1, "b": 2, "label": 3}),
    "features, label and weight": (({"a": 1}, 2, 3), {"a": 1, "label": 2, "weight": 3}),
    "features and targets": (({"a": 1}, {"b": 2, "c": 3}), {"a": 1, "label": {"b": 2, "c": 3}}),
    "a feature called weight": (({"weight": 1, "a": 2}, 3), {"x/weight": 1, "a": 2, "label": 3}),
    "both, and a feature called label": (
        ({"weight": 1, "label": 2}, 3, 4),
        {"x/weight": 1, "x/label": 2, "label": 3, "weight": 4},
    ),
    "a named tuple, in its own order": (Example(1, 2), {"label": 1, "image": 2}),
    "a tensor, which has no name": (1, 1),
}


@pytest.mark.parametrize(("element", "named"), NAMED.values(), ids=NAMED)
def test_features_are_named(element, named):
    assert name_features(element) == named


@pytest.mark.parametrize(
    "element",
    [(), (1,), (1, 2, 3, 4), ((1, 2), 3), (1, 2, {"a": 3}), (1, (2, 3))],
    ids=str,
)  # fmt: skip
def test_tuple_that_cannot_be_named_is_rejected(element):
    assert "must be dicts of tensors, or (x, label) or" in one_line(name_features, element)


def pairs(count=6):
    return tf.data.Dataset.range(count).map(lambda i: (tf.stack([i, i]), i))


PAIRS = {
    "dataset": pairs,
    "global batches": lambda: ctl.data.GlobalBatches(pairs().batch(2, drop_remainder=True)),
    "per replica": lambda: ctl.data.PerReplica(pairs().batch(2)),
    "augmented": lambda: ctl.data.augmented(pairs(), lambda example, seed: example),
    "source": lambda: Squares(6),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_features_of_any_data_are_named(kind):
    data = PAIRS[kind]()
    spec = {"x": tf.TensorSpec([None, 2], tf.int64), "label": tf.TensorSpec([None], tf.int64)}
    assert make_pipeline(data).element_spec("train") == spec
    if kind != "source":
        elements = kind_of(data).dataset.as_numpy_iterator()
        labels = [np.ravel(element["label"]) for element in elements]
        assert np.concatenate(labels).tolist() == list(range(6))


def test_dataset_of_named_tuples_or_of_dicts_has_their_names():
    dataset = tf.data.Dataset.from_tensor_slices(Example([1, 2], [3, 4]))
    named = name_elements(dataset)
    assert [*named.as_numpy_iterator()] == [{"label": 1, "image": 3}, {"label": 2, "image": 4}]
    assert kind_of(named).dataset is named


def make_pipeline(data, strategy=None):
    strategy = strategy or tf.distribute.get_strategy()
    return InputPipeline(lambda split, context: data, strategy=strategy, seed=0, prefetch=1)


# Specs.


class Squares(ctl.data.Source):
    """A source that computes its examples."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def gather(self, indexes):
        return {"x": tf.stack([indexes, indexes], axis=1), "label": indexes**2}


def two_features(count):
    return tf.data.Dataset.range(count).map(lambda i: {"x": tf.ones([1]), "label": i})


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


class Batches(tf_keras.utils.Sequence):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.zeros([3, 2]), np.zeros([3])


def batches(count=4, **options):
    return two_features(8).batch(count, **options)


def random(example, seed):
    noise = tf.random.stateless_uniform(tf.shape(example["x"]), seed)
    return {**example, "x": example["x"] + noise}


def sequences():
    """Characters in sequences of four, input and target, as in TensorFlow's text tutorial."""
    characters = tf.data.Dataset.range(50).batch(5, drop_remainder=True)
    return characters.map(lambda x: {"x": x[:-1], "label": x[1:]})


REJECTED = {
    "None": (lambda: None, "returned None, but must return a ctl.data.Source"),
    "a dict": (lambda: {"x": np.zeros(3)}, "such as ctl.data.arrays(...)"),
    "an array": (lambda: np.zeros(3), "such as ctl.data.arrays(...)"),
    "an iterator": (lambda: iter([]), "such as ctl.data.generator(function)"),
    "augmented batches": (lambda: ctl.data.augmented(batches(), random), "are batches"),
    "a class": (lambda: Squares, "must return a ctl.data.Source"),
    "no examples": (lambda: numbers(0), "an empty dataset: at least one"),
    "a source without examples": (lambda: Squares(0), "an empty dataset: at least one"),
    "numbers": (lambda: tf.data.Dataset.range(3), "must be dicts"),
    "a source without features": (lambda: NoFeatures(3), "must be dicts"),
    "a source of totals": (lambda: Totals(3), "whose first axis is the batch axis"),
    "single global examples": (lambda: ctl.data.GlobalBatches(numbers(3)), "first axis is the"),
    "batches, prefetched": (lambda: batches().repeat().prefetch(2), "batches, (None,) and (None"),
    "batches, mapped": (lambda: batches().map(lambda e: {**e, "x": -e["x"]}), "are batches"),
    "batches in parallel": (lambda: batches(num_parallel_calls=2), "are batches"),
    "full batches": (lambda: batches(drop_remainder=True), "are batches, (4,) and (4, 1)"),
    "ragged batches": (lambda: two_features(8).ragged_batch(4), "are batches"),
    "unknown rank": (unknown_rank, "known rank (tf.ensure_shape"),
    "sparse tensors": (sparse, "must be dense tensors"),
    "a Sequence of Keras": (Batches, "such as ctl.data.random_access(data)"),
    "no values": (lambda: ctl.data.arrays({"x": np.zeros([3, 0])}), "leave out those with an axis"),
}


SINGLE_EXAMPLES = {
    "sequences made by batch": sequences,
    "rows of a batch": lambda: batches().unbatch(),
    "windows": lambda: (
        tf.data.Dataset.range(9).window(3).flat_map(lambda w: w.batch(3)).map(lambda x: {"x": x})
    ),
    "an image": lambda: example(b"").map(lambda file: {"image": tf.io.decode_jpeg(file)}),
    "a batch with a static shape": lambda: batches(2).map(
        lambda e: {k: tf.ensure_shape(v, [2, *v.shape[1:]]) for k, v in e.items()}
    ),
    "two datasets": lambda: tf.data.Dataset.zip({"x": batches(), "label": batches()}).map(
        lambda e: {"x": e["x"]["x"], "label": e["label"]["label"]}
    ),
}


@pytest.mark.parametrize("make_data", SINGLE_EXAMPLES.values(), ids=SINGLE_EXAMPLES)
def test_examples_whose_first_axis_is_not_that_of_a_batch_are_accepted(make_data):
    check_data(make_data(), "train")


def test_tuple_with_none_is_rejected_by_what_to_write():
    triples = tf.data.Dataset.from_tensors(1.0).map(lambda x: (x, 1.0, None))
    assert "leave out the None" in one_line(name_elements, triples)
    assert "leave out the None" in one_line(name_features, (1.0, 1.0, None))


@pytest.mark.parametrize(("make_data", "message"), REJECTED.values(), ids=REJECTED)
def test_unsupported_data_is_rejected_in_one_line(make_data, message):
    assert message in one_line(check_data, make_data(), "train")


# Python functions: they work on one machine, and are rejected elsewhere.


def double(values):
    return 2 * values


def in_python(example):
    x = tf.numpy_function(double, [example["x"]], tf.float32)
    return {**example, "x": tf.ensure_shape(x, example["x"].shape)}


def parse_in_python(record):
    return in_python(tf.io.parse_single_example(record, FEATURES))


def from_generator():
    spec = {"x": tf.TensorSpec([2], tf.float32)}
    return tf.data.Dataset.from_generator(lambda: iter([{"x": [1.0, 2.0]}]), output_signature=spec)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "a", range(10))


ONE = tf.data.Dataset.from_tensors({"x": [1.0, 2.0]})
PYTHON = {
    "parse": lambda path: ctl.data.records(path, parse_in_python),
    "augment": lambda path: ctl.data.augmented(
        ctl.data.records(path, FEATURES), lambda e, seed: in_python(e)
    ),
    "augmented dataset": lambda path: ctl.data.augmented(ONE, lambda e, seed: in_python(e)),
    "generator": lambda path: from_generator(),
}


# Its hosts do not run this program.
REMOTE = mock.Mock(spec=tf.distribute.ParameterServerStrategy)


@pytest.mark.parametrize("name", PYTHON)
def test_python_function_is_rejected_where_hosts_are_remote(path, name):
    data = PYTHON[name](path)
    batch, _ = next(iter(make_pipeline(data).training_dataset(2, start=0)))
    assert batch["x"].shape == (2, 2)
    message = one_line(make_pipeline(data, REMOTE).data, "train")
    assert "The train data calls a Python function" in message


def test_other_data_is_accepted_where_hosts_are_remote(path):
    make_pipeline(ctl.data.augmented(ONE, random), REMOTE).data("train")
    records = ctl.data.augmented(ctl.data.records(path, FEATURES), random)
    source = make_pipeline(records, REMOTE).data("train").source
    graph = tf.function(source.gather).get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
    assert not any("PyFunc" in node.op for node in graph.as_graph_def().node)
    assert source.gather(tf.constant([3], tf.int64))["id"].numpy().tolist() == [3]


# Errors of reading.


def of_lengths(lengths):
    """Examples of two features, one of which has another length in each example."""
    spec = {"b": tf.TensorSpec([]), "x": tf.TensorSpec([None])}
    examples = [{"b": 1.0, "x": [0.0] * length} for length in lengths]
    return tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=spec)


def shape_error(dataset):
    """The message for examples of different shapes."""
    spec = tf.nest.map_structure(lambda s: tf.TensorSpec([None, *s.shape]), dataset.element_spec)
    with pytest.raises(ctl.UsageError) as error, report_data_errors("training", lambda: spec):
        list(dataset.batch(2))
    return str(error.value)


# TensorFlow reports the shapes in other words if the first example has no elements.
@pytest.mark.parametrize("lengths", [(2, 3), (0, 1)])
def test_examples_of_different_shapes_are_named(lengths):
    one, other = lengths
    expected = f"x has shape [{one}] in one training example and [{other}] in another: pad or crop"
    assert shape_error(of_lengths(lengths)).startswith(expected)


def test_target_of_different_shapes_is_named():
    # tf.data orders "label" before "x", and its targets by their names.
    dataset = of_lengths((2, 3)).map(lambda e: {"label": {"z": e["x"], "a": e["b"]}, "a": e["b"]})
    assert shape_error(dataset).startswith("label/z has shape")


def test_other_errors_are_unchanged():
    error = tf.errors.InvalidArgumentError(None, None, "odd")
    with pytest.raises(type(error), match="odd"), report_data_errors("training", dict):
        raise error
