"""The process of one part: `python -m benchmarks.gpu.part NAME`, which `benchmarks.gpu` starts."""

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # several processes share the GPU

from benchmarks.gpu.parts import PARTS, Report


def main() -> None:
    """Runs the part; its results go to stdout, everything else to stderr."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.part")
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--jax_python", default=sys.executable)
    parser.add_argument("--torch_python", default=sys.executable)
    flags = parser.parse_args()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps the output of frameworks out of them
    report = Report(answers, flags)
    with report.attempt("part"):
        PARTS[flags.name].load()(report)


if __name__ == "__main__":
    main()
