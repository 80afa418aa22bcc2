"""Functions run in real processes with their own environment."""

import json
import os
import subprocess
import time

import pytest

from ctl.errors import UsageError
from ctl.hardware.child_process import KERAS
from ctl.testing import multiprocess, run_workers

pytestmark = pytest.mark.slow


def describe_task(extra):
    config = json.loads(os.environ["TF_CONFIG"])
    workers = len(config["cluster"]["worker"])
    return config["task"]["index"], workers, extra, os.environ.get("GREETING")


def fail_on_second_worker():
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    print(f"worker {index} is running", flush=True)
    if index == 1:
        raise RuntimeError("the disk is full")
    time.sleep(60)


def exit_without_result():
    os._exit(0)


def raise_usage_error():
    raise UsageError("Choose another batch.")


def environment_at_start():
    import sys

    assert "tensorflow" not in sys.modules
    names = ("TF_CONFIG", "TF_TEST_INHERITED", "XLA_TEST_INHERITED", "CUDA_VISIBLE_DEVICES")
    names += KERAS
    return {name: os.environ.get(name) for name in names}


def test_each_worker_knows_its_task_and_returns_its_result():
    results = run_workers(describe_task, "more", workers=2, environment={"GREETING": "hello"})
    assert results == [(i, 2, "more", "hello") for i in range(2)]


def test_environment_is_set_before_tensorflow_is_imported(monkeypatch):
    monkeypatch.setattr(multiprocess, "subprocess", subprocess)  # not tests.support.fork_server
    for name in ("TF_CONFIG", "TF_TEST_INHERITED", "XLA_TEST_INHERITED", *KERAS):
        monkeypatch.setenv(name, "inherited")
    environments = [{}, {"CUDA_VISIBLE_DEVICES": "0", "TF_CONFIG": "{}"}]
    hidden, shown = multiprocess.call(environment_at_start, [], environments, timeout=60)
    unset = dict.fromkeys(("TF_CONFIG", "TF_TEST_INHERITED", "XLA_TEST_INHERITED"))
    unset |= dict.fromkeys(KERAS, "inherited")
    assert hidden == {**unset, "CUDA_VISIBLE_DEVICES": "-1"}
    assert shown == {**unset, "CUDA_VISIBLE_DEVICES": "0", "TF_CONFIG": "{}"}


def test_failure_names_the_process_and_shows_the_output_of_all():
    with pytest.raises(AssertionError) as error:
        run_workers(fail_on_second_worker, workers=2)
    lines = str(error.value).splitlines()
    assert lines[0] == "Failed: process 1 (exit code 1)."
    assert "Output of process 0 (running):" in lines
    assert "Output of process 1 (exit code 1):" in lines
    assert "  worker 1 is running" in lines
    assert "  RuntimeError: the disk is full" in lines
    assert "Timed out" not in str(error.value)


def test_process_that_exits_without_a_result_has_failed():
    with pytest.raises(AssertionError, match=r"Failed: process 0 \(exit code 0\)\."):
        run_workers(exit_without_result, workers=1)


def test_processes_that_do_not_finish_are_killed_at_the_timeout():
    message = r"^Timed out after 1 s\.\nOutput of process 0 \(running"
    with pytest.raises(AssertionError, match=message):
        run_workers(time.sleep, 60, workers=1, timeout=1)


def test_usage_error_of_a_worker_is_raised_here():
    with pytest.raises(UsageError, match="another batch"):
        run_workers(raise_usage_error, workers=1)
