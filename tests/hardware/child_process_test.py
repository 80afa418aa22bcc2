"""Children of a process that is killed stop, and those that end normally are not disturbed."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from ctl.hardware.child_process import ChildProcess
from tests.support import child

# Saves when it is asked to stop, as a run does.
CHILD = """
import pathlib, signal, sys, time
from ctl.hardware.child_process import stop_with_parent

def stop(*_):
    with open("saved", "a") as file:
        file.write("x")
    time.sleep(0.5)
    pathlib.Path("ended").touch()
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
stop_with_parent()
pathlib.Path("running").touch()
time.sleep(60)
"""
PARENT = """
import sys, time
from ctl.hardware.child_process import ChildProcess
ChildProcess("child", [sys.executable, "child.py"], {})  # with a thread that reads the output
time.sleep(60)
"""


def wait_for(name):
    deadline = time.monotonic() + 120
    while not pathlib.Path(name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("child.py").write_text(CHILD)
    pathlib.Path("parent.py").write_text(PARENT)


def test_children_of_a_killed_process_save_and_stop(folder):
    parent = subprocess.Popen([sys.executable, "parent.py"], env=child.environment())
    wait_for("running")
    parent.kill()
    parent.wait()
    wait_for("ended")
    assert pathlib.Path("saved").read_text() == "x"  # a second signal would kill a run


def test_process_that_the_user_has_started_outlives_its_parent(folder):
    start = "subprocess.Popen([sys.executable, 'child.py'], stdout=subprocess.DEVNULL)"
    script = f"import subprocess, sys; print({start}.pid)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=child.environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    wait_for("running")
    time.sleep(0.1)
    assert not pathlib.Path("saved").exists()
    os.kill(int(done.stdout), signal.SIGTERM)
    wait_for("saved")


def test_output_exit_code_and_signals(capfd):
    program = "print('\\033[31ma\\033[0m\\n'); exit(3)"
    process = ChildProcess("a run", [sys.executable, "-c", program], {})
    process._popen.wait()
    process.stop()
    process.kill()
    colored = "\x1b[31ma\x1b[0m"
    assert capfd.readouterr().out == f"[a run] {colored}\n[a run] \n"
    assert (process.exit_code, process.line) == (3, colored)
