"""Data that training makes is saved with the variables, and a resumed run continues with it."""

import collections
import threading

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.state_dicts import StateDict
from tests.support import reference_model

BATCH = 7  # 4 + 3 rows on two replicas, 2 + 2 + 2 + 1 on four


class Buffer:
    """Holds the rows of earlier batches, and draws from them."""

    def __init__(self):
        self.rng = np.random.default_rng(3)
        self.rows = collections.deque([(np.ones(4), 0.5)], maxlen=20)

    def batch(self):
        new = self.rng.normal(size=[3, 4])
        self.rows += [(row, float(np.sin(row.sum()))) for row in new]
        chosen = [self.rows[i] for i in self.rng.integers(len(self.rows), size=BATCH)]
        return {"x": np.stack([x for x, _ in chosen]), "label": np.array([y for _, y in chosen])}

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state, "rows": [*self.rows], "none": None}

    def load_state_dict(self, state):
        assert state["none"] is None and isinstance(state["rows"][0], tuple)
        self.rng.bit_generator.state = state["rng"]
        self.rows = collections.deque(state["rows"], maxlen=20)


def build_model():
    tf_keras.utils.set_random_seed(0)
    return tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=[4], dtype="float64")])


def loss_fn(batch, outputs):
    return tf.square(batch["label"] - outputs[:, 0])


def make_step(replicas):
    return ctl.Step(
        build_model, lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9), loss_fn,
        global_batch_size=BATCH, strategy=testing.make_strategy(replicas), precision="float64",
    )  # fmt: skip


def distribute(step, buffer):
    dataset = tf.data.Dataset.from_tensor_slices(buffer.batch()).batch(BATCH)
    return next(iter(step.strategy.experimental_distribute_dataset(dataset)))


def run(step, buffer, steps):
    for _ in range(steps):
        step(distribute(step, buffer))


def plain(steps):
    model, optimizer, buffer = build_model(), tf_keras.optimizers.SGD(0.1, momentum=0.9), Buffer()
    for _ in range(steps):
        batch = buffer.batch()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_fn(batch, model(batch["x"])))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.variables), model.variables, strict=True)
        )
    return model.get_weights()[0]


@pytest.mark.parametrize(("replicas", "others"), [(1, 2), (2, 4), (4, 1)])
def test_a_step_resumes_with_the_buffer_of_its_checkpoint(tmp_path, replicas, others):
    step, buffer, counter = make_step(replicas), Buffer(), tf.Variable(0)
    run(step, buffer, 3)
    counter.assign(5)
    extra = {"buffer": buffer, "counter": counter}
    ctl.Checkpointer(tmp_path, step, extra=extra).save()
    run(step, buffer, 2)  # what is lost by the kill

    resumed, buffer, counter = make_step(others), Buffer(), tf.Variable(0)
    resumed.build(distribute(resumed, Buffer()))
    extra = {"buffer": buffer, "counter": counter}
    assert ctl.Checkpointer(tmp_path, resumed, extra=extra).all_restore_latest()
    run(resumed, buffer, 3)
    assert counter == 5
    np.testing.assert_allclose(resumed.model.get_weights()[0], plain(6), atol=1e-12)


def test_a_checkpoint_without_the_buffer_or_with_another_name_does_not_match(tmp_path):
    step, buffer = make_step(1), Buffer()
    run(step, buffer, 1)
    ctl.Checkpointer(tmp_path / "without", step).save()
    path = ctl.Checkpointer(tmp_path / "with", step, extra={"buffer": buffer}).save()
    for folder, extra, message in (
        ("without", {"buffer": buffer}, "only the trainer has buffer"),
        ("with", {}, "only the checkpoint has buffer"),
        ("with", {"rows": buffer}, "only the trainer has rows; only the checkpoint has buffer"),
    ):
        with pytest.raises(ctl.UsageError, match=message):
            ctl.Checkpointer(tmp_path / folder, step, extra=extra).all_restore_latest()
        checkpoints = ctl.Checkpointer(tmp_path / folder, step, extra=extra, partial=True)
        assert checkpoints.all_restore_latest()
    # Restored by name: the step has become one of several.
    other = Buffer()
    checkpoints = ctl.Checkpointer(tmp_path / "with", [step], extra={"buffer": other})
    checkpoints.restore(path)
    assert len(other.rows) == len(buffer.rows) == 4


def test_the_copy_that_a_thread_writes_is_that_of_its_step(tmp_path, monkeypatch, caplog):
    step, buffer, wait = make_step(1), Buffer(), threading.Event()
    run(step, buffer, 1)
    serialize = StateDict.serialize
    monkeypatch.setattr(StateDict, "serialize", lambda self: (wait.wait(9), serialize(self))[1])
    checkpoints = ctl.Checkpointer(tmp_path, step, extra={"buffer": buffer}, background=True)
    saver = threading.Timer(0.3, wait.set)
    saver.start()
    checkpoints.save()
    buffer.batch()
    checkpoints.wait()
    monkeypatch.undo()
    buffer.batch()
    ctl.Checkpointer(tmp_path, step, extra={"buffer": buffer}).all_restore_latest()
    assert len(buffer.rows) == 4
    assert not caplog.records  # TensorFlow warns of objects that it does not copy


def test_an_attribute_of_a_trainer_with_a_state_is_saved(tmp_path):
    trainers = [reference_model.make_trainer(testing.make_strategy(1), BATCH) for _ in range(2)]
    for trainer in trainers:
        trainer.buffer = Buffer()
    trainers[0].buffer.batch()
    ctl.Checkpointer(tmp_path, trainers[0]).save()
    ctl.Checkpointer(tmp_path, trainers[1]).all_restore_latest()
    one, two = (trainer.buffer.batch() for trainer in trainers)
    np.testing.assert_array_equal(one["x"], two["x"])


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"x": object()}, "an object"),
        ({1: 2}, "a dict"),
        ([np.array([None])], "a"),
        (collections.namedtuple("Point", "x")(1), "a Point"),
        (np.zeros(2, tf.bfloat16.as_numpy_dtype), "a"),
    ],
)
def test_a_state_that_a_checkpoint_cannot_hold_is_one_line(tmp_path, state, found):
    buffer = Buffer()
    buffer.state_dict = lambda: state
    step = make_step(1)
    step.build(distribute(step, Buffer()))
    with pytest.raises(ctl.UsageError, match=r"buffer\.state_dict\(\) contains " + found):
        ctl.Checkpointer(tmp_path, step, extra={"buffer": buffer}).save()
    with pytest.raises(ctl.UsageError, match=r"extra\['buffer'\] of ctl.Checkpointer is"):
        ctl.Checkpointer(tmp_path, step, extra={"buffer": 1})
