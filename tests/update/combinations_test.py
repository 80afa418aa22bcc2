"""Every combination of options that the rules allow computes the update of the global batch.

The default run tests a subset that contains every value that an option may have on two replicas,
except float32. The slow tests contain every allowed pair of values, and the long tests all
combinations. The file is named after what it tests, not after a module: it runs the whole step
against the rules of ctl/update/config.py.
"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from ctl import testing
from ctl.errors import UsageError
from tests.support import reference_model
from tests.update import combinations
from tests.update.combinations import Choice

# One rounding error per operation, and fewer than 32 operations in sequence in this model.
TOLERANCE = {
    "float64": 1e-10, "float32": 1e-5, "bfloat16": 32 * 2**-8, "float16": 32 * 2**-11,
}  # fmt: skip
BATCH = 8


# Auto-clustering is enabled per process, and on CPUs by an environment variable.
CHOICES = [c for c in combinations.all_choices() if not c.broken() and c.xla != "autocluster"]


def covering(choices, size):
    """A small subset of `choices` that contains every set of `size` values on one and two replicas."""
    sets_of = {
        choice: {*itertools.combinations(dataclasses.asdict(choice).items(), size)}
        for choice in choices
        if choice.replicas <= 2
    }
    remaining = set().union(*sets_of.values())
    subset = []
    while remaining:
        best = max(sets_of, key=lambda choice: len(sets_of[choice] & remaining))
        remaining -= sets_of[best]
        subset.append(best)
    return subset


COVERING = covering(CHOICES, 2)
# tests/parts/compression_test.py compares the update in float32 with that by hand.
BY_DEFAULT = covering([c for c in COVERING if c.replicas == 2 and c.precision != "float32"], 1)


class Normalized(reference_model.ReferenceTrainer):
    """The reference model with a batch normalization after its hidden layer."""

    def build_model(self):
        layers = tf_keras.layers
        model = super().build_model()
        hidden = layers.BatchNormalization()(model.layers[-2].output)
        return tf_keras.Model(model.input, layers.Dense(reference_model.CLASSES)(hidden))


def make(choice):
    return reference_model.make_trainer(
        testing.make_strategy(choice.replicas),
        BATCH,
        cls=Normalized if choice.sync_batch_norm else reference_model.ReferenceTrainer,
        precision=choice.precision,
        xla=choice.xla,
        micro_batches=choice.micro_batches,
        logical_shards=choice.shards,
        all_reduce_dtype=choice.reduce_dtype,
        model={"sync_batch_norm": True} if choice.sync_batch_norm else {},
    )


def update(trainer):
    before = trainer.model.get_weights()
    trainer.train(tf.constant(1))
    return [b - a for b, a in zip(before, trainer.model.get_weights(), strict=True)]


@functools.cache
def make_reference(sync_batch_norm):
    return make(Choice(precision="float64", sync_batch_norm=sync_batch_norm))


def check(choice):
    trainer = make(choice)
    reference = make_reference(choice.sync_batch_norm)
    reference.global_step.assign(0)
    reference.model.set_weights(trainer.model.get_weights())
    tolerance = TOLERANCE["bfloat16" if choice.reduce_dtype else choice.precision]
    for exact, actual in zip(update(reference), update(trainer), strict=True):
        bound = tolerance * max(1.0, np.abs(exact).max())
        np.testing.assert_allclose(actual, exact, rtol=0, atol=bound)


def name(choice):
    return "-".join(str(getattr(choice, axis)) for axis in combinations.AXES)


@pytest.mark.parametrize(
    "choice",
    [pytest.param(c, marks=() if c in BY_DEFAULT else pytest.mark.slow) for c in COVERING],
    ids=name,
)
def test_every_pair_of_options_computes_the_exact_update(choice):
    check(choice)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("choice", [c for c in CHOICES if c not in COVERING], ids=name)
def test_every_combination_computes_the_exact_update(choice):
    check(choice)


SIZES = (Choice(shards=3, replicas=2), Choice(shards=16, replicas=2))
# One choice per rule that AXES and SIZES can break; tests/update/config_test.py checks the others.
BROKEN = {
    rule.reason[:40]: choice
    for choice in reversed((*combinations.all_choices(), *SIZES))
    for rule in choice.broken()
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_trainer_rejects_what_the_rules_reject(broken):
    with pytest.raises(UsageError):
        make(broken)
