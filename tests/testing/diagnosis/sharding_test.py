"""Mistakes of sharded slots are detected, and right ones pass."""

import pytest
import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.parts import sharded_optimizer
from ctl.parts.replica_values import SliceLayout
from ctl.rows import replicas
from ctl.testing import equivalence
from ctl.testing.splits import Split
from ctl.testing.subjects.trainer_subject import TrainerSubject
from tests.testing import gallery


class Wide(gallery.Right):
    """With kernels that are split over the replicas."""

    def build_model(self):
        layers = tf_keras.layers
        hidden = layers.Dense(40, activation="tanh", input_shape=(gallery.FEATURES,))
        return tf_keras.Sequential([hidden, layers.Dense(gallery.CLASSES)])


def make_adam():
    return tf_keras.optimizers.Adam(0.01)


def make_subject(optimizer):
    options = TrainerOptions(shard_state=True)
    return TrainerSubject(Wide, gallery.examples(), 3, optimizer=optimizer, options=options)


@pytest.mark.slow
def test_right_slices_pass():
    assert equivalence.run(make_subject(make_adam), [Split(4, 2)]).equivalent


@pytest.mark.slow
def test_a_slice_updated_by_its_neighbours_slots_is_detected(monkeypatch):
    apply = sharded_optimizer._Sharded.apply_gradients
    cut, join = SliceLayout.cut, SliceLayout.join
    shift = {}  # replica -> 1 from the second update on: both have exchanged slices, but not slots

    def apply_shifted(self, *arguments, **keywords):
        shift[replica_number()] = tf.cast(self.iterations > 0, tf.int32)
        return apply(self, *arguments, **keywords)

    def cut_shifted(self, value, replica):
        return cut(self, value, (replica + shift[replica_number()]) % 2)

    def join_shifted(self, bodies, rest):
        if tf.executing_eagerly():  # of a complete slot, not in the step
            return join(self, bodies, rest)
        return join(self, tf.roll(bodies, shift[replica_number()], axis=0), rest)

    monkeypatch.setattr(sharded_optimizer._Sharded, "apply_gradients", apply_shifted)
    monkeypatch.setattr(SliceLayout, "cut", cut_shifted)
    monkeypatch.setattr(SliceLayout, "join", join_shifted)
    assert equivalence.run(make_subject(make_adam), [Split(4, 2)]).differences


def replica_number():
    return int(tf.get_static_value(replicas.number()))
