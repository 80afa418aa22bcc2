"""Starts and supervises the processes of a run on this machine.

    ctl launch --workers=2 -- --config=experiments/mnist_multi_worker.py

Each process runs `python -m ctl.main` with the arguments after `--`, and reads its task from TF_CONFIG.
Each line of output begins with the name of its process. The launcher reports the process that fails
first, stops the others and exits with that process's code; with --max_restarts it restarts all
processes first.

    ctl launch --workers=4 --min_workers=2 --max_restarts=9 -- --config=... --workdir=runs/a

With --min_workers the run also continues with fewer workers. A worker that is killed counts as lost:
the others continue from the last checkpoint, with the same global batches. After --rejoin_seconds it
is tried again: the run saves, and continues with it. If fewer than --min_workers can run, the launcher
waits for up to --wait_seconds. A run is stopped for another number of workers only after it has saved a
checkpoint. A run that fails repeatedly without a new checkpoint is not restarted.
"""

import argparse
from collections.abc import Sequence
import pathlib
import re
import sys
from typing import Any

from ctl.configs.flags import use_underscores
from ctl.errors import UsageError, check_local
from ctl.hardware import elastic, gpu
from ctl.hardware.processes import USER_ERROR, Launcher

# The forms of a Boolean flag that ctl.main accepts, as absl's flags do.
_FRESH = re.compile(r"--?(no)?fresh(?:=(.*))?")


def main(argv: Sequence[str]) -> int:
    """Runs the launcher.

    Args:
        argv: the command line, starting with the program's name.

    Returns:
        The exit code: 0 done, 2 user error, else the code of the process that failed first.
    """
    try:
        flags, arguments = _parse(list(argv[1:]))
        # An elastic run may have lost a GPU before its command is rerun.
        _check_gpus(flags.min_workers or flags.workers)
        command = [sys.executable, "-m", "ctl.main", *arguments]
        return Launcher(
            lambda task: command,
            workers=flags.workers,
            servers=flags.ps,
            max_restarts=flags.max_restarts,
            **(_make_elastic(flags, arguments) if flags.min_workers else {}),
        ).run()
    except UsageError as error:
        _print_line(str(error))
        return USER_ERROR


def _make_elastic(flags: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of the launcher that let it continue with fewer workers."""
    workdir = _read_workdir(arguments)
    pool = elastic.WorkerPool(
        flags.workers,
        minimum=flags.min_workers,
        rejoin_seconds=flags.rejoin_seconds,
        gpus=gpu.list_uuids(),
    )
    limit = elastic.FailureLimit(workdir)
    return {"pool": pool, "failure_limit": limit, "wait_seconds": flags.wait_seconds}


def _read_workdir(arguments: Sequence[str]) -> pathlib.Path:
    """Reads --workdir; its new checkpoints show the launcher that the run makes progress."""
    if _is_fresh(arguments):
        raise UsageError(
            "--fresh would start the run from scratch at each restart of --min_workers: remove it, and "
            "name a new --workdir."
        )
    parser = _Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("--workdir")
    workdir = parser.parse_known_args(arguments)[0].workdir
    if not workdir:
        raise UsageError("--min_workers requires --workdir=FOLDER among the arguments of ctl.main.")
    # The launcher would see no checkpoint, and take each failure for one without progress.
    check_local("The --workdir of --min_workers", workdir)
    return pathlib.Path(workdir)


def _is_fresh(arguments: Sequence[str]) -> bool:
    """Returns the value of --fresh, whose last occurrence counts."""
    matches = [match for match in map(_FRESH.fullmatch, arguments) if match]
    if not matches:
        return False
    negated, value = matches[-1].groups()
    return not negated and (value or "").lower() not in ("false", "f", "0")


def _parse(command_line: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the launcher's flags and the arguments of ctl.main."""
    dashes = command_line.index("--") if "--" in command_line else len(command_line)
    parser = _Parser(prog="ctl launch", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workers", type=int, default=1, help="worker processes; default 1")
    parser.add_argument("--ps", type=int, default=0, help="parameter servers; default none")
    parser.add_argument(
        "--max_restarts", type=int, default=0, help="restarts after failures; default 0"
    )
    parser.add_argument(
        "--min_workers", type=int, help="fewest workers of a run; default --workers"
    )
    parser.add_argument(
        "--rejoin_seconds",
        type=float,
        help="seconds until a lost worker is tried again, default 300",
    )
    parser.add_argument("--wait_seconds", type=float, help="to wait for --min_workers; default 600")
    flags = parser.parse_args(list(map(use_underscores, command_line[:dashes])))
    _check_numbers(flags)
    arguments = command_line[dashes + 1 :]
    if not arguments:
        raise UsageError(
            "There is nothing to run: add `-- --config=FILE`, the arguments of ctl.main after two "
            "dashes."
        )
    return flags, arguments


def _check_numbers(flags: argparse.Namespace) -> None:
    limits = {"workers": 1, "ps": 0, "max_restarts": 0, "min_workers": 1}
    for name, least in {**limits, "rejoin_seconds": 0, "wait_seconds": 0}.items():
        value = getattr(flags, name)
        if value is not None and not value >= least:  # also NaN
            raise UsageError(f"--{name} is {value}, but must be at least {least}.")
    if flags.min_workers is None:
        for name in ("rejoin_seconds", "wait_seconds"):
            if getattr(flags, name) is not None:
                raise UsageError(f"--{name} has no effect without --min_workers: set it, too.")
    elif flags.min_workers > flags.workers:
        raise UsageError(
            f"--min_workers is {flags.min_workers}, but must be at most --workers, {flags.workers}."
        )
    elif flags.ps:
        raise UsageError(
            "--min_workers has no effect with --ps: the chief continues without a lost worker."
        )
    flags.rejoin_seconds = 300.0 if flags.rejoin_seconds is None else flags.rejoin_seconds
    flags.wait_seconds = 600.0 if flags.wait_seconds is None else flags.wait_seconds


class _Parser(argparse.ArgumentParser):
    """A parser that raises a UsageError instead of printing its usage and exiting."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"The command line cannot be read: {message}; see --help.")


def _check_gpus(workers: int) -> None:
    gpus = gpu.list_gpus()
    if gpus and workers > len(gpus):
        raise UsageError(
            f"--workers is {workers}, but this machine has {len(gpus)} GPUs: start at most "
            f"{len(gpus)} workers, or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU."
        )


def _print_line(text: str) -> None:
    print("ctl.launch:", " ".join(text.split()), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
