"""The comparison of splits: right trainers pass, and each planted mistake is named."""

import re
import resource

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.errors import UsageError
from ctl.testing import assert_replica_equivalent, check_replica_equivalence
from tests import child
from tests.testing import gallery, mistakes

SIZES = (8, 5)  # even, and uneven; on 4 replicas the last has none of 5


def named(line):
    """A message without the numbers that Keras gives layers in the order of a process."""
    return re.sub(r"(dense|batch_norm\w*?)_\d+\b", r"\1", line)


def ids(value):
    return getattr(value, "trainer", value).__name__


def some(values, step):
    """All values, most of them slow, and every other one of these long."""
    marks = {0: [], 1: [pytest.mark.slow]}
    long = [pytest.mark.slow, pytest.mark.long]
    return [
        pytest.param(value, marks=long if i % step and i % 2 else marks[min(1, i % step)])
        for i, value in enumerate(values)
    ]


@pytest.mark.parametrize("cls", some(gallery.RIGHT, 3), ids=ids)
def test_right_trainers_pass(cls):
    report = assert_replica_equivalent(
        cls, gallery.examples(), replicas=(1, 2), batch_sizes=SIZES, in_process=True
    )
    assert report.precision == "float64"
    assert {(s.batch, s.replicas) for s in report.compared} >= {(8, 2), (5, 2)}


def check(mistake, **arguments):
    with pytest.raises(AssertionError) as error:
        assert_replica_equivalent(mistake.trainer, gallery.examples(), in_process=True, **arguments)
    line = named(str(error.value).splitlines()[0])
    assert line.startswith(mistake.trainer.__name__)
    assert mistake.where in line
    assert mistake.cause in line


