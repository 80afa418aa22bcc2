"""assert_loop_equivalent passes right loops; diagnosis/rules_test.py has loops with mistakes."""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.errors import UsageError
from ctl.testing import Loop, assert_loop_equivalent, check_loop_equivalence
from ctl.testing.equivalence_report import NotComparable
from tests.testing import gallery, loop_gallery, mistakes
from tests.testing.loop_gallery import check


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop", [loop for loop in loop_gallery.DIFFERENT if loop is not loop_gallery.Penalized]
)
def test_right_loops_pass(loop):
    report = check(loop, 5)
    assert report.verdict == "equivalent" and report.precision == "float64"
    assert [split.row_counts for split in report.compared] == [[3, 2]]


@pytest.mark.slow
def test_replicas_without_rows_are_compared_by_default():
    report = assert_loop_equivalent(loop_gallery.Plain, gallery.examples(24))
    assert [2, 2, 1, 0] in [split.row_counts for split in report.compared]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("loop", loop_gallery.RIGHT)
def test_no_seed_gives_a_false_alarm(loop, seed):
    mask = getattr(loop, "mask", "")
    assert_loop_equivalent(loop, gallery.examples(24, seed), mask=mask, in_process=True)


class Dropping(loop_gallery.Plain):
    def build_model(self):
        hidden = tf_keras.layers.Dense(8, activation="tanh", input_shape=(4,))
        return tf_keras.Sequential([hidden, tf_keras.layers.Dropout(0.4), tf_keras.layers.Dense(3)])


@pytest.mark.slow
def test_a_loop_with_dropout_cannot_be_compared():
    with pytest.raises(NotComparable, match=r"cannot tell.*random numbers"):
        assert_loop_equivalent(
            Dropping, gallery.examples(24), replicas=(2,), batch_sizes=(4,), in_process=True
        )


def build_steps(strategy, global_batch_size):
    """Two `ctl.Step`s, whose random numbers are those of the rows on every split."""

    def make(seed):
        def forward(batch, training):
            draws = ctl.random.normal(tf.shape(batch["x"]), dtype=tf.float32)
            return step.model(batch["x"] + tf.cast(draws, tf.float64), training=training)

        loop, adam = gallery.Classifies(), functools.partial(tf_keras.optimizers.Adam, 0.01)
        options = dict(global_batch_size=global_batch_size, strategy=strategy, seed=seed)
        step = ctl.Step(loop.build_model, adam, loop.per_example_loss, forward=forward, **options)
        return step

    steps = [make(0), make(1)]
    return Loop(lambda batch: {str(i): each(batch).loss for i, each in enumerate(steps)}, steps)


@pytest.mark.slow
def test_random_numbers_that_are_equal_on_all_splits_are_compared():
    report = check(build_steps, 4, 5, steps=2)
    assert report.verdict == "equivalent", report.failure()
    assert "casts what is computed in float32" in report.why


def build_float32(strategy, global_batch_size):
    """A loop that computes in float32 whatever the default dtype is; wrong if FACTOR is not 1."""
    with strategy.scope():
        weights = tf.Variable(tf.ones([4]), name="weights")

    def replica_step(batch):
        with tf.GradientTape() as tape:
            outputs = tf.linalg.matvec(tf.cast(batch, tf.float32), weights)
            loss = tf.reduce_sum(tf.tanh(outputs)) / global_batch_size
        context = tf.distribute.get_replica_context()
        gradient = context.all_reduce("SUM", tape.gradient(loss, weights))
        weights.assign_sub(0.1 * gradient * (1 if strategy.num_replicas_in_sync == 1 else FACTOR))
        return loss

    @tf.function
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    return Loop(step, [weights])


