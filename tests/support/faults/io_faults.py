"""Runs a tiny experiment again and again, and disturbs another point of it each time.

    python -m tests.support.faults.io_faults --loop=calls --stride=20 --json=faults.json

A library in C (io_faults.c) is preloaded. It counts the calls on files below the folder of the run
(open, read, write, rename, unlink, fsync, mkdir) and lets the n-th fail, once or from then on, or sends
a signal to the process. Then the fault is gone, and the same command is rerun. A try is survived if

- the first command ends with exit code 0, or with one line and exit code 1, or 75 after a signal,
- the second command ends with exit code 0, and
- the weights, the lines of metrics.jsonl, the best checkpoint, the exported model and result.json are
  those of the undisturbed run.
"""

import argparse
import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import ctypes
import dataclasses
import errno
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from typing import Any

from tests.support import experiments

SOURCE = pathlib.Path(__file__).with_suffix(".c")
ROOT = SOURCE.parents[3]
LIBRARY = "CTL_IO_FAULTS"  # the variable that names the built library, which is also preloaded
SHORT = -1000  # half of the bytes are written
WRITING = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EINTR)
# The errors that a call can have.
ERRORS = {
    "open": (errno.EIO, errno.EMFILE, errno.ESTALE, errno.EINTR),
    "read": (errno.EIO, errno.ESTALE, errno.EINTR),
    "create": (*WRITING, errno.EMFILE),
    "write": (*WRITING, SHORT),
    "fsync": WRITING,
    **dict.fromkeys(("rename", "exchange", "unlink", "mkdir"), WRITING[:-1]),
}
# It is exported in two formats.
EXPERIMENT = experiments.DROPOUT.replace(
    "    def build_model", '    export_formats = ("saved_model", "keras")\n\n    def build_model'
)


def build(folder: pathlib.Path) -> pathlib.Path | None:
    """Compiles the library into a folder; returns None on a machine without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    library = folder / "io_faults.so"
    options = ["-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run([compiler, *options], check=True)
    return library


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the undisturbed run: its kind and its paths."""

    kind: str
    path: str
    other: str


