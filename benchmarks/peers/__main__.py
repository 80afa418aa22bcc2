"""Compares ctl with other frameworks on four models, on a CPU.

    python -m benchmarks.peers --cache FOLDER
    python -m benchmarks.peers --cache FOLDER --workloads mnist --frameworks ctl tensorflow torch

It installs the frameworks into environments in FOLDER (4 GB), on the first run. For each workload all
programs first train from the same weights on the same batch, and must have the same losses. Then, in
each of `--rounds` rounds, all programs start, and take turns to train for a window of `--seconds`, in
a different order each time. The table has the median ratio to ctl's speed in the same turn, and its 95 %
interval. Tables go to stdout, progress goes to stderr.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import subprocess
import tempfile

import numpy as np

from benchmarks import flags as command_line
from benchmarks import report, windows
from benchmarks.peers import environments, workloads

TOLERANCE = 0.01  # of a mean loss, relative to the first one
REFERENCE = "ctl"


@dataclasses.dataclass(frozen=True)
class Framework:
    """A way to train the workloads.

    Attributes:
        label: the name in the table.
        environment: the environment that it runs in.
        command: the module in this package, and its variant.
        packages: the packages whose versions are reported.
    """

    label: str
    environment: str
    command: tuple[str, ...]
    packages: tuple[str, ...]


_OWN, _TENSORFLOW = environments.OWN, ("tensorflow-cpu", "tensorflow", "tf-keras")
_JAX, _TORCH = ("jax", "flax", "optax"), ("torch",)
FRAMEWORKS = {
    name: Framework(*row)
    for name, *row in [
        ("ctl", "ctl", _OWN, ("ctl_loop", "auto"), _TENSORFLOW),
        ("ctl_xla", "ctl, `runtime.xla=loop`", _OWN, ("ctl_loop", "loop"), _TENSORFLOW),
        ("tensorflow", "hand-written, `tf.range`", _OWN, ("tensorflow_loop", "off"), _TENSORFLOW),
        ("tensorflow_xla", "hand-written, step in XLA", _OWN, ("tensorflow_loop", "step"), _TENSORFLOW),
        ("tf_keras", "tf_keras `fit`", _OWN, ("keras_fit", "tf_keras"), _TENSORFLOW),
        ("keras_tensorflow", "Keras 3 `fit`, TensorFlow", "keras", ("keras_fit", "tensorflow"),
         ("keras", *_TENSORFLOW[:2])),
        ("keras_jax", "Keras 3 `fit`, JAX", "jax", ("keras_fit", "jax"), ("keras", "jax")),
        ("jax_scan", "JAX, `lax.scan`", "jax", ("jax_loop", "scan"), _JAX),
        ("jax_step", "JAX, one call per step", "jax", ("jax_loop", "step"), _JAX),
        ("torch", "PyTorch, eager", "torch", ("torch_loop", "eager"), _TORCH),
        ("torch_compiled", "PyTorch, compiled", "torch", ("torch_loop", "compiled"), _TORCH),
    ]
}  # fmt: skip
# On a CPU XLA is slower with convolutions.
_DEFAULT = [name for name in FRAMEWORKS if name not in ("ctl_xla", "tensorflow_xla")]


def main(arguments: list[str] | None = None) -> None:
    """Checks and measures the programs; prints the table and writes the requested files."""
    flags = command_line.parse(
        __doc__,
        arguments,
        choices={"workloads": workloads.WORKLOADS, "frameworks": FRAMEWORKS},
        cache=pathlib.Path,
        workloads=list(workloads.WORKLOADS),
        frameworks=_DEFAULT,
        rounds=3,
        windows=5,
        seconds=1.0,
        result=pathlib.Path,
    )
    if not flags.cache or REFERENCE not in flags.frameworks:
        raise SystemExit(f"--cache is required, and {REFERENCE!r} among the --frameworks")
    pythons = {
        name: environments.python(flags.cache, FRAMEWORKS[name].environment)
        for name in flags.frameworks
    }
    rows, failures = [], []
    for name in flags.workloads:
        with tempfile.TemporaryDirectory(prefix="ctl-peers-") as folder:
            workloads.WORKLOADS[name].write(pathlib.Path(folder))
            agreed, failed = check(name, folder, pythons)
            failures += failed
            rows += measure(name, folder, {each: pythons[each] for each in agreed}, flags)
    for failure in failures:
        print(f"Not measured: {failure}")
    report.show(
        rows,
        REFERENCE,
        {name: framework.label for name, framework in FRAMEWORKS.items()},
        flags.result,
        versions=versions(pythons),
    )


def command(framework: str, workload: str, folder: str, python: str, *, check: bool) -> list[str]:
    """Returns the command of a program."""
    settings = workloads.WORKLOADS[workload]
    task = {
        "name": workload,
        "batch": settings.batch,
        "steps_per_loop": settings.check_steps if check else settings.steps_per_loop,
        "dropout": 0.0 if check else settings.dropout,
        "check": check,
        "folder": folder,
    }
    module, *variant = FRAMEWORKS[framework].command
    return [python, "-m", f"benchmarks.peers.{module}", *variant, json.dumps(task)]


def check(workload: str, folder: str, pythons: dict[str, str]) -> tuple[list[str], list[str]]:
    """Returns the frameworks whose losses are those of ctl, and what is wrong with the others."""
    agreed, failures, expected = [], [], np.zeros(0)
    for name, python in sorted(pythons.items(), key=lambda item: item[0] != REFERENCE):
        windows.print_progress(f"{workload}: losses of {name}")
        program = command(name, workload, folder, python, check=True)
        done = subprocess.run(program, stdout=subprocess.PIPE, **environments.place())
        if done.returncode:
            if name == REFERENCE:
                raise SystemExit(f"ctl failed on {workload}; its output is above.")
            failures.append(f"{workload} in {FRAMEWORKS[name].label} failed.")
            continue
        losses = np.array(json.loads(done.stdout))
        if name == REFERENCE:
            expected = losses
            if losses[-1] > (1 - 5 * TOLERANCE) * losses[0]:
                raise SystemExit(
                    f"The losses of {workload} fall too little to be compared: {losses}"
                )
        if np.allclose(losses, expected, rtol=0, atol=TOLERANCE * expected[0]):
            agreed.append(name)
        else:
            failures.append(
                f"{workload} in {FRAMEWORKS[name].label} has the losses {losses.round(4)}, "
                f"but ctl {expected.round(4)}."
            )
        windows.print_progress(f"{workload}: {losses.round(4)}")
    return agreed, failures


def measure(
    workload: str, folder: str, pythons: dict[str, str], flags: argparse.Namespace
) -> list[report.Row]:
    """Returns one row per framework."""
    start = {
        name: functools.partial(
            windows.worker,
            command(name, workload, folder, python, check=False),
            **environments.place(),
        )
        for name, python in pythons.items()
    }
    counts = {"processes": flags.rounds, "windows": flags.windows, "seconds": flags.seconds}
    rates, _ = windows.measure(start, title=workload, **counts)
    batch = workloads.WORKLOADS[workload].batch
    return report.make_rows(workload, batch, rates, REFERENCE)


def versions(pythons: dict[str, str]) -> dict[str, str]:
    """Returns the versions of the packages of all frameworks."""
    installed: dict[str, str] = {}
    for name, python in pythons.items():
        installed |= environments.versions(python, FRAMEWORKS[name].packages)
    return dict(sorted(installed.items()))


if __name__ == "__main__":
    main()
