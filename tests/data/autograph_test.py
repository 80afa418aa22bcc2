"""AutoGraph converts the functions of users, and none of ctl's."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api
import tf_keras

import ctl
from ctl import testing
from ctl.loop import inference


@pytest.fixture(autouse=True)
def converted(monkeypatch):
    """The functions that AutoGraph converts, as module:name; in the end, none is ctl's."""
    names, convert = set(), api._convert_actual

    def record(function, context):
        names.add(f"{function.__module__}:{function.__name__}")
        return convert(function, context)

    monkeypatch.setattr(api, "_convert_actual", record)
    yield names
    assert not {name for name in names if name.startswith(("ctl.", "ctl:"))}


def twice_if_positive(x):
    """A Python `if` on a tensor, which raises an error unless AutoGraph converts it."""
    if tf.reduce_sum(x) > 0:
        x = 2 * x
    return x


class Doubling(tf_keras.layers.Layer):
    def call(self, inputs):
        return twice_if_positive(inputs)


class Branches(ctl.StandardTrainer):
    """Every hook that ctl traces doubles what it returns; all values are positive."""

    def build_model(self):
        return tf_keras.Sequential(
            [Doubling(), tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
        )

    def build_dataset(self, split, input_context):
        source = ctl.data.arrays({"x": np.arange(1.0, 9.0).reshape(8, 1), "weight": np.ones(8)})
        if split == "eval":
            return source
        return ctl.data.augmented(source, lambda row, _: {**row, "x": twice_if_positive(row["x"])})

    def build_metrics(self):
        return {"mean": tf_keras.metrics.Mean(dtype="float64")}

    def preprocess(self, batch):
        return {**batch, "x": twice_if_positive(batch["x"])}

    def forward(self, batch, training):
        return twice_if_positive(self.model(batch["x"], training=training))

    def per_example_loss(self, batch, outputs):
        return twice_if_positive(outputs[:, 0])

    def sample_weight(self, batch):
        return twice_if_positive(batch["weight"])

    def regularization_losses(self):
        return [twice_if_positive(tf.reduce_sum(self.model.trainable_variables[0]))]

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["mean"].update_state(twice_if_positive(outputs[:, 0]), weights)

    def collect_outputs(self, batch, outputs):
        return {"outputs": twice_if_positive(outputs)}

    def compute_metrics(self, collected):
        return {"largest": collected["outputs"].max()}


class OwnSteps(Branches):
    def replica_step(self, batch):
        loss = self.minimize(batch, lambda rows: twice_if_positive(rows["x"][:, 0] * self.weight()))
        return twice_if_positive(loss)

    def weight(self):
        return self.model.trainable_variables[0][0, 0]

    def train_step(self, iterator):
        super().train_step(iterator)
        if self.global_step > 1:
            self.global_step.assign_add(10)


def make(cls, replicas=2):
    return cls(
        strategy=testing.make_strategy(replicas),
        global_batch_size=8,
        optimizer=lambda: tf_keras.optimizers.SGD(1.0),
        # The sign of a sum is that of the rows of one replica.
        options=ctl.TrainerOptions(precision="float64", allow_row_coupling=True),
    )


@pytest.mark.slow
def test_hooks_of_a_trainer_are_converted_and_no_function_of_ctl(converted):
    trainer = make(Branches)
    outputs = trainer.train(tf.constant(1))
    # Four doublings of the mean 4.5 (augmentation, preprocess, layer, forward), that of the loss, and
    # the penalty.
    assert float(outputs["mean"]) == 2 * 16 * 4.5
    assert float(outputs["loss"]) == 2 * 16 * 4.5 + 2
    before = float(trainer.model.get_weights()[0][0, 0])
    assert before == 1 - (2 * 16 * 4.5 + 2)
    trainer.model.set_weights([np.ones([1, 1])])
    results = ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))
    assert float(results["loss"]) == 2 * 8 * 4.5  # without the augmentation
    assert results["largest"] == 2 * 8 * 8
    exported = inference.make_function(trainer, trainer.serve)
    assert exported({"x": tf.constant([[3.0]], tf.float64)}).numpy().tolist() == [[8 * 3.0]]
    assert converted > {f"{__name__}:{name}" for name in ("preprocess", "<lambda>")}


def test_own_steps_are_converted_and_no_function_of_ctl(converted):
    trainer = make(OwnSteps, 1)
    assert "loss" in trainer.train(tf.constant(2))
    assert trainer.global_step.numpy() == 12
    assert f"{__name__}:replica_step" in converted


def test_functions_that_parse_records_are_converted(tmp_path):
    path = str(tmp_path / "numbers.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for number in (1.0, 2.0):
            writer.write(tf.io.serialize_tensor(tf.constant(number)).numpy())

    def parse(record):
        return {"x": twice_if_positive(tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), []))}

    source = ctl.data.records(path, parse)
    mixture = ctl.data.mixture({"a": (source, 1), "b": (source, 1)})
    batch = mixture.gather(tf.range(4, dtype=tf.int64))
    np.testing.assert_array_equal(sorted(batch["x"].numpy()), [2, 2, 4, 4])


def test_user_can_exclude_a_hook_from_conversion():
    class Excluded(Branches):
        @tf.autograph.experimental.do_not_convert
        def per_example_loss(self, batch, outputs):
            return twice_if_positive(outputs[:, 0])

    with pytest.raises(Exception, match="AutoGraph"):
        make(Excluded, 1).train(tf.constant(1))


TYPED = """
class Typed(ctl.StandardTrainer):
    def build_model(self):
        return tf_keras.Sequential([tf_keras.layers.Dense(1)])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": np.ones([8, 1])})

    def forward(self, batch, training):
        return self.model(batch["x"], training=training)

    def per_example_loss(self, batch, outputs):
        return tf.square(outputs[:, 0])

    def replica_step(self, batch):
        return self.minimize(
            batch, lambda rows: self.per_example_loss(rows, self.forward(rows, training=True))
        )
"""


def test_methods_that_are_typed_at_a_prompt_are_called_as_they_are_without_a_warning(monkeypatch):
    warnings = []
    monkeypatch.setattr(api.logging, "warning", lambda *arguments: warnings.append(arguments))
    typed = {**globals(), "__name__": "__main__"}
    exec(compile(TYPED, "<stdin>", "exec"), typed)
    trainer = make(typed["Typed"], 1)
    assert "loss" in trainer.train(tf.constant(1))
    assert "loss" in ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))
    assert warnings == []
