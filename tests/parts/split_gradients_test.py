"""Gradients split over the replicas: every split trains as one replica, and readers of gradients."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.errors import UsageError
from ctl.graphs import dataflow
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.parts.replica_values import SliceLayout
from ctl.rows import packs
from ctl.update import gradients
from ctl.update.gradients import Slice
from tests.parts import sharded_optimizer_test as sharded
from tests.support.checks import close

OPTIMIZERS = sharded.OPTIMIZERS
STEPS = 6
CLIP = {"clip": ctl.Clip(global_norm=0.1)}
GROUPS = dict(
    weight_decay_exclude=["*/bias"],
    optimizer_groups=[
        dict(variables="second/kernel", learning_rate_scale=0.1),
        dict(variables="first/*", frozen=True),
    ],
)


def make(replicas, split="gradients", **options):
    return sharded.make(replicas, shard=split, **{"precision": "float64", **options})


def train(replicas, split="gradients", steps=STEPS, **options):
    """Returns the trainer, and the results of its loop."""
    trainer = make(replicas, split, **options)
    return trainer, trainer.train(tf.constant(steps))


def arrays(trainer):
    """Weights, slots and averages, which all replicas have alike."""
    sharded.weights(trainer)  # checks the copies
    variables = [*trainer.model.variables, *sharded.inner(trainer).variables]
    return [testing.copies(trainer.strategy, variable)[0] for variable in variables]


def check_equal(first, second, atol=1e-12):
    close(arrays(first), arrays(second), atol)


@pytest.mark.parametrize(
    ("replicas", "batch", "options"),
    [
        (2, 7, CLIP),
        pytest.param(4, 5, {**CLIP, "ema_decay": 0.9}, marks=pytest.mark.slow),
        pytest.param(4, 7, {"clip": ctl.Clip(norm=0.05)}, marks=pytest.mark.slow),
        pytest.param(2, 7, {"clip": ctl.Clip(value=0.01)}, marks=pytest.mark.slow),
        pytest.param(2, 7, {**CLIP, "micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param(2, 7, {**CLIP, "cls": sharded.Embedded}, marks=pytest.mark.slow),
        pytest.param(
            2, 7, {**CLIP, **GROUPS, "optimizer": OPTIMIZERS["momentum"]}, marks=pytest.mark.slow
        ),
    ],
)
def test_split_gradients_train_as_one_replica(replicas, batch, options):
    one, _ = train(1, False, batch=batch, **options)
    split, _ = train(replicas, batch=batch, **options)
    check_equal(one, split)
    if options["clip"].global_norm:  # without the bound, the weights are others
        free, _ = train(1, False, batch=batch, **{**options, "clip": ctl.Clip()})
        with pytest.raises(AssertionError):
            check_equal(one, free)


@functools.cache
def traced():
    """A trainer on two replicas, and the gradients that each replica applied."""
    all_applied, update = [], gradients.apply
    trainer = make(2, cls=sharded.Embedded, **CLIP)
    with pytest.MonkeyPatch.context() as patch:

        def apply(optimizer, applied, variables):
            all_applied.append(applied)
            return update(optimizer, applied, variables)

        patch.setattr(gradients, "apply", apply)
        patch.setattr(packs, "BYTES", 100)  # several packs: the kernel of the head has 840 bytes
        trainer.train(tf.constant(1))
    return trainer, all_applied


def test_a_replica_applies_copies_of_its_slices_and_complete_sparse_gradients():
    _, applied = traced()
    assert applied
    for sparse, *split in applied:
        assert isinstance(sparse, tf.IndexedSlices)
        for each in split:
            # A slice of rows would share the memory of the complete gradient.
            copies = [x for x in dataflow.ancestors(each.values) if x.op.type == "DeepCopy"]
            assert isinstance(each, Slice) and each.values.shape in [x.shape for x in copies]


@pytest.mark.slow
def test_norms_and_shares_are_those_of_one_replica():
    options = {**CLIP, "norms": "layers", "optimizer": OPTIMIZERS["momentum"]}
    one, split = (train(*which, **options)[1] for which in ((1, False), (2, "gradients")))
    flat = [tf.nest.flatten(result) for result in (one, split)]
    np.testing.assert_allclose(flat[0], flat[1], rtol=1e-12)
    assert one["gradient_norm"] > 0.1 and len(one["layers"]["gradient_norm"]) == 6


@pytest.mark.slow
def test_overflowing_steps_of_float16_are_skipped_on_every_replica():
    options = {"optimizer": OPTIMIZERS["overflowing"], "precision": "float16", "steps": 30}
    (plain, _), (split, _) = train(2, True, **options), train(2, **options)
    assert 5 < int(split.skipped_steps.numpy()) == int(plain.skipped_steps.numpy()) < 25
    assert sharded.weights(plain) == sharded.weights(split)  # the same bits without a norm


@pytest.mark.parametrize(
    ("saved", "restored"), [((2, "gradients"), (1, False)), ((1, False), (4, "gradients"))]
)
@pytest.mark.slow
def test_a_checkpoint_restores_onto_other_replicas(tmp_path, saved, restored):
    first, _ = train(*saved, **CLIP)
    second = make(*restored, **CLIP)
    Checkpointer(tmp_path, first).save()
    checkpoints = Checkpointer(tmp_path, second)
    assert checkpoints.all_restore_latest() and checkpoints.unmatched is None
    for trainer in (first, second):
        trainer.train(tf.constant(STEPS))
    check_equal(first, second)


def train_in_a_process():
    trainer, _ = train(tf.distribute.MultiWorkerMirroredStrategy(), **CLIP)
    return arrays(trainer)


@pytest.mark.slow
def test_two_processes_train_as_one_replica():
    one, _ = train(1, False, **CLIP)
    for process in testing.run_workers(train_in_a_process):
        close(process, arrays(one), 1e-12)


class TwoOptimizers(sharded.Trainer):
    """Its steps update the same variables by the trainer's optimizer and by a complete one."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.other = tf_keras.optimizers.SGD(0.1)
            self.other.build(self.model.trainable_variables)

    def replica_step(self, batch):
        def losses(rows):
            return self.per_example_loss(rows, self.forward(rows, training=True))

        self.minimize(batch, losses, optimizer=self.other)
        return self.minimize(batch, losses)


