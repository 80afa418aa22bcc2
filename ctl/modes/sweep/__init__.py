"""--sweep: runs an experiment with several values of its keys, each in a run of its own.

Modules:
    settings.py  the values, and the names of the runs
    search.py    values that Optuna chooses
    runner.py    starts the runs as processes, and stops them
    table.py     the table of the results
"""

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
from ctl.modes.sweep import search, settings
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
    devices = _divide_devices(values.sweep_parallel or "1")
    # Before the folder is created: it reports mistakes outside of the sweep.
    config = command_line.load_config(values.config, changes)
    folder = pathlib.Path(values.workdir or f"runs/{name_experiment(values.config)}.sweep")
    names = os.listdir(folder) if folder.is_dir() else []
    if set(names) - {"run.lock"} and "sweep.json" not in names:
        raise UsageError(
            f"{folder} has files in it and no sweep.json, so it is not a sweep's folder: name another "
            "--workdir."
        )
    command = [sys.executable, "-m", "ctl.main", f"--config={values.config}"]
    command += [f"--mode={values.mode}"]
    command += [f"--{name}" for name in command_line.SWITCHES if values[name].value]
    command += [f"--config.{key}" + ("" if text is None else f"={text}") for key, text in changes]
    is_search = search.FORM.fullmatch(values.sweep[0])
    listed = [] if is_search else settings.make_runs(values.config, changes, values.sweep)
    with RunLock(folder) as lock:
        lock.acquire()
        runner = Runner(folder, command, listed, fresh=values.fresh)
        runs = search.choose_runs(values, changes, folder, runner.entries) if is_search else listed
        return runner.run(runs, devices, config)


def _divide_devices(parallel: str) -> list[dict[str, str]]:
    """Returns the variables that give each of the parallel runs GPUs of its own."""
    if not parallel.isdecimal() or not int(parallel):
        raise UsageError(
            f"--sweep_parallel is {parallel!r}, but must be a number of runs, at least 1."
        )
    count, gpus = int(parallel), gpu.list_gpus()
    if not gpus or count == 1:
        return [{}] * count
    if count > len(gpus):
        raise UsageError(
            f"--sweep_parallel is {count}, but this machine has {len(gpus)} GPUs, and each run uses at "
            "least one: start at most as many runs as GPUs, or set CUDA_VISIBLE_DEVICES=-1 to use the "
            "CPU."
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[slot::count])} for slot in range(count)]