@pytest.mark.parametrize("mistake", some(mistakes.MISTAKES, 4), ids=ids)
def test_planted_mistakes_are_named(mistake):
    check(
        mistake,
        replicas=mistake.replicas,
        accumulation=mistake.accumulation,
        batch_sizes=SIZES,
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mistake", mistakes.MISTAKES, ids=ids)
def test_planted_mistakes_are_named_by_the_default_comparison(mistake):
    check(mistake)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("cls", gallery.RIGHT, ids=ids)
def test_right_trainers_pass_the_thorough_comparison(cls):
    assert_replica_equivalent(cls, gallery.examples(), thorough=True, in_process=True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_no_seed_gives_a_false_alarm(seed):
    cls = gallery.RIGHT[seed % len(gallery.RIGHT)]
    assert_replica_equivalent(
        cls,
        gallery.examples(seed=seed),
        replicas=(1, 3),
        accumulation=(1,),
        batch_sizes=(5,),
        options=ctl.TrainerOptions(seed=seed),
        in_process=True,
    )


def test_default_comparison_takes_what_two_cores_give_in_twenty_seconds():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = assert_replica_equivalent(gallery.Right, gallery.examples(), in_process=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert {s.replicas for s in report.compared} == {1, 2, 4}
    assert any(0 in s.shares for s in report.compared)
    assert any(s.micro_batches == 2 for s in report.compared)
    # Processor time, the import of TensorFlow included: others may be at work on this machine.
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert 1 < spent < 2 * 20


def test_a_persons_own_optimizer_is_compared_beside_plain_sgd():
    class PerReplicaRate(tf_keras.optimizers.SGD):
        def apply_gradients(self, pairs, **arguments):
            replicas = tf.distribute.get_replica_context().num_replicas_in_sync
            super().apply_gradients([(g / replicas, v) for g, v in pairs], **arguments)

    arguments = dict(replicas=(1, 2), accumulation=(1,), batch_sizes=(5,), in_process=True)
    assert_replica_equivalent(
        gallery.Right,
        gallery.examples(),
        optimizer=lambda: tf_keras.optimizers.Adam(0.01),
        **arguments,
    )
    report = check_replica_equivalence(
        gallery.Right, gallery.examples(), optimizer=lambda: PerReplicaRate(0.1), **arguments
    )
    assert "1/2 times that of one replica: under plain SGD" in report.failure()


def test_a_function_that_makes_the_trainer_and_a_list_of_batches_do():
    seen = []

    def make(**arguments):
        seen.append(arguments["strategy"].num_replicas_in_sync)
        return mistakes.ReducedTwice(**arguments)

    rows = gallery.examples()
    batches = [{name: values[i : i + 4] for name, values in rows.items()} for i in (0, 4, 8)]
    report = check_replica_equivalence(
        make, batches, replicas=(2,), accumulation=(1,), batch_sizes=(5,), in_process=True
    )
    assert set(seen) == {1, 2}
    assert "2 times that of one replica" in report.failure()


class Single(gallery.Right):
    """Computes in float32, whatever it is asked for."""

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, tf.cast(outputs, tf.float32))


class Narrow(gallery.Right):
    """Cannot be computed in float64."""

    def preprocess(self, batch):
        return {**batch, "x": tf.cast(batch["x"], tf.float32)}

    def forward(self, batch, training):
        return self.model(batch["x"], training=training) * tf.ones([], tf.float32)


@pytest.mark.parametrize(("cls", "precision"), [(Single, "float64"), (Narrow, "float32")])
def test_float32_in_a_model_is_no_false_alarm(cls, precision):
    report = assert_replica_equivalent(
        cls, gallery.examples(), replicas=(1, 2), batch_sizes=SIZES, in_process=True
    )
    assert report.precision == precision


def test_splits_that_ctl_refuses_are_told_and_not_held_against_the_trainer():
    report = assert_replica_equivalent(
        gallery.Normalized,
        gallery.examples(),
        replicas=(1, 2),
        batch_sizes=(5,),
        in_process=True,
    )
    assert {split.micro_batches for split in report.refused} == {2}
    assert all("micro-batch" in why for why in report.refused.values())


@pytest.mark.parametrize(
    ("batches", "line"),
    [
        ([], "batches is empty"),
        ([1], "no dict"),
        ({"x": np.zeros([8, 4]), "label": np.zeros(7)}, "same number"),
        (gallery.examples(6), "have 6 examples together, and the comparison wants 8"),
    ],
)
def test_batches_that_cannot_be_compared_are_told_in_a_line(batches, line):
    with pytest.raises(UsageError, match=line):
        check_replica_equivalence(gallery.Right, batches)


def test_a_loss_that_is_not_finite_cannot_be_compared():
    rows = gallery.examples()
    rows["x"][0] = np.nan
    with pytest.raises(UsageError, match="is not finite at step 0"):
        check_replica_equivalence(
            gallery.Right, rows, replicas=(1, 2), batch_sizes=(5,), in_process=True
        )


SPOILED = """\
import tensorflow as tf
import tf_keras
from ctl.testing import check_replica_equivalence
from tests.testing import gallery, mistakes

tf.config.run_functions_eagerly(True)
tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
tf_keras.backend.set_floatx("float16")
strategy = tf.distribute.OneDeviceStrategy("CPU:0")
print(tf.constant(1) + 1)
with strategy.scope():
    for cls in (gallery.Right, mistakes.ReducedTwice):
        report = check_replica_equivalence(
            cls, gallery.examples(), replicas=(1, 2), accumulation=(1,), batch_sizes=(5,))
        print(report.failure() if report.differences else f"{cls.__name__} is right")
"""


@pytest.mark.slow
def test_what_the_caller_did_to_tensorflow_does_not_matter():
    done = child.run(["-c", SPOILED])
    assert done.returncode == 0, done.stderr
    assert "Right is right" in done.stdout
    assert "2 times that of one replica" in done.stdout


def test_a_trainer_that_cannot_be_sent_to_another_process_is_told():
    class Local(gallery.Right):
        pass

    with pytest.raises(UsageError, match=r"cannot be sent .* top level of a module"):
        check_replica_equivalence(Local, gallery.examples(), in_process=False)


class Broken(gallery.Right):
    def build_model(self):
        raise RuntimeError("no such layer")


def test_what_a_child_process_said_is_in_the_message():
    with pytest.raises(AssertionError, match="no such layer"):
        check_replica_equivalence(Broken, gallery.examples(), in_process=False)
