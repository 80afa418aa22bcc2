"""The table of what ctl replaces is complete, and its names exist."""

import json
import pickle

import pytest
import tensorflow as tf

from ctl.private import replaced
from tests.support import child


@pytest.mark.slow  # a process that has not replaced anything
def test_trainers_and_steps_replace_exactly_what_the_table_lists():
    done = child.run(["-m", "tests.private.building"], fresh=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "by an import": [],
        "not listed": [],
        "not replaced": [],
        "replaced": len(replaced.describe()),
        "same names": True,
        "pickled": True,
    }


@pytest.mark.parametrize("function", [tf.nn.gelu, tf.nn.max_pool2d, tf.compat.v1.nn.max_pool])
def test_a_function_of_tensorflow_stays_the_same_object(function):
    assert pickle.loads(pickle.dumps(function)) is function
    (cell,) = replaced._cells(function)
    assert cell.cell_contents.__wrapped__.__name__ == function.__name__
