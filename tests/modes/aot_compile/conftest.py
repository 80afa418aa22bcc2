"""Fixtures of the tests of --mode=aot_compile."""

import pytest

from ctl.modes.aot_compile.strategy import SliceStrategy
from tests.support import reference_model

BATCH = 8


@pytest.fixture
def make_trainer():
    """Makes a ReferenceTrainer for a slice: make_trainer(replicas, **options)."""

    def make(replicas, **options):
        options.setdefault("precision", "float32")  # the most precise dtype that a TPU computes in
        return reference_model.make_trainer(SliceStrategy(replicas), BATCH, **options)

    return make
