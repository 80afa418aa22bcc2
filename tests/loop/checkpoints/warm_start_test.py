"""A run may start from the weights of another run, and nothing else of it."""

import shutil
import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.loop.checkpoints import warm_start
from ctl.loop.checkpoints.checkpointer import Checkpointer
from tests.loop.shared import arrays, init, make_reference, same, same_copies, share
from tests.support import reference_model


class Normed(reference_model.ReferenceTrainer):
    """The reference model with moving statistics."""

    classes = reference_model.CLASSES

    def build_model(self):
        model = super().build_model()
        hidden = tf_keras.layers.BatchNormalization(name="norm")(model.output)
        return tf_keras.Model(model.input, tf_keras.layers.Dense(self.classes, name="head")(hidden))


class Wider(Normed):
    classes = 7


@share
def make_trainer(replicas=1, cls=Normed, seed=0, precision="float64", **options):
    tf_keras.backend.reset_uids()  # names as in a process of its own
    adam = lambda: tf_keras.optimizers.Adam(1e-2)  # noqa: E731
    options |= dict(seed=seed, precision=precision)
    return make_reference(replicas, cls=cls, optimizer=adam, **options)


def values(trainer):
    return {v.name.removesuffix(":0"): v.numpy() for v in trainer.model.variables}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A workdir with the checkpoints of steps 2 and 3, and the weights at each."""
    folder = tmp_path_factory.mktemp("trained")
    trainer = make_trainer()
    checkpoints, weights = Checkpointer(folder / "checkpoints", trainer), {}
    for steps in (2, 1):
        trainer.train(tf.constant(steps))
        checkpoints.save()
        weights[int(trainer.global_step.numpy())] = values(trainer)
    return folder, weights


@pytest.fixture
def other_run(trained, tmp_path):
    """A copy of it that a test may change."""
    folder, weights = trained
    return shutil.copytree(folder, tmp_path, dirs_exist_ok=True), weights


@pytest.mark.parametrize(
    ("replicas", "where", "step"),
    [(2, ".", 3), (1, "checkpoints", 3), (1, "checkpoints/ckpt-2", 2)],
)
def test_every_replica_has_the_weights_and_the_counters_are_zero(other_run, replicas, where, step):
    folder, weights = other_run
    trainer = make_trainer(replicas, seed=1)
    fresh = arrays(trainer.optimizer.variables)
    (loaded,) = warm_start.all_load(trainer, init(folder / where))
    assert loaded.path == str(folder / "checkpoints" / f"ckpt-{step}")
    assert (set(loaded.names), loaded.total, loaded.cast) == (set(weights[step]), 11, "")
    for variable in trainer.model.variables:
        want = weights[step][variable.name.removesuffix(":0")]
        assert same_copies(variable, want, replicas), variable.name
    assert trainer.global_step.numpy() == 0
    assert same(trainer.optimizer.variables, fresh)


def test_only_the_named_variables_are_loaded(other_run):
    folder, weights = other_run
    trainer = make_trainer(cls=Wider, seed=1)
    before = values(trainer)
    (loaded,) = warm_start.all_load(trainer, init(folder, "dense*/*", "norm/moving_*"))
    want = {"dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"}
    assert set(loaded.names) == want | {"norm/moving_mean", "norm/moving_variance"}
    for name, value in values(trainer).items():
        assert np.array_equal(value, weights[3][name] if name in loaded.names else before[name])


def test_values_of_another_precision_are_cast_and_reported(other_run):
    folder, weights = other_run
    trainer = make_trainer(precision="float32")
    assert warm_start.all_load(trainer, init(folder))[0].cast == "float64"
    for name, value in values(trainer).items():
        assert np.array_equal(value, weights[3][name].astype(np.float32))


@pytest.mark.parametrize(
    ("where", "patterns", "line"),
    [
        (".", ["dense/*", "conv*"], r"'conv\*', which no variable of the model matches: its"),
        (".", [], r"\(head/kernel is \[3, 7\], but \[3, 3\] .*name what to load by init.variables"),
        ("checkpoints/ckpt-9", [], "ckpt-9, which does not exist: name a run's workdir"),
        ("empty", [], "empty, which has no complete checkpoint"),
        ("foreign", [], r"does not match the model \(no embedding/embeddings, .*, and 3 more"),
        ("broken", [], "broken, which cannot be read"),
    ],
)
def test_weights_that_cannot_be_loaded_are_reported_and_none_are_loaded(
    other_run, where, patterns, line
):
    folder, _ = other_run
    (folder / "empty").mkdir()
    tf.train.Checkpoint(step=tf.Variable(1)).write(str(folder / "foreign"))
    (folder / "broken.index").write_bytes(bytes(100))
    trainer = make_trainer(cls=Wider)
    before = values(trainer)
    for function in (warm_start.check, warm_start.all_load):
        with pytest.raises(ctl.UsageError, match=line):
            function(trainer, init(folder / where, *patterns))
    np.testing.assert_equal(values(trainer), before)


def test_folder_that_fresh_moves_aside_is_rejected(other_run):
    folder, _ = other_run
    with pytest.raises(ctl.UsageError, match="which --fresh moves aside"):
        warm_start.check(make_trainer(), init(folder / "checkpoints"), moved=folder)


def test_incomplete_newer_checkpoint_is_skipped(other_run):
    folder, _ = other_run
    (folder / "checkpoints" / "ckpt-3.whole").unlink()
    assert warm_start.all_load(make_trainer(), init(folder))[0].path.endswith("ckpt-2")


def test_all_processes_load_the_checkpoint_of_the_chief(other_run):
    folder, _ = other_run
    chief = types.SimpleNamespace(broadcast_from_chief=lambda step: step - 1)
    (loaded,) = warm_start.all_load(make_trainer(), init(folder), chief)
    assert loaded.path.endswith("ckpt-2")


class Distilling(Normed):
    """Has a second model like that of the other run, whose layers are numbered on from the first's."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.teacher = Normed.build_model(self)
            dense = tf_keras.Sequential([tf_keras.layers.Dense(3)])
            self.others = [dense, Normed.build_model(self)]


