"""Layers that `optimizer.groups` freezes until a step: frozen before it, trained from it on."""

import functools
import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.built.built_step import BuiltStep
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.parts.parameter_groups import ParameterGroups
from tests.support import reference_model
from tests.support.checks import close, one_line
from tests.support.second_model import SecondModel

strategy = functools.cache(testing.make_strategy)
GROUPS = [
    dict(variables="embedding/*", frozen_until=2, learning_rate_scale=0.5),
    dict(variables="dense/*", frozen_until=4),
]


class Eight(reference_model.ReferenceTrainer):
    """Each batch is all examples, or seven of them."""

    data_factory = staticmethod(lambda split: ctl.data.arrays(reference_model.examples(8)))


def make(replicas=1, *, cls=Eight, batch=8, **options):
    tf_keras.backend.reset_uids()
    options.setdefault("optimizer_groups", GROUPS)
    return reference_model.make_trainer(strategy(replicas), batch, cls=cls, **options)


def until(groups):
    return ParameterGroups(ctl.TrainerOptions(optimizer_groups=groups))


def rates_of_groups(step):
    return [0.5 * (step >= 2), step >= 4, step >= 4, 1, 1]


def train_by_hand(weights, steps, rates_of=rates_of_groups):
    """The weights after steps of SGD on all examples, with the rates of each step."""
    for step in range(steps):
        _, gradients, _ = reference_model.loss_and_gradients(weights, reference_model.examples(8))
        rates = rates_of(step)
        weights = [w - r * g for w, r, g in zip(weights, rates, gradients, strict=True)]
    return weights


@pytest.mark.parametrize(
    ("replicas", "loops", "options"),
    [
        (2, (1, 1, 5), {}),
        pytest.param(1, (3, 4), {"xla": "loop"}, marks=pytest.mark.slow),
        pytest.param(2, (3, 4), {"shard_state": True}, marks=pytest.mark.slow),
    ],
)
def test_every_replica_trains_a_layer_from_its_step_on(replicas, loops, options):
    trainer = make(replicas, **options)
    before = trainer.model.get_weights()
    for steps in loops:
        outputs = trainer.train(tf.constant(steps))
    losses = []  # of the last loop, which unfreezes a layer
    for step in range(7 - loops[-1], 7):
        weights = train_by_hand(before, step)
        losses.append(reference_model.loss_and_gradients(weights, reference_model.examples(8))[0])
    np.testing.assert_allclose(float(outputs["loss"]), np.mean(losses), rtol=1e-11)
    for variable, value in zip(trainer.model.weights, train_by_hand(before, 7), strict=True):
        for copy in testing.copies(strategy(replicas), variable):
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-11, err_msg=variable.name)


@pytest.mark.slow
def test_run_that_is_resumed_before_at_or_after_the_step_has_the_same_bits(tmp_path):
    groups = [dict(variables="embedding/*", frozen_until="2 epochs")]  # of one step
    trainer = make(optimizer=lambda: tf_keras.optimizers.Adam(0.1), optimizer_groups=groups)
    embedding = trainer.model.get_layer("embedding")
    paths = {}
    for stop in (1, 2, 3):
        trainer.train(tf.constant(1))
        assert embedding.trainable == (stop > 2)
        paths[stop] = Checkpointer(tmp_path / str(stop), trainer).save()
    trainer.train(tf.constant(3))
    expected = trainer.model.get_weights()
    for stop in (3, 2, 1):  # a step that moves back freezes the layers again
        Checkpointer(tmp_path, trainer).restore(paths[stop])
        trainer.train(tf.constant(6 - stop))
        close(expected, trainer.model.weights)


class Judged(SecondModel, Eight):
    """One of the layers of the second model is not trained at all."""

    def make_judge(self):
        layers = tf_keras.layers
        inner = tf_keras.Sequential([layers.Dense(3, name="mid")], name="inner")
        last = layers.Dense(1, name="out", trainable=False)
        return tf_keras.Sequential([layers.Dense(3, name="in", input_shape=[4]), inner, last])

    def make_judge_optimizer(self):
        return tf_keras.optimizers.Adam(0.1)


