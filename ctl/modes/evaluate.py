"""--mode=eval and --mode=continuous_eval."""

import contextlib
import time

from ctl.errors import UsageError
from ctl.loop.checkpoints.checkpointer import DamagedCheckpoint
from ctl.loop.controller import Controller
from ctl.loop.stop import StopOnSignal
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, STOPPED, Arguments
from ctl.modes.run import Run

_POLL_SECONDS = 1.0


def evaluate(arguments: Arguments) -> int:
    """Evaluates the newest checkpoint of a run; returns the exit code."""
    run = _open_run(arguments)
    controller = run.make_controller()
    if not controller.restore_checkpoint():
        raise UsageError(f"{run.workdir.path} has no checkpoint to evaluate: train first.")
    _write_evaluation(run.workdir, controller)
    run.processes.barrier()  # no process exits while another one still evaluates
    return DONE


def continuous_eval(arguments: Arguments) -> int:
    """Evaluates each checkpoint of a run as it appears, up to the one at `train.steps`.

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
            if not new:
                _wait(stop, seconds=_POLL_SECONDS)
                continue
            evaluated = new[0]
            # The run that trains may delete a checkpoint at any time, to keep the newest few.
            with contextlib.suppress(DamagedCheckpoint):
                controller.restore_checkpoint(checkpoints.path(evaluated))
                _write_evaluation(run.workdir, controller)
            if evaluated >= run.config.train.steps:
                return DONE
    return STOPPED


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
