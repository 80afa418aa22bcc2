"""The page of rules about which options may be combined."""

from ctl.configs import keys, matrix
from ctl.replica.arithmetic import precision
from tests import child


def test_docs_matrix_is_current():
    assert (child.ROOT / "docs/matrix.md").read_text() == matrix.matrix()


def test_axes_are_the_values_of_the_options():
    assert set(matrix.AXES["precision"]) == set(precision.PRECISIONS)
    assert {*matrix.AXES["xla"], "auto"} == set(keys.XLA_MODES)
