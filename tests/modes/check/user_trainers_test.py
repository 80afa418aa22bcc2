"""--mode=check on trainers as users write them: GANs, contrastive losses, tokens, casts, exceptions.

tests/checks has the trainers that a step rejects, and tests/testing the mistakes of an update.
"""

import concurrent.futures
import types

import numpy as np
import pytest

from ctl.modes.check import checkpoint_check, data_checks, learning_checks, replica_check
from ctl.modes.check.outcome import FAIL, PASS, WARNING
from ctl.testing.diagnosis import causes
from ctl.testing.equivalence_report import Report
from ctl.testing.splits import Split
from tests.modes.check import user_trainers


def compare(factory, batch_sizes):
    """Compares splits on one and two replicas in this process, as --mode=check does in its own."""
    rows = replica_check.read_examples(factory, 8)
    config = factory.experiment.config
    return replica_check.compare_trainer(
        config, factory.config_path, rows, batch_sizes, replicas=(1, 2)
    )


def line_of(text):
    """The place of the only line of user_trainers.py that contains a text, as check prints it."""
    with open(user_trainers.__file__) as file:
        (number,) = [i for i, line in enumerate(file, 1) if text in line]
    return f"user_trainers.py:{number}: "


@pytest.mark.slow
def test_gan_without_per_example_loss_passes(make_user_factory):
    factory = make_user_factory("Gan")
    checks = (
        learning_checks.check_first_loss, data_checks.check_evaluation,
        learning_checks.check_overfitting, checkpoint_check.check_round_trip,
    )  # fmt: skip
    outcomes = [check(factory) for check in checks]
    assert {outcome.verdict for outcome in outcomes} == {PASS}, outcomes
    first_loss, evaluation, overfitting, round_trip = (each.observation for each in outcomes)
    assert "in replica_step" in first_loss
    assert evaluation == "40 of 40 examples"
    assert "in 101 steps; it need not fall with 2 optimizers" in overfitting
    # Two models with four variables each, and two Adam optimizers. The second one creates its slots in
    # the first step.
    assert "all 30 variables" in round_trip
    report = compare(factory, (5,))
    assert report.equivalent and report.precision == "float64", report.failure()


@pytest.mark.slow
def test_steps_after_the_first_do_not_diverge(make_user_factory):
    outcome = learning_checks.check_gradients(make_user_factory("Autoencoder"))
    assert outcome.verdict == PASS, outcome
    assert outcome.observation == "all 8 trainable variables of 2 models change"


def test_second_model_without_gradient_is_a_warning_that_names_it(make_user_factory):
    outcome = learning_checks.check_gradients(make_user_factory("GanWithoutDiscriminatorGradient"))
    assert outcome.verdict == WARNING, outcome
    assert "4 of 8 trainable variables do not change: discriminator: dense" in outcome.observation


@pytest.mark.slow
def test_contrastive_loss_over_the_global_batch_passes(make_user_factory):
    report = compare(make_user_factory("TwoTowers"), (5,))
    assert report.equivalent and not report.refused, report
    # Also in evaluation, whose last batch is a partial one.
    assert {split.micro_batches for split in report.compared} == {1}


def test_compression_is_reported_as_not_compared(make_user_factory):
    factory = make_user_factory("Regression", **{"runtime.all_reduce.compression": "float16"})
    compared = concurrent.futures.Future()
    compared.set_result(Report("Regression", "float64", (Split(4, 2), Split(5, 2)), {}))
    processes = types.SimpleNamespace(submit=lambda *_: compared)
    outcome = replica_check.start(factory, processes)()
    assert outcome.observation.endswith(
        "in float64, give one update; runtime.all_reduce.compression is not part of this comparison"
    )


def test_reason_for_float32_is_the_users_line(make_user_factory):
    report = compare(make_user_factory("OnlyFloat32"), (5,))
    assert report.equivalent and report.precision == "float32"
    place = line_of("tf.constant([0.5], tf.float32)")
    assert report.why.startswith("float64 fails with ") and f"{place}TypeError: " in report.why
    observation = replica_check.describe_report(report).observation
    assert ", without accumulation, in float32 with the tolerance of float32 (" in observation


@pytest.mark.slow
def test_accumulation_is_compared_if_the_config_accumulates(make_user_factory):
    factory = make_user_factory("Regression", **{"optimizer.micro_batches": 2})
    report = compare(factory, (4,))
    assert {split.micro_batches for split in report.compared} == {1, 2}
    # The examples of Regression are float32.
    assert report.equivalent and (report.precision, report.why) == ("float64", "")
    outcome = replica_check.describe_report(report)
    assert outcome.verdict == PASS and "with accumulation 2, in float64," in outcome.observation


@pytest.mark.slow
def test_step_that_fails_on_few_rows_is_compared_on_more_rows(make_user_factory):
    factory = make_user_factory("HardExamples")
    report = compare(factory, (2, 4))
    ((split, error),) = report.errors.items()
    assert (split.batch, split.replicas) == (2, 2)
    assert line_of("tf.math.top_k") + "ValueError: input must have" in error
    assert report.headline[1] == causes.PER_EXAMPLE.format(hook="per_example_loss")
    assert f"  Fails on {split}: {error}" in report.failure()
    # It is reported by itself if nothing differs.
    report = compare(factory, (2,))
    assert not report.equivalent and not report.differences
    outcome = replica_check.describe_report(report)
    assert outcome.verdict == FAIL
    assert outcome.observation.startswith("fails on 2 replicas (1 + 1 rows): ")
    assert line_of("tf.math.top_k") in outcome.observation


def test_tokens_that_are_counted_twice_are_a_warning(make_user_factory):
    outcome = learning_checks.check_first_loss(make_user_factory("TokensCountedTwice"))
    assert outcome.verdict == WARNING, outcome
    assert "which counts each token twice" in outcome.observation
    assert "the mean over the tokens of a row" in outcome.fix


def test_mean_over_tokens_with_their_number_as_weight_passes(make_user_factory):
    factory = make_user_factory("Tagger")
    assert learning_checks.check_first_loss(factory).verdict == PASS
    assert data_checks.check_evaluation(factory).verdict == PASS


@pytest.mark.slow
def test_texts_are_compared(make_user_factory):
    factory = make_user_factory("Texts", **{"optimizer.ema_decay": 0.9})
    for check in (data_checks.check_order, learning_checks.check_gradients):
        outcome = check(factory)
        assert outcome.verdict == PASS, outcome
    report = compare(factory, (5,))
    assert report.equivalent and report.precision == "float64", report.failure()


def test_batches_of_several_lengths_are_padded():
    batches = [{"x": np.ones([2, length]), "label": np.ones(2)} for length in (3, 5)]
    factory = types.SimpleNamespace(global_batch_size=2, read_batches=lambda count: batches[:count])
    rows = replica_check.read_examples(factory, 3)
    assert rows["x"].tolist() == [[1, 1, 1, 0, 0]] * 2 + [[1] * 5]
    assert rows["label"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (np.zeros(4, np.int32), [0, 1, 0, 1]),
        (np.full(4, 2.0), [2, 0, 2, 0]),
        (np.array([0, 1, 1, 1]), [0, 1, 1, 1]),
        (np.zeros((4, 2)), np.zeros((4, 2))),
    ],
)
def test_rows_of_one_label_get_another_one(label, expected):
    changed = replica_check.with_two_labels({"x": np.ones(4), "label": label})["label"]
    np.testing.assert_array_equal(changed, np.array(expected, label.dtype), strict=True)
