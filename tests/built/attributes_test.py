"""What a trainer keeps apart from the attributes of a subclass, and reads of them."""

import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.inner_loop import loop_of
from tests.support import reference_model
from tests.support.checks import close

# Names that ctl once used on the trainer, the present private one without its prefix, and names that a
# subclass is likely to use.
ATTRIBUTES = [
    "update", "feed", "layout", "rows", "spikes", "building", "engine", "plan", "step", "pipeline",
    "_update", "_feed", "_loss", "_plan", "_step", "_engine", "_compiled", "_position",
    "_keyed", "_own_dataset", "_outputs", "_internals", "_metrics", "_data", "_iterator",
]  # fmt: skip


class Assigning(reference_model.ReferenceTrainer):
    """Assigns every name, before and after the constructor of the base class."""

    def __init__(self, **arguments):
        for name in ATTRIBUTES:
            setattr(self, name, 3)
        super().__init__(**arguments)
        for name in ATTRIBUTES:
            setattr(self, name, tf.Variable(3.0, name=name.strip("_")))


@pytest.mark.slow
def test_attributes_of_a_subclass_do_not_collide_with_those_of_ctl(tmp_path):
    options = {"precision": "float16", "xla": "off", "norms": "global"}
    plain, trainer = (
        reference_model.make_trainer(testing.make_strategy(1), 8, cls=cls, **options)
        for cls in (reference_model.ReferenceTrainer, Assigning)
    )
    for each in (plain, trainer):
        each.train(tf.constant(2))
    checkpoint = tf.train.Checkpoint(**trainer.checkpoint_items())
    path = checkpoint.write(str(tmp_path / "ckpt"))
    trainer.train(tf.constant(2))
    checkpoint.read(path).assert_consumed()
    evaluation = ctl.StandardEvaluator(trainer).evaluate(tf.constant(-1))
    assert int(evaluation["examples"]) == reference_model.EXAMPLES
    close(plain.model.get_weights(), trainer.model.get_weights())


def test_checkpoint_names_are_those_of_the_first_version():
    trainer = reference_model.make_trainer(testing.make_strategy(1), 8)
    items = trainer.checkpoint_items()
    assert {*items} == {"global_step", "model", "optimizer", "skipped_steps", "spikes"}
    names = {v.name for v in items["spikes"].variables}
    assert names == {"last_losses:0", "losses_seen:0"}


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
    assert loop_of(trainer).step.attributes.parameter_count() == own + (3 + 1) * 2 + (5 + 1) * 4
