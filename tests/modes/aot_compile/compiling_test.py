"""The compiler's process: its bounds, its answers, and when it is asked again."""

import dataclasses
import pathlib
import signal
import subprocess
import sys

import pytest

from ctl.errors import Failure
from ctl.modes.aot_compile import compiling, slices
from ctl.modes.aot_compile.compiling import Bounds, Compiled

V5E = slices.find("v5e:2x2")
PYTHON = pathlib.Path(sys.executable)


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Puts a program of the test's own in the compiler's place."""

    def put(text):
        path = tmp_path / "compiler.py"
        path.write_text(text)
        monkeypatch.setattr(compiling, "_COMPILER", path)

    return put


def once(**bounds):
    return compiling.once(b"hlo", V5E, PYTHON, Bounds(**bounds), effort=compiling.QUICK)


def test_the_request_names_the_slice(compiler):
    compiler(
        "import json, sys; r = json.load(open(sys.argv[1]));"
        "good = r['topology'] == 'v5e:2x2' and r['cores'] == 4 and r['effort'] == -1.0;"
        "good = good and open(r['hlo'], 'rb').read() == b'hlo' and r['host_chips'] == [2, 2, 1];"
        "print(json.dumps({'peak_bytes': 7 if good else 0}))"
    )
    assert once() == Compiled(peak_bytes=7)


def test_it_inherits_nothing_of_the_environment(compiler, monkeypatch):
    monkeypatch.setenv("TPU_NAME", "somebodys")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    compiler(
        "import json, os; e = os.environ;"
        "n = len({'TPU_NAME', 'PYTHONPATH'} & set(e)) + (e['TPU_SKIP_MDS_QUERY'] != '1');"
        "print(json.dumps({'all_reduces': n}))"
    )
    assert once().all_reduces == 0


def test_one_that_takes_too_long_is_stopped(compiler):
    compiler("import time; time.sleep(60)")
    assert once(seconds=0.3).error == "the compiler was stopped after 0.3 s, its limit"


def test_one_that_takes_too_much_memory_is_stopped(compiler):
    compiler("x = b'1' * 2**28; import time; time.sleep(60)")
    assert "0.125 GiB of memory" in once(bytes=2**27).error


def test_one_that_ends_without_an_answer_is_told_with_its_last_words(compiler):
    compiler("import sys; sys.exit('libtpu is broken')")
    assert once().error == "the compiler ended with 1: libtpu is broken"


def test_one_whose_parent_is_killed_ends_by_itself(tmp_path):
    compiler = compiling._COMPILER.read_text().replace("parts = private_parts()", "time.sleep(60)")
    assert "time.sleep(60)" in compiler
    (tmp_path / "compiler.py").write_text(compiler)
    (tmp_path / "request.json").write_text('{"seconds": 1}')
    done = subprocess.run([PYTHON, tmp_path / "compiler.py", tmp_path / "request.json"], timeout=30)
    assert done.returncode == -signal.SIGALRM


def test_packages_without_the_private_functions_are_a_failure_by_name():
    # The real compiler, in an environment that has no jax.
    compiling_file = pathlib.Path(compiling.__file__).with_name("compiler.py")
    assert compiling_file == compiling._COMPILER
    with pytest.raises(Failure, match="No module named 'jax'"):
        once()


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
        "(22.50G) exceeds available HBM (15.75G).",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
        "Used 22.50G of 15.75G hbm. Exceeded hbm capacity by 6.75G.",
    ],
)
def test_out_of_memory_is_understood_with_what_was_needed(compiler, message):
    compiler(f"import json; print(json.dumps({{'error': {message!r}, 'kind': 'XlaRuntimeError'}}))")
    found = once()
    assert found.out_of_memory
    assert found.peak_bytes == int(22.5 * 2**30)


class Efforts:
    """Answers in the place of the compiler, by the effort."""

    def __init__(self, quick, slow):
        self.answers = {compiling.QUICK: quick, compiling.DEFAULT: slow}
        self.asked = []

    def __call__(self, hlo, slice_, python, bounds, *, effort):
        self.asked.append(effort)
        return dataclasses.replace(self.answers[effort], effort=effort, seconds=2.0)


def compiled(monkeypatch, quick, slow):
    efforts = Efforts(quick, slow)
    monkeypatch.setattr(compiling, "once", efforts)
    return compiling.compile_for(b"", V5E, PYTHON), efforts.asked


FITS = Compiled(peak_bytes=V5E.hbm_bytes // 2)
NEAR = Compiled(peak_bytes=int(V5E.hbm_bytes * 0.9))
OUT = Compiled(error="no memory", out_of_memory=True)


def test_far_from_the_limit_the_quick_answer_is_taken(monkeypatch):
    found, asked = compiled(monkeypatch, FITS, OUT)
    assert asked == [compiling.QUICK]
    assert found.peak_bytes == FITS.peak_bytes


@pytest.mark.parametrize("quick", [NEAR, OUT])
def test_near_the_limit_the_default_effort_has_the_last_word(monkeypatch, quick):
    found, asked = compiled(monkeypatch, quick, FITS)
    assert asked == [compiling.QUICK, compiling.DEFAULT]
    assert not found.error and found.effort == compiling.DEFAULT
    assert found.seconds == 4.0


def test_an_error_of_another_kind_is_not_asked_twice(monkeypatch):
    found, asked = compiled(monkeypatch, Compiled(error="unimplemented"), FITS)
    assert asked == [compiling.QUICK]
    assert found.error
