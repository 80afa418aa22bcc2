"""The measurements on a GPU run on a CPU too, and a part that fails hides no other."""

import io
import itertools
import json
import types

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import equality, programs
from benchmarks.gpu.parts import PARTS, Report
import ctl


def run(path, *flags):
    code = program.main([*flags, "--out", str(path)])
    return code, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_part_has_a_function():
    assert all(callable(part.load()) for part in PARTS.values())


@pytest.mark.slow
@pytest.mark.long
def test_part_that_exceeds_its_time_is_killed_and_reported(tmp_path, capsys, monkeypatch):
    clock = itertools.count()  # a tenth of a second between two readings, for the time of the run
    monkeypatch.setattr(program, "time", types.SimpleNamespace(monotonic=lambda: next(clock) / 10))
    code, lines = run(tmp_path / "lines", "--parts", "environment", "nccl", "--seconds", "1.2")
    assert code == 1
    assert [line["part"] for line in lines] == ["environment", "environment", "nccl"]
    assert "time limit of 1 s" in lines[0]["error"]
    assert "time of the run is over" in lines[2]["error"]
    assert capsys.readouterr().out == (tmp_path / "lines").read_text()


def test_failure_is_a_result_and_the_next_one_follows():
    file = io.StringIO()
    report = Report(file, types.SimpleNamespace(small=True, seconds=60))
    with report.attempt("first"):
        raise ValueError("a line\nthe reason")
    report("second", examples_per_second=3)
    assert [json.loads(line) for line in file.getvalue().splitlines()] == [
        {"name": "first", "error": "ValueError: the reason"},
        {"name": "second", "examples_per_second": 3},
    ]


def test_weights_that_are_not_a_number_are_wrong():
    def make_trainer(value):
        return types.SimpleNamespace(
            strategy=tf.distribute.get_strategy(),
            model=types.SimpleNamespace(variables=[tf.Variable(value), tf.Variable([1.0])]),
            optimizer=types.SimpleNamespace(variables=[]),
        )

    trainer, reference = make_trainer([1.0, np.nan]), make_trainer([1.0, 1.0])
    assert equality._largest_difference(reference, make_trainer([1.0, 1.5])) == 0.5
    assert equality._largest_difference(trainer, reference) == np.inf


@pytest.mark.parametrize(("shift", "right"), [(0.0, True), (1e-3, False)])
def test_normal_numbers_of_a_device_are_checked(shift, right, monkeypatch):
    calls = iter([0.0, shift, shift])
    normal = ctl.random.normal
    monkeypatch.setattr(ctl.random, "normal", lambda shape: normal(shape) + next(calls))
    monkeypatch.setattr(equality.devices, "KIND", "CPU")
    file = io.StringIO()
    equality.check_dropout(Report(file, types.SimpleNamespace(small=True, seconds=60)))
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [line.get("right", False) for line in lines] == [right] * 2, lines


def test_resumption_without_two_kills_is_an_error():
    assert programs._resume_verdict(kills=2, variables=3, equal=3) == {}
    assert "error" in programs._resume_verdict(kills=2, variables=3, equal=2)
    assert "1 of 2 kills" in programs._resume_verdict(kills=1, variables=3, equal=3)["error"]


@pytest.mark.slow
@pytest.mark.long
def test_parts_run_on_a_cpu(tmp_path):
    code, lines = run(tmp_path / "lines", "--small", "--seconds", "850", "--parts", *PARTS)
    assert code == 0, lines
    assert {line["part"] for line in lines} == {*PARTS}
    assert sum(line.get("right", False) for line in lines) >= 7
    assert sum("skipped" in line for line in lines) >= 2