FACTOR = 1.0


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_float32_is_compared_with_the_tolerance_that_was_measured(factor, monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", factor)
    x = np.random.default_rng(0).normal(size=(16, 4))
    options = dict(replicas=(2,), batch_sizes=(5,), in_process=True)
    report = check_loop_equivalence(build_float32, x, **options)
    assert report.verdict == ("equivalent" if factor == 1 else "differs")
    assert report.precision == "float32"
    assert report.why == "its weights are float32"


class MeanOfMeans(mistakes.MeanOfMeans, loop_gallery.Plain):
    pass


@pytest.mark.slow
def test_uneven_splits_of_a_loop_for_full_batches_are_listed():
    report = check(MeanOfMeans, 4, 5, full_batches=True)
    assert report.verdict == "equivalent"
    assert [str(split) for split in report.refused] == ["2 replicas (3 + 2 rows)"]
    assert report.notes == ()


def fail_without_rows(strategy, global_batch_size):
    loop = loop_gallery.Plain(strategy, global_batch_size)

    def replica_step(batch):
        if batch["x"].shape[0] == 0:
            raise ValueError("no rows")
        return loop_gallery.Plain.replica_step(loop, batch)

    loop.replica_step = replica_step
    return loop


def test_an_exception_on_a_split_is_a_failure_with_its_line():
    report = check(fail_without_rows, 1)
    assert report.verdict == "differs"
    message = r"fail_without_rows: fails on 2 replicas \(1 \+ 0 rows\): .*: ValueError: no rows"
    assert re.match(message, report.failure())


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (loop_gallery.Plain, dict(mask="mask"), "give batches as a dict"),
        (loop_gallery.Plain, dict(steps=0), "steps is 0, but must be at least 1"),
        (loop_gallery.Plain, dict(full_batches=True, batch_sizes=(5,)), r"excludes .*\(5,\) on 2 or 4"),
        (lambda *_: 3, {}, r"build returned int, but must return a ctl\.testing\.Loop"),
        (lambda *_: Loop(print, [3]), {}, "contains int, which has no variables"),
        (lambda *_: Loop(lambda batch: 0.0, []), {}, "contain no trainable variable"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_an_error(build, arguments, message):
    with pytest.raises(UsageError, match=message):
        check_loop_equivalence(build, np.zeros([8, 4]), in_process=True, **arguments)


@pytest.mark.parametrize(
    "in_process",
    [True, pytest.param(False, marks=[pytest.mark.slow, pytest.mark.long])],
)
def test_each_phase_prints_a_line_also_in_a_new_process(in_process, capfd):
    assert check(loop_gallery.Plain, 5, steps=1, in_process=in_process).verdict == "equivalent"
    lines = [x for x in capfd.readouterr().err.splitlines() if x.startswith("ctl.testing: ")]
    assert lines == [
        "ctl.testing: Plain on 1 replica (5 rows)",
        "ctl.testing: Plain on 2 replicas (3 + 2 rows)",
        "ctl.testing: the updates are equal; checking loss scale and optimizers",
    ]


class InvalidForFive(loop_gallery.Plain):
    """Computes NaN for each global batch of 5 rows."""

    def share_of_loss(self, batch, outputs):
        loss = super().share_of_loss(batch, outputs)
        return loss * np.nan if self.global_batch_size == 5 else loss


@pytest.mark.slow
def test_loss_that_is_not_finite_on_a_later_batch_size_is_an_error():
    with pytest.raises(NotComparable, match=r"not finite on 1 replica"):
        check(InvalidForFive, 4, 5, steps=1)


class NotApplied(loop_gallery.Plain):
    def apply(self, gradients, variables):
        pass


class WithoutLearningRate(loop_gallery.Plain):
    def build_optimizer(self):
        return tf_keras.optimizers.SGD(0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "start"),
    [(NotApplied, "N"), (WithoutLearningRate, "With the loop's own optimizer: n")],
)
def test_step_that_changes_nothing_is_noted(build, start):
    report = check(build, 4, steps=1)
    assert report.verdict == "equivalent"
    assert f"{start}o trainable variable changed: compared as an evaluation." in report.notes
