"""--mode=eval and --mode=continuous_eval: evaluate the checkpoints of a run."""

from collections.abc import Mapping, Sequence
import contextlib
import time
from typing import Any

from ctl.errors import UsageError
from ctl.loop.checkpoints.checkpointer import DamagedCheckpoint
from ctl.loop.checkpoints.files import hold
from ctl.loop.stop import StopOnSignal
from ctl.modes import DONE, STOPPED, Arguments
from ctl.modes.export import find_checkpoint
from ctl.modes.run import ExperimentRun

_POLL_SECONDS = 1.0


def evaluate(arguments: Arguments) -> int:
    """Evaluates a checkpoint of a run, by default the one of its result; returns the exit code."""
    path = find_checkpoint(arguments.workdir, arguments.checkpoint)
    # A run that trains meanwhile may delete it.
    with hold(path or "") as held:
        run, changes = _open_run(arguments)
        is_result = not arguments.checkpoint and not changes
        controller = run.make_controller(
            actions=run.make_actions(trains=False), records=run.is_chief and is_result
        )
        # A parameter server cannot open what this process holds.
        source = path if run.experiment.hardware.cluster else held
        try:
            restored = controller.restore_checkpoint(source)
        except DamagedCheckpoint as error:
            raise UsageError(
                f"{path} cannot be read ({error}): name another --checkpoint."
            ) from None
    if not restored:
        raise UsageError(f"{run.workdir.path} has no checkpoint to evaluate: train first.")
    if path:
        run.progress.print_line(f"Evaluating {path}.")
    evaluation = controller.evaluate()
    if evaluation is not None:  # None: stopped before its end
        if is_result:
            # The step of a run that restored its best checkpoint is still the last one.
            step = {} if path else {"step": controller.step}
            _write_result(run, {**step, "eval": evaluation})
        else:
            _write_other(run, controller.step, path or restored, changes, evaluation)
    run.processes.barrier()  # no process exits while another one still evaluates
    return DONE


def continuous_eval(arguments: Arguments) -> int:
    """Evaluates each checkpoint of a run as it appears, up to the last one.

    Returns:
        The exit code: done, or stopped by a signal.
    """
    run, changes = _open_run(arguments)
    if run.experiment.hardware.cluster:
        raise UsageError(
            "--mode=continuous_eval runs in one process, next to those that train: unset TF_CONFIG."
        )
    checkpoints = run.checkpoints
    with StopOnSignal() as stop:
        controller = run.make_controller(
            actions=run.make_actions(trains=False), records=not changes
        )
        evaluated = 0
        run.progress.print_line(f"Waiting for checkpoints in {run.workdir.name}/checkpoints.")
        while not stop.requested:
            run.workdir.sync()
            new = [step for step in checkpoints.files.steps() if step > evaluated]
            if not new and _has_ended(run, evaluated):
                return DONE
            if not new:
                _wait(stop, seconds=_POLL_SECONDS)
                continue
            evaluated = new[0]
            # The run that trains may delete a checkpoint at any time, to keep the newest few.
            with contextlib.suppress(DamagedCheckpoint):
                path = controller.restore_checkpoint(checkpoints.path(evaluated))
                evaluation = controller.evaluate()
                if evaluation is not None and changes:
                    _write_other(run, evaluated, path or "", changes, evaluation)
                # A run that has ended meanwhile has the result of a later step.
                elif evaluation is not None and evaluated >= run.workdir.result().get("step", 0):
                    _write_result(run, {"step": evaluated, "eval": evaluation})
    return STOPPED


def _has_ended(run: ExperimentRun, evaluated: int) -> bool:
    """Returns whether a checkpoint was the last one of a run."""
    stopped = run.workdir.result().get("stopped") or {}
    # The number of steps as it was resolved by the run, which may have had other data.
    steps = run.workdir.config().get("train.steps", run.config.train.steps)
    return evaluated >= steps or stopped.get("step") == evaluated


def _open_run(arguments: Arguments) -> tuple[ExperimentRun, list[str]]:
    """Builds the run, and lists the changes of its config that change the evaluation."""
    if not arguments.config.eval.splits:
        raise UsageError(
            "eval.splits is empty, so there is nothing to evaluate: name a split that build_dataset "
            "returns, such as --config.eval.splits=\"['eval']\"."
        )
    run = ExperimentRun(arguments, reads_only=True)
    run.workdir.check_run()
    config = run.record
    run.workdir.check_config(
        config, allow_change=arguments.allow_config_change, only_evaluates=True
    )
    changes = run.workdir.evaluation_changes(config)
    for line in changes:
        run.progress.print_line(f"Changed since the run was started: {line}")
    return run, changes


def _wait(stop: StopOnSignal, *, seconds: float) -> None:
    """Sleeps, but wakes soon after a signal."""
    end = time.monotonic() + seconds
    while not stop.requested and time.monotonic() < end:
        time.sleep(0.05)


def _write_result(run: ExperimentRun, entries: Mapping[str, Any]) -> None:
    run.workdir.write_result({**run.workdir.result(), **entries})


def _write_other(
    run: ExperimentRun, step: int, path: str, changes: Sequence[str], evaluation: Mapping[str, Any]
) -> None:
    """Records an evaluation that is not the run's own: of a named checkpoint, or of other data."""
    changed = {"changes": changes} if changes else {}
    entry = {"path": path, "step": step, **changed, "eval": evaluation}
    _write_result(run, {"checkpoint": entry})
    run.workdir.event("checkpoint_eval", step, path=path, **changed, eval=evaluation)
