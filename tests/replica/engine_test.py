"""What a trainer reports of a loop, and what it keeps apart from the attributes of a subclass."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.replica import loss_spikes
from ctl.replica.engine import engine_of
from tests import reference_model
from tests.faulty_trainers import BAD, BATCH, Jumping, Overflowing, Poisoned


class ReportsOutputs:
    """Mixin: a metric that is the mean of the first output, so that each step changes it."""

    def build_metrics(self):
        return {"output": tf_keras.metrics.Mean()}

    def update_metrics(self, metrics, batch, outputs, weights):
        metrics["output"].update_state(outputs[:, 0], sample_weight=weights)


def reporting(cls, replicas, *, attributes=(), **options):
    planted = type("Planted", (ReportsOutputs, cls), dict(attributes))
    return reference_model.make_trainer(
        testing.make_strategy(replicas), BATCH, cls=planted,
        optimizer=lambda: tf_keras.optimizers.Adam(1e-2), **options,
    )  # fmt: skip


def check_report(trainer, path, *, first, skipped, steps=4):
    """Checks that a loop reports the mean over its applied steps, as loops of one step report them."""
    trainer.train(tf.constant(first))
    checkpoint = tf.train.Checkpoint(**trainer.checkpoint_items())
    saved = checkpoint.write(str(path / "ckpt"))
    reports = [trainer.train(tf.constant(1)) for _ in range(steps)]
    applied = [r for i, r in enumerate(reports, start=first) if i != skipped]
    assert len(applied) == steps - 1
    skipped_steps = trainer.skipped_steps.numpy()
    checkpoint.read(saved).assert_consumed()
    outputs = trainer.train(tf.constant(steps))
    assert trainer.skipped_steps.numpy() == skipped_steps >= 1
    for name in ("loss", "output"):
        expected = np.mean([float(report[name]) for report in applied])
        assert float(outputs[name]) == pytest.approx(expected, rel=1e-5), name


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("replicas", "replica", "options"),
    [
        (1, 0, {}),
        pytest.param(1, 0, {"xla": "step"}, marks=SLOW),
        (1, 0, {"xla": "loop"}),
        pytest.param(2, 1, {}, marks=SLOW),
        (2, 1, {"gradient_accumulation_steps": 2}),
        pytest.param(4, 3, {}, marks=SLOW),
        (4, 3, {"xla": "gradients"}),
    ],
)
def test_overflow_of_a_gradient_with_a_finite_loss_is_not_reported(
    replicas, replica, options, tmp_path
):
    planted = {"replica": replica, "at": BAD, "what": "gradient"}
    trainer = reporting(Overflowing, replicas, attributes=planted, precision="float16", **options)
    check_report(trainer, tmp_path, first=1, skipped=BAD)


def test_infinite_loss_of_a_skipped_step_is_not_reported(tmp_path):
    planted = {"at": BAD, "what": "loss"}
    trainer = reporting(Overflowing, 2, attributes=planted, precision="float16")
    check_report(trainer, tmp_path, first=1, skipped=BAD)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=SLOW), 4])
def test_spike_that_is_skipped_is_not_reported(replicas, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_spikes, "WINDOW", 11)
    at = loss_spikes.WINDOW + 2
    trainer = reporting(
        Jumping, replicas, attributes={"jumps_at": at}, on_non_finite="skip", loss_spike=5.0
    )
    check_report(trainer, tmp_path, first=at - 1, skipped=at)


@pytest.mark.parametrize(("replicas", "row"), [(1, 0), pytest.param(2, 5, marks=SLOW), (4, 7)])
def test_nan_in_the_outputs_of_a_skipped_step_is_not_in_the_metrics(replicas, row, tmp_path):
    trainer = reporting(Poisoned, replicas, attributes={"row": row}, on_non_finite="skip")
    check_report(trainer, tmp_path, first=1, skipped=BAD)


def test_skipped_step_of_a_trainer_with_its_own_replica_step_is_not_reported(tmp_path):
    class Own(Poisoned):
        def replica_step(self, batch):
            outputs = []

            def loss_fn(rows):
                outputs.append(self.forward(rows, training=True))
                return self.per_example_loss(rows, outputs[-1])

            loss = self.minimize(batch, loss_fn)
            self.update_metrics(self.metrics, batch, outputs[-1], ctl.replica.present())
            return loss

    trainer = reporting(Own, 2, attributes={"row": 1}, on_non_finite="skip")
    check_report(trainer, tmp_path, first=1, skipped=BAD)


def test_statistics_of_a_second_model_are_restored_if_the_step_is_skipped():
    class TwoModels(Poisoned):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            with self.build_scope():
                self.second = tf_keras.Sequential([tf_keras.layers.BatchNormalization()])
                self.second.build([None, 3])

        def replica_step(self, batch):
            self.second(self.forward(batch, training=True), training=True)
            return super().replica_step(batch)

    trainer = reporting(TwoModels, 2, attributes={"row": 1}, on_non_finite="skip")
    trainer.train(tf.constant(BAD))
    variables = trainer.second.non_trainable_variables
    before = [testing.copies(trainer.strategy, variable) for variable in variables]
    trainer.train(tf.constant(1))
    after = [testing.copies(trainer.strategy, variable) for variable in variables]
    np.testing.assert_array_equal(np.stack(after), np.stack(before))
    trainer.train(tf.constant(1))
    moved = [testing.copies(trainer.strategy, variable) for variable in variables]
    assert not np.array_equal(np.stack(moved), np.stack(before))


# Names that ctl once used on the trainer, the present private one without its prefix, and names that a
# subclass is likely to use.
ATTRIBUTES = [
    *("update", "feed", "layout", "rows", "spikes", "building", "engine", "plan", "step", "pipeline"),
    *("_update", "_feed", "_loss", "_plan", "_step", "_engine", "_compiled", "_position", "_keyed"),
    *("_own_dataset", "_outputs", "_internals", "_metrics", "_data", "_iterator"),
]  # fmt: skip


class Assigning(reference_model.ReferenceTrainer):
    """Assigns every name, before and after the constructor of the base class."""

    as_variable = False

    def __init__(self, **arguments):
        for name in ATTRIBUTES:
            setattr(self, name, 3)
        super().__init__(**arguments)
        for name in ATTRIBUTES:
            variable = tf.Variable(3.0, name=name.strip("_")) if self.as_variable else None
            setattr(self, name, 3 if variable is None else variable)


def make_float16(cls):
    options = {"precision": "float16", "xla": "off", "norms": True}
    return reference_model.make_trainer(testing.make_strategy(2), 8, cls=cls, **options)


@pytest.fixture(scope="module")
def weights_after_four_steps():
    trainer = make_float16(reference_model.ReferenceTrainer)
    for _ in range(2):
        trainer.train(tf.constant(2))
    return trainer.model.get_weights()


@pytest.mark.parametrize("as_variable", [False, True])
def test_attributes_of_a_subclass_do_not_collide_with_those_of_ctl(
    as_variable, weights_after_four_steps, tmp_path
):
    cls = type("Assigning", (Assigning,), {"as_variable": as_variable})
    trainer = make_float16(cls)
    trainer.train(tf.constant(2))
    path = tf.train.Checkpoint(**trainer.checkpoint_items()).write(str(tmp_path / "ckpt"))
    trainer.train(tf.constant(2))
    restored = make_float16(cls)
    tf.train.Checkpoint(**restored.checkpoint_items()).read(path).assert_consumed()
    restored.train(tf.constant(2))
    evaluation = ctl.StandardEvaluator(restored).evaluate(tf.constant(-1))
    assert int(evaluation["examples"]) == reference_model.EXAMPLES
    for end in (trainer.model.get_weights(), restored.model.get_weights()):
        for weights, expected in zip(end, weights_after_four_steps, strict=True):
            np.testing.assert_array_equal(weights, expected)


@pytest.mark.parametrize("name", ["_train_options", "_train_loop_fn"])
def test_attributes_of_orbit_that_a_subclass_overwrites_are_reported(name):
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8)
    setattr(trainer, name, 3)
    with pytest.raises(ctl.UsageError, match=f"self.{name} belongs to orbit.StandardTrainer"):
        trainer.train(tf.constant(1))


@pytest.mark.parametrize("name", ["_train_iter", "_train_dataset"])
def test_attributes_of_orbit_that_ctl_sets_itself_may_be_overwritten(name):
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8)
    setattr(trainer, name, 3)
    trainer.train(tf.constant(1))
    assert trainer.global_step.numpy() == 1


def test_checkpoint_names_are_those_of_the_first_version():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8)
    items = trainer.checkpoint_items()
    assert {*items} == {"global_step", "model", "optimizer", "skipped_steps", "spikes"}
    names = {v.name for v in items["spikes"].variables}
    assert names == {"last_losses:0", "losses_seen:0"}


@pytest.mark.parametrize(
    ("replicas", "row", "options"),
    [
        (1, 0, {}),
        (2, 5, {}),
        pytest.param(1, 0, {"xla": "loop"}, marks=SLOW),
        pytest.param(2, 5, {"gradient_accumulation_steps": 2, "norms": True}, marks=SLOW),
    ],
)
def test_loop_without_an_applied_step_has_no_loss_and_no_metrics(replicas, row, options):
    trainer = reporting(
        Poisoned, replicas, attributes={"row": row}, on_non_finite="skip", **options
    )
    assert np.isfinite(trainer.train(tf.constant(BAD))["loss"])
    outputs = trainer.train(tf.constant(1))
    assert int(outputs.pop("skipped_steps")) == 1
    assert {"loss", "output"} <= outputs.keys()
    assert all(np.isnan(value) for value in outputs.values())
    assert np.isfinite(trainer.train(tf.constant(1))["loss"])


def test_loop_that_overflows_in_every_step_has_no_loss():
    trainer = reporting(reference_model.ReferenceTrainer, 1, precision="float16", loss_scale=1e30)
    outputs = trainer.train(tf.constant(3))
    assert np.isnan(outputs["loss"]) and np.isnan(outputs["output"])
    assert outputs["loss_scale"] == 1e30 and outputs["skipped_steps"] == 3


def test_own_train_step_that_reports_no_loss_has_none():
    class Own(reference_model.ReferenceTrainer):
        def train_step(self, iterator):
            next(iterator)
            self.global_step.assign_add(1)

    trainer = reference_model.make_trainer(testing.make_strategy(1), 7, cls=Own)
    assert "loss" not in trainer.train(tf.constant(2))


def test_parameters_of_all_models_are_counted_once():
    class Two(reference_model.ReferenceTrainer):
        def build_model(self):
            self.first = super().build_model()  # also part of `model`
            self.others = [tf_keras.Sequential([tf_keras.layers.Dense(2, input_shape=(3,))])]
            return tf_keras.Sequential([tf_keras.layers.Dense(4, input_shape=(5,))])

        def forward(self, batch, training):
            return self.first({"x": batch["x"], "token": batch["token"]})

    trainer = reference_model.make_trainer(testing.make_strategy(2), 8, cls=Two)
    own = trainer.first.count_params()
    assert engine_of(trainer).parameter_count() == own + (3 + 1) * 2 + (5 + 1) * 4
