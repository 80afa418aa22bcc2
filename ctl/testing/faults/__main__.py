"""Runs the program, and kills it at an exact point of its run.

    python -m ctl.testing.faults --kill=step:33 -- --config=experiments/mnist.py
    python -m ctl.testing.faults --kill=save:2 --signal=SIGTERM -- --config=experiments/mnist.py
    python -m ctl.testing.faults --kill=step:33 --workers=2 --worker=1 --max_restarts=1 -- --config=...

The arguments after `--` are those of ctl.main, which knows nothing of it. With --workers it is
ctl.launch, and the process of --worker is killed, at its first start alone. Whoever starts several
processes in another way gives all the same --kill, and all but one --signal=none.
"""

import argparse
from collections.abc import Sequence
import os
import signal
import sys

from ctl import launch
from ctl.errors import UsageError
from ctl.hardware import tpu
from ctl.hardware.cluster import Cluster

NONE = "none"


def main(argv: Sequence[str]) -> int:
    """Runs the program with a kill in it.

    Args:
        argv: the command line, the program's name first.

    Returns:
        The exit code of the program, or of the launcher, where it outlives the signal.
    """
    own, arguments = list(argv[1:]), []
    if "--" in own:
        cut = own.index("--")
        own, arguments = own[:cut], own[cut + 1 :]
    flags = _flags(own)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is loaded
    tpu.skip_metadata_server()
    from ctl.testing.faults import kills

    try:
        kills.parse(flags.kill)
        if not arguments:
            raise UsageError("Nothing to run: add `-- --config=FILE`.")
        if flags.worker >= max(flags.workers, 1):
            raise UsageError(f"--worker is {flags.worker}, and they are numbered from 0.")
    except UsageError as error:
        print("ctl.testing.faults:", error, file=sys.stderr, flush=True)
        return launch.MISTAKE
    if flags.workers:
        return _Launcher(flags, arguments).run()
    return _run(flags, arguments)


def _run(flags: argparse.Namespace, arguments: Sequence[str]) -> int:
    from ctl import main as program
    from ctl.testing.faults import kills

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the program itself begins
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    by = None if flags.signal == NONE else signal.Signals[flags.signal]
    with kills.killing(flags.kill, by=by):
        return program.run(["ctl", *arguments])


class _Launcher(launch.Launcher):
    """Starts its processes with a kill in one of them, and without if it starts them again."""

    def __init__(self, flags: argparse.Namespace, arguments: Sequence[str]):
        """Takes the command line's flags and the arguments of `ctl.main`."""
        super().__init__(
            workers=flags.workers, servers=0, max_restarts=flags.max_restarts, arguments=arguments
        )
        self._flags = flags
        self._begun: set[str] = set()

    def _begin(self, place: Cluster) -> launch.Process:
        if place.name in self._begun:
            return super()._begin(place)
        self._begun.add(place.name)
        number = self._flags.signal if place.name == f"worker {self._flags.worker}" else NONE
        kill = [f"--kill={self._flags.kill}", f"--signal={number}"]
        command = [sys.executable, "-m", "ctl.testing.faults", *kill, "--", *self._arguments]
        environment = {"TF_CONFIG": place.tf_config(), **self._own[place.name]}
        return launch.Process(place, command, environment)


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ctl.testing.faults", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    points = "start, step:K, save:N or eval:N"
    parser.add_argument("--kill", required=True, metavar="POINT", help=points)
    signals = ("SIGKILL", "SIGTERM", "SIGINT", NONE)
    parser.add_argument("--signal", choices=signals, default="SIGKILL")
    parser.add_argument("--workers", type=int, default=0, help="start so many by ctl.launch")
    parser.add_argument("--worker", type=int, default=0, help="which is killed; default 0")
    parser.add_argument("--max_restarts", type=int, default=0, help="of ctl.launch")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
