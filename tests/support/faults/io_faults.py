"""Runs a tiny experiment again and again, and lets another call on its files fail each time.

    python -m tests.support.faults.io_faults --stride=20 --json=faults.json

A library in C (io_faults.c) is preloaded. It counts the calls on files below the folder of the run
(open, read, write, rename, unlink, fsync, mkdir) and lets the n-th fail, once or from then on. Then the
fault is gone, and the same command is rerun. A try is survived if

- the first command ends with exit code 0, or with one line and exit code 1,
- the second command ends with exit code 0, and
- the weights, the lines of metrics.jsonl, the best checkpoint, the exported model and result.json are
  those of the undisturbed run.
"""

import argparse
import collections
from collections.abc import Iterator, Sequence
import contextlib
import ctypes
import dataclasses
import errno
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import traceback
from typing import Any

SOURCE = pathlib.Path(__file__).with_suffix(".c")
LIBRARY = "CTL_IO_FAULTS"  # the variable that names the built library, which is also preloaded
SHORT = -1  # half of the bytes are written
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
EXPERIMENT = """\
import numpy as np
import tf_keras
import ctl

X = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)


class Trainer(ctl.StandardTrainer):
    export_formats = ("saved_model", "keras")

    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential(
            [layers.Dense(4, input_shape=(4,)), layers.Dropout(0.3), layers.Dense(3)])

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"x": X, "label": (X[:, 0] > 0).astype(np.int32)})

    def per_example_loss(self, batch, outputs):
        return tf_keras.losses.sparse_categorical_crossentropy(
            batch["label"], outputs, from_logits=True)


def get_config():
    return ctl.config(
        trainer="experiment.py:Trainer",
        data=dict(global_batch_size=7),
        optimizer=dict(name="adam", learning_rate=0.05),
        train=dict(steps=8, steps_per_loop=2, checkpoint_interval=2, checkpoints_to_keep=2,
                   export="best", best=dict(metric="eval/loss", mode="min")),
        eval=dict(interval=4),
    )
"""


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
        self._callback: Any = None

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

    def call_instead(self, function: Any) -> None:
        """Calls a function at the chosen call, instead of letting it fail; None to let it fail."""
        self._callback = ctypes.CFUNCTYPE(None)(function) if function else None
        self._library.ctl_fault_callback(self._callback)


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
    versions = sorted(path for path in (workdir / "export").iterdir())
    state["export"] = [path.name for path in versions]
    (version,) = versions
    state["export files"] = sorted(
        str(path.relative_to(version)) for path in version.rglob("*") if path.is_file()
    )
    state["export values"] = tensors(str(version / "variables/variables"))
    result = json.loads((workdir / "result.json").read_text())
    state["result"] = {k: result.get(k) for k in ("step", "train", "eval", "best", "export")}
    return state


def check(
    first: tuple[int | None, str, str], second: tuple[int | None, str, str], expected: Any, got: Any
) -> str:
    """Returns why a try was not survived; "" if it was."""
    code, _, err = first
    lines = err.splitlines()
    if code is None:
        return f"traceback: {lines[-1][:150] if lines else ''}"
    if code not in (0, 1, 75):
        return f"exit code {code}: {err[:150]}"
    if len(lines) > (code != 0):
        return f"{len(lines)} lines on stderr: {lines[-1][:150]}"
    if second[0] != 0:
        return f"rerun: exit code {second[0]}: {second[2].strip()[-150:]}"
    if isinstance(got, str):
        return got
    different = [name for name in expected if expected[name] != got.get(name)]
    return f"other {', '.join(different)}" if different else ""


def attempt(workdir: pathlib.Path, expected: dict[str, Any]) -> tuple[Any, Any]:
    """Reruns the command without a fault; returns its result and the state of the run."""
    second = run("--config=experiment.py", f"--workdir={workdir}")
    try:
        return second, read_state(workdir)
    except Exception as error:
        return second, f"damaged: {error!r}"[:200]


def choose(calls: Sequence[Call], stride: int, offset: int) -> Iterator[tuple[int, int, bool]]:
    """Chooses numbers of calls, and the error of each, in turn."""
    turns: collections.Counter[str] = collections.Counter()
    for number in range(1 + offset, len(calls) + 1, stride):
        kind = calls[number - 1].kind
        turn = turns[kind]
        turns[kind] += 1
        error = ERRORS[kind][turn % len(ERRORS[kind])]
        # Python repeats a call that a signal has interrupted, for ever if that stays.
        yield number, error, turn % 2 == 1 and error != errno.EINTR


def loop(stride: int, offset: int, print_line: Any = lambda line: None) -> dict[str, Any]:
    """Tries calls; returns the counts, and each try."""
    faults, tries = Faults(), []
    pathlib.Path("experiment.py").write_text(EXPERIMENT)
    whole = pathlib.Path("whole")
    with faults.armed("whole", 0, log="calls"):
        assert run("--config=experiment.py", "--workdir=whole")[0] == 0
    expected, calls = read_state(whole), read_calls("calls")
    for number, error, stays in choose(calls, stride, offset):
        workdir = pathlib.Path("whole")  # the same name, which messages and results contain
        shutil.rmtree(workdir, ignore_errors=True)
        with faults.armed("whole", number, error, stays=stays):
            first = run("--config=experiment.py", "--workdir=whole")
        fault = check(first, *_rerun(workdir, expected))
        name = "short write" if error == SHORT else errno.errorcode[error]
        tries.append(
            {
                "number": number,
                "call": dataclasses.asdict(calls[number - 1]),
                "error": name + (" from then on" if stays else ""),
                "code": first[0],
                "err": first[2].strip()[-300:],
                "fault": fault,
            }
        )
        print_line(json.dumps(tries[-1]))
    failed = sum(bool(each["fault"]) for each in tries)
    return {
        "calls": len(calls), "tries": len(tries), "survived": len(tries) - failed, "failed": failed,
        "each": tries,
    }  # fmt: skip


def _rerun(workdir: pathlib.Path, expected: dict[str, Any]) -> tuple[Any, Any, Any]:
    second, got = attempt(workdir, expected)
    return second, expected, got


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds and preloads the library in a new process, and runs the loop there."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.faults.io_faults")
    parser.add_argument("--stride", type=int, default=20, help="try every n-th call")
    parser.add_argument("--offset", type=int, default=0, help="the calls to leave out at first")
    parser.add_argument("--json", default="", help="a file for the result")
    flags = parser.parse_args(arguments)
    if LIBRARY not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            library = build(pathlib.Path(folder))
            if library is None:
                raise SystemExit("There is no C compiler: install cc.")
            variables = {LIBRARY: str(library), "LD_PRELOAD": str(library)}
            command = [sys.executable, "-m", "tests.support.faults.io_faults", *sys.argv[1:]]
            raise SystemExit(subprocess.run(command, env={**os.environ, **variables}).returncode)
    path = os.path.abspath(flags.json) if flags.json else ""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        result = loop(flags.stride, flags.offset, lambda line: print(line, flush=True))
    if path:
        pathlib.Path(path).write_text(json.dumps(result, indent=1))
    print({k: v for k, v in result.items() if k != "each"})


if __name__ == "__main__":
    main()
