"""assert_replica_equivalent passes right trainers; diagnosis/rules_test.py has those with mistakes."""

import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.errors import UsageError
from ctl.testing import assert_replica_equivalent, check_replica_equivalence, equivalence
from ctl.testing.splits import Split
from ctl.testing.subjects.trainer_subject import TrainerSubject
from tests.support import child
from tests.testing import gallery, mistakes


class ReducedTwice(mistakes.ReducedTwice, gallery.ByHand):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls", [gallery.Right, gallery.Dropping, gallery.Normalized, gallery.Adversarial]
)
def test_right_trainers_pass(cls):
    """Accumulation is compared of one trainer; of all, and by hand, in the thorough comparison."""
    accumulation = (1, 2) if cls is gallery.Right else (1,)
    report = gallery.check(cls, 5, replicas=(1, 2), accumulation=accumulation)
    assert report.equivalent and report.precision == "float64", report.failure()
    assert {(s.replicas, s.micro_batches) for s in report.compared} >= {(2, 1)}


def test_graphs_of_a_comparison_are_not_optimized_and_later_ones_are(request):
    optimizer = tf.config.optimizer
    before = optimizer.get_experimental_options()
    request.addfinalizer(lambda: optimizer.set_experimental_options(before))
    optimizer.set_experimental_options({"disable_meta_optimizer": False})
    is_disabled = []

    def start(split):
        options = optimizer.get_experimental_options()
        is_disabled.append(options["disable_meta_optimizer"])
        raise UsageError("rejected")

    attempts = (("float64", True),)
    subject = types.SimpleNamespace(name="loop", steps=1, start=start, attempts=attempts)
    subject.cast = lambda precision, examples: subject
    with pytest.raises(UsageError, match="rejected"):
        equivalence.run(subject, [Split(2, 2)])
    assert is_disabled == [True]
    assert not optimizer.get_experimental_options()["disable_meta_optimizer"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("cls", gallery.RIGHT)
def test_right_trainers_pass_the_thorough_comparison(cls):
    assert_replica_equivalent(cls, gallery.examples(), thorough=True, in_process=True)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_no_seed_gives_a_false_alarm(seed):
    cls, options = gallery.RIGHT[seed % len(gallery.RIGHT)], ctl.TrainerOptions(seed=seed)
    report = gallery.check(cls, 5, seed=seed, replicas=(1, 3), options=options)
    assert report.equivalent, report.failure()


@pytest.mark.slow
def test_failure_is_an_error_with_the_report_of_a_function_and_a_list_of_batches():
    replicas = []

    def make_trainer(**arguments):
        replicas.append(arguments["strategy"].num_replicas_in_sync)
        return ReducedTwice(**arguments)

    rows = gallery.examples()
    batches = [{name: values[i : i + 4] for name, values in rows.items()} for i in (0, 4, 8)]
    options = dict(replicas=(2,), accumulation=(1,), batch_sizes=(5,), steps=1, in_process=True)
    with pytest.raises(AssertionError, match=r"make_trainer: update of .*: 2 times the value on"):
        assert_replica_equivalent(make_trainer, batches, **options)
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
    run = child.run(["-c", CHANGED_STATE], fork=True)
    assert run.returncode == 0, run.stderr
    assert "Right is right" in run.stdout
    assert "2 times the value on one replica" in run.stdout


def test_trainer_that_cannot_be_pickled_is_an_error():
    class Local(gallery.Right):
        pass

    message = r"cannot be pickled .* top level of a module, or call ctl\.testing\.split_cpu\(4\) in"
    with pytest.raises(UsageError, match=message):
        check_replica_equivalence(Local, gallery.examples(), in_process=False)


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


@pytest.mark.slow
def test_float32_in_a_model_is_not_a_false_alarm():
    report = gallery.check(CastsToFloat32, 5, replicas=(2,), accumulation=(1, 2))
    assert report.equivalent and report.precision == "float64", report.failure()


class MeanInFloat32(gallery.ByHand):
    """Computes a factor of the losses in float32, whose sums depend on the order of the rows."""

    def share_of_loss(self, batch, outputs):
        values = tf.cast(batch["x"][:, 0], tf.float32) ** 2
        total = gallery.all_reduce(gallery.SUM, tf.reduce_sum(self.masked(batch, values)))
        loss = super().share_of_loss(batch, outputs)
        return loss * tf.cast(total, loss.dtype)


class WrongBesideFloat32(mistakes.ReducedTwice, MeanInFloat32):
    pass


@pytest.mark.slow
def test_parts_in_float32_are_named_and_compared_with_its_tolerance():
    report = equivalence.run(make_subject(MeanInFloat32), [Split(7, replicas=4)])
    assert report.equivalent, report.failure()
    assert "equivalence_test.py:" in report.why and "computed in float32" in report.why
    wrong = equivalence.run(make_subject(WrongBesideFloat32), [UNEVEN])
    assert "summed over the replicas twice" in wrong.cause
    assert "equivalence_test.py:" in wrong.failure()


UNEVEN = Split(5, replicas=2)


def make_subject(cls=gallery.Right, *, examples=None, optimizer=None, steps=2):
    return TrainerSubject(cls, examples or gallery.examples(), steps, optimizer=optimizer)


class PerReplicaRate(tf_keras.optimizers.SGD):
    """An optimizer that depends on the number of replicas."""

    def apply_gradients(self, pairs, **arguments):
        replicas = len(tf.distribute.get_strategy().extended.worker_devices)
        super().apply_gradients([(g / replicas, v) for g, v in pairs], **arguments)


@pytest.mark.slow
def test_users_optimizer_is_compared_in_addition_to_plain_sgd():
    # diagnosis/sharding_test.py has an optimizer that passes.
    report = equivalence.run(make_subject(optimizer=lambda: PerReplicaRate(0.1), steps=1), [UNEVEN])
    message = "1/2 times the value on one replica. There was no difference under plain SGD"
    assert message in report.failure()


@pytest.mark.slow
def test_rejected_splits_are_reported_and_are_not_failures():
    splits = [UNEVEN, Split(5, replicas=2, micro_batches=2)]
    report = equivalence.run(make_subject(gallery.Normalized, steps=1), splits)
    assert report.equivalent
    assert report.compared == (UNEVEN,)
    (reason,) = report.refused.values()
    assert "micro-batch" in reason


def test_trainer_that_is_rejected_on_every_split_is_an_error():
    with pytest.raises(UsageError, match=r"ctl rejects every split: .*micro-batch"):
        equivalence.run(make_subject(gallery.Normalized), [Split(5, micro_batches=2)])


class SecondNearest(gallery.Right):
    """Compares each row with the two nearest of the global batch, of which there must be two."""

    def per_example_loss(self, batch, outputs):
        rows = ctl.replica.all_gather(outputs)
        distance = tf.reduce_sum((outputs[:, tf.newaxis] - rows) ** 2, axis=2)
        nearest = tf.math.top_k(-distance, k=2).values
        return super().per_example_loss(batch, outputs) - tf.reduce_sum(nearest, axis=1)


@pytest.mark.slow
def test_batch_of_one_row_is_not_compared_if_the_loss_requires_more():
    one_row = Split(1, replicas=2)
    report = equivalence.run(make_subject(SecondNearest, steps=1), [UNEVEN, one_row])
    assert report.equivalent and report.compared == (UNEVEN,)
    assert "a batch of one row fails on one replica too" in report.refused[one_row]
    # By itself it is an error.
    message = "input must have (at least k columns|last dimension >= k)"
    with pytest.raises(Exception, match=message):
        equivalence.run(make_subject(SecondNearest, steps=1), [one_row])


def test_loss_that_is_not_finite_cannot_be_compared():
    examples = gallery.examples()
    examples["x"][0] = np.nan
    with pytest.raises(UsageError, match=r"not finite on 1 replica .*step 0"):
        equivalence.run(make_subject(examples=examples), [UNEVEN])


def test_one_split_per_number_of_replicas_is_evaluated():
    splits = [Split(4, replicas=2), UNEVEN, Split(4, micro_batches=2), Split(4), Split(5)]
    assert equivalence._choose_evaluated(splits) == {Split(4), UNEVEN}


def test_trial_needs_split_cpus_and_no_current_strategy():
    # tests/support/process.py calls split_cpu(4).
    assert equivalence.can_run_here(4)
    assert not equivalence.can_run_here(5)
    with testing.make_strategy(2).scope():
        assert not equivalence.can_run_here(2)
