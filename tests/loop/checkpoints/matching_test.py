"""Each variable of a trainer has a match in its checkpoint: by place, else by name."""

import pytest
import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.loop.checkpoints import matching
from ctl.loop.checkpoints.checkpointer import Checkpointer
from tests.loop.shared import make_reference
from tests.support import reference_model


@pytest.mark.parametrize(
    ("replicas", "precision"), [(1, "float64"), (2, "float64"), (1, "float16")]
)
def test_trainer_and_its_checkpoint_have_the_same_variables(tmp_path, replicas, precision):
    trainer = make_reference(replicas, precision=precision)
    path = Checkpointer(tmp_path, trainer).save()
    root = tf.train.Checkpoint(**trainer.checkpoint_items())
    content, variables = matching.CheckpointContent(path), matching.list_variables(root)
    expected, saved = (
        sorted((v.name, v.shape, v.dtype.name, v.slot) for v in side)
        for side in (variables, content.variables)
    )
    assert saved == expected
    assert matching.find_misplaced(variables, content, content.places(root)) == (False, [])
    assert matching.compare(variables, content.variables, {}).complete
    names = [v.name.removesuffix(":0") for v in trainer.model.variables]
    assert sorted(v.name for v in content.variables_of("model")) == sorted(names)


def variable(name, shape, dtype=tf.float32, node=0, slot=False):
    return matching.Variable(name, shape, dtype, name, node, slot)


def test_mismatches_are_described_by_name():
    variables = [variable("m/a", (2,), slot=True), variable("a", (2,)), variable("b", (3,))]
    variables += [variable("c", (), tf.float64), variable("new", ())]
    saved = [variable("a", (4,), node=1), variable("b", (3,), node=2), variable("c", (), node=3)]
    saved += [variable("m/a", (4,), node=4, slot=True)]
    saved += [variable(f"old{n}", (), node=10 + n) for n in range(11)]
    comparison = matching.compare(variables, saved, {})
    assert [(a.name, b.node) for a, b in comparison.pairs] == [("b", 2)]
    assert comparison.describe() == (
        "a is [2], but [4] in the checkpoint, c is float64 [], but float32 [] in the checkpoint, m/a is "
        "[2], but [4] in the checkpoint; only the trainer has new; only the checkpoint has "
        "old0, old1, old2, old3, old4, old5, old6, old7, and 3 more"
    )
    assert comparison.left() == ["a", "c", "new", "m/a"]


def test_variables_of_the_same_name_are_matched_by_place(tmp_path):
    """Two models may each have a layer of the same name."""

    def root(**values):
        checkpoint = tf.train.Checkpoint(**{name: tf.Module() for name in values})
        for name, value in values.items():
            getattr(checkpoint, name).weight = tf.Variable(value, name="weight")
        return checkpoint

    path = root(x=1.0, y=2.0).write(str(tmp_path / "ckpt"))
    other, content = root(y=0.0, z=0.0), matching.CheckpointContent(path)
    comparison = matching.compare(
        matching.list_variables(other), content.variables, content.places(other)
    )
    ((one, two),) = comparison.pairs
    assert one.source is other.y.weight and content.value(two) == 2.0
    assert (len(comparison.missing), len(comparison.unused)) == (1, 1)


def test_slots_of_another_optimizer_do_not_match(tmp_path):
    """RMSprop's velocities have the places and shapes of SGD's momenta."""
    sgd = make_reference(optimizer=lambda: tf_keras.optimizers.SGD(1.0, momentum=0.9))
    path = Checkpointer(tmp_path, sgd).save()
    tf_keras.backend.reset_uids()  # names as in a process of its own
    other = make_reference(optimizer=lambda: tf_keras.optimizers.RMSprop(1.0))
    root = tf.train.Checkpoint(**other.checkpoint_items())
    content, variables = matching.CheckpointContent(path), matching.list_variables(root)
    mismatch, extra = matching.find_misplaced(variables, content, content.places(root))
    assert mismatch and extra == []


def make_two_layers(frozen, *, first="a", second="b"):
    """A trainer of two layers of the same shapes, of which one is frozen."""

    class TwoLayers(reference_model.ReferenceTrainer):
        def build_model(self):
            size = reference_model.FEATURES
            layers = [tf_keras.layers.Dense(size, name=name) for name in (first, second)]
            model = tf_keras.Sequential(layers)
            model.build([None, size])
            layers[frozen].trainable = False
            return model

        def forward(self, batch, training):
            return self.model(batch["x"], training=training)

    return make_reference(cls=TwoLayers, optimizer=lambda: tf_keras.optimizers.Adam(1.0))


def test_slots_of_another_layer_do_not_match(tmp_path):
    """The place of a slot is a number: that of one layer may be that of another, of the same shape."""
    path = Checkpointer(tmp_path, make_two_layers(frozen=1)).save()
    message = r"only the trainer has m/b/kernel.*checkpoint has m/a/kernel"
    with pytest.raises(UsageError, match=message):
        Checkpointer(tmp_path, make_two_layers(frozen=0)).restore(path)


def test_slots_of_a_layer_with_another_number_match(tmp_path):
    """Keras numbers the layers of a process, so that another one may have other names."""
    path = Checkpointer(tmp_path, make_two_layers(frozen=1)).save()
    Checkpointer(tmp_path, make_two_layers(frozen=1, first="a_1", second="a")).restore(path)
