"""Runs the program and kills it at an exact point of its run.

    python -m tests.support.faults --kill=step:33 -- --config=experiments/mnist.py
    python -m tests.support.faults --kill=save:2 --signal=SIGTERM -- --config=experiments/mnist.py
    python -m tests.support.faults --kill=step:33 --workers=2 --worker=1 --max_restarts=1 -- --config=...

The arguments after `--` are those of ctl.main, which is unaware of the kill. With --workers the
processes are started as by ctl.launch, and the process of --worker is killed the first time it runs.
"""

import argparse
from collections.abc import Sequence
import os
import runpy
import signal
import sys

from ctl.hardware import installation
from ctl.hardware.cluster import Cluster
from ctl.launch import Launcher

NO_SIGNAL = "none"


def main(argv: Sequence[str]) -> int:
    """Runs the program with a kill injected.

    Args:
        argv: the command line, starting with the program's name.

    Returns:
        The exit code of the launcher.

    Raises:
        SystemExit: the end of the program if it runs in this process and survives the signal.
    """
    dashes = argv.index("--")
    flags, arguments = _parse(argv[1:dashes]), argv[dashes + 1 :]
    if flags.workers:
        return _launch(flags, arguments)
    installation.set_variables(os.environ)  # before TensorFlow is imported
    from tests.support.faults import kills

    number = None if flags.signal == NO_SIGNAL else signal.Signals[flags.signal]
    with kills.killing(flags.kill, by=number):
        # The program runs as `python -m ctl.main` does, so that nothing here depends on its module.
        sys.argv = ["ctl", *arguments]
        runpy.run_module("ctl.main", run_name="__main__", alter_sys=True)
    return 0


def _launch(flags: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Starts several processes, one of which is killed the first time it runs."""
    started: set[str] = set()

    def command(task: Cluster) -> list[str]:
        if task.name in started:
            return [sys.executable, "-m", "ctl.main", *arguments]
        started.add(task.name)
        number = flags.signal if task.name == f"worker {flags.worker}" else NO_SIGNAL
        kill = [f"--kill={flags.kill}", f"--signal={number}"]
        return [sys.executable, "-m", "tests.support.faults", *kill, "--", *arguments]

    return Launcher(command, workers=flags.workers, max_restarts=flags.max_restarts).run()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.faults", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    points = "start, step:K, save:N or eval:N"
    parser.add_argument("--kill", required=True, metavar="POINT", help=points)
    signals = ("SIGKILL", "SIGTERM", "SIGINT", NO_SIGNAL)
    parser.add_argument("--signal", choices=signals, default="SIGKILL")
    parser.add_argument("--workers", type=int, default=0, help="start this many workers")
    parser.add_argument("--worker", type=int, default=0, help="the worker to kill; default 0")
    parser.add_argument("--max_restarts", type=int, default=0, help="as in ctl.launch")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
