"""assert_replica_equivalent passes right trainers; diagnosis/rules_test.py has those with mistakes."""

import resource

import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.errors import UsageError
from ctl.testing import assert_replica_equivalent, check_replica_equivalence, trial
from tests import child
from tests.testing import gallery, mistakes


class ReducedTwice(mistakes.ReducedTwice, gallery.ByHand):
    pass


def right_trainers():
    """All right trainers; the slow tests have those that the default tests do not."""
    default = (gallery.Dropping,)  # Right is compared in trial_test.py
    return [
        pytest.param(cls, marks=[] if cls in default else [pytest.mark.slow], id=cls.__name__)
        for cls in gallery.RIGHT
    ]


@pytest.mark.parametrize("cls", right_trainers())
def test_right_trainers_pass(cls):
    report = assert_replica_equivalent(
        cls, gallery.examples(), replicas=(1, 2), batch_sizes=(5,), in_process=True
    )
    assert report.precision == "float64"
    assert {(s.replicas, s.micro_batches) for s in report.compared} >= {(2, 1)}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("cls", gallery.RIGHT)
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


@pytest.mark.slow
@pytest.mark.long
def test_default_comparison_takes_at_most_twenty_seconds_of_two_cores():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = assert_replica_equivalent(gallery.Right, gallery.examples(), in_process=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert {s.replicas for s in report.compared} == {1, 2, 4}
    assert any(0 in s.row_counts for s in report.compared)
    assert any(s.micro_batches == 2 for s in report.compared)
    # Processor time, including the import of TensorFlow: the machine may be busy with other work.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert 1 < seconds < 2 * 20


@pytest.mark.slow
def test_failure_is_an_error_with_the_report_of_a_function_and_a_list_of_batches():
    replicas = []

    def make_trainer(**arguments):
        replicas.append(arguments["strategy"].num_replicas_in_sync)
        return ReducedTwice(**arguments)

    rows = gallery.examples()
    batches = [{name: values[i : i + 4] for name, values in rows.items()} for i in (0, 4, 8)]
    with pytest.raises(
        AssertionError, match=r"make_trainer: update of .*: 2 times the value on one replica"
    ):
        assert_replica_equivalent(
            *(make_trainer, batches), replicas=(2,), accumulation=(1,), batch_sizes=(5,), steps=1,
            in_process=True,
        )  # fmt: skip
    assert set(replicas) == {1, 2}


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches is empty"),
        ([1], "not a dict of arrays"),
        ({"x": np.zeros([8, 4]), "label": np.zeros(7)}, "must have the same number of rows"),
        (gallery.examples(6), "have 6 examples in total, but the comparison requires 8"),
    ],
)
def test_unusable_batches_are_an_error(batches, message):
    with pytest.raises(UsageError, match=message):
        check_replica_equivalence(gallery.Right, batches)


CHANGED_STATE = """\
import tensorflow as tf
import tf_keras
from ctl.testing import check_replica_equivalence
from tests.testing import gallery
from tests.testing.equivalence_test import ReducedTwice

tf.config.run_functions_eagerly(True)
tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
tf_keras.backend.set_floatx("float16")
strategy = tf.distribute.OneDeviceStrategy("CPU:0")
print(tf.constant(1) + 1)
with strategy.scope():
    for cls in (gallery.Right, ReducedTwice):
        report = check_replica_equivalence(
            cls, gallery.examples(), replicas=(1, 2), accumulation=(1,), batch_sizes=(5,))
        print(report.failure() if report.differences else f"{cls.__name__} is right")
"""


@pytest.mark.slow
@pytest.mark.long
def test_global_state_of_tensorflow_does_not_matter():
    run = child.run(["-c", CHANGED_STATE])
    assert run.returncode == 0, run.stderr
    assert "Right is right" in run.stdout
    assert "2 times the value on one replica" in run.stdout


def test_trainer_that_cannot_be_pickled_is_an_error():
    class Local(gallery.Right):
        pass

    message = (
        r"cannot be pickled .* top level of a module, or call ctl\.testing\.split_cpu\(4\) in "
        r"conftest\.py, which runs the comparison in this process\."
    )
    with pytest.raises(UsageError, match=message):
        check_replica_equivalence(Local, gallery.examples(), in_process=False)
    assert trial.can_run_here(4)  # as the message says, because tests/conftest.py calls split_cpu


class Broken(gallery.Right):
    def build_model(self):
        raise RuntimeError("no such layer")


@pytest.mark.slow
def test_error_of_the_new_process_is_in_the_message():
    with pytest.raises(AssertionError, match="no such layer"):
        check_replica_equivalence(Broken, gallery.examples(), in_process=False)


class CastsToFloat32(gallery.Right):
    """Computes the loss in float32 in every precision."""

    def per_example_loss(self, batch, outputs):
        return super().per_example_loss(batch, tf.cast(outputs, tf.float32))


class OnlyFloat32(gallery.Right):
    """Cannot be computed in float64."""

    def preprocess(self, batch):
        return {**batch, "x": tf.cast(batch["x"], tf.float32)}

    def forward(self, batch, training):
        return self.model(batch["x"], training=training) * tf.ones([], tf.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "precision"),
    [pytest.param(CastsToFloat32, "float64", marks=pytest.mark.slow), (OnlyFloat32, "float32")],
)
def test_float32_in_a_model_is_not_a_false_alarm(cls, precision):
    report = assert_replica_equivalent(
        cls, gallery.examples(), replicas=(2,), batch_sizes=(5,), in_process=True
    )
    assert report.precision == precision
