"""Code of TensorFlow's and Keras' tutorials is right on every split of a batch, or is rejected.

`tests/users_code/table.py` lists the cases. A trainer is compared, in float64, with a plain loop over
the global batch in eager TensorFlow; if it draws random numbers, with itself on one replica.
"""

import numpy as np
import pytest
import tensorflow as tf

import ctl
from tests.users_code import metrics, normalization, pairs, running, state, table
from tests.users_code.examples import EXAMPLES
from tests.users_code.running import QUICK, Split, assert_right, difference, evaluate, train

EMPTY_SHARE = Split(4, batch=5)  # 2 + 2 + 1 + 0 rows
LONG_SPLITS = (
    Split(4),  # 2 + 2 + 2 + 1 rows
    Split(2, batch=8, ragged=True),  # the last batch has 2 + 1
    Split(2, micro_batches=2),
)
# They assign a variable in each forward pass.
WITH_ACCUMULATION = (normalization.SpectralNormalization, state.CountingVariable)
LONG = (pytest.mark.slow, pytest.mark.long)


def cases(rows, *, every):
    """The cases as parameters, of which all but one in `every` run before a release."""
    marks = [() if i % every == every - 1 else LONG for i in range(len(rows))]
    values = zip(rows, marks, strict=True)
    return pytest.mark.parametrize("row", [pytest.param(r, marks=m, id=r.name) for r, m in values])


@cases([row for row in table.ROWS if row.message is None], every=5)
def test_original_form_is_right(row, caplog):
    assert_right(row, row.original, QUICK)
    assert "the rows of a replica or micro-batch" not in caplog.text


@cases([row for row in table.ROWS if row.message], every=4)
def test_original_form_is_rejected_in_one_line_that_says_what_to_write(row):
    with pytest.raises(ctl.UsageError) as raised:
        train(row.original, QUICK)
    message = str(raised.value)
    assert all(part in message for part in row.message), message
    assert "\n" not in message


@pytest.mark.slow
@cases([row for row in table.ROWS if row.rewritten], every=5)
def test_rewritten_form_is_right(row):
    assert_right(row, row.rewritten, QUICK)


@pytest.mark.slow
@cases(table.ROWS, every=13)
def test_replica_without_rows_changes_nothing(row):
    check_split(row, EMPTY_SHARE)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("split", LONG_SPLITS, ids=str)
@pytest.mark.parametrize("row", table.ROWS, ids=lambda row: row.name)
def test_every_split_is_right(row, split):
    check_split(row, split)


def check_split(row, split):
    case = row.rewritten or row.original
    if row.message is not None and row.rewritten is None:
        pytest.skip("has no form that trains")
    try:
        assert_right(row, case, split)
    except ctl.UsageError as error:
        assert case not in WITH_ACCUMULATION
        # Rows of other micro-batches cannot be gathered, and a fold needs a static number of rows.
        reason = "per_row" if split.ragged else "micro_batches=1"
        assert reason in str(error)


@pytest.mark.slow
def test_kit_reports_rows_that_depend_on_other_rows_if_a_run_accepts_them():
    case, options = pairs.ContrastiveLoss, ctl.TrainerOptions(allow_row_coupling=True)
    rows = {name: EXAMPLES[name][:8] for name in case.features}
    report = ctl.testing.check_replica_equivalence(
        case, rows, replicas=(1, 2), accumulation=(1,), batch_sizes=(7,), options=options
    )
    assert "ctl.replica.all_gather" in report.headline[1]


@pytest.mark.slow
def test_metrics_are_those_of_one_batch_and_one_replica():
    case = metrics.CustomMetric
    assert difference(evaluate(case, 1, 19), evaluate(case, 2, 3)) <= 1e-10
    assert difference(train(case, Split(1)), train(case, QUICK)) <= 1e-10


def test_plain_batch_normalization_is_warned_of(caplog):
    running.build(normalization.PlainBatchNormalization, QUICK).train(tf.constant(1))
    assert "Use ctl.SyncBatchNormalization" in caplog.text


class OnlyOfPositives(pairs.Case):
    """A mean over the positive rows of a replica, of which the first batch has none."""

    def per_example_loss(self, batch, outputs):
        positive = tf.cast(batch["label"] > 0, outputs.dtype)
        losses = super().per_example_loss(batch, outputs) * positive
        return losses / tf.maximum(tf.reduce_sum(positive), 1.0)


class FromSecondStepOn(pairs.Case):
    def per_example_loss(self, batch, outputs):
        late = tf.cast(self.global_step >= 2, outputs.dtype)
        return super().per_example_loss(batch, outputs) + late * tf.reduce_mean(outputs**2)


@pytest.mark.slow
@pytest.mark.parametrize("case", [OnlyOfPositives, FromSecondStepOn])
def test_kit_rejects_losses_that_combine_rows_in_other_batches_only(case):
    rows = {"x": EXAMPLES["x"][:8], "label": np.zeros(8, np.int32)}
    with pytest.raises(ctl.UsageError, match="combines rows"):
        report = ctl.testing.check_replica_equivalence(
            case, rows, replicas=(1, 2), accumulation=(1,), batch_sizes=(4,)
        )
        raise ctl.UsageError(" ".join(report.headline))
