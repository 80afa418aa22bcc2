"""What the program does with an experiment: one function a mode."""

from collections.abc import Sequence
import contextlib
import time
from typing import Any

from ctl.errors import UsageError, print_line
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.checkpoints import warm_start
from ctl.loop.checkpoints.checkpointer import DamagedCheckpoint
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.loop.controller import Controller
from ctl.loop.lock import RunLock
from ctl.loop.stop import StopOnSignal
from ctl.loop.workdir import Workdir
from ctl.modes import messages, results, run
from ctl.modes.aot_compile.slices import Slice
from ctl.modes.experiment import Experiment

DONE, STOPPED = 0, 75


def train(
    experiment: Experiment,
    workdir: Workdir,
    *,
    evaluates: bool,
    fresh: bool,
    allow_change: bool,
    allow_partial: bool = False,
) -> int:
    """Trains to `train.steps`, evaluating by the way and at the end where asked.

    Args:
        experiment: what `build` returned.
        workdir: the run's folder; a run in it is resumed.
        evaluates: whether to evaluate.
        fresh: move a run in the folder aside first.
        allow_change: go on though the config's arithmetic changed.
        allow_partial: go on from a checkpoint that fits in part.

    Returns:
        The exit code.
    """
    with RunLock(workdir.path) as lock:
        return _train(
            experiment,
            workdir,
            lock,
            evaluates=evaluates,
            fresh=fresh,
            allow_change=allow_change,
            allow_partial=allow_partial,
        )


def _train(
    experiment: Experiment,
    workdir: Workdir,
    lock: RunLock,
    *,
    evaluates: bool,
    fresh: bool,
    allow_change: bool,
    allow_partial: bool,
) -> int:
    config = experiment.config
    processes = ProcessGroup(experiment.hardware)
    if fresh or not CheckpointFiles(workdir.checkpoints).steps():
        warm_start.check(experiment.trainer, config.init, moved=workdir.path if fresh else None)
    changes = _prepare(experiment, workdir, lock, fresh=fresh, allow_change=allow_change)
    processes.barrier()  # the folder is as it is to be
    checkpoints = run.checkpoints_of(experiment, workdir, processes, partial=allow_partial)
    reached = processes.broadcast_from_chief(checkpoints.latest_step() or 0)
    if reached >= config.train.steps and processes.any_process(
        results.is_complete(workdir, reached, evaluates)
    ):
        evaluation = workdir.result().get("eval") or {}
        run.sayer(experiment)(messages.complete(reached, evaluation, config))
        return DONE
    progress = run.progress_of(experiment)
    with (
        StopOnSignal() as stop,
        run.preemption_notice(experiment) as notice,
        run.stall_watch(experiment, workdir) as watch,
    ):
        controller = run.controller_of(
            experiment,
            workdir,
            checkpoints,
            progress,
            stop=lambda: processes.any_process(stop.requested or bool(notice and notice.received)),
            save_due=run.save_due(experiment, processes),
            watch=watch.loop,
            guard=run.guard_of(experiment, workdir, processes),
            train_actions=[lambda _: lock.check()],
        )
        restored = controller.restore_checkpoint()
        warm = None
        if not restored:
            warm = warm_start.begin(
                experiment.trainer, config.init, agree=processes.broadcast_from_chief
            )
        workdir.create(config.to_dict())  # not before the checkpoint was seen to fit
        progress.print_line(messages.start(experiment.hardware, experiment.trainer))
        for line in changes:
            progress.print_line(f"Changed since the run was started: {line}")
        if restored:
            progress.print_line(f"Resumed from {restored}.")
            partial = checkpoints.unmatched
            if partial:
                progress.print_line(messages.partial(partial))
            left = {"left": partial.left(), "dropped": partial.dropped()} if partial else {}
            workdir.event("resume", controller.step, path=restored, changes=changes, **left)
        else:
            if warm:
                progress.print_line(messages.warm(warm))
            workdir.event("start", controller.step, **(warm.record() if warm else {}))
        start = time.monotonic()
        if evaluates and controller.step >= config.train.steps:
            controller.evaluate()
        elif evaluates:
            controller.train_and_evaluate(config.train.steps, eval_interval=config.eval.interval)
        else:
            controller.train(config.train.steps)
        controller.wait_for_checkpoint()
        result = results.of_run(experiment, controller, time.monotonic() - start)
        workdir.write_result(
            result if controller.outputs else {**result, **results.of_training(workdir)}
        )
        why = {"signal": stop.received.name} if stop.received else {}
        if notice and notice.received:
            why["notice"] = notice.received
        workdir.event("stop" if controller.stopped else "end", controller.step, **why)
    processes.barrier()  # no process goes while another writes
    if controller.stopped:
        progress.print_line(messages.stopped(controller.step, workdir.path))
        return STOPPED
    progress.print_line(messages.done(workdir.path))
    return DONE


