"""The compiler's process: its limits, its answers, and when a program is compiled twice."""

import dataclasses
import pathlib
import sys

import pytest

from ctl.errors import Failure
from ctl.modes.aot_compile import compiler_process, slices
from ctl.modes.aot_compile.compiler_process import Compiled, Limits

V5E = slices.find_slice("v5e:2x2")
PYTHON = pathlib.Path(sys.executable)


@pytest.fixture
def replace_compiler(tmp_path, monkeypatch):
    """Replaces compiler.py by a program of the test."""

    def replace(text):
        path = tmp_path / "compiler.py"
        path.write_text(text)
        monkeypatch.setattr(compiler_process, "_COMPILER", path)

    return replace


def compile_once(**limits):
    effort = compiler_process.QUICK
    return compiler_process.compile_once(b"hlo", V5E, PYTHON, Limits(**limits), effort=effort)


def test_the_request_describes_the_slice(replace_compiler):
    replace_compiler(
        "import json, sys; r = json.load(open(sys.argv[1]));"
        "good = r['topology'] == 'v5e:2x2' and r['cores'] == 4 and r['effort'] == -1.0;"
        "good = good and open(r['hlo'], 'rb').read() == b'hlo' and r['host_chips'] == [2, 2, 1];"
        "print(json.dumps({'peak_bytes': 7 if good else 0}))"
    )
    assert compile_once() == Compiled(peak_bytes=7)


def test_the_compiler_does_not_inherit_the_environment(replace_compiler, monkeypatch):
    monkeypatch.setenv("TPU_NAME", "a-tpu")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    replace_compiler(
        "import json, os; e = os.environ;"
        "n = len({'TPU_NAME', 'PYTHONPATH'} & set(e)) + (e['TPU_SKIP_MDS_QUERY'] != '1');"
        "print(json.dumps({'all_reduces': n}))"
    )
    assert compile_once().all_reduces == 0


def test_a_compiler_that_takes_too_long_is_stopped(replace_compiler):
    replace_compiler("import time; time.sleep(60)")
    assert compile_once(seconds=0.3).error == "the compiler was stopped after 0.3 s, its limit"


def test_a_compiler_that_needs_too_much_memory_is_stopped(replace_compiler):
    replace_compiler("x = b'1' * 2**28; import time; time.sleep(60)")
    assert "0.125 GiB of memory" in compile_once(bytes=2**27).error


def test_a_compiler_that_crashes_is_reported_with_its_last_message(replace_compiler):
    replace_compiler("import sys; sys.exit('libtpu is broken')")
    assert compile_once().error == "the compiler ended with exit code 1: libtpu is broken"


def test_an_environment_without_the_compilers_packages_is_a_failure_by_name():
    # The real compiler.py, in an environment without jax.
    assert compiler_process._COMPILER.name == "compiler.py"
    with pytest.raises(Failure, match="No module named 'jax'"):
        compile_once()


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
        "(22.50G) exceeds available HBM (15.75G).",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 22.50G of 15.75G hbm. Exceeded hbm capacity by 6.75G.",
    ],
)
def test_out_of_memory_is_recognized_with_the_memory_needed(replace_compiler, message):
    answer = f"{{'error': {message!r}, 'kind': 'XlaRuntimeError'}}"
    replace_compiler(f"import json; print(json.dumps({answer}))")
    compiled = compile_once()
    assert compiled.out_of_memory
    assert compiled.peak_bytes == int(22.5 * 2**30)


class FakeCompiler:
    """Returns a fixed result for each effort, and records the efforts."""

    def __init__(self, quick, slow):
        self.results = {compiler_process.QUICK: quick, compiler_process.DEFAULT: slow}
        self.efforts = []

    def __call__(self, hlo, slice_, python, limits, *, effort):
        self.efforts.append(effort)
        return dataclasses.replace(self.results[effort], effort=effort, seconds=2.0)


def compile_program(monkeypatch, quick, slow):
    """The result of `compile_program`, and the efforts that it used."""
    fake = FakeCompiler(quick, slow)
    monkeypatch.setattr(compiler_process, "compile_once", fake)
    return compiler_process.compile_program(b"", V5E, PYTHON), fake.efforts


FITS = Compiled(peak_bytes=V5E.hbm_bytes // 2)
NEAR_LIMIT = Compiled(peak_bytes=int(V5E.hbm_bytes * 0.9))
OUT_OF_MEMORY = Compiled(error="no memory", out_of_memory=True)


def test_far_from_the_limit_the_quick_result_is_used(monkeypatch):
    compiled, efforts = compile_program(monkeypatch, FITS, OUT_OF_MEMORY)
    assert efforts == [compiler_process.QUICK]
    assert compiled.peak_bytes == FITS.peak_bytes


@pytest.mark.parametrize("quick", [NEAR_LIMIT, OUT_OF_MEMORY])
def test_near_the_limit_the_result_of_the_default_effort_is_used(monkeypatch, quick):
    compiled, efforts = compile_program(monkeypatch, quick, FITS)
    assert efforts == [compiler_process.QUICK, compiler_process.DEFAULT]
    assert not compiled.error and compiled.effort == compiler_process.DEFAULT
    assert compiled.seconds == 4.0


def test_an_error_other_than_out_of_memory_is_not_tried_twice(monkeypatch):
    compiled, efforts = compile_program(monkeypatch, Compiled(error="unimplemented"), FITS)
    assert efforts == [compiler_process.QUICK]
    assert compiled.error
