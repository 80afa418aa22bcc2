"""assert_loop_equivalent passes right loops of plain TensorFlow, and names planted mistakes."""

import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.testing import Loop, assert_loop_equivalent, check_loop_equivalence
from ctl.testing.report import NotComparable
from tests.testing.loops import right_loops, wrong_loops

DEFAULT_MISTAKES = {
    "LocalMean",
    "MeanOfMeans",
    "MetricGrows",
    "NotUnscaled",
    "NoiseInEvaluation",
}
DEFAULT_LOOPS = {"Masked"}


def mark(loops, default, name=lambda loop: loop.__name__):
    return [
        pytest.param(loop, marks=[] if name(loop) in default else [pytest.mark.slow], id=name(loop))
        for loop in loops
    ]


@pytest.mark.parametrize("loop", mark(right_loops.RIGHT, DEFAULT_LOOPS))
def test_right_loops_pass(loop):
    report = assert_loop_equivalent(
        loop,
        right_loops.examples(),
        replicas=(1, 2),
        batch_sizes=(4, 5),
        mask=getattr(loop, "mask", ""),
        in_process=True,
    )
    assert report.precision == "float64"
    assert [split.row_counts for split in report.compared] == [[2, 2], [3, 2]]
    assert report.verdict == "equivalent"


@pytest.mark.slow
def test_replicas_without_rows_are_compared_by_default():
    report = assert_loop_equivalent(right_loops.Plain, right_loops.examples(), in_process=True)
    assert [2, 2, 1, 0] in [split.row_counts for split in report.compared]


@pytest.mark.parametrize(
    "mistake", mark(wrong_loops.MISTAKES, DEFAULT_MISTAKES, lambda m: m.loop.__name__)
)
def test_planted_mistake_is_named(mistake):
    batch_sizes = (8, 5)
    if mistake.loop.__name__ in DEFAULT_MISTAKES - {"LocalMean"}:  # one size shows their cause
        batch_sizes = (5,) if "(3 + 2 rows)" in mistake.where else (8,)
    with pytest.raises(AssertionError) as error:
        assert_loop_equivalent(
            mistake.loop,
            right_loops.examples(),
            replicas=mistake.replicas,
            batch_sizes=batch_sizes,
            mask=getattr(mistake.loop, "mask", ""),
            in_process=True,
        )
    # Without the numbers that Keras appends to the names of layers.
    line = re.sub(r"(dense|batch_norm\w*?)_\d+\b", r"\1", str(error.value).splitlines()[0])
    assert line.startswith(mistake.loop.__name__)
    assert mistake.where in line
    assert mistake.cause in line


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("loop", right_loops.RIGHT)
def test_no_seed_gives_a_false_alarm(loop, seed):
    assert_loop_equivalent(
        loop,
        right_loops.examples(seed=seed),
        mask=getattr(loop, "mask", ""),
        in_process=True,
    )


class Dropping(right_loops.Plain):
    def build_model(self):
        hidden = tf_keras.layers.Dense(8, activation="tanh", input_shape=(4,))
        return tf_keras.Sequential([hidden, tf_keras.layers.Dropout(0.4), tf_keras.layers.Dense(3)])


def test_a_loop_with_dropout_cannot_be_compared():
    with pytest.raises(
        NotComparable, match=r"cannot tell\. .* draws random numbers, such as dropout"
    ):
        assert_loop_equivalent(
            Dropping, right_loops.examples(), replicas=(2,), batch_sizes=(4,), in_process=True
        )


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
    report = check_loop_equivalence(
        build_float32, x, replicas=(2,), batch_sizes=(5,), in_process=True
    )
    assert report.verdict == ("equivalent" if factor == 1 else "differs")
    assert report.precision == "float32"
    assert report.notes[0] == "Computed in float32: its weights are float32."


def test_uneven_splits_of_a_loop_for_full_batches_are_listed():
    report = check_loop_equivalence(
        wrong_loops.MeanOfMeans,
        right_loops.examples(),
        replicas=(2,),
        batch_sizes=(4, 5),
        full_batches=True,
        in_process=True,
    )
    assert report.verdict == "equivalent"
    assert [str(split) for split in report.refused] == ["2 replicas (3 + 2 rows)"]
    assert report.notes == ()


def fail_without_rows(strategy, global_batch_size):
    loop = right_loops.Plain(strategy, global_batch_size)

    def replica_step(batch):
        if batch["x"].shape[0] == 0:
            raise ValueError("no rows")
        return right_loops.Plain.replica_step(loop, batch)

    loop.replica_step = replica_step
    return loop


def test_an_exception_on_a_split_is_a_failure_with_its_line():
    report = check_loop_equivalence(
        fail_without_rows, right_loops.examples(), replicas=(2,), batch_sizes=(1,), in_process=True
    )
    assert report.verdict == "differs"
    message = r"fail_without_rows: fails on 2 replicas \(1 \+ 0 rows\): .*: ValueError: no rows"
    assert re.match(message, report.failure())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(batches=[]), "batches is empty"),
        (dict(batches={"x": np.zeros([8, 4]), "label": np.zeros(7)}), "the same number of rows"),
        (dict(batches=np.zeros([6, 4])), "have 6 examples in total, but the comparison requires 8"),
        (dict(batches=np.zeros([8, 4]), mask="mask"), "give batches as a dict"),
        (
            dict(batches=np.zeros([8, 4]), full_batches=True, batch_sizes=(5,)),
            r"full_batches=True excludes all splits of batch_sizes=\(5,\) on 2 or 4 replicas",
        ),
    ],
)
def test_unusable_batches_are_an_error(arguments, message):
    with pytest.raises(UsageError, match=message):
        check_loop_equivalence(right_loops.Plain, **arguments)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda *_: 3, r"build returned int, but must return a ctl\.testing\.Loop"),
        (lambda *_: Loop(print, [3]), "contains int, which has no variables"),
        (lambda *_: Loop(lambda batch: 0.0, []), "contain no trainable variable"),
    ],
)
def test_what_is_no_loop_is_an_error(build, message):
    with pytest.raises(UsageError, match=message):
        check_loop_equivalence(build, np.zeros([8, 4]), in_process=True)


@pytest.mark.slow
def test_loop_that_cannot_be_pickled_is_compared_in_this_process_only():
    build = lambda strategy, size: right_loops.Plain(strategy, size)  # noqa: E731
    arguments = dict(replicas=(2,), batch_sizes=(4,), steps=1)
    with pytest.raises(UsageError, match=r"or call ctl\.testing\.split_cpu\(2\) in conftest\.py"):
        check_loop_equivalence(build, right_loops.examples(), in_process=False, **arguments)
    assert check_loop_equivalence(build, right_loops.examples(), **arguments).equivalent


@pytest.mark.slow
@pytest.mark.long
def test_a_loop_is_compared_in_a_new_process():
    report = assert_loop_equivalent(
        right_loops.Plain,
        right_loops.examples(),
        replicas=(2,),
        batch_sizes=(5,),
        in_process=False,
    )
    assert report.verdict == "equivalent"
