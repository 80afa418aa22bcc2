"""Everything that a trainer does with a model works for a model of Keras 3."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built import build
from ctl.built.attributes import Attributes
from ctl.configs import keys
from ctl.keras import models
from ctl.keras.variables import penalties
from ctl.loop import inference
from ctl.loop.checkpoints import warm_start
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.exports import write_version
from tests.keras.keras3 import twins
from tests.keras.keras3.models import KINDS, Kind
from tests.keras.keras3.twins import difference, make_trainer, train

SYNC = {"sync_batch_norm": True}


def dense(k):
    return k.Sequential([k.Input((6,)), k.layers.Dense(5, name="a"), k.layers.Dense(4, name="b")])


class Dense(twins.Twin):
    shape = (6,)
    make = staticmethod(dense)


def weights(trainer):
    return {v.name: v.numpy() for v in trainer.model.weights}


def changed(before, after):
    return {name for name in before if not np.array_equal(before[name], after[name])}


def test_adapter_has_the_attributes_of_the_model():
    model = dense(keras)
    model.temperature = 2.0
    adapted = models.adapt(model)
    assert models.adapt(model) is adapted and models.adapt(adapted) is adapted
    assert adapted.layers == model.layers and adapted.temperature == 2.0
    assert [v.name for v in adapted.weights] == ["a/kernel:0", "a/bias:0", "b/kernel:0", "b/bias:0"]
    assert all(v is w.value for v, w in zip(adapted.weights, model.weights, strict=True))
    adapted.temperature = 3.0
    adapted.trainable = False
    assert model.temperature == 3.0 and not model.trainable and not adapted.trainable_variables


def nested(k):
    inputs = k.Input((6,))
    inner = k.Sequential([k.Input((6,)), *(k.layers.Dense(6, name=name) for name in "ab")])
    shared = k.layers.Dense(6, name="c")
    return k.Model(inputs, k.layers.Add()([k.layers.Dense(6, name="d")(shared(inner(inputs))),
                                           shared(inputs)]))  # fmt: skip


def test_checkpoint_has_the_names_and_the_order_of_tf_keras(tmp_path):
    saved, names = [], []
    for package in (tf_keras, keras):
        model = models.adapt(nested(package))
        path = tf.train.Checkpoint(model=model).save(str(tmp_path / package.__name__))
        saved.append(tf.train.list_variables(path))
        names.append([layer.name for layer in model._flatten_layers() if layer.weights][1:])
    assert saved[0] == saved[1]
    assert names[0][1:] == names[1][1:] == ["a", "b", "c", "d"]


def test_layers_without_an_input_shape_are_built_on_two_replicas():
    def make(k):
        return k.Sequential(
            [k.Sequential([k.layers.Dense(5, name="a")]), k.layers.Dense(4, name="b")]
        )

    trainer = make_trainer(replicas=2, cls=Dense, make=make)
    assert [*weights(trainer)] == ["a/kernel:0", "a/bias:0", "b/kernel:0", "b/bias:0"]
    assert [v.name for v in trainer.optimizer.variables][1] == "m/a/kernel:0"


def test_layers_and_variables_can_be_frozen_between_two_loops():
    trainer = make_trainer(cls=Dense)
    a, b = (trainer.model.get_layer(name) for name in "ab")
    for frozen, trained in (
        (None, {"a/kernel:0", "a/bias:0", "b/kernel:0", "b/bias:0"}),
        (a, {"b/kernel:0", "b/bias:0"}),
        (b.kernel, {"b/bias:0"}),
    ):
        if frozen is not None:
            frozen.trainable = False
        before = weights(trainer)
        trainer.train(tf.constant(1))
        assert changed(before, weights(trainer)) == trained


@pytest.mark.slow
def test_groups_freeze_unfreeze_and_scale_layers():
    groups = (
        {"variables": "a/*", "frozen_until": 2},
        {"variables": "b/bias", "learning_rate_scale": 0.5},
    )
    runs = []
    for package in (keras, tf_keras):
        trainer = make_trainer(package, cls=Dense, optimizer_groups=groups)
        first = weights(trainer)
        trainer.train(tf.constant(2))
        assert changed(first, weights(trainer)) == {"b/kernel:0", "b/bias:0"}
        runs.append(train(trainer, 2)[1])
    assert difference(*runs) < 1e-12


def test_precision_reaches_the_layers():
    trainer = make_trainer(cls=Dense, precision="float16")
    layer = trainer.model.layers[0]
    assert (layer.compute_dtype, layer.variable_dtype) == ("float16", "float32")
    assert keras.config.dtype_policy().name == "float32" == keras.config.floatx()

    def own(k):
        keras.config.set_dtype_policy("mixed_bfloat16")
        return dense(k)

    with pytest.raises(ctl.UsageError, match=r"mixed_bfloat16 .*float"):
        make_trainer(cls=Dense, make=own)


@pytest.mark.slow
def test_added_losses_of_one_replica_are_not_those_of_another_one():
    class Penalty(keras.layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=shape[1:], name="scale")

        def call(self, inputs):
            self.add_loss(0.1 * keras.ops.sum(self.scale**2))
            return inputs * self.scale

    def make(k):  # synchronization lets the replicas take turns inside of the forward pass
        return k.Sequential(
            [k.Input((6,)), Penalty(), k.layers.BatchNormalization(), k.layers.Dense(4)]
        )

    runs = [
        train(make_trainer(cls=Dense, make=make, batch=8, replicas=n, model=SYNC), 3)
        for n in (1, 2)
    ]
    assert difference(runs[0][1], runs[1][1]) < 1e-12
    assert abs(runs[0][0]["loss"] - runs[1][0]["loss"]) < 1e-12


class Tied(keras.layers.Layer):
    def __init__(self, dense):
        super().__init__()
        self.kernel = dense.kernel

    def call(self, inputs):
        return keras.ops.matmul(inputs, keras.ops.transpose(self.kernel))


def test_penalty_of_a_variable_that_two_layers_hold_counts_once():
    dense = keras.layers.Dense(3, kernel_regularizer="l2")
    dense.build((None, 3))
    model = models.adapt(keras.Sequential([keras.Input((3,)), dense, Tied(dense)]))
    owner = types.SimpleNamespace(model=model)
    assert len(model.losses) == 1
    assert len(penalties(Attributes(owner).layers(), model.trainable_variables)) == 1


@pytest.mark.slow
def test_run_resumes_with_equal_bits_from_a_checkpoint_written_in_the_background(tmp_path):
    make = lambda replicas: make_trainer(replicas=replicas, model=SYNC, seed=3)  # noqa: E731
    trainer = make(2)
    checkpoints = Checkpointer(tmp_path, trainer, background=True)
    for steps in (1, 2):
        trainer.train(tf.constant(steps))
        checkpoints.save()
    checkpoints.wait()
    names = [name for name, _ in tf.train.list_variables(checkpoints.path(3))]
    assert "model/layer_with_weights-0/kernel/.ATTRIBUTES/VARIABLE_VALUE" in names
    trainer.train(tf.constant(2))
    resumed, single = make(2), make(1)
    for other in (resumed, single):
        Checkpointer(tmp_path, other).all_restore_latest()
        other.train(tf.constant(2))
    expected = [v.numpy() for v in (*trainer.model.weights, *trainer.optimizer.variables)]
    values = [v.numpy() for v in (*resumed.model.weights, *resumed.optimizer.variables)]
    assert difference(expected, values) == 0
    assert (
        difference(
            expected, [v.numpy() for v in (*single.model.weights, *single.optimizer.variables)]
        )
        < 1e-9
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, "nested"])
def test_run_starts_from_the_weights_of_a_run_of_tf_keras(name, tmp_path):
    kind = KINDS.get(name, Kind(lambda k, rate: nested(k), Dense))
    models.reset_names()
    trainer = kind.trainer(tf_keras)
    for variable in trainer.model.weights:
        variable.assign_add(tf.ones_like(variable))
    trainer.global_step.assign(1)
    Checkpointer(tmp_path, trainer).save()
    models.reset_names()
    other = kind.trainer()
    init = keys.defaults().init
    init.checkpoint = str(tmp_path)
    (loaded,) = warm_start.all_load(other, init)
    assert len(loaded.names) == loaded.total
    before, after = weights(trainer), weights(other)
    assert before.keys() == after.keys() and not changed(before, after)


def test_exported_models_are_of_keras_alone(tmp_path):
    trainer = make_trainer(model=SYNC, precision="float32")
    for variable in trainer.model.weights:
        variable.assign_add(tf.ones_like(variable))
    path = Checkpointer(tmp_path, trainer).save()
    restored = inference.restore_trainer(type(trainer), trainer.options, path, global_batch_size=7)
    x = np.random.default_rng(0).normal(size=(3, 8, 8, 1))
    want = trainer.serve({"x": tf.constant(x)}).numpy()
    folder = write_version(restored, tmp_path / "export", {})
    signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
    assert np.allclose(signature(x=tf.constant(x))["outputs"], want, atol=1e-6)
    loaded = keras.models.load_model(folder / "model.keras")
    assert {type(v).__module__.partition(".")[0] for v in loaded.layers} == {"keras"}
    assert np.allclose(loaded.predict(x.astype("float32"), verbose=0), want, atol=1e-6)
    assert np.allclose(restored.model.predict(x.astype("float32"), verbose=0), want, atol=1e-6)
    assert "ctl" not in restored.model.to_json()


class Adversaries(twins.Twin):
    """A generator, and two critics in a list, each with an optimizer of its own."""

    shape = (6,)
    make = staticmethod(dense)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        with self.build_scope():
            self.critics = [
                keras.Sequential(
                    [keras.Input((4,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
                )
                for _ in range(2)
            ]
            self.optimizers = [tf_keras.optimizers.SGD(0.1) for _ in self.critics]

    def replica_step(self, batch):
        for critic, optimizer in zip(self.critics, self.optimizers, strict=True):
            self.minimize(
                batch,
                lambda rows, critic=critic: tf.nn.softplus(
                    critic(self.model(rows["x"], training=True), training=True)[:, 0]
                ),
                variables=critic.trainable_variables,
                optimizer=optimizer,
            )
        return self.minimize(
            batch, lambda rows: -self.critics[0](self.model(rows["x"], training=True))[:, 0]
        )


@pytest.mark.slow
def test_several_models_are_trained_keyed_and_saved(tmp_path):
    runs = []
    for replicas in (1, 2):
        trainer = make_trainer(cls=Adversaries, make=dense, replicas=replicas, seed=2)
        critics = [models.adapt(model) for model in trainer.critics]
        rng = np.random.default_rng(2)
        for variable in (v for model in critics for v in model.weights):
            variable.assign(rng.normal(size=variable.shape))
        trainer.train(tf.constant(3))
        runs.append([v.numpy() for model in (trainer.model, *critics) for v in model.weights])
    assert difference(*runs) < 1e-12
    path = Checkpointer(tmp_path, trainer).save()
    names = [name for name, _ in tf.train.list_variables(path)]
    assert any(name.startswith("critics/1/layer_with_weights-0/kernel") for name in names)


class Unbuilt(keras.Model):
    """Its layers make their variables in the first call, since it has a `build` of its own."""

    def build(self, shape):
        self.hidden = keras.layers.Dense(5)
        self.norm = keras.layers.BatchNormalization(synchronized=True)
        self.last = keras.layers.Dense(4)

    def call(self, inputs, training=False):
        return self.last(self.norm(self.hidden(inputs), training=training))


@pytest.mark.slow
def test_step_of_ones_own_loop_trains_the_model():
    strategy = testing.make_strategy(2)
    rng = np.random.default_rng(0)
    data = ctl.data.arrays({"x": rng.normal(size=(16, 6)), "label": rng.integers(0, 4, 16)})
    step = ctl.Step(
        Unbuilt,
        keras.optimizers.SGD(0.1),
        lambda batch, outputs: keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True
        ),
        global_batch_size=8,
        strategy=strategy,
        precision="float64",
        metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )
    losses = [float(step(b).loss) for b, _ in zip(ctl.data.distribute(data, 8, strategy), range(9))]  # noqa: B905
    assert losses[-1] < losses[0] and isinstance(step.optimizer, tf_keras.optimizers.SGD)
    assert len(step.model.weights) == 8


def test_step_has_the_precision_of_the_policy_of_keras():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        step = ctl.Step(
            lambda: dense(keras), keras.optimizers.SGD(), lambda *_: None, global_batch_size=8
        )
    finally:
        keras.config.set_dtype_policy(policy)
    assert step.options.precision == "bfloat16"


def test_what_cannot_be_trained_is_one_line(monkeypatch, pretend_strategy):
    class Holding(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean()

    with pytest.raises(ctl.UsageError, match=r"holds the metric '\w+' of Keras 3"):
        models.adapt(keras.Sequential([Holding()]))
    layer = keras.layers.Dense(1)
    layer.scale = tf.Variable(1.0)
    with pytest.raises(ctl.UsageError, match=r"dense.* holds a tf.Variable \(scale\), which"):
        models.adapt(layer)
    pretend_strategy("parameter_server")
    with pytest.raises(ctl.UsageError, match=r"Parameter servers .*Keras 3"):
        build.check_model(dense(keras))
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ctl.UsageError, match="The backend of Keras 3 is jax"):
        models.adapt(keras.layers.Dense(1))
