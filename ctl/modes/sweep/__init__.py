"""--sweep: runs an experiment with several values of its keys, each in a run of its own.

Modules:
    settings.py  the values, and the names of the runs
    runner.py    starts the runs as processes, stops them, and writes the table of the results
"""

from collections.abc import Sequence
import os
import pathlib
import sys

from absl import flags

from ctl.configs import flags as command_line
from ctl.configs.flags import Changes
from ctl.errors import UsageError
from ctl.hardware import gpu
from ctl.loop.lock import RunLock
from ctl.loop.workdir import name_experiment
from ctl.modes.sweep import settings
from ctl.modes.sweep.runner import Runner


def run(values: flags.FlagValues, changes: Changes) -> int:
    """Runs a sweep.

    Args:
        values: the flags of the command line.
        changes: the changes of the config, which all runs have.

    Returns:
        The exit code: 0 if all runs are done, 1 if one of them failed, 75 if the sweep was stopped.

    Raises:
        UsageError: a setting is wrong; no run was started then.
    """
    if "TF_CONFIG" in os.environ:
        raise UsageError("--sweep starts its runs on this machine: unset TF_CONFIG.")
    if values.dry_run:
        raise UsageError("--dry_run tries one run: remove --sweep, or --dry_run.")
    parallel = _parse_parallel(values.sweep_parallel)
    runs = settings.make_runs(values.config, changes, values.sweep)
    name = name_experiment(values.config)
    folder = pathlib.Path(values.workdir or f"runs/{name}.sweep")
    _check_folder(folder)
    command = [
        sys.executable,
        "-m",
        "ctl.main",
        f"--config={values.config}",
        f"--mode={values.mode}",
    ]
    command += [f"--{name}" for name in command_line.SWITCHES if values[name].value]
    command += _as_arguments(changes)
    with RunLock(folder) as lock:
        lock.acquire()
        runner = Runner(
            folder, command, runs, parallel=parallel, fresh=values.fresh, config=runs[0].config
        )
        return runner.run()


def _as_arguments(changes: Changes) -> list[str]:
    return [f"--config.{key}" + (f"={text}" if text is not None else "") for key, text in changes]


def _parse_parallel(text: str | None) -> int:
    if text is None:
        return 1
    if not text.isdecimal() or not int(text):
        raise UsageError(f"--sweep_parallel is {text!r}, but must be a number of runs, at least 1.")
    count, gpus = int(text), gpu.list_gpus()
    if gpus and count > len(gpus):
        raise UsageError(
            f"--sweep_parallel is {count}, but this machine has {len(gpus)} GPUs, and each run uses at "
            "least one: start at most as many runs as GPUs, or set CUDA_VISIBLE_DEVICES=-1 to use the "
            "CPU."
        )
    return count


def _check_folder(folder: pathlib.Path) -> None:
    if (folder / "config.json").exists():
        raise UsageError(
            f"{folder} holds a run, not a sweep: name another --workdir for the sweep."
        )
    names: Sequence[str] = os.listdir(folder) if folder.is_dir() else []
    if set(names) - {"run.lock"} and "sweep.json" not in names:
        raise UsageError(
            f"{folder} has files in it and no sweep.json, so it is not a sweep's folder: name another "
            "--workdir."
        )
