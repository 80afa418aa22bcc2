"""Tries a run: trains two steps in a temporary folder (--dry_run)."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import pathlib
import shutil

from ml_collections import config_dict

from ctl.configs import overrides
from ctl.configs.values import SERVERS
from ctl.errors import print_line
from ctl.loop.lock import RunLock
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, Arguments

DRY_STEPS = 2  # of training, and of each evaluation


def dry_run(arguments: Arguments, train: Callable[[Arguments], int]) -> int:
    """Trains in a temporary folder; returns the exit code.

    Args:
        arguments: the command line; its workdir is not touched.
        train: trains a run.
    """
    with _temporary_workdir(arguments.workdir) as workdir:
        code = train(dataclasses.replace(arguments, workdir=workdir, fresh=False))
    if workdir.writes:
        passed = f"{DRY_STEPS} steps with their evaluations, checkpoints and actions passed"
        result = passed if code == DONE else "stopped"
        print_line(f"Dry run: {result}, and nothing was kept.")
    return code


def shorten(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns a locked copy of a config that trains two steps, and saves and evaluates after each.

    Args:
        config: the config, after the trainer was built from it: the optimizer and its schedule are
            those of the complete run.
    """
    ones = ("train.steps_per_loop", "train.checkpoint_interval", "eval.interval")
    values = {"train.steps": DRY_STEPS, "train.checkpoint_keep_every": 0, **dict.fromkeys(ones, 1)}
    # No writers to a server, which would keep the run.
    writers = [name for name in config.summaries.writers if name not in SERVERS]
    return overrides.with_values(config, {**values, "summaries.writers": writers})


@contextlib.contextmanager
def _temporary_workdir(workdir: Workdir) -> Iterator[Workdir]:
    """Yields a folder next to the workdir, so on the same disk and for all processes of the run."""
    folder = workdir.path if workdir.path.name else workdir.path.absolute()  # "." has no name
    path = folder.with_name(f"{folder.name}.dry_run")
    parents = [parent for parent in path.parents if not parent.exists()]
    temporary = Workdir(path, writes=workdir.writes)
    if workdir.writes and temporary.has_run():
        _remove_killed(path)
    try:
        yield temporary
    finally:
        if workdir.writes:
            if temporary.has_run():
                shutil.rmtree(path, ignore_errors=True)
            for parent in parents:
                with contextlib.suppress(OSError):  # not empty: something else uses it now
                    parent.rmdir()


def _remove_killed(path: pathlib.Path) -> None:
    """Removes the folder of a killed dry run; raises UsageError if another one is in progress."""
    with RunLock(path) as lock:
        lock.acquire()
        shutil.rmtree(path)
