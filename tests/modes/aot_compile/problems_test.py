"""Planted problems are told in the person's terms: what, and on which line of theirs."""

import pathlib

import pytest
import tensorflow as tf

from ctl.modes.aot_compile import compiling, environment, export, slices
from ctl.modes.aot_compile.compiling import Bounds
from ctl.modes.aot_compile.problems import Unfit
from ctl.modes.aot_compile.strategy import SliceStrategy
from tests import tiny
from tests.modes.aot_compile import planted

SOURCE = pathlib.Path(planted.__file__)
V5E = slices.find("v5e:2x2")


def made(cls):
    return tiny.trainer(SliceStrategy(V5E.cores), planted.BATCH, cls=cls, precision="float32")


def line_of(name):
    lines = SOURCE.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.endswith(f"planted: {name}"))
    return f"planted.py:{number}"


def refused(name, trainer=None):
    with pytest.raises(Unfit) as caught:
        export.train_step(trainer or made(planted.trainer_class(name)))
    return caught.value.problems


CAUGHT = {
    "py_function": "EagerPyFunc, which calls back into Python",
    "string": "AsString, which makes a string",
    "print": "which prints on the host",
    "image": "which decodes an image",
    "sized": "a size that the data decide",
    "variable": "makes a variable in every step",
    "ragged": "rows of different lengths",
    "branch": "EagerPyFunc",
}


@pytest.mark.parametrize("name", CAUGHT)
def test_a_problem_is_told_with_its_line(name):
    told = refused(name)
    assert any(CAUGHT[name] in p.what and p.where.endswith(line_of(name)) for p in told), told
    assert all(p.fatal for p in told)
    assert len({p.what for p in told}) == len(told)  # not again for the gradient


def test_a_summary_in_the_step_is_told_with_its_line(tmp_path):
    trainer = made(planted.trainer_class("summary"))
    trainer.writer = tf.summary.create_file_writer(str(tmp_path))
    told = refused("summary", trainer)
    assert any("summary on the host" in p.what for p in told)
    assert any(p.where.endswith(line_of("summary")) for p in told)


def test_a_batch_of_unknown_size_is_told_with_the_tensors_name():
    told = refused("", made(planted.UnknownBatch))
    assert len(told) == len(tiny.examples())
    assert any(p.what.startswith("label of the batch has the shape (None,)") for p in told)


@pytest.mark.parametrize(
    ("name", "says"), [("masked", "size depends on the data"), ("double", "float64")]
)
def test_what_compiles_and_may_be_slow_is_a_warning_with_its_line(name, says):
    warnings = export.train_step(made(planted.trainer_class(name))).warnings
    mine = [w for w in warnings if says in w.what and w.where.endswith(line_of(name))]
    assert len(mine) == 1 and not mine[0].fatal


def test_a_right_step_has_nothing_to_tell():
    assert export.train_step(made(tiny.TinyTrainer)).warnings == []


@pytest.mark.slow
def test_a_group_of_too_few_replicas_is_refused_by_the_compiler():
    hlo = export.train_step(made(planted.trainer_class("group"))).hlo
    found = compiling.once(hlo, V5E, environment.python(), Bounds(), effort=compiling.QUICK)
    assert found.error and not found.out_of_memory
    assert "replica" in found.error.lower()


@pytest.mark.slow
def test_too_large_a_step_is_refused_by_the_compiler_at_both_efforts():
    hlo = export.train_step(made(planted.TooLarge)).hlo
    found = compiling.compile_for(hlo, V5E, environment.python())
    assert found.out_of_memory
    assert found.peak_bytes > V5E.hbm_bytes
    assert found.effort == compiling.DEFAULT
