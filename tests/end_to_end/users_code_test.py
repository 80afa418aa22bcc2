"""Code of TensorFlow's and Keras' tutorials is right on every split of a batch, or is rejected.

`tests/users_code/table.py` lists the cases. A trainer is compared, in float64, with a plain loop over
the global batch in eager TensorFlow; if it draws random numbers, with itself on one replica.
"""

import pytest

import ctl
from tests.users_code import generative, metrics, noise, normalization, state, table
from tests.users_code.coupled import COUPLED
from tests.users_code.examples import EXAMPLES
from tests.users_code.running import (
    QUICK,
    Split,
    assert_right,
    build,
    difference,
    evaluate,
    train,
    train_plainly,
)

EMPTY_SHARE = Split(4, batch=5)  # 2 + 2 + 1 + 0 rows
LONG_SPLITS = (
    Split(4),  # 2 + 2 + 2 + 1 rows
    Split(2, batch=8, ragged=True),  # the last batch has 2 + 1
    Split(2, micro_batches=2),
)
ROWS = (*table.ROWS, *COUPLED)
# They assign a variable in each forward pass, or have a fixed draw.
WITH_ACCUMULATION = (
    normalization.SpectralNormalization,
    state.CountingVariable,
    noise.FourierFeatures,
)

LONG = (pytest.mark.slow, pytest.mark.long)
# A second or more each; the default run has others of their kinds.
SLOW_CASES = (
    "masked language model", "actor critic", "recurrent dropout of Keras", "sampled softmax"
)  # fmt: skip


def cases(rows, *, every):
    """The cases as parameters, of which all but one in `every` run before a release."""
    chosen = [pytest.mark.slow if row.name in SLOW_CASES else () for row in rows]
    marks = [mark if i % every == every - 1 else LONG for i, mark in enumerate(chosen)]
    values = zip(rows, marks, strict=True)
    return pytest.mark.parametrize("row", [pytest.param(r, marks=m, id=r.name) for r, m in values])


@cases([row for row in ROWS if row.message is None], every=8)
def test_original_form_is_right(row):
    assert_right(row, row.original, QUICK)


@cases([row for row in ROWS if row.message], every=5)
def test_original_form_is_rejected_in_one_line_that_says_what_to_write(row):
    with pytest.raises(ctl.UsageError) as raised:
        train(row.original, QUICK)
    message = str(raised.value)
    assert all(part in message for part in row.message), message
    assert "\n" not in message


@cases([row for row in ROWS if row.rewritten], every=12)
def test_rewritten_form_is_right(row):
    assert_right(row, row.rewritten, QUICK)


@pytest.mark.slow
@cases(ROWS, every=12)
def test_replica_without_rows_changes_nothing(row):
    check_split(row, EMPTY_SHARE)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("split", LONG_SPLITS, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
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
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row.name == "SimCLR" else LONG, id=row.name) for row in COUPLED],
)
def test_kit_reports_rows_that_depend_on_other_rows_if_a_run_accepts_them(row):
    examples = {name: EXAMPLES[name][:8] for name in row.original.features}
    report = ctl.testing.check_replica_equivalence(
        row.original,
        examples,
        replicas=(1, 2),
        accumulation=(1,),
        batch_sizes=(7,),
        options=ctl.TrainerOptions(allow_row_coupling=True),
    )
    assert report.differences


@pytest.mark.slow
def test_one_replica_that_computes_its_batch_at_once_is_warned(caplog):
    case = COUPLED[0].original
    assert difference(train_plainly(case), train(case, Split(1))) <= 1e-10
    assert "tests/users_code/pairs.py:" in caplog.text and "all_gather" in caplog.text


@pytest.mark.parametrize(
    "case",
    [
        metrics.CustomMetric,
        pytest.param(metrics.MeanOfRows, marks=pytest.mark.slow),
        pytest.param(metrics.MonteCarloDropout, marks=pytest.mark.slow),
    ],
)
def test_evaluation_is_that_of_one_batch(case):
    assert difference(evaluate(case, 1, 19), evaluate(case, 2, 3)) <= 1e-10


@pytest.mark.parametrize(
    "case", [metrics.CustomMetric, pytest.param(metrics.MeanOfRows, marks=pytest.mark.slow)]
)
def test_training_metrics_are_those_of_one_replica(case):
    assert difference(train(case, Split(1)), train(case, QUICK)) <= 1e-10


def test_plain_batch_normalization_is_warned_of(caplog):
    build(normalization.PlainBatchNormalization, QUICK)
    assert "Use ctl.SyncBatchNormalization" in caplog.text


def test_draw_for_a_constant_batch_size_is_rejected():
    with pytest.raises(ctl.UsageError, match=r"ctl\.random\.uniform"):
        train(generative.FixedBatchDiffusion, Split(1))
