"""The update of a random model, batch and set of options is that of one replica.

By default the cases are the same in each run. New ones, a thousand, with a printed seed:

    python -m pytest -n 0 -m slow --hypothesis-profile=long tests/properties

A failing case is reduced to its simplest form and printed as a `Case(...)`, which is run again by

    python -m tests.properties "Case(replicas=2, batch=3)"
"""

import collections
import functools
import random
from unittest import mock

import hypothesis
import pytest
import tensorflow as tf

from ctl.errors import UsageError
from ctl.replica.arithmetic import gradients, loss, reduction
from ctl.replica.step.update import Update
from tests.properties.case import Case, cases
from tests.properties.case_trainer import compare, find_differences, train

FIXED, MISTAKE, LONG = 4, 10, 1000  # cases; one takes about 4 s of processor time


def explore(count: int, **settings) -> None:
    """Compares random cases with one replica; fails at the first difference, in its simplest form."""
    outcomes = collections.Counter()
    seed = random.SystemRandom().randrange(2**32)

    @hypothesis.settings(max_examples=count, **settings)
    @hypothesis.given(cases())
    def check(case):
        try:
            differences = find_differences(case)
        except UsageError:
            outcomes["rejected"] += 1
            hypothesis.reject()
        outcomes["compared"] += 1
        assert not differences, "\n".join([str(case), *differences[:5]])

    if not hypothesis.settings.default.derandomize:
        print(f"seed {seed}")
        check = hypothesis.seed(seed)(check)
    check()
    print(dict(outcomes))
    assert outcomes["rejected"] <= 0.25 * outcomes["compared"], "too many cases are rejected"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_random_updates_are_those_of_one_replica():
    explore(FIXED if hypothesis.settings.default.derandomize else LONG)


def reduce_means(values, loss, *, dtype=None):
    """The mean of the replicas' gradients."""
    count = tf.distribute.get_replica_context().num_replicas_in_sync
    reduced, loss = ALL_REDUCE(values, loss, dtype=dtype)
    return [
        None if g is None else gradients.unscale([g], tf.constant(count))[0] for g in reduced
    ], loss


def clip_before_reduce(values, loss, *, dtype=None):
    """Each replica clips its own gradients."""
    return ALL_REDUCE([None if g is None else tf.clip_by_norm(g, 0.05) for g in values], loss)


def count_local_rows(self, weights, count):
    """Each replica divides by the weight of its own rows: a mean of means."""
    own = tf.cast(count, self._plan.dtype) if weights is None else tf.reduce_sum(weights)
    return own * tf.distribute.get_replica_context().num_replicas_in_sync


def ignore_mask(sample_weight, row_mask, dtype):
    """Padding rows count."""
    return sample_weight


def scale_penalty_by_replicas(penalties, parts, dtype):
    """Every micro-batch adds the penalty."""
    return tf.add_n([tf.cast(each, dtype) for each in penalties]) if penalties else None


ALL_REDUCE = reduction.all_reduce
# Mistake -> (object, attribute, replacement, the simplest case that shows it).
MISTAKES = {
    "mean of gradients": (reduction, "all_reduce", reduce_means, Case(replicas=2)),
    "mean of means": (Update, "_denominator", count_local_rows, Case(replicas=2, batch=3)),
    "clipping before the reduction": (
        *(reduction, "all_reduce", clip_before_reduce),
        Case(replicas=2, batch=2),
    ),
    "padding counts": (loss, "row_weights", ignore_mask, Case(replicas=2, batch=3)),
    "a penalty per micro-batch": (
        *(loss, "regularization_contribution", scale_penalty_by_replicas),
        Case(replicas=2, batch=2, body=("dense",), penalty=True),
    ),
}


@functools.cache
def train_reference(case):
    return train(case.reference)


SLOW = ("mean of gradients", "padding counts")  # tests of tests/replica detect all of them, too


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", [pytest.param(m, marks=() if m in SLOW else pytest.mark.long) for m in MISTAKES]
)
def test_planted_mistake_is_found_in_its_simplest_case(mistake):
    place, name, replacement, case = MISTAKES[mistake]
    expected = train_reference(case)
    with mock.patch.object(place, name, replacement):
        assert compare(train(case), expected)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_found_by_random_cases(mistake):
    place, name, replacement, _ = MISTAKES[mistake]
    with mock.patch.object(place, name, replacement), pytest.raises(AssertionError, match="Case"):
        explore(MISTAKE, phases=[hypothesis.Phase.generate])
