"""Users' code with layers of Keras 3 is right on every split of a batch, or is rejected in one line."""

import pytest

import ctl
from tests.users_code.keras3 import ROWS
from tests.users_code.running import QUICK, assert_right, train


# tests/end_to_end/users_code_test.py has the same forms with layers of tf_keras.
@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.long if i % 6 else [], id=row.name)
        for i, row in enumerate(ROWS)
    ],
)
def test_case_is_right_or_rejected_in_one_line(row):
    if row.message is None:
        assert_right(row, row.original, QUICK)
    else:
        with pytest.raises(ctl.UsageError) as raised:
            train(row.original, QUICK)
        message = str(raised.value)
        assert all(part in message for part in row.message) and "\n" not in message, message
    if row.rewritten:
        assert_right(row, row.rewritten, QUICK)
