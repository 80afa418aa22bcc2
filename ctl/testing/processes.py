"""Runs Python functions in processes of their own, and brings back what they return or say."""

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
from ctl.hardware import cluster, rendezvous

_LINES = 30  # of each process' output, for a failure's message


def run_workers(
    function: Callable[..., Any],
    *arguments: Any,
    workers: int = 2,
    timeout: float = 240.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls a function in several real processes that know of each other by TF_CONFIG.

        def train(steps):                            # at the top level of the test's module
            strategy = tf.distribute.MultiWorkerMirroredStrategy()
            ...
            return model.get_weights()

        first, second = ctl.testing.run_workers(train, 10)

    Args:
        function: what each worker calls; with its arguments and result it must pickle.
        *arguments: what with.
        workers: how many processes.
        timeout: seconds that all of them may take.
        environment: variables to set beside TF_CONFIG; GPUs are hidden unless it shows them.

    Returns:
        Each worker's result, in order.

    Raises:
        AssertionError: a worker failed or did not end; each one's output is in the message.
        UsageError: the function cannot be sent to another process.
    """
    ports = rendezvous.find_free_ports(workers)
    places = cluster.make_local_clusters(workers=workers, servers=0, ports=ports)
    variables = [{**(environment or {}), "TF_CONFIG": place.tf_config()} for place in places]
    return call(function, arguments, variables, timeout=timeout)


def call(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    environments: Sequence[Mapping[str, str]] = ({},),
    *,
    timeout: float,
) -> list[Any]:
    """Calls a function once in each environment, all at the same time.

    Args:
        function: what to call.
        arguments: what with.
        environments: variables to set, of each process; the caller's TF_ and XLA_ ones are left out.
        timeout: seconds that all of them may take.

    Returns:
        Each one's result.

    Raises:
        AssertionError: one failed or did not end; each one's output is in the message.
        UsageError: the function cannot be sent to another process.
    """
    task = _pickled(function, arguments)
    with tempfile.TemporaryDirectory() as name:
        folders = [pathlib.Path(name) / str(i) for i in range(len(environments))]
        processes = [_start(task, f, e) for f, e in zip(folders, environments, strict=True)]
        try:
            _wait(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if not all((folder / "result").exists() for folder in folders):
            raise AssertionError(_told(folders, processes, timeout))
        results = [pickle.loads((folder / "result").read_bytes()) for folder in folders]
    for result in results:
        if isinstance(result, UsageError):
            raise result
    return results


def _pickled(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    held = [function, *arguments]
    own = [v for v in held if getattr(v, "__module__", "") == "__main__"]
    try:
        if own:
            raise TypeError("it is defined in the program itself")
        # The path apart and first: what follows is read by it.
        return pickle.dumps(sys.path) + pickle.dumps((function, list(arguments)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        why = " ".join(str(error).split())
        raise UsageError(
            f"What the test gives cannot be sent to a process of its own ({why}): define the "
            "function, or the trainer's class, and what it is made with at the top level of a module."
        ) from None


def _start(
    task: bytes, folder: pathlib.Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "task").write_bytes(task)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "XLA_", "PYTEST"))}
    own = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", **environment}
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "ctl.testing.child", str(folder)],
            env={**kept, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Returns when all have ended, or one has failed, or the time is over."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)


def _told(
    folders: Sequence[pathlib.Path],
    processes: Sequence[subprocess.Popen[bytes]],
    timeout: float,
) -> str:
    lines = [f"Not every process returned a result within {timeout:g} s."]
    for i, (folder, process) in enumerate(zip(folders, processes, strict=True)):
        done = (folder / "result").exists()
        how = "returned" if done else f"ended with {process.returncode}"
        said = (folder / "output").read_text(errors="replace").splitlines()[-_LINES:]
        lines += [f"Process {i} {how}, and said:", *(f"  {line}" for line in said)]
    return "\n".join(lines)
