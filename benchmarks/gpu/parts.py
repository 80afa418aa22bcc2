"""The parts of `python -m benchmarks.gpu`, the most important ones first.

A part is a function of a `Report`. It reports each result at once, by name, and each of its steps is in
`with report.attempt(name)`, so that one failure does not hide the other results.

`benchmarks.gpu` starts a process for each: `python -m benchmarks.gpu.parts NAME`.
"""

import argparse
from collections.abc import Iterator
import contextlib
import dataclasses
import importlib
import json
import os
import sys
import traceback
from typing import Any, TextIO

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # several processes share the GPU

from benchmarks import flags as command_line
from benchmarks import windows


@dataclasses.dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        function: module:function in this package.
        seconds: the limit of its time.
    """

    function: str
    seconds: float

    def load(self):
        """Imports and returns the function."""
        module, name = self.function.split(":")
        return getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)


# First what shows that the updates are right on the device, then speed, then the rest.
PARTS = {
    "environment": Part("environment:describe", 30),
    "equivalence": Part("equality:check_equivalence", 90),
    "overflow": Part("equality:check_overflow", 60),
    "dropout": Part("equality:check_dropout", 30),
    "resume": Part("programs:check_resume", 90),
    "mnist_float32": Part("speed:measure_mnist_float32", 130),
    "resnet50": Part("speed:measure_resnet50", 210),
    "transformer": Part("transformer:measure", 150),
    "jax": Part("speed:measure_jax", 60),
    "torch": Part("speed:measure_torch", 120),
    "logical_shards": Part("equality:check_logical_shards", 60),
    "several_off": Part("several:off", 120),
    "several_gradients": Part("several:gradients", 120),
    "several_step": Part("several:step", 120),
    "several_loop": Part("several:loop", 120),
}


class Report:
    """Writes the results of a part.

    Attributes:
        small: whether the models are tiny, for a test on a CPU.
        flags: the flags of the command line.
    """

    def __init__(self, file: TextIO, flags: argparse.Namespace):
        """Makes a report.

        Args:
            file: where the lines go.
            flags: the flags of the command line: small, jax_python, torch_python.
        """
        self.small, self.flags, self._file = flags.small, flags, file

    def __call__(self, name: str, **values: Any) -> None:
        """Writes one result."""
        print(json.dumps({"name": name, **values}), file=self._file, flush=True)

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Reports an exception as the error of a result, and continues."""
        try:
            yield
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            last = str(error).strip().rpartition("\n")[2]
            self(name, error=f"{type(error).__name__}: {last.strip()}"[:1000])


def main() -> None:
    """Runs the part; its results go to stdout, everything else to stderr."""
    flags = command_line.parse(
        __doc__, sys.argv[2:], small=False, jax_python=sys.executable, torch_python=sys.executable
    )
    with windows.answers_only() as answers:
        report = Report(answers, flags)
        with report.attempt("part"):
            PARTS[sys.argv[1]].load()(report)


if __name__ == "__main__":
    main()
