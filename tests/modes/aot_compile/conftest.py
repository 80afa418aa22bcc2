"""Fixtures of the tests of --mode=aot_compile."""

import pytest

from ctl.modes.aot_compile import programs
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


@pytest.fixture
def all_reduce_shapes():
    """The shapes of the all-reduces in a trainer's exported train step."""

    def export_and_list(trainer):
        programs.export_train_step(trainer)
        traced = trainer.strategy.traced[0]
        graph = traced.function.get_concrete_function(*traced.specs).graph
        operations = graph.get_operations()
        return [op.inputs[0].shape for op in operations if op.type == "XlaAllReduce"]

    return export_and_list