@pytest.mark.slow
def test_another_optimizer_gets_complete_gradients():
    one, _ = train(1, False, cls=TwoOptimizers, **CLIP)
    split, _ = train(2, cls=TwoOptimizers, **CLIP)
    check_equal(one, split)


def test_a_step_that_would_split_nothing_is_rejected():
    class OwnStep(sharded.Trainer):
        def train_step(self, iterator):
            super().train_step(iterator)

    with pytest.raises(UsageError, match=r"overrides train_step: .*shard_state=true\.$"):
        make(2, cls=OwnStep)


@pytest.mark.parametrize("broken", ["body of one replica", "rest of all"])
def test_an_element_that_is_not_finite_is_found_on_every_replica_by_its_gradient(broken):
    strategy, layout = sharded.strategy(2), SliceLayout([5, 8], 2)  # 32 elements and a rest of 8
    value = np.ones([5, 8])
    value.flat[20 if broken.startswith("body") else 37] = np.inf

    @tf.function
    def run():
        def check():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            split = [
                Slice(layout.cut(tf.constant(v), replica), layout.body) for v in (value, value)
            ]
            split[0] = split[0].map(tf.zeros_like)
            counted = gradients.total([*split, value], tf.math.count_nonzero)
            return gradients.find_non_finite([None, *split], tf.constant(1.0)), counted

        return strategy.run(check)

    found, counted = map(strategy.experimental_local_results, run())
    assert [int(each) for each in found] == [3, 3]
    assert [int(each) for each in counted] == [80, 80]
