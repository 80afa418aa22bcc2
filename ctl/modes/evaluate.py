"""--mode=eval and --mode=continuous_eval."""

import contextlib
import os
import time

from ctl.errors import UsageError, list_some
from ctl.loop.actions import best_checkpoint
from ctl.loop.checkpoints.checkpointer import DamagedCheckpoint
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.loop.controller import Controller
from ctl.loop.stop import StopOnSignal
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, STOPPED, Arguments
from ctl.modes.run import Run

_POLL_SECONDS = 1.0


def evaluate(arguments: Arguments) -> int:
    """Evaluates a checkpoint of a run, by default the newest; returns the exit code."""
    path = _find_checkpoint(arguments.workdir, arguments.checkpoint)
    run = _open_run(arguments)
    controller = run.make_controller()
    try:
        restored = controller.restore_checkpoint(path)
    except (DamagedCheckpoint, IndexError) as error:  # TensorFlow's error of a file cut short
        raise UsageError(f"{path} cannot be read ({error}): name another --checkpoint.") from None
    if not restored:
        raise UsageError(f"{run.workdir.path} has no checkpoint to evaluate: train first.")
    if path is None:
        _write_evaluation(run.workdir, controller)
    else:
        run.progress.print_line(f"Evaluating {path}.")
        _write_evaluation_of(run.workdir, controller, path)
    run.processes.barrier()  # no process exits while another one still evaluates
    return DONE


def continuous_eval(arguments: Arguments) -> int:
    """Evaluates each checkpoint of a run as it appears, up to the last one.

    Returns:
        The exit code: done, or stopped by a signal.
    """
    run = _open_run(arguments)
    if run.experiment.hardware.cluster:
        raise UsageError(
            "--mode=continuous_eval runs in one process, next to those that train: unset TF_CONFIG."
        )
    checkpoints = run.checkpoints
    with StopOnSignal() as stop:
        controller = run.make_controller()
        evaluated = 0
        run.progress.print_line(f"Waiting for checkpoints in {run.workdir.checkpoints}.")
        while not stop.requested:
            new = [step for step in checkpoints.files.steps() if step > evaluated]
            if not new and _has_ended(run, evaluated):
                return DONE
            if not new:
                _wait(stop, seconds=_POLL_SECONDS)
                continue
            evaluated = new[0]
            # The run that trains may delete a checkpoint at any time, to keep the newest few.
            with contextlib.suppress(DamagedCheckpoint):
                controller.restore_checkpoint(checkpoints.path(evaluated))
                _write_evaluation(run.workdir, controller)
    return STOPPED


def _find_checkpoint(workdir: Workdir, name: str) -> str | None:
    """The path of the checkpoint that --checkpoint names; None for the newest.

    Raises:
        UsageError: there is no such checkpoint.
    """
    if not name:
        return None
    if name == "best":
        return best_checkpoint.find_best(workdir.best)
    folders = [CheckpointFiles(folder) for folder in (workdir.checkpoints, workdir.best)]
    if name.isdecimal():
        for files in folders:
            if int(name) in files.steps():
                return files.path(int(name))
        steps = sorted({step for files in folders for step in files.steps()})
        raise UsageError(
            f"--checkpoint={name}: {workdir.path} has no checkpoint of this step, but of "
            f"{list_some([str(step) for step in steps]) or 'none'}."
        )
    path = name.removesuffix(".index")
    if not os.path.exists(f"{path}.index"):
        raise UsageError(
            f"--checkpoint is {name!r}, but must be best, a step, or a checkpoint's path, such as "
            f"{folders[0].path(1000)}."
        )
    return path


def _has_ended(run: Run, evaluated: int) -> bool:
    """Whether a checkpoint was the last one of a run: no other one follows it."""
    stopped = run.workdir.result().get("stopped") or {}
    return evaluated >= run.config.train.steps or stopped.get("step") == evaluated


def _open_run(arguments: Arguments) -> Run:
    run = Run(arguments, reads_only=True)
    run.workdir.check_run()
    run.workdir.check_config(run.config.to_dict())
    return run


def _wait(stop: StopOnSignal, *, seconds: float) -> None:
    """Sleeps, but wakes soon after a signal."""
    end = time.monotonic() + seconds
    while not stop.requested and time.monotonic() < end:
        time.sleep(0.05)


def _write_evaluation(workdir: Workdir, controller: Controller) -> None:
    evaluation = controller.evaluate()
    if evaluation is not None:  # None: stopped before its end
        workdir.write_result({**workdir.result(), "step": controller.step, "eval": evaluation})


def _write_evaluation_of(workdir: Workdir, controller: Controller, path: str) -> None:
    """Evaluates a checkpoint by name; the result of the run is still that of its last step."""
    evaluation = controller.evaluate()
    if evaluation is not None:
        entry = {"path": path, "step": controller.step, "eval": evaluation}
        workdir.write_result({**workdir.result(), "checkpoint": entry})
