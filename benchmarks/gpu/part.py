"""The process of one part: `python -m benchmarks.gpu.part NAME`, which `benchmarks.gpu` starts."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # several processes share the GPU

from benchmarks import flags as command_line
from benchmarks import windows
from benchmarks.gpu.parts import PARTS, Report


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
