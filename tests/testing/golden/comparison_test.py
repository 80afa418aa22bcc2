"""What a golden curve detects, and what it accepts."""

import dataclasses
import functools

import pytest

import ctl
from ctl.errors import UsageError
from ctl.testing.golden.assertion import compare
from ctl.testing.golden.recording import Curve, Step
from tests.testing.golden import trainers
from tests.testing.golden.trainers import curve, make, recorded

SUM = "other examples, or another order"


@functools.cache
def step_of_label():
    """The first step that uses the example whose label `OtherLabel` changes."""
    batches = [step.batch["label"] for step in recorded().steps]
    other = [step.batch["label"] for step in curve(trainers.OtherLabel).steps]
    return 1 + next(k for k in range(len(batches)) if batches[k] != other[k])


def change_environment(recording, **changes):
    return dataclasses.replace(recording, environment={**recording.environment, **changes})


@pytest.mark.slow
def test_a_second_run_has_the_same_bits():
    report = compare(curve(), recorded())
    assert report.equal and report.compares_bits


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "accumulation"), [(2, 1), (4, 2)])
def test_other_replicas_and_micro_batches_are_within_the_tolerance(replicas, accumulation):
    actual = curve(replicas=replicas, gradient_accumulation_steps=accumulation)
    report = compare(actual, recorded())
    assert report.equal, report.failure()
    assert f"replicas: 1 -> {replicas}" in report.changes
    # It is not the same by chance.
    assert [step.bits for step in actual.steps] != [step.bits for step in recorded().steps]


@pytest.mark.slow
def test_other_replicas_with_uneven_and_empty_shares_are_within_the_tolerance():
    expected = trainers.recording.record(make(batch=5), trainers.STEPS, measure_tolerance=True)
    report = compare(curve(replicas=4, batch=5), expected)
    assert report.equal, report.failure()


@pytest.mark.slow
def test_logical_shards_require_the_same_bits_on_other_replicas():
    report = compare(
        curve(replicas=2, logical_shards=2),
        curve(logical_shards=2),
    )
    assert report.equal and report.compares_bits


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_another_seed_is_detected(replicas):
    report = compare(curve(seed=1, replicas=replicas), recorded())
    assert (report.step, report.tensor) == (1, "loss")
    assert "seed: 0 -> 1" in report.changes
    assert SUM in report.failure()


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_other_label_is_detected_in_the_first_step_that_uses_it(replicas):
    report = compare(curve(trainers.OtherLabel, replicas=replicas), recorded())
    assert (report.step, report.tensor) == (step_of_label(), "loss")
    assert "In the batch label differs, but x does not." in report.failure()
    assert report.compares_bits == (replicas == 1)


def test_another_order_of_reduction_is_detected_by_its_bits():
    report = compare(curve(trainers.ReversedRows), recorded())
    assert not report.equal and report.compares_bits
    assert "within the tolerance for rounding errors: the same operations" in report.failure()
    # On another CPU it is accepted, since its bits have no meaning there.
    other = change_environment(recorded(), CPU="another")
    assert compare(curve(trainers.ReversedRows), other).equal


def test_another_library_version_is_reported_and_compared_within_the_tolerance():
    old = change_environment(recorded(), tensorflow="2.19.0", numpy="1.26.4")
    report = compare(curve(), old)
    assert report.equal and not report.compares_bits
    version = recorded().environment["tensorflow"]
    assert f"tensorflow: 2.19.0 -> {version}" in report.changes and len(report.changes) == 2


def test_another_version_of_ctl_requires_the_same_bits_and_is_noted():
    old = change_environment(recorded(), ctl="0.0.1")
    report = compare(curve(), old)
    assert report.equal and report.compares_bits
    failure = compare(curve(trainers.ReversedRows), old)
    assert not failure.equal and failure.compares_bits
    assert f"The version of ctl has changed: 0.0.1 -> {ctl.__version__}." in failure.failure()


def test_another_library_version_that_computes_something_else_is_detected():
    old = change_environment(recorded(), tensorflow="2.19.0")
    steps = list(old.steps)
    update = [1.01 * value for value in steps[3].update]
    steps[3] = dataclasses.replace(steps[3], update=update)
    report = compare(curve(), dataclasses.replace(old, steps=steps))
    assert (report.step, report.tensor) == (4, "dense/kernel:0")
    assert "since tensorflow: 2.19.0 -> " in report.failure()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"optimizer": lambda: trainers.tf_keras.optimizers.Adam(1.001e-2)}, "optimizer learning_"),
        ({"clip": ctl.Clip(global_norm=0.1)}, "optimizer.clip"),
    ],
)
def test_another_optimizer_is_detected_on_other_replicas(options, line):
    report = compare(curve(replicas=2, **options), recorded())
    assert (report.step, report.tensor) == (1, "dense/kernel:0")
    assert any(change.startswith(line) for change in report.changes)


def test_another_model_is_detected():
    report = compare(curve(trainers.Wider), recorded())
    assert (report.step, report.tensor) == (1, "dense/kernel:0")
    assert report.difference == (
        "the trainer has dense/kernel:0 [4, 7], where dense/kernel:0 [4, 5] was recorded"
    )


def test_a_file_of_fewer_steps_is_rejected():
    short = dataclasses.replace(recorded(), steps=recorded().steps[:2])
    with pytest.raises(UsageError, match="has 2 steps, but 6 are required"):
        compare(curve(), short)
    assert compare(short, recorded()).equal  # fewer steps may be compared


def test_a_recording_that_could_not_be_repeated_is_compared_within_the_tolerance():
    report = compare(curve(), dataclasses.replace(recorded(), repeatable=False))
    assert report.changes == ("two runs of the recording had different bits",)


def make_curve(*steps, cpu="a"):
    return Curve({"CPU": cpu}, True, {"w": [2]}, list(steps))


def make_step(loss=1.0, update=0.5, **values):
    return Step(
        **{
            **dict(loss=loss, update=[update], bits=["a"], other_bits="", batch={}),
            **dict(loss_tolerance=0.01, tolerance=[0.02], **values),
        }
    )


@pytest.mark.parametrize(("quantity", "bound"), [("loss", 0.01), ("update", 0.02)])
def test_each_quantity_may_differ_by_its_tolerance_and_no_more(quantity, bound):
    golden = make_curve(make_step(), cpu="b")
    value = {"loss": 1.0, "update": 0.5}[quantity]
    for factor, equal in ((0.999, True), (1.001, False)):
        step = make_step(**{quantity: value + factor * bound})
        assert compare(make_curve(step), golden).equal == equal


def test_nan_equals_nan_only():
    nan, on_another = (make_curve(make_step(loss=float("nan")), cpu=cpu) for cpu in "ab")
    assert compare(nan, nan).equal and compare(nan, on_another).equal
    report = compare(make_curve(make_step()), on_another)
    assert report.step == 1 and "the loss is 1 instead of nan" in report.difference


def test_slots_and_batches_are_compared_by_bits():
    golden = make_curve(make_step())
    assert compare(make_curve(make_step(other_bits="b")), golden).tensor.startswith("variables")
    assert compare(make_curve(make_step(batch={"x": "b"})), golden).tensor == "batch"