def models(**sources):
    return init("", models=sources)


def test_other_models_get_the_weights_of_the_model_of_another_run(other_run):
    folder, weights = other_run
    trainer = make_trainer(2, cls=Distilling, seed=1)
    before = values(trainer)
    loaded = warm_start.all_load(
        trainer, models(teacher=str(folder), **{"others/1": str(folder / "checkpoints/ckpt-2")})
    )
    assert [(each.model, each.path[-1]) for each in loaded] == [("teacher", "3"), ("others/1", "2")]
    assert [each.total for each in loaded] == [11, 11]
    assert warm_start.record(loaded).keys() == {"models"}
    assert "dense_2/kernel" in loaded[0].names  # "dense/kernel" in the other run
    names = [v.name.removesuffix(":0") for v in trainer.model.variables]  # in the same order
    for model, expected in ((trainer.teacher, weights[3]), (trainer.others[1], weights[2])):
        for variable, name in zip(model.variables, names, strict=True):
            assert same_copies(variable, expected[name], 2), variable.name
    np.testing.assert_equal(values(trainer), before)


@share
def make_unsuitable():
    """A trainer with further models that differ from those of the other run."""
    trainer = make_trainer.__wrapped__(cls=Distilling)
    with trainer.build_scope():
        trainer.late = tf_keras.Sequential([tf_keras.layers.Dense(3)])
        output = trainer.teacher.layers[-2].output
        trainer.wide = tf_keras.Model(trainer.teacher.input, tf_keras.layers.Dense(7)(output))
        output = tf_keras.layers.Dense(3, name="extra")(trainer.teacher.output)
        trainer.deep = tf_keras.Model(trainer.teacher.input, output)
    return trainer


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("techer", "'techer', which is no model of the trainer: did you mean teacher"),
        ("late", "init.models has 'late', but self.late is not built: build it in the constructor"),
        ("wide", r"models.wide is .*/kernel is \[3, 7\], but \[3, 3\] .*build the same model"),
        ("deep", r"init.models.deep is .*\(no extra/kernel, extra/bias.*build the same model"),
    ],
)
def test_other_models_that_cannot_be_loaded_are_reported(trained, name, line):
    folder, _ = trained
    trainer = make_unsuitable()
    before = arrays(trainer.teacher.variables)
    for function in (warm_start.check, warm_start.all_load):
        with pytest.raises(ctl.UsageError, match=line) as error:
            function(trainer, models(**{"teacher": str(folder), name: str(folder)}))
        assert "\n" not in str(error.value)
    assert same(trainer.teacher.variables, before)


@pytest.mark.slow
def test_averages_of_another_run_are_loaded_into_every_model(tmp_path):
    other = make_trainer(ema_decay=0.9)
    other.train(tf.constant(3))
    path = Checkpointer(tmp_path, other).save()
    raw = arrays(other.model.variables)
    with other.averaged_weights():
        averages = arrays(other.model.variables)
    assert all((a != b).any() for a, b in zip(raw, averages, strict=True))
    trainer = make_trainer(2, cls=Distilling, seed=1, ema_decay=0.9)
    loaded = warm_start.all_load(trainer, init(path, models={"teacher": path}, averages=True))
    assert [(len(each.names), each.averages) for each in loaded] == [(11, True)] * 2
    assert warm_start.record(loaded)["averages"] is True
    for model in (trainer.model, trainer.teacher):
        for variable, average in zip(model.variables, averages, strict=True):
            assert same_copies(variable, average, 2), variable.name
    with trainer.averaged_weights():  # the average of this run starts from them
        assert same(trainer.model.variables, averages)


def test_averages_that_another_run_does_not_have_are_reported(other_run):
    folder, _ = other_run
    with pytest.raises(ctl.UsageError, match="which has no averages of the weights: set"):
        warm_start.check(make_trainer(), init(folder, averages=True))


def test_loaded_weights_are_listed():
    values = dict(path="old/ckpt-5", names=["a", "b"], total=3)
    loaded = warm_start.LoadedWeights(model="", averages=False, cast="", **values)
    assert str(loaded) == "Weights of 2 of 3 variables from old/ckpt-5: a, b."
    loaded = warm_start.LoadedWeights(model="teacher", averages=True, cast="float64", **values)
    start, _, end = str(loaded).partition(" from old/ckpt-5")
    assert start == "Averaged weights of 2 of 3 variables of teacher"
    assert end == ", cast from float64: a, b."
