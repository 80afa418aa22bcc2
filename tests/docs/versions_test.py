"""The tests with other versions of TensorFlow leave its packages free."""

import sys

import pytest

from tests.support import versions


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not read TOML")
def test_pins_leave_the_packages_of_tensorflow_free():
    names = [pin.partition("==")[0] for pin in versions.pins()]
    assert "pytest" in names and not {"tensorflow-cpu", "keras", "numpy"} & set(names)