def evaluate(experiment: Experiment, workdir: Workdir) -> int:
    """Evaluates the newest checkpoint of a run; returns the exit code."""
    _require_run(experiment, workdir)
    processes = ProcessGroup(experiment.hardware)
    checkpoints = run.checkpoints_of(experiment, workdir, processes, reads_only=True)
    controller = run.controller_of(experiment, workdir, checkpoints, run.progress_of(experiment))
    if not controller.restore_checkpoint():
        raise UsageError(f"{workdir.path} has no checkpoint to evaluate: train first.")
    _write_evaluation(workdir, controller)
    processes.barrier()
    return DONE


def continuous_eval(experiment: Experiment, workdir: Workdir) -> int:
    """Evaluates each checkpoint of a run as it appears, up to that of `train.steps`.

    Returns:
        The exit code: done, or stopped by a signal.
    """
    _require_run(experiment, workdir)
    if experiment.hardware.cluster:
        raise UsageError(
            "--mode=continuous_eval runs in one process, by the side of the others: unset TF_CONFIG."
        )
    steps = experiment.config.train.steps
    progress = run.progress_of(experiment)
    checkpoints = run.checkpoints_of(experiment, workdir, ProcessGroup(), reads_only=True)
    with StopOnSignal() as stop:
        controller = run.controller_of(experiment, workdir, checkpoints, progress)
        seen = 0
        progress.print_line(f"Waiting for checkpoints in {workdir.checkpoints}.")
        while not stop.requested:
            new = [step for step in checkpoints.files.steps() if step > seen]
            if not new:
                _wait(stop, seconds=1.0)
                continue
            seen = new[0]
            with contextlib.suppress(
                DamagedCheckpoint
            ):  # deleted since, to keep the number that is kept
                controller.restore_checkpoint(checkpoints.path(seen))
                _write_evaluation(workdir, controller)
            if seen >= steps:
                return DONE
    return STOPPED


def check(experiment: Experiment, config_path: str) -> int:
    """Looks at an experiment before a long run, and writes nothing.

    Returns:
        The exit code: 1 where something would go wrong.
    """
    from ctl.modes.check import (  # with the kit for tests, which no other mode needs
        checks,
        trainer_factory,
    )

    if experiment.hardware.cluster:
        raise UsageError("--mode=check runs in one process: unset TF_CONFIG.")
    print_line(f"Checking {experiment.config.trainer}, which takes about a minute.")
    return checks.look(trainer_factory.TrainerFactory(experiment, config_path), print_line)


def _wait(stop: StopOnSignal, *, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not stop.requested and time.monotonic() < until:
        time.sleep(0.05)


def _prepare(
    experiment: Experiment, workdir: Workdir, lock: RunLock, *, fresh: bool, allow_change: bool
) -> list[str]:
    """Makes way for the run in its folder, or checks that it may go on there: the chief's work.

    Returns:
        A line for each change of the config that the run goes on with.
    """
    if not experiment.hardware.is_chief:
        return []
    lock.acquire()
    aside = workdir.move_aside() if fresh else None
    if aside:
        run.sayer(experiment)(f"The old run is now {aside}.")
        lock.follow(aside)
    return workdir.check_config(experiment.config.to_dict(), allow_change=allow_change)


def aot_compile(
    config: Any, config_path: str, workdir: Workdir, asked: Sequence[Slice], *, find_batch: bool
) -> int:
    """Compiles the step for TPU slices, none of which need be here.

    Args:
        config: a checked config.
        config_path: the file that it is from.
        workdir: the folder that the findings are written to.
        asked: the slices.
        find_batch: whether to search for the largest batch that fits.

    Returns:
        The exit code: 1 where it would not run on one of them.
    """
    from ctl.modes.aot_compile import (  # private parts of TensorFlow, which no other mode needs
        report,
        survey,
    )

    outcomes = survey.survey(
        config, config_path, asked, find_batch=find_batch, print_line=print_line
    )
    print_line(report.table(outcomes))
    path = report.write(outcomes, workdir.path)
    print_line(f"{report.LIMITS} All figures: {path}")
    return 0 if all(outcome.compiled for outcome in outcomes) else 1


def _require_run(experiment: Experiment, workdir: Workdir) -> None:
    workdir.check_run()
    workdir.check_config(experiment.config.to_dict())


def _write_evaluation(workdir: Workdir, controller: Controller) -> None:
    evaluation = controller.evaluate()
    if evaluation is None:  # stopped before its end
        return
    workdir.write_result({**workdir.result(), "step": controller.step, "eval": evaluation})
