"""The table of what ctl replaces is complete, and its names exist."""

import json

import pytest

from ctl.keras import replaced
from tests.support import child


@pytest.mark.slow  # a process that has not replaced anything
def test_trainers_and_steps_replace_exactly_what_the_table_lists():
    done = child.run(["-m", "tests.keras.building"], fresh=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "by an import": [],
        "not listed": [],
        "not replaced": [],
        "replaced": sum(len(row.names) for row in replaced.REPLACED),
        "same names": True,
        "pickled": True,
    }
