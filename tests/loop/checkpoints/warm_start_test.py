"""A run may begin with the weights of another, and with nothing else of it."""

import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.loop.checkpoints import warm_start
from ctl.loop.checkpoints.checkpointer import Checkpointer
from tests import reference_model


class Normed(reference_model.ReferenceTrainer):
    """The tiny model with moving statistics."""

    classes = reference_model.CLASSES

    def build_model(self):
        model = super().build_model()
        hidden = tf_keras.layers.BatchNormalization(name="norm")(model.output)
        return tf_keras.Model(model.input, tf_keras.layers.Dense(self.classes, name="head")(hidden))


class Wider(Normed):
    classes = 7


def made(replicas=1, cls=Normed, seed=0, precision="float64"):
    tf_keras.backend.reset_uids()  # names as in a process of its own
    adam = lambda: tf_keras.optimizers.Adam(1e-2)  # noqa: E731
    options = dict(seed=seed, precision=precision)
    return reference_model.make_trainer(
        testing.make_strategy(replicas), 8, cls=cls, optimizer=adam, **options
    )


def init(checkpoint, *variables):
    return types.SimpleNamespace(checkpoint=str(checkpoint), variables=list(variables))


def values(trainer):
    return {v.name.removesuffix(":0"): v.numpy() for v in trainer.model.variables}


@pytest.fixture
def other_run(tmp_path):
    """A workdir with the checkpoints of steps 2 and 3, and the weights at each."""
    trainer = made()
    checkpoints, found = Checkpointer(tmp_path / "checkpoints", trainer), {}
    for steps in (2, 1):
        trainer.train(tf.constant(steps))
        checkpoints.save()
        found[int(trainer.global_step.numpy())] = values(trainer)
    return tmp_path, found


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("where", "step"), [(".", 3), ("checkpoints", 3), ("checkpoints/ckpt-2", 2)]
)
def test_every_copy_has_the_weights_and_the_run_is_at_its_beginning(
    other_run, replicas, where, step
):
    folder, weights = other_run
    trainer = made(replicas, seed=1)
    fresh = [v.numpy() for v in trainer.optimizer.variables]
    taken = warm_start.begin(trainer, init(folder / where))
    assert taken.path == str(folder / "checkpoints" / f"ckpt-{step}")
    assert (set(taken.names), taken.of, taken.cast) == (set(weights[step]), 11, "")
    for variable in trainer.model.variables:
        want = weights[step][variable.name.removesuffix(":0")]
        for copy in testing.copies(testing.make_strategy(replicas), variable):
            assert np.array_equal(copy, want), variable.name
    assert trainer.global_step.numpy() == 0
    for variable, value in zip(trainer.optimizer.variables, fresh, strict=True):
        assert np.array_equal(variable, value)


def test_only_the_variables_that_are_named_are_taken(other_run):
    folder, weights = other_run
    trainer = made(cls=Wider, seed=1)
    before = values(trainer)
    taken = warm_start.begin(trainer, init(folder, "dense*/*", "norm/moving_*"))
    want = {"dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"}
    assert set(taken.names) == want | {"norm/moving_mean", "norm/moving_variance"}
    for name, value in values(trainer).items():
        assert np.array_equal(value, weights[3][name] if name in taken.names else before[name])


def test_another_precision_is_cast_and_told(other_run):
    folder, weights = other_run
    trainer = made(precision="float32")
    assert warm_start.begin(trainer, init(folder)).cast == "float64"
    for name, value in values(trainer).items():
        assert np.array_equal(value, weights[3][name].astype(np.float32))


@pytest.mark.parametrize("function", [warm_start.check, warm_start.begin])
@pytest.mark.parametrize(
    ("where", "patterns", "line"),
    [
        (".", ["dense/*", "conv*"], r"init.variables has 'conv\*', which no variable of the model "
         r"matches: there are embedding/embeddings, .*, and 3 more"),
        (".", [], r"does not fit the model \(head/kernel is \[3, 7\], there \[3, 3\], head/bias is "
         r"\[7\], there \[3\]\): name what to take by init.variables"),
        ("checkpoints/ckpt-9", [], "ckpt-9, and there is none: name a run's workdir"),
        ("nowhere", [], "nowhere, and there is none: name a run's workdir"),
        ("empty", [], "empty, which has no whole checkpoint"),
        ("foreign", [], r"does not fit the model \(no embedding/embeddings, dense/kernel, .*, and 3 m"),
        ("broken", [], "broken, which cannot be read"),
        ("named", [], "named, which cannot be read"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_told_and_nothing_is(other_run, where, patterns, line, function):
    folder, _ = other_run
    (folder / "empty").mkdir()
    tf.train.Checkpoint(step=tf.Variable(1)).write(str(folder / "foreign"))
    (folder / "broken.index").write_bytes(bytes(100))
    (folder / "named.index").write_bytes(
        (folder / "checkpoints" / "ckpt-3.index").read_bytes()  # the data is missing
    )
    trainer = made(cls=Wider)
    before = values(trainer)
    with pytest.raises(ctl.UsageError, match=line):
        function(trainer, init(folder / where, *patterns))
    assert all(np.array_equal(value, before[name]) for name, value in values(trainer).items())


def test_what_the_checkpoint_lacks_is_told(tmp_path):
    trainer = made(cls=reference_model.ReferenceTrainer)
    path = Checkpointer(tmp_path, trainer).save()
    with pytest.raises(ctl.UsageError, match=r"\(no norm/gamma, .*head/kernel, head/bias\)"):
        warm_start.check(made(), init(path, "norm/*", "head/*"))


def test_the_folder_that_is_moved_aside_is_no_beginning(other_run):
    folder, _ = other_run
    with pytest.raises(ctl.UsageError, match="which --fresh moves aside"):
        warm_start.check(made(), init(folder / "checkpoints"), moved=folder)


def test_a_newer_checkpoint_that_was_not_written_to_the_end_is_passed_over(other_run):
    folder, _ = other_run
    (folder / "checkpoints" / "ckpt-3.whole").unlink()
    assert warm_start.begin(made(), init(folder)).path.endswith("ckpt-2")


def test_all_processes_take_the_checkpoint_of_the_chief(other_run):
    folder, _ = other_run
    taken = warm_start.begin(made(), init(folder), agree=lambda step: step - 1)
    assert taken.path.endswith("ckpt-2")