class Faults:
    """Controls the preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ[LIBRARY])
        self._library.ctl_fault_arm.argtypes = (
            ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p,
        )  # fmt: skip

    @contextlib.contextmanager
    def armed(
        self, folder: str, number: int, error: int = 0, *, stays: bool = False, log: str = ""
    ) -> Iterator[None]:
        """Lets a call on files below a folder fail; 0 for none, to log all of them only."""
        path = os.fsencode(os.path.abspath(folder))
        also = [kind for kind, errors in ERRORS.items() if stays and error in errors]
        self._library.ctl_fault_arm(
            path, number, error, " ".join(also).encode(), os.fsencode(log) if log else None
        )
        try:
            yield
        finally:
            self._library.ctl_fault_disarm()


def read_calls(log: str) -> list[Call]:
    """Reads the log of a run."""
    lines = pathlib.Path(log).read_text().splitlines()
    return [Call(*line.split("\t")[1:]) for line in lines]


def run(*arguments: str) -> tuple[int | None, str, str]:
    """Runs the program in this process; returns its exit code (None if it raised), stdout and stderr."""
    from ctl import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: int | None = main.run(["ctl", *arguments])
        except BaseException:
            code = None
            traceback.print_exc()
    return code, out.getvalue(), err.getvalue()


def read_state(workdir: pathlib.Path) -> dict[str, Any]:
    """Returns what must not depend on faults, of a run that is complete."""
    import tensorflow as tf

    from ctl.loop.checkpoints.files import CheckpointFiles

    def tensors(path: str) -> dict[str, bytes]:
        reader = tf.train.load_checkpoint(path)
        names = sorted(reader.get_variable_to_shape_map())
        return {n: reader.get_tensor(n).tobytes() for n in names if "OBJECT_GRAPH" not in n}

    state: dict[str, Any] = {}
    for name in ("checkpoints", "best"):
        files = CheckpointFiles(workdir / name)
        state[name] = files.steps()[-1]
        state[f"{name} values"] = tensors(files.path(files.steps()[-1]))
    state["best notes"] = files.notes(state["best"])
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    results = ("split", "step", "loss", "accuracy", "examples", "learning_rate", "epoch")
    state["metrics"] = [{k: line[k] for k in results if k in line} for line in lines]
    (version,) = (workdir / "export").iterdir()
    files = [path.relative_to(version) for path in version.rglob("*") if path.is_file()]
    state["export"], state["export files"] = version.name, sorted(map(str, files))
    state["export values"] = tensors(str(version / "variables/variables"))
    result = json.loads((workdir / "result.json").read_text())
    state["result"] = {k: result.get(k) for k in ("step", "train", "eval", "best", "export")}
    return state


def check(
    first: tuple[int | None, str, str],
    second: tuple[int | None, str, str],
    expected: Any,
    got: Any,
    codes: Sequence[int] = (0, 1, 75),
) -> str:
    """Returns why a try was not survived; "" if it was."""
    code, _, err = first
    lines = err.splitlines()
    if code is None:
        return f"traceback: {lines[-1][:150] if lines else ''}"
    if code not in codes:
        return f"exit code {code}: {err[:150]}"
    if len(lines) > (code != 0):
        return f"{len(lines)} lines on stderr: {lines[-1][:150]}"
    if second[0] != 0:
        return f"rerun: exit code {second[0]}: {second[2].strip()[-150:]}"
    if isinstance(got, str):
        return got
    different = [name for name in expected if expected[name] != got.get(name)]
    return f"other {', '.join(different)}" if different else ""


def choose(kinds: Sequence[str], stride: int, offset: int) -> Iterator[tuple[int, int, bool]]:
    """Chooses numbers of calls, the error of each in turn, and whether it stays."""
    turns: collections.Counter[str] = collections.Counter()
    for number in range(1 + offset, len(kinds) + 1, stride):
        kind = kinds[number - 1]
        turn = turns[kind]
        turns[kind] += 1
        error = ERRORS[kind][turn % len(ERRORS[kind])]
        # Python repeats a call that a signal has interrupted, for ever if that stays.
        yield number, error, turn % 2 == 1 and error != errno.EINTR


def loop_calls(stride: int, offset: int) -> Iterator[Any]:
    """Lets calls fail; yields first the number of calls, then each try."""
    crashed = _read_crashed()
    faults, expected, calls = _undisturbed()
    yield len(calls)
    yield from _describe_crashed(crashed, expected)
    for number, error, stays in choose([call.kind for call in calls], stride, offset):
        name = "short write" if error == SHORT else errno.errorcode[error]
        shutil.rmtree(FOLDER, ignore_errors=True)
        with faults.armed(FOLDER, number, error, stays=stays):
            result = run(*COMMAND)
        name += " from then on" if stays else ""
        yield _describe(f"{number} {calls[number - 1].kind}", name, result, expected)


def loop_signals(stride: int, offset: int) -> Iterator[Any]:
    """Sends signals at calls; yields first the number of calls, then each try."""
    crashed = _read_crashed()
    faults, expected, calls = _undisturbed()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for each in numbers[::2]:
        signal.signal(each, signal.default_int_handler)  # as ctl.main.console
    yield len(calls)
    yield from _describe_crashed(crashed, expected)
    for turn, number in enumerate(range(1 + offset, len(calls) + 1, stride)):
        sent = numbers[turn % len(numbers)]
        shutil.rmtree(FOLDER, ignore_errors=True)
        with faults.armed(FOLDER, number, -sent):
            result = run(*COMMAND)
        yield _describe(f"{number} {calls[number - 1].kind}", sent.name, result, expected)


def loop_names(stride: int, offset: int) -> Iterator[Any]:
    """Yields the number of names that announce something, then each with what was not synced before."""
    calls = _undisturbed()[2]
    found = list(find_announced(calls))[offset::stride]
    yield len(found)
    for name, faults in found:
        yield {"where": name, "fault": ", ".join(faults)[:300]}


def find_announced(calls: Sequence[Call]) -> Iterator[tuple[str, list[str]]]:
    """Yields each name that announces something, with what a power failure could lose of it.

    The marker of a checkpoint announces its files, the folder of a version its files, and the event of
    a start config.json. The last event announces everything.

    Args:
        calls: those of a run, from the first one in its folder.
    """
    content: set[pathlib.Path] = set()  # files with content that is not synced
    names: set[pathlib.Path] = set()  # whose folder is not synced
    folder = pathlib.Path(FOLDER).absolute()
    known = {folder}  # names that exist; calls on the parent of the folder are not logged
    for call in calls:
        path, other = (pathlib.Path(each).absolute() for each in (call.path, call.other or "."))
        if call.kind in ("create", "mkdir"):
            names |= {path} - known  # TensorFlow creates folders that exist
            known.add(path)
        elif call.kind == "unlink":
            for paths in (content, names, known):
                paths.discard(path)
        elif call.kind == "write":
            content.add(path)
        elif call.kind == "fsync":
            content.discard(path)
            names = {name for name in names if name.parent != path}
        elif call.kind in ("rename", "exchange"):
            is_version = other.parent == folder / "export" and other.name.isdecimal()
            if other.suffix == ".whole" or is_version:
                prefix = str(path.with_suffix("")) if other.suffix == ".whole" else str(path)
                lost = [p for p in content | names if str(p).startswith(prefix) and p != path]
                lost += [path] * (path in content) + [p for p in names if p in other.parents]
                lost = [str(p.relative_to(folder.parent)) for p in lost]
                yield str(other.relative_to(folder)), lost
            content, names, known = (
                {other / p.relative_to(path) if p.is_relative_to(path) else p for p in paths}
                for paths in (content, names, known)
            )
            names.add(other)
    durable = ("config.json", "result.json", "checkpoints", "best", "export", "")
    lost = [p for p in content | names if p in [folder / name for name in durable]]
    yield "the end", [str(p.relative_to(folder.parent)) for p in lost]


FOLDER = "run"  # in all runs the same, since messages and results contain it
KEYS = {
    "train.steps": 8, "train.steps_per_loop": 2, "train.checkpoint_interval": 2,
    "train.checkpoints_to_keep": 2, "train.export": "best", "train.best.metric": "eval/loss",
    "train.best.mode": "min", "eval.interval": 4, "optimizer.learning_rate": 0.05,
}  # fmt: skip
FLAGS = ("--config=experiment.py", *(f"--config.{key}={value}" for key, value in KEYS.items()))
COMMAND = (*FLAGS, f"--workdir={FOLDER}")


def _read_crashed() -> Any:
    """Reruns the command after the process of an earlier try has crashed; returns its end and state.

    TensorFlow's reader of checkpoints crashes if one of its first reads fails.
    """
    return _finish() if os.path.exists(FOLDER) else None


def _describe_crashed(crashed: Any, expected: dict[str, Any]) -> Iterator[Any]:
    if crashed:
        second, got = crashed
        fault = check((75, "", ""), second, expected, got)
        yield {"where": "a crash of the process", "fault": fault}


def _finish() -> tuple[Any, Any]:
    """Reruns the command without a fault; returns its result, and the state of the run."""
    second = run(*COMMAND)
    try:
        return second, read_state(pathlib.Path(FOLDER))
    except Exception as error:
        return second, f"damaged: {error!r}"[:200]


def _undisturbed() -> tuple[Faults, dict[str, Any], list[Call]]:
    faults = Faults()
    shutil.rmtree(FOLDER, ignore_errors=True)
    with faults.armed(FOLDER, 0, log="calls"):
        assert run(*COMMAND)[0] == 0
    return faults, read_state(pathlib.Path(FOLDER)), read_calls("calls")


def _describe(where: str, error: str, first: Any, expected: dict[str, Any]) -> dict[str, Any]:
    """Reruns the command without a fault, and describes the try."""
    second, got = _finish()
    return {
        "where": where, "error": error, "code": first[0], "err": first[2].strip()[-300:],
        "fault": check(first, second, expected, got),
    }  # fmt: skip


LOOPS = {"calls": loop_calls, "signals": loop_signals, "names": loop_names}


def main_in_process(loop: Callable[[int, int], Iterator[Any]] | None = None) -> None:
    """Parses the command line, and runs a loop in a temporary folder.

    Args:
        loop: gets the stride and the offset; by default the one that `--loop` names.
    """
    flags = _parse()
    path = os.path.abspath(flags.json) if flags.json else ""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        pathlib.Path("experiment.py").write_text(EXPERIMENT)
        if loop:
            found = _collect(loop(flags.stride, flags.offset))
        else:
            found = _collect(_preload(flags.loop, flags.stride, flags.offset))
    count, *tries = found
    failed = sum(bool(each["fault"]) for each in tries)
    counts = {"points": count, "tries": len(tries)}
    counts |= {"survived": len(tries) - failed, "failed": failed}
    if path:
        pathlib.Path(path).write_text(json.dumps({**counts, "each": tries}, indent=1))
    print(counts)


def _collect(tries: Iterator[Any]) -> list[Any]:
    found = []
    for each in tries:
        print(json.dumps(each), flush=True)
        found.append(each)
    return found


def _preload(loop: str, stride: int, offset: int) -> Iterator[Any]:
    """Runs a loop in a process with the library; starts another one after a crash."""
    library = build(pathlib.Path.cwd())
    if library is None:
        raise SystemExit("There is no C compiler: install cc.")
    variables = {LIBRARY: str(library), "LD_PRELOAD": str(library)}
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    is_first = True
    while True:
        command = [sys.executable, "-m", "tests.support.faults.io_faults", f"--loop={loop}"]
        command += [f"--stride={stride}", f"--offset={offset}"]
        with subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout or ():
                each = json.loads(line)
                if is_first or not isinstance(each, int):
                    yield each
                offset += stride if "error" in (each if isinstance(each, dict) else ()) else 0
                is_first = False
        if process.returncode != -signal.SIGSEGV:
            break
        offset += stride
    if process.returncode:
        raise SystemExit(f"The process has ended with {process.returncode}.")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--loop", choices=LOOPS, default="calls", help="what is tried")
    parser.add_argument("--stride", type=int, default=20, help="try every n-th point")
    parser.add_argument("--offset", type=int, default=0, help="the points to leave out at first")
    parser.add_argument("--json", default="", help="a file for the result")
    return parser.parse_args()


if __name__ == "__main__":
    if LIBRARY in os.environ:
        arguments = _parse()
        _collect(LOOPS[arguments.loop](arguments.stride, arguments.offset))
    else:
        main_in_process()
