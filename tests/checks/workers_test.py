"""Processes of a run that differ are named before they train."""

from concurrent import futures
import importlib
import json
import os
import sys
import threading
import types

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl import testing
from ctl.checks import workers
from ctl.data import kinds
from ctl.errors import UsageError
from ctl.version import versions
from tests.support import child, reference_model


class Group:
    """Two processes as two threads, of which each has one of these."""

    is_single = False
    members = (("worker 0", "a"), ("worker 1", "b"))

    def __init__(self, index, shared, barrier):
        self.index, self.shared, self.barrier = index, shared, barrier

    def gather(self, values):
        return self.gather_text(list(values))

    def gather_text(self, text):
        self.shared[self.index] = text
        self.barrier.wait(60)
        result = list(self.shared)
        self.barrier.wait(60)
        return result


def both(function):
    """Calls function(group, index) in both; returns the errors, which must be the same."""
    shared, barrier = [None, None], threading.Barrier(2)

    def run(index):
        try:
            function(Group(index, shared, barrier), index)
        except UsageError as error:
            return str(error)
        return ""

    with futures.ThreadPoolExecutor(2) as threads:
        one, two = threads.map(run, range(2))
    assert one == two
    return one


def differ(*facts):
    return both(lambda group, index: workers.compare(group, "another config", facts[index]))


def test_differences_are_named_in_both_processes():
    assert differ({"seed": 0, "a": [1]}, {"a": [1], "seed": 0}) == ""
    assert differ({"seed": 0, "a": 1}, {"seed": 7, "a": 1}) == (
        "worker 1 was started with another config (seed: 0 -> 7): start all processes with that of "
        "worker 0."
    )
    assert "(b: absent -> 2)" in differ({}, {"b": 2})
    many = differ(dict.fromkeys("abcde", 0), dict.fromkeys("abcde", 1))
    assert "(a: 0 -> 1; b: 0 -> 1; c: 0 -> 1; and 2 more)" in many


def program(index, **keys):
    config = ctl.config(trainer="net.py:Net", data=dict(global_batch_size=8), **keys)
    return lambda group: workers.compare_configs(group, config)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(seed=7), "seed: 0 -> 7"),
        (dict(optimizer=dict(clip=dict(norm=0.5))), r"optimizer.clip.norm: 0.0 -> 0.5"),
        (dict(train=dict(steps_per_loop=7)), "train.steps_per_loop: "),
        (dict(model=dict(width=3)), "model.width: absent -> 3"),
        (dict(runtime=dict(cluster=dict(start_timeout=7))), ""),  # of the machine
    ],
)
def test_configs_are_compared_but_for_what_belongs_to_a_machine(keys, message):
    error = both(lambda group, index: program(index, **(keys if index else {}))(group))
    assert (message in error) if message else not error


def test_code_of_the_project_and_versions_are_compared(monkeypatch, tmp_path):
    code = workers._code(reference_model.ReferenceTrainer)
    assert "reference_model.py" in code and "../__init__.py" in code
    assert not any("ctl/trainer" in name or "numpy" in name for name in code)
    file = tmp_path / "helper.py"
    file.write_text("A = 1\n")
    module = types.ModuleType("helper")
    module.__file__ = str(file)
    monkeypatch.setitem(__import__("sys").modules, "helper", module)
    before = workers._code(reference_model.ReferenceTrainer)
    file.write_text("A = 2\n")
    after = workers._code(reference_model.ReferenceTrainer)
    assert [name.rpartition("/")[-1] for name in before if before[name] != after[name]] == [
        "helper.py"
    ]
    assert {"ctl", "tensorflow", "numpy"} <= versions().keys()


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        (dict(seed=7), 8, "seed: 0 -> 7"),
        (dict(clip=ctl.Clip(norm=0.5)), 8, r"optimizer.clip.norm: 0.0 -> 0.5"),
        ({}, 9, "global_batch_size: 8 -> 9"),
        (dict(prefetch=3), 8, ""),  # of the machine
    ],
)
def test_options_of_scripts_are_compared(options, size, message):
    def run(group, index):
        own = (ctl.TrainerOptions(**options), size) if index else (ctl.TrainerOptions(), 8)
        workers.compare_programs(group, *own, run)

    assert both(run) == (
        message
        and f"worker 1 was started with other options ({message}): start all processes with "
        "that of worker 0."
    )


def train_differently(folder, cases):
    """Trains by a script with a trainer or a step in one of two processes; returns the errors."""
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    sys.path.insert(0, f"{folder}/{index}")
    module = importlib.import_module("helper")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    errors = []
    for case in cases:
        try:
            errors.append(module.train(strategy, case, index))
        except UsageError as error:
            errors.append(str(error))
    return errors


