"""Planted problems are reported with the line of the user's own code."""

import inspect

import pytest
import tensorflow as tf

from ctl.modes.aot_compile import compiler_process, programs, slices
from ctl.modes.aot_compile.problems import NotExportable, explain_export_error
from ctl.modes.aot_compile.strategy import SliceStrategy
from tests.modes.aot_compile import planted
from tests.support import reference_model

V5E = slices.find_slice("v5e:2x2")


def make_trainer(cls):
    # The planted lines would be rejected before the export, as what depends on the split.
    return reference_model.make_trainer(
        SliceStrategy(V5E.cores),
        planted.BATCH,
        cls=cls,
        precision="float32",
        allow_unkeyed_random=True,
        allow_row_coupling=True,
    )


def line_of(change):
    lines, first = inspect.getsourcelines(change)
    (index,) = (i for i, line in enumerate(lines) if line.endswith("# planted\n"))
    return f"planted.py:{first + index}"


def find_problems(trainer):
    """The problems for which the export of the trainer's step is rejected."""
    with pytest.raises(NotExportable) as caught:
        programs.export_train_step(trainer)
    return caught.value.problems


FATAL = {
    planted.print_loss: "which prints on the host",
    planted.sized: "a size that depends on the data",
    planted.variable: "makes a variable in every step",
    planted.summary: "summary on the host",
    planted.callback_in_branch: "EagerPyFunc, which calls back into Python",
}


@pytest.mark.parametrize("change", FATAL)
def test_a_problem_is_reported_with_its_line(change, tmp_path):
    trainer = make_trainer(planted.in_loss(change))
    trainer.writer = tf.summary.create_file_writer(str(tmp_path))
    problems = find_problems(trainer)
    wanted = (FATAL[change], line_of(change))
    assert any(wanted[0] in p.what and p.where.endswith(wanted[1]) for p in problems), problems
    assert all(p.fatal for p in problems)
    assert len({p.what for p in problems}) == len(problems)  # not again for the gradient


def test_a_batch_of_unknown_size_is_reported_with_the_tensors_name():
    problems = find_problems(make_trainer(planted.UnknownBatch))
    assert len(problems) == len(reference_model.examples())
    assert any(p.what.startswith("label of the batch has the shape (None,)") for p in problems)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (planted.masked, "the size of Where depends on the data"),
        pytest.param(planted.double, "float64", marks=pytest.mark.slow),
    ],
)
def test_an_operation_that_may_be_slow_is_a_warning_with_its_line(change, message):
    warnings = programs.export_train_step(make_trainer(planted.in_loss(change))).warnings
    matching = [w for w in warnings if message in w.what and w.where.endswith(line_of(change))]
    assert len(matching) == 1 and not matching[0].fatal


def test_a_correct_step_has_no_warnings():
    assert programs.export_train_step(make_trainer(reference_model.ReferenceTrainer)).warnings == []


@pytest.mark.slow
@pytest.mark.long
def test_a_collective_over_too_few_replicas_is_rejected_by_the_compiler():
    hlo = programs.export_train_step(make_trainer(planted.in_loss(planted.group))).hlo
    compiled = compiler_process.compile_once(hlo, V5E, effort=compiler_process.QUICK)
    assert compiled.error and not compiled.out_of_memory
    assert "replica" in compiled.error.lower()


@pytest.mark.long
@pytest.mark.slow
def test_a_step_that_is_too_large_is_rejected_by_the_compiler_at_both_efforts():
    hlo = programs.export_train_step(make_trainer(planted.TooLarge)).hlo
    compiled = compiler_process.compile_program(hlo, V5E)
    assert compiled.out_of_memory
    assert compiled.peak_bytes > V5E.hbm_bytes
    assert compiled.effort == compiler_process.DEFAULT


def test_loop_without_a_bound_is_reported_with_what_to_pass():
    error = ValueError("XLA compilation requires a fixed tensor list size. Set the max number")
    (problem,) = explain_export_error(error, tf.Graph())
    assert "pass maximum_iterations" in str(problem) and "runtime.xla" not in str(problem)
