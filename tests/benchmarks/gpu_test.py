"""The measurements on a GPU run on a CPU too, and a part that fails hides no other."""

import importlib.util
import io
import itertools
import json
import types

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import equality, kernels, programs, speed, tables
from benchmarks.gpu.parts import PARTS, Report
import ctl


def run(path, *flags):
    code = program.main([*flags, "--out", str(path)])
    return code, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_part_has_a_function():
    assert all(callable(part.load()) for part in PARTS.values())


@pytest.mark.parametrize("measure", [speed.measure_jax, speed.measure_torch])
def test_program_of_another_framework_exists(measure, monkeypatch):
    scripts = []
    monkeypatch.setattr(speed, "_run_script", lambda *arguments: scripts.append(arguments[2]))
    measure(types.SimpleNamespace(flags=types.SimpleNamespace(jax_python="", torch_python="")))
    (script,) = scripts
    assert importlib.util.find_spec(f"benchmarks.comparisons.{script}")


@pytest.mark.slow
@pytest.mark.long
def test_part_that_exceeds_its_time_is_killed_and_reported(tmp_path, capsys, monkeypatch):
    clock = itertools.count()  # a tenth of a second between two readings, for the time of the run
    monkeypatch.setattr(program, "time", types.SimpleNamespace(monotonic=lambda: next(clock) / 10))
    code, lines = run(tmp_path / "lines", "--parts", "environment", "jax", "--seconds", "1.2")
    assert code == 1
    assert [line["part"] for line in lines] == ["environment", "environment", "jax"]
    assert "time limit of 1 s" in lines[0]["error"]
    assert "time of the run is over" in lines[2]["error"]
    assert capsys.readouterr().out == (tmp_path / "lines").read_text()


def make_report():
    """A report, and the function that returns its lines."""
    file = io.StringIO()
    report = Report(file, types.SimpleNamespace(small=True))
    return report, lambda: [json.loads(line) for line in file.getvalue().splitlines()]


def test_failure_is_a_result_and_the_next_one_follows():
    report, lines = make_report()
    with report.attempt("first"):
        raise ValueError("a line\nthe reason")
    report("second", examples_per_second=3)
    assert lines() == [
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
    report, lines = make_report()
    equality.check_dropout(report)
    assert [line.get("right", False) for line in lines()] == [right] * 2, lines()


def test_resumption_without_two_kills_is_an_error():
    assert programs._resume_verdict(kills=2, variables=3, equal=3) == {}
    assert "error" in programs._resume_verdict(kills=2, variables=3, equal=2)
    assert "1 of 2 kills" in programs._resume_verdict(kills=1, variables=3, equal=3)["error"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemm_fusion_dot_12", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3", "attention"),
        ("sm90_xmma_dgrad_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc", "convolutions"),
        ("MemcpyD2D", "elementwise operations"),
    ],
)
def test_kernels_are_sorted_by_their_names(name, kind):
    assert kernels.find_kind(name) == kind


def test_the_tables_of_the_page_are_made_from_the_lines(tmp_path):
    environment, torch = {"part": "environment"}, {"part": "torch", "examples_per_second": 1}
    step = {"part": "transformer", "name": "bfloat16, batch 64", "tokens_per_second": 900}
    lines = [
        {**environment, "name": "host", "processor": "P", "cores": 3},
        {**environment, "name": "packages", "tensorflow": "2.20.0"},
        {**environment, "name": "tensorflow", "gpus": [{"device_name": "H9"}]},
        {**step, "milliseconds_per_step": 9.0, "peak_gib": 2.5},
        {**step, "name": f"{step['name']}, kernels", "milliseconds": {"a": 1.0, "b": 5.0}},
        {**torch, "name": "torch 1, transformer, bfloat16, compiled"},
        {**torch, "name": "torch 1, transformer, bfloat16, batch 64, compiled", "peak_gib": 3},
        {"part": "torch", "error": "killed"},
    ]
    source, path = tmp_path / "lines", tmp_path / "gpu.json"
    source.write_text("\n".join(map(json.dumps, lines)))
    tables.main(str(source), str(path))
    saved = json.loads(path.read_text())
    assert saved["host"] == {"gpu": "one H9", "processor": "P", "cores": 3}
    assert saved["versions"] == {"tensorflow": "2.20.0", "torch": "1"}
    assert {name: table["rows"] for name, table in saved["tables"].items()} == {
        "speed": [[tables._ROWS[0][0], "900 tokens", "PyTorch, compiled", 1024, 0.88]],
        "memory": [["batch 64", 9.0, 2.5, 3]],
        "step": [["b", 5.0], ["a", 1.0], ["between kernels", 3.0]],
    }


@pytest.mark.slow
@pytest.mark.long
def test_parts_run_on_a_cpu(tmp_path):
    code, lines = run(tmp_path / "lines", "--small", "--seconds", "850", "--parts", *PARTS)
    assert code == 0, lines
    assert {line["part"] for line in lines} == {*PARTS}
    assert sum(line.get("right", False) for line in lines) >= 7
    assert sum("skipped" in line for line in lines) >= 2
