"""Each variable of a trainer is found in its checkpoint, and by name where places differ."""

import pytest
import tensorflow as tf
import tf_keras

from ctl import testing
from ctl.loop.checkpoints import matching
from ctl.loop.checkpoints.checkpointer import Checkpointer
from tests import reference_model


@pytest.mark.parametrize(
    ("replicas", "precision"), [(1, "float64"), (2, "float64"), (1, "float16")]
)
def test_a_trainer_holds_what_its_checkpoint_holds(tmp_path, replicas, precision):
    trainer = reference_model.make_trainer(testing.make_strategy(replicas), 8, precision=precision)
    path = Checkpointer(tmp_path, trainer).save()
    root = tf.train.Checkpoint(**trainer.checkpoint_items())
    content, mine = matching.CheckpointContent(path), matching.variables_of(root)
    told = [sorted((v.name, v.shape, v.dtype.name, v.slot) for v in s) for s in
            (mine, content.variables)]  # fmt: skip
    assert told[0] == told[1]
    assert matching.misplaced(mine, content, content.places(root)) == (False, [])
    assert matching.compare(mine, content.variables).complete
    names = [v.name.removesuffix(":0") for v in trainer.model.variables]
    assert sorted(v.name for v in content.under("model")) == sorted(names)


def variable(name, shape, dtype=tf.float32, node=0, slot=False):
    return matching.Variable(name, shape, dtype, name, node, slot)


def test_what_does_not_match_is_told_by_name():
    mine = [
        variable("m/a", (2,), slot=True),
        variable("a", (2,)),
        variable("b", (3,)),
        variable("c", (), tf.float64),
        variable("new", ()),
    ]
    theirs = [
        variable("a", (4,), node=1),
        variable("b", (3,), node=2),
        variable("c", (), node=3),
        variable("m/a", (4,), node=4, slot=True),
        *(variable(f"old{n}", (), node=10 + n) for n in range(11)),
    ]
    found = matching.compare(mine, theirs)
    assert [(a.name, b.node) for a, b in found.pairs] == [("b", 2)]
    assert found.told() == (
        "a is [2], there [4], c is float64 [], there float32 [], m/a is [2], there [4]; only the "
        "trainer has new; only the checkpoint has "
        "old0, old1, old2, old3, old4, old5, old6, old7, and 3 more"
    )
    assert found.left() == ["a", "c", "new", "m/a"]


def test_of_one_name_the_one_at_the_same_place_is_taken(tmp_path):
    """Two models may each have a layer of one name."""

    def root(**values):
        checkpoint = tf.train.Checkpoint(**{name: tf.Module() for name in values})
        for name, value in values.items():
            getattr(checkpoint, name).weight = tf.Variable(value, name="weight")
        return checkpoint

    path = root(x=1.0, y=2.0).write(str(tmp_path / "ckpt"))
    other, content = root(y=0.0, z=0.0), matching.CheckpointContent(path)
    found = matching.compare(matching.variables_of(other), content.variables, content.places(other))
    assert [(a.source is other.y.weight, content.value(b)) for a, b in found.pairs] == [(True, 2.0)]
    assert (len(found.missing), len(found.unused)) == (1, 1)


def test_slots_of_another_optimizer_are_no_ones_own(tmp_path):
    """RMSprop's velocities have the places and shapes of SGD's momenta."""
    sgd = reference_model.make_trainer(
        testing.make_strategy(1), 8, optimizer=lambda: tf_keras.optimizers.SGD(1.0, momentum=0.9)
    )
    path = Checkpointer(tmp_path, sgd).save()
    tf_keras.backend.reset_uids()  # names as in a process of its own
    other = reference_model.make_trainer(
        testing.make_strategy(1), 8, optimizer=lambda: tf_keras.optimizers.RMSprop(1.0)
    )
    root, content = (
        tf.train.Checkpoint(**other.checkpoint_items()),
        matching.CheckpointContent(path),
    )
    at_odds, beside = matching.misplaced(matching.variables_of(root), content, content.places(root))
    assert at_odds and beside == []
