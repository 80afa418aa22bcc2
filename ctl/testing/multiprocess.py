"""Runs a function in separate processes and returns its results.

The module does not use concurrent.futures, whose workers import the caller's main module, and with it
TensorFlow, before their environment can be set, and do not report the output of a failed worker.
"""

from collections.abc import Callable, Mapping, Sequence
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
from typing import Any

from ctl.errors import UsageError
from ctl.hardware import cluster, quiet, rendezvous
from ctl.hardware.child_process import KERAS

_PROGRESS = "ctl.testing: "
_OUTPUT_LINES = 30  # lines of each process in an error message
IN_THIS_PROCESS = (
    ", or call ctl.testing.split_cpu({devices}) in conftest.py, which runs the comparison "
    "in this process"
)


def run_workers(
    function: Callable[..., Any],
    *arguments: Any,
    workers: int = 2,
    timeout: float = 240.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls a function in several processes that form a cluster by TF_CONFIG.

        def train(steps):                            # at the top level of the test module
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            ...
            return model.get_weights()

        first, second = ctl.testing.run_workers(train, 10)

    Args:
        function: called once in each worker; it, its arguments and its result must be picklable.
        *arguments: its arguments.
        workers: number of processes.
        timeout: seconds after which all of them are killed.
        environment: variables to set in addition to TF_CONFIG. GPUs are hidden unless
            CUDA_VISIBLE_DEVICES is among them.

    Returns:
        Each worker's result, in the order of the workers.

    Raises:
        AssertionError: a worker failed or timed out; the message has each worker's output.
        UsageError: the function cannot be pickled, or raised a `UsageError`.
    """
    with rendezvous.reserve_ports(workers) as ports:
        tasks = cluster.make_local_clusters(workers=workers, servers=0, ports=ports)
        variables = [{**(environment or {}), "TF_CONFIG": task.tf_config()} for task in tasks]
        return call(function, arguments, variables, timeout=timeout)


def call(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    environments: Sequence[Mapping[str, str]] = ({},),
    *,
    timeout: float,
    alternative: str = "",
) -> list[Any]:
    """Calls a function in one new process per environment, all at the same time.

    Args:
        function: what to call; it, its arguments and its result must be picklable.
        arguments: its arguments.
        environments: variables to set in each process. Of the caller's TF_ and XLA_ variables only
            those in `KERAS` are inherited.
        timeout: seconds after which all processes are killed.
        alternative: what else to do if the function cannot be pickled, for the message.

    Returns:
        The result of each process.

    Raises:
        AssertionError: a process failed or timed out; the message has each process' output.
        UsageError: the function cannot be pickled, or raised a `UsageError`.
    """
    task = _pickle_task(function, arguments, alternative)
    with tempfile.TemporaryDirectory() as name:
        folders = [pathlib.Path(name) / str(i) for i in range(len(environments))]
        processes = [_start(task, f, e) for f, e in zip(folders, environments, strict=True)]
        try:
            codes = _wait(processes, timeout, folders[0] / "output")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if not all((folder / "result").exists() for folder in folders):
            raise AssertionError(_describe_failure(folders, codes, timeout))
        results = [pickle.loads((folder / "result").read_bytes()) for folder in folders]
    for result in results:
        if isinstance(result, UsageError):
            raise result
    return results


def _pickle_task(function: Callable[..., Any], arguments: Sequence[Any], alternative: str) -> bytes:
    try:
        if any(getattr(v, "__module__", "") == "__main__" for v in (function, *arguments)):
            raise TypeError("it is defined in the main module")
        # sys.path comes in a pickle of its own: loading the second one imports modules from it.
        return pickle.dumps(sys.path) + pickle.dumps((function, list(arguments)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            "The function or trainer of the test cannot be pickled and sent to another process "
            f"({' '.join(str(error).split())}): define it, and the classes of its arguments, at the "
            f"top level of a module{alternative}."
        ) from None


def _start(
    task: bytes, folder: pathlib.Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "task").write_bytes(task)
    others = ("TF_", "XLA_", "PYTEST")
    inherited = {k: v for k, v in os.environ.items() if k in KERAS or not k.startswith(others)}
    defaults = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "ctl.testing.multiprocess", str(folder)],
            env={**inherited, **defaults, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def show_progress(line: str) -> None:
    """Prints a line to sys.stderr; in a process of `call`, the caller prints it."""
    print(f"{_PROGRESS}{line}", file=sys.stderr, flush=True)


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], timeout: float, output: pathlib.Path
) -> list[int | None]:
    """Waits until all have exited, one has failed, or the timeout; returns the exit codes so far."""
    deadline, shown = time.monotonic() + timeout, 0
    while True:
        codes = [process.poll() for process in processes]
        lines = output.read_text(errors="replace").split("\n")[:-1]
        lines = [line for line in lines if line.startswith(_PROGRESS)]
        for line in lines[shown:]:
            show_progress(line.removeprefix(_PROGRESS))
        shown = len(lines)
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.05)


def _describe_failure(
    folders: Sequence[pathlib.Path], codes: Sequence[int | None], timeout: float
) -> str:
    def describe(folder: pathlib.Path, code: int | None) -> str:
        if code is None:
            return "running"
        return "finished" if (folder / "result").exists() else f"exit code {code}"

    pairs = zip(folders, codes, strict=True)
    states = [f"process {i} ({describe(*each)})" for i, each in enumerate(pairs)]
    failed = [state for state in states if "(exit" in state]
    lines = [f"Failed: {', '.join(failed)}." if failed else f"Timed out after {timeout:g} s."]
    for state, folder in zip(states, folders, strict=True):
        output = (folder / "output").read_text(errors="replace").splitlines()
        lines += [f"Output of {state}:", *(f"  {line}" for line in output[-_OUTPUT_LINES:])]
    return "\n".join(lines)


def _run_task(folder: pathlib.Path) -> None:
    """Runs the task of a folder in this process; writes its result, or its `UsageError`."""
    quiet.hide_absl_messages()
    with (folder / "task").open("rb") as file:
        sys.path[:] = pickle.load(file)
        function, arguments = pickle.load(file)
    try:
        result = function(*arguments)
    except UsageError as error:
        result = error
    # Renamed when complete: the file may still be written when the caller's timeout ends.
    (folder / "part").write_bytes(pickle.dumps(result))
    (folder / "part").rename(folder / "result")


if __name__ == "__main__":
    _run_task(pathlib.Path(sys.argv[1]))
