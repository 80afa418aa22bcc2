"""Starts and supervises the processes of a run on this machine.

    python -m ctl.launch --workers=2 -- --config=experiments/mnist_multi_worker.py

Each process runs `python -m ctl.main` with the arguments after `--`, and finds its task in TF_CONFIG.
Each line of output begins with the name of its process. The launcher reports the process that fails
first, stops the others and exits with that process's code; with --max_restarts it restarts all
processes first. Importing this module does not import TensorFlow.
"""

import argparse
from collections.abc import Sequence
import os
import sys

from ctl.errors import UsageError
from ctl.hardware import gpu
from ctl.hardware.processes import USER_ERROR, Launcher


def main(argv: Sequence[str]) -> int:
    """Runs the launcher.

    Args:
        argv: the command line, starting with the program's name.

    Returns:
        The exit code: 0 done, 2 user error, else that of the process that failed first.
    """
    try:
        flags, arguments = _parse(list(argv[1:]))
        _check_gpus(flags.workers)
    except UsageError as error:
        print("ctl.launch:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        return USER_ERROR
    command = [sys.executable, "-m", "ctl.main", *arguments]
    return Launcher(
        lambda task: command,
        workers=flags.workers,
        servers=flags.ps,
        max_restarts=flags.max_restarts,
    ).run()


def _parse(command_line: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the launcher's flags and the arguments of ctl.main."""
    dashes = command_line.index("--") if "--" in command_line else len(command_line)
    parser = _Parser(prog="python -m ctl.launch", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workers", type=int, default=1, help="worker processes; default 1")
    parser.add_argument("--ps", type=int, default=0, help="parameter servers; default none")
    parser.add_argument("--max_restarts", type=int, default=0, help="after a failure; default 0")
    flags = parser.parse_args(command_line[:dashes])
    for name, least in (("workers", 1), ("ps", 0), ("max_restarts", 0)):
        value = getattr(flags, name)
        if value < least:
            raise UsageError(f"--{name} is {value}, but must be at least {least}.")
    arguments = command_line[dashes + 1 :]
    if not arguments:
        raise UsageError(
            "There is nothing to run: add `-- --config=FILE`, the arguments of ctl.main after two "
            "dashes."
        )
    return flags, arguments


class _Parser(argparse.ArgumentParser):
    """Raises a UsageError in place of argparse's usage text and exit."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"The command line cannot be read: {message}; see --help.")


def _check_gpus(workers: int) -> None:
    gpus = gpu.list_gpus(os.environ)
    if gpus and workers > len(gpus):
        raise UsageError(
            f"--workers is {workers}, but this machine has {len(gpus)} GPUs: start at most "
            f"{len(gpus)} workers, or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU."
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
