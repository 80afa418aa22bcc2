"""Runs the program and kills it at an exact point of its run.

    python -m tests.support.faults --kill=step:33 -- --config=experiments/mnist.py
    python -m tests.support.faults --kill=save:2 --signal=SIGTERM -- --config=experiments/mnist.py

The arguments after `--` are those of ctl.main, which is unaware of the kill.
"""

import argparse
import os
import runpy
import signal
import sys

from ctl.hardware import installation


def main() -> None:
    """Runs the program with a kill injected; ends with SystemExit if it survives the signal."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.faults", allow_abbrev=False)
    parser.add_argument("--kill", required=True, metavar="POINT", help="step:K, save:N or eval:N")
    parser.add_argument("--signal", choices=("SIGKILL", "SIGTERM", "SIGINT"), default="SIGKILL")
    dashes = sys.argv.index("--")
    flags, arguments = parser.parse_args(sys.argv[1:dashes]), sys.argv[dashes + 1 :]
    installation.set_variables(os.environ)  # before TensorFlow is imported
    from tests.support.faults import kills

    with kills.killing(flags.kill, by=signal.Signals[flags.signal]):
        # The program runs as `python -m ctl.main` does, so that nothing here depends on its module.
        sys.argv = ["ctl", *arguments]
        runpy.run_module("ctl.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
