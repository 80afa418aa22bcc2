"""Python functions in an input pipeline: they work on one machine, and are rejected elsewhere."""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data.input_pipeline import InputPipeline
from ctl.hardware import strategies
from tests.data.record_files import FEATURES, write


def double(values):
    return 2 * values


def in_python(example):
    x = tf.numpy_function(double, [example["x"]], tf.float32)
    return {**example, "x": tf.ensure_shape(x, example["x"].shape)}


def parse_in_python(record):
    return in_python(tf.io.parse_single_example(record, FEATURES))


def generator():
    spec = {"x": tf.TensorSpec([2], tf.float32)}
    return tf.data.Dataset.from_generator(lambda: iter([{"x": [1.0, 2.0]}]), output_signature=spec)


def random(example, seed):
    return {**example, "x": example["x"] + tf.random.stateless_uniform([2], seed)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "a", range(10))


def arrays():
    return ctl.data.arrays({"x": np.ones([4, 2], np.float32)})


DATA = {
    "arrays": (lambda path: arrays(), False),
    "dataset": (lambda path: tf.data.Dataset.range(5).map(lambda i: {"x": i}), False),
    "records": (lambda path: ctl.data.records(path, FEATURES), False),
    "augmented records": (
        lambda path: ctl.data.augmented(ctl.data.records(path, FEATURES), random),
        False,
    ),
    "parse": (lambda path: ctl.data.records(path, parse_in_python), True),
    "augment": (
        lambda path: ctl.data.augmented(arrays(), lambda example, seed: in_python(example)),
        True,
    ),
    "augmented dataset": (
        lambda path: ctl.data.augmented(
            tf.data.Dataset.from_tensors({"x": [1.0, 2.0]}), lambda e, seed: in_python(e)
        ),
        True,
    ),
    "generator": (lambda path: generator(), True),
    "branch": (
        lambda path: tf.data.Dataset.from_tensors({"x": [1.0, 2.0]}).map(
            lambda e: tf.cond(tf.reduce_sum(e["x"]) > 0, lambda: in_python(e), lambda: e)
        ),
        True,
    ),
}


def pipeline(data):
    strategy = tf.distribute.get_strategy()
    return InputPipeline(lambda split, context: data, strategy=strategy, seed=0, prefetch=1)


@pytest.mark.parametrize("name", DATA)
def test_python_function_is_rejected_where_hosts_are_remote(path, monkeypatch, name):
    make, uses_python = DATA[name]
    monkeypatch.setattr(strategies, "strategy_name", lambda strategy: "parameter_server")
    if not uses_python:
        pipeline(make(path)).data("train")
        return
    with pytest.raises(ctl.UsageError) as error:
        pipeline(make(path)).data("train")
    assert "The train data calls a Python function" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name, (_, uses_python) in DATA.items() if uses_python])
def test_python_function_works_on_one_machine(path, name):
    data = pipeline(DATA[name][0](path)).training_dataset(2, start=0)
    batch = next(iter(data))
    assert batch[0]["x"].shape == (2, 2)


def test_records_are_read_by_tensorflow_where_hosts_are_remote(path, monkeypatch):
    monkeypatch.setattr(strategies, "strategy_name", lambda strategy: "parameter_server")
    source = pipeline(ctl.data.records(path, FEATURES)).data("train")
    graph = tf.function(source.gather).get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
    assert not any("PyFunc" in node.op for node in graph.as_graph_def().node)
    assert source.gather(tf.constant([3], tf.int64))["id"].numpy().tolist() == [3]
