"""The compiler's process, and its environment, which uv makes from the pins."""

import re
import sys

import pytest

from ctl.errors import Failure, UsageError
from ctl.modes.aot_compile import compiler_process, slices
from ctl.modes.aot_compile.compiler_process import Compiled

V5E = slices.find_slice("v5e:2x2")


def compile_once():
    return compiler_process.compile_once(b"hlo", V5E, effort=compiler_process.QUICK)


def test_the_request_has_the_slice_and_no_other_variables(replace_compiler, monkeypatch):
    monkeypatch.setenv("TPU_NAME", "a-tpu")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    replace_compiler("""
import json, os, sys
request = json.load(open(sys.argv[1]))
assert (request["topology"], request["cores"], request["effort"]) == ("v5e:2x2", 4, -1.0)
assert open(request["hlo"], "rb").read() == b"hlo" and request["host_chips"] == [2, 2, 1]
assert not {"TPU_NAME", "PYTHONPATH"} & set(os.environ)
assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"
print(json.dumps({"peak_bytes": 7}))
""")
    assert compile_once() == Compiled(peak_bytes=7)


def test_a_compiler_that_takes_too_long_is_stopped(replace_compiler, monkeypatch):
    monkeypatch.setattr(compiler_process, "_MAX_SECONDS", 0.3)
    replace_compiler("import time; time.sleep(60)")
    assert compile_once().error == "the compiler was stopped after 0.3 s, its limit"


def test_a_compiler_that_crashes_is_reported_with_its_last_message(replace_compiler):
    replace_compiler("import sys; sys.exit('libtpu is broken')")
    assert compile_once().error == "the compiler ended with exit code 1: libtpu is broken"


@pytest.mark.parametrize(
    "message",
    [
        "on HBM, the total memory required for HLO temporaries (22.50G) exceeds available HBM (15G).",
        "in memory space hbm. Used 22.50G of 15.75G hbm. Exceeded hbm capacity by 6.75G.",
    ],
)
def test_out_of_memory_is_recognized_with_the_memory_needed(replace_compiler, message):
    answer = {"error": f"RESOURCE_EXHAUSTED: Ran out of memory {message}"}
    replace_compiler(f"import json; print(json.dumps({answer}))")
    compiled = compile_once()
    assert compiled.out_of_memory and compiled.peak_bytes == int(22.5 * 2**30)


@pytest.mark.parametrize(
    ("quick", "effort"),
    [
        ({"peak_bytes": V5E.hbm_bytes // 2}, compiler_process.QUICK),
        ({"error": "unimplemented"}, compiler_process.QUICK),
        ({"peak_bytes": int(V5E.hbm_bytes * 0.9)}, compiler_process.DEFAULT),
        ({"error": "RESOURCE_EXHAUSTED: Ran out of memory"}, compiler_process.DEFAULT),
    ],
)
def test_near_the_limit_the_result_of_the_default_effort_is_used(replace_compiler, quick, effort):
    replace_compiler(f"""import json, sys
effort = json.load(open(sys.argv[1]))["effort"]
quick, default = {quick | {"seconds": 2.0}}, {{"peak_bytes": 7, "seconds": 3.0}}
print(json.dumps(quick if effort == {compiler_process.QUICK} else default))
""")
    compiled = compiler_process.compile_program(b"", V5E)
    assert (compiled.effort, compiled.seconds) == (effort, 5.0 if effort + 1 else 2.0)
    assert compiled.peak_bytes == (7 if effort + 1 else quick.get("peak_bytes", 0))


FAKE_UV = """#!/bin/sh
cd {folder}
echo "$@" >> log
for argument; do [ "$argument" = --offline ] && offline=yes; done
[ -n "$offline" ] && [ ! -e cached ] && exit 2
[ -e broken ] && {{ echo "no route to the index" >&2; exit 2; }}
touch cached
"""


@pytest.fixture
def uv(tmp_path, monkeypatch):
    """The folder of a script in place of uv, which logs its arguments, and whose cache is empty."""
    compiler_process.find_python.cache_clear()
    path = tmp_path / "uv"
    path.write_text(FAKE_UV.format(folder=tmp_path))
    path.chmod(0o755)
    monkeypatch.setenv("UV", str(path))
    yield tmp_path
    compiler_process.find_python.cache_clear()


def test_every_pin_is_one_exact_version():
    lines = compiler_process.PINS.read_text().replace("\\\n", "").splitlines()
    pins = dict(line.split("==", 1) for line in lines if not line.startswith("#"))
    hashes = [re.findall("--hash=sha256:[0-9a-f]{64}(?= |$)", pin) for pin in pins.values()]
    assert {len(each) for each in hashes} == {1, 4}  # one wheel, or one per version of Python
    pins = {name: pin.split()[0] for name, pin in pins.items()}
    assert {"jax", "jaxlib", "libtpu"} <= set(pins)
    assert pins["jax"] == pins["jaxlib"]
    assert all(version[0].isdigit() for version in pins.values())


def test_packages_are_downloaded_once(uv, capsys):
    command = compiler_process.find_python()
    assert "--offline" in command and str(compiler_process.PINS) in command
    assert "once, about 300 MB" in capsys.readouterr().out
    compiler_process.find_python.cache_clear()  # as another process
    assert compiler_process.find_python() == command
    lines = (uv / "log").read_text().splitlines()
    assert ["--offline" in line for line in lines] == [True, False, True, True]
    assert ["--require-hashes" in line for line in lines] == [False, True, False, False]
    assert not capsys.readouterr().out


def test_packages_that_cannot_be_downloaded_are_reported(uv):
    (uv / "broken").touch()
    with pytest.raises(Failure, match=r"uv failed \(no route to the index\)"):
        compiler_process.find_python()


def test_missing_uv_is_reported(uv, monkeypatch):
    monkeypatch.delenv("UV")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/none/python")
    with pytest.raises(Failure, match="uv is missing"):
        compiler_process.find_python()


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_a_machine_without_libtpu_is_rejected(uv, monkeypatch, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(UsageError, match="Linux on x86-64"):
        compiler_process.find_python()