@pytest.mark.slow
def test_layers_of_a_second_model_are_unfrozen_and_others_stay_frozen():
    trainer = make(cls=Judged, optimizer_groups=[dict(variables="judge/*", frozen_until=2)])
    with pytest.raises(ctl.UsageError, match="unfreezes out/kernel:0, out/bias:0"):
        trainer.train(tf.constant(2))
    groups = [dict(variables=["judge/in/*", "judge/inner/*"], frozen_until=2)]
    trainer = make(cls=Judged, optimizer_groups=groups)
    before = trainer.judge.get_weights()
    for steps, expected in ((2, set()), (1, {"in", "mid"})):
        trainer.train(tf.constant(steps))
        pairs = zip(trainer.judge.weights, before, strict=True)
        changed = [v.name.partition("/")[0] for v, old in pairs if not np.array_equal(v, old)]
        assert set(changed) == expected and len(changed) == 2 * len(expected)


def test_layer_is_frozen_as_a_whole_or_not_at_all():
    groups = [dict(variables=f"dense/{v}", frozen_until=n) for v, n in (("kernel", 2), ("bias", 3))]
    with pytest.raises(ctl.UsageError, match="freezes dense/kernel:0, but"):
        make(optimizer_groups=groups[:1])
    with pytest.raises(ctl.UsageError, match="freezes dense/kernel:0, dense/bias:0"):
        make(optimizer_groups=groups)


def test_variables_of_the_model_itself_cannot_be_frozen():
    class Scaled(tf_keras.Sequential):
        def build(self, input_shape):
            self.scale = self.add_weight(name="scale", initializer="ones")
            super().build(input_shape)

        def call(self, x):
            return self.scale * super().call(x)

    model = Scaled([tf_keras.layers.Dense(1, name="inner")])
    model.build([None, 2])
    with pytest.raises(ctl.UsageError, match="freezes scale:0"):
        until([dict(variables="scale", frozen_until=2)]).create(None, model)


def test_steps_are_split_where_layers_are_unfrozen():
    groups = until([dict(variables="a/*", frozen_until=3), dict(variables="b/*", frozen_until=5)])
    layers = [tf_keras.layers.Dense(1, name=name) for name in "abc"]
    groups.create(None, tf_keras.Sequential([tf_keras.Input([1]), *layers]))
    position = tf.Variable(0)
    step = types.SimpleNamespace(changes=groups.changes, begin=groups.begin, _global_step=position)
    split = functools.partial(BuiltStep.split, step)
    states = [(n, [layer.trainable for layer in layers]) for n in split(8)]
    assert states == [(3, [False, False, True]), (2, [True, False, True]), (3, [True, True, True])]
    for first, count, expected in ((3, 2, [2]), (4, 4, [1, 3]), (5, 4, [4])):
        position.assign(first)
        assert [*split(count)] == expected


# Layers that the trainer itself unfreezes, between two loops.


class Unfreezes(Eight):
    """The embedding is trained from step 2 on."""

    def train_loop_begin(self):
        super().train_loop_begin()
        embedding = next(layer for layer in self.model.layers if "embedding" in layer.name)
        embedding.trainable = int(self.global_step.numpy()) >= 2


def test_step_is_traced_again_only_when_a_layer_was_frozen_or_unfrozen(monkeypatch, tmp_path):
    trainer = make(cls=Unfreezes, optimizer_groups=())
    before, traces, counts = trainer.model.get_weights(), [], []
    loss = trainer.per_example_loss
    monkeypatch.setattr(trainer, "per_example_loss", lambda *a: (traces.append(0), loss(*a))[1])
    for step in range(5):
        trainer.train(tf.constant(1))
        counts.append(len(traces))
        if step == 0:
            path = Checkpointer(tmp_path, trainer).save()
    assert counts == [1, 1, 2, 2, 2]
    expected = train_by_hand(before, 5, lambda step: [step >= 2, 1, 1, 1, 1])
    end = trainer.model.get_weights()
    close(end, expected, 1e-11)
    # Freezing gives the same bits after a restart.
    Checkpointer(tmp_path, trainer).restore(path)
    for _ in range(4):
        trainer.train(tf.constant(1))
    close(trainer.model.get_weights(), end)


def test_layer_without_slot_variables_cannot_be_unfrozen():
    class BuiltFrozen(Unfreezes):
        def build_model(self):
            model = super().build_model()
            next(layer for layer in model.layers if "embedding" in layer.name).trainable = False
            return model

    trainer = make(cls=BuiltFrozen, optimizer_groups=())
    trainer.train(tf.constant(2))
    message = "embeddings:0 became trainable after the trainer was built"
    with one_line(message):
        trainer.train(tf.constant(1))
