"""The measurements on a GPU run on a CPU too, and a part that fails hides no other."""

import io
import json
import types

import pytest

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.parts import PARTS, Report


def run(path, *flags):
    code = program.main([*flags, "--out", str(path)])
    return code, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_part_has_a_function():
    assert all(callable(part.load()) for part in PARTS.values())


def test_part_that_exceeds_its_time_is_killed_and_reported(tmp_path, capsys):
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


@pytest.mark.slow
def test_parts_run_on_a_cpu(tmp_path):
    parts = ["environment", "mnist_float32", "equivalence", "jax", "out_of_memory", "nccl"]
    code, lines = run(tmp_path / "lines", "--small", "--parts", *parts)
    assert code == 0, lines
    assert {line["part"] for line in lines} == {*parts}
    speeds = [line for line in lines if "examples_per_second" in line]
    assert len(speeds) == 3 and all(line["examples_per_second"] > 0 for line in speeds)
    assert sum(line.get("right", False) for line in lines) == 7
    assert sum("skipped" in line for line in lines) >= 2


@pytest.mark.slow
@pytest.mark.long
def test_all_parts_run_on_a_cpu(tmp_path):
    code, lines = run(tmp_path / "lines", "--small", "--seconds", "850")
    assert code == 0, lines
    assert {line["part"] for line in lines} == {*PARTS}