SCRIPT = """\
import numpy as np, tf_keras, tensorflow as tf, ctl

def loss(batch, outputs):
    return tf.reduce_sum((batch["label"] - outputs) ** 2, 1)

class Net(ctl.StandardTrainer):
    other = ""

    def build_model(self):
        return make_model(self.other)

    def build_dataset(self, split, context):
        return make_data(self.other)

    def per_example_loss(self, batch, outputs):
        return loss(batch, outputs)

def make_model(other):
    return tf_keras.Sequential([tf_keras.layers.Dense(3 if other == "layer" else 4)])

def make_data(other):
    x = np.random.RandomState(0).randn(40 if other == "data" else 48, 4).astype("float32")
    return ctl.data.arrays({"x": x, "label": x[:, :1]})

def train(strategy, case, index):
    kind, other = case if index else (case[0], "")
    options = dict(seed=7) if other == "seed" else {}
    make = lambda: tf_keras.optimizers.SGD(0.1)
    size = 6 if other == "batch" else 8
    if kind == "trainer":
        Net.other = other
        trainer = Net(
            strategy=strategy, global_batch_size=size, optimizer=make,
            options=ctl.TrainerOptions(**options))
        trainer.train(tf.constant(1))
    else:
        step = ctl.Step(
            lambda: make_model(other), make, loss, global_batch_size=size, strategy=strategy,
            **options)
        step(next(iter(ctl.data.distribute(make_data(other), size, strategy))))
    return ""
"""


@pytest.mark.slow
def test_two_processes_of_a_script_raise_the_same_line(tmp_path):
    cases = {
        (kind, other): message
        for kind in ("step", "trainer")
        for other, message in {
            "": "",
            "seed": "other options (seed: 0 -> 7)",
            "batch": "other options (global_batch_size: 8 -> 6)",
            "layer": "another model (kernel: (4, 4) -> (4, 3))",
            "data": "another copy of the data (",
        }.items()
    }
    for index in (0, 1):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "helper.py").write_text(SCRIPT)
    first, second = testing.run_workers(train_differently, str(tmp_path), list(cases))
    assert first == second
    for error, (case, message) in zip(first, cases.items(), strict=True):
        assert error.startswith(message and f"worker 1 was started with {message}"), case
        assert bool(error) == bool(message), error
    with (tmp_path / "1" / "helper.py").open("a") as file:
        file.write("# older")
    first, second = testing.run_workers(train_differently, str(tmp_path), list(cases)[:1])
    assert first == second
    assert first[0].startswith("worker 1 was started with other code (helper.py: ")


VALUES = np.arange(200.0).reshape(100, 2)


def sources(values):
    arrays = ctl.data.arrays({"x": values, "text": values[:, 0].astype(str)})
    dataset = tf.data.Dataset.from_tensor_slices({"x": values})
    return arrays, dataset, ctl.data.augmented(arrays, lambda example, seed: example)


def test_samples_of_rows_show_other_values():
    other = VALUES.copy()
    other[-1, 1] += 1e-9
    for index, (one, same, changed) in enumerate(
        zip(sources(VALUES), sources(VALUES.copy()), sources(other), strict=True)
    ):
        a, b, c = (workers._sample(kinds.kind_of(each, "train")) for each in (one, same, changed))
        assert a == b
        assert (a != c) == (index != 1)  # of a dataset, the first examples are read
    per_worker = ctl.data.PerReplica(tf.data.Dataset.from_tensors({"x": VALUES}))
    assert workers._sample(kinds.kind_of(per_worker, "train")) is None


def test_each_variable_is_compared_before_it_exists():
    created = []

    def build(group, index):
        with workers.compare_new_variables(group):
            for size in (2, 3 + index, 4):
                created.append(tf.Variable(tf.zeros([size]), shape=[size], name=f"v{size}"))

    error = both(build)
    assert "another model (v3: [3] -> absent; v4: absent -> [4])" in error
    assert len(created) == 2


PROJECT = """\
import json, os
import numpy as np, tf_keras, tensorflow as tf, ctl

case = os.environ["CASE"] if json.loads(os.environ["TF_CONFIG"])["task"]["index"] else ""
X = np.random.RandomState(case == "values").randn(48, 4).astype("float32")

class Net(ctl.StandardTrainer):
    def build_model(self):
        size = 3 if case == "layer" else 8
        return tf_keras.Sequential([tf_keras.layers.Dense(size, input_shape=(4,))])

    def build_dataset(self, split, context):
        return ctl.data.arrays({"x": X, "label": X[:, :1]})

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum((batch["label"] - outputs) ** 2, 1)

def get_config():
    return ctl.config(
        trainer="net.py:Net", data=dict(global_batch_size=8), train=dict(steps=2),
        runtime=dict(strategy="multi_worker_mirrored"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("", ""),
        ("values", "another copy of the data (values of train: "),
        ("layer", "another model (kernel: (4, 8) -> (4, 3))"),
    ],
)
def test_two_processes_end_with_the_same_line_and_the_code_of_a_mistake(case, message, tmp_path):
    (tmp_path / "net.py").write_text(PROJECT)
    command = ["-m", "ctl.launch", "--workers=2", "--", "--config=net.py", "--workdir=run"]
    result = child.run(command, cwd=tmp_path, CASE=case)
    printed = result.stdout + result.stderr
    assert result.returncode == (2 if message else 0), printed
    if message:
        line = f"ctl: worker 1 was started with {message}"
        assert all(f"[worker {i}] {line}" in printed for i in range(2))
        assert not (tmp_path / "run").exists()
