"""Layers that `optimizer.groups` freezes until a step: frozen before it, trained from it on."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.replica.updates.unfreezing import Unfreezing
from tests import reference_model

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


def train_by_hand(weights, steps):
    """The weights after steps of SGD with rate 1 on all examples, with the groups above."""
    for step in range(steps):
        _, gradients, _ = reference_model.loss_and_gradients(weights, reference_model.examples(8))
        rates = [0.5 * (step >= 2), step >= 4, step >= 4, 1, 1]
        weights = [w - r * g for w, r, g in zip(weights, rates, gradients, strict=True)]
    return weights


@pytest.mark.parametrize(
    ("replicas", "loops", "options"),
    [
        (2, (1, 1, 5), {"gradient_accumulation_steps": 2}),
        pytest.param(1, (3, 4), {"xla": "loop"}, marks=pytest.mark.slow),
        pytest.param(2, (3, 4), {"shard_state": True}, marks=pytest.mark.slow),
    ],
    ids=["two, accumulated", "one program", "slots in parts"],
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


def adam():
    return tf_keras.optimizers.Adam(0.1)


def train_unevenly(replicas):
    """Each replica's copies after 4 steps of 7 rows, and the norms."""
    options = dict(norms="layers", optimizer_groups=GROUPS[:1])
    trainer = make(replicas, batch=7, optimizer=adam, **options)
    norms = trainer.train(tf.constant(4))
    copies = [testing.copies(strategy(replicas), v) for v in trainer.model.weights]
    return copies, [norms["gradient_norm"], norms["update_norm"]]


@pytest.mark.slow
def test_uneven_shares_and_adam_give_the_update_of_one_replica():
    (expected, expected_norms), (actual, norms) = train_unevenly(1), train_unevenly(2)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-11)
    for (value,), copies in zip(expected, actual, strict=True):
        for copy in copies:
            np.testing.assert_allclose(copy, value, rtol=0, atol=1e-11)


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_that_is_resumed_before_at_or_after_the_step_has_the_same_bits(tmp_path, replicas):
    options = dict(optimizer=adam, optimizer_groups=GROUPS[:1])  # unfreezes at step 2
    uninterrupted, resumed = (make(replicas, **options) for _ in range(2))
    paths = {}
    for stop in (1, 2, 3):
        uninterrupted.train(tf.constant(1))
        paths[stop] = Checkpointer(tmp_path / str(stop), uninterrupted).save()
    uninterrupted.train(tf.constant(3))
    for stop in (3, 2, 1):  # a step that moves back freezes the layers again
        Checkpointer(tmp_path, resumed).restore(paths[stop])
        resumed.train(tf.constant(6 - stop))
        for one, other in zip(uninterrupted.model.weights, resumed.model.weights, strict=True):
            np.testing.assert_array_equal(one, other)


def test_step_may_be_given_in_epochs():
    trainer = make(optimizer_groups=[dict(variables="dense/*", frozen_until="2 epochs")])
    layer = trainer.model.get_layer("dense")
    trainer.train(tf.constant(2))
    assert not layer.trainable
    trainer.train(tf.constant(1))
    assert layer.trainable


class Judged(Eight):
    """A second model, which its own optimizer updates; one of its layers is not trained at all."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            layers = tf_keras.layers
            self.judge = tf_keras.Sequential(
                [
                    layers.Dense(3, name="in", input_shape=[4]),
                    tf_keras.Sequential([layers.Dense(3, name="mid")], name="inner"),
                    layers.Dense(1, name="out", trainable=False),
                ]
            )
            self.judge_optimizer = tf_keras.optimizers.Adam(0.1)
            self.judge_optimizer.build(self.judge.trainable_variables)

    def replica_step(self, batch):
        self.minimize(
            batch,
            lambda rows: tf.square(self.judge(rows["x"])[:, 0]),
            variables=self.judge.trainable_variables,
            optimizer=self.judge_optimizer,
        )
        return super().replica_step(batch)


def test_layers_of_a_second_model_are_unfrozen_and_others_stay_frozen():
    trainer = make(cls=Judged, optimizer_groups=[dict(variables="judge/*", frozen_until=2)])
    with pytest.raises(ctl.UsageError, match="unfreezes out/kernel:0, out/bias:0, but the trainer"):
        trainer.train(tf.constant(2))
    groups = [dict(variables=["judge/in/*", "judge/inner/*"], frozen_until=2)]
    trainer = make(cls=Judged, optimizer_groups=groups)
    before = trainer.judge.get_weights()
    trainer.train(tf.constant(2))
    for weight, old in zip(trainer.judge.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, old)
    trainer.train(tf.constant(1))
    changed = {
        v.name: not np.array_equal(v, old)
        for v, old in zip(trainer.judge.weights, before, strict=True)
    }
    assert changed == {
        "in/kernel:0": True, "in/bias:0": True, "mid/kernel:0": True, "mid/bias:0": True,
        "out/kernel:0": False, "out/bias:0": False,
    }  # fmt: skip


def test_layer_is_frozen_as_a_whole_or_not_at_all():
    with pytest.raises(ctl.UsageError, match="freezes dense/kernel:0, but other variables of"):
        make(optimizer_groups=[dict(variables="dense/kernel", frozen_until=2)])
    groups = [
        dict(variables=f"dense/{name}", frozen_until=n)
        for name, n in dict(kernel=2, bias=3).items()
    ]
    with pytest.raises(ctl.UsageError, match="freezes dense/kernel:0, dense/bias:0, but other"):
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
        Unfreezing([dict(variables="scale", frozen_until=2)]).add_models({"": model})


def test_steps_are_split_where_layers_are_unfrozen():
    unfreezing = Unfreezing(
        [dict(variables="a/*", frozen_until=3), dict(variables="b/*", frozen_until=5)]
    )
    layers = [tf_keras.layers.Dense(1, name=name) for name in "abc"]
    unfreezing.add_models({"": tf_keras.Sequential([tf_keras.Input([1]), *layers])})
    states = [(n, [layer.trainable for layer in layers]) for n in unfreezing.split(0, 8)]
    assert states == [(3, [False, False, True]), (2, [True, False, True]), (3, [True, True, True])]
    assert list(unfreezing.split(3, 2)) == [2]
    assert list(unfreezing.split(4, 4)) == [1, 3]
    assert list(unfreezing.split(5, 4)) == [4]
