"""Elements of datasets: tuples, as tf_keras takes them, become dicts of named features."""

import collections

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data.elements import name_dataset_features, name_features
from ctl.data.input_pipeline import InputPipeline
from ctl.data.source import dataset_of

Example = collections.namedtuple("Example", ["label", "image"])

NAMED = {
    "a dict": ({"image": 1}, {"image": 1}),
    "x and label": ((1, 2), {"x": 1, "label": 2}),
    "x, label and weight": ((1, 2, 3), {"x": 1, "label": 2, "weight": 3}),
    "features and label": (({"a": 1, "b": 2}, 3), {"a": 1, "b": 2, "label": 3}),
    "features, label and weight": (({"a": 1}, 2, 3), {"a": 1, "label": 2, "weight": 3}),
    "a named tuple, in its own order": (Example(1, 2), {"label": 1, "image": 2}),
    "a tensor, which has no name": (1, 1),
}


@pytest.mark.parametrize(("element", "named"), NAMED.values(), ids=NAMED)
def test_features_are_named(element, named):
    assert name_features(element) == named


@pytest.mark.parametrize(
    "element",
    [(), (1,), (1, 2, 3, 4), ((1, 2), 3), (1, {"a": 2}), (1, (2, 3)), ({"label": 1}, 2),
     ({"weight": 1}, 2, 3)],
    ids=str,
)  # fmt: skip
def test_tuple_that_cannot_be_named_is_rejected(element):
    with pytest.raises(
        ctl.UsageError, match=r"must be dicts of tensors, or \(x, label\) or"
    ) as error:
        name_features(element)
    assert "\n" not in str(error.value)


def pairs(count=6):
    return tf.data.Dataset.range(count).map(lambda i: (tf.stack([i, i]), i))


DATA = {
    "dataset": pairs,
    "global batches": lambda: ctl.data.GlobalBatches(pairs().batch(2)),
    "per replica": lambda: ctl.data.PerReplica(pairs().batch(2)),
    "augmented": lambda: ctl.data.augmented(pairs(), lambda example, seed: example),
}


@pytest.mark.parametrize("kind", DATA)
def test_elements_of_any_dataset_are_named(kind):
    data = DATA[kind]()
    named = name_dataset_features(data)
    assert type(named) is type(data) or kind == "dataset"
    dataset = dataset_of(named)
    assert set(dataset.element_spec) == {"x", "label"}
    assert dataset.cardinality() == dataset_of(data).cardinality()
    labels = [np.ravel(element["label"]) for element in dataset.as_numpy_iterator()]
    assert np.concatenate(labels).tolist() == list(range(6))


def test_elements_of_named_tuples_are_named_by_their_fields():
    dataset = tf.data.Dataset.from_tensor_slices(Example([1, 2], [3, 4]))
    named = list(name_dataset_features(dataset).as_numpy_iterator())
    assert named == [{"label": 1, "image": 3}, {"label": 2, "image": 4}]


def test_data_whose_elements_have_names_is_unchanged():
    dataset = tf.data.Dataset.from_tensor_slices({"x": [1]})
    source = ctl.data.arrays({"x": [1]})
    assert name_dataset_features(dataset) is dataset
    assert name_dataset_features(source) is source


@pytest.mark.parametrize("split", ["train", "eval"])
def test_input_pipeline_names_the_features(split):
    pipeline = InputPipeline(
        lambda *_: pairs(), strategy=tf.distribute.get_strategy(), seed=0, prefetch=1
    )
    assert set(pipeline.element_spec(split)) == {"x", "label"}
    read = pipeline.training_dataset if split == "train" else pipeline.evaluation_dataset
    dataset = read(3, start=0) if split == "train" else read(3)
    batch, _ = next(iter(dataset))
    assert batch["x"].shape == [3, 2]
