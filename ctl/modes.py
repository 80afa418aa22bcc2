"""What the program does with an experiment: one function a mode."""

from collections.abc import Sequence
import contextlib
import time
from typing import Any

from ctl import announcements, assembly, results
from ctl.aot.slices import Slice
from ctl.errors import UsageError
from ctl.experiment import Experiment
from ctl.loop import warm_start
from ctl.loop.agreement import Agreement
from ctl.loop.checkpoints import Damaged
from ctl.loop.commits import Commits
from ctl.loop.controller import Controller
from ctl.loop.lock import RunLock
from ctl.loop.progress import say
from ctl.loop.stop import StopOnSignal
from ctl.loop.workdir import Workdir

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
    agreement = Agreement(experiment.hardware)
    if fresh or not Commits(workdir.checkpoints).steps():
        warm_start.check(experiment.trainer, config.init, moved=workdir.path if fresh else None)
    changes = _prepare(experiment, workdir, lock, fresh=fresh, allow_change=allow_change)
    agreement.meet()  # the folder is as it is to be
    checkpoints = assembly.checkpoints_of(experiment, workdir, agreement, partial=allow_partial)
    reached = agreement.of_chief(checkpoints.latest_step() or 0)
    if reached >= config.train.steps and agreement.any(
        results.is_complete(workdir, reached, evaluates)
    ):
        evaluation = workdir.result().get("eval") or {}
        assembly.sayer(experiment)(announcements.complete(reached, evaluation, config))
        return DONE
    progress = assembly.progress_of(experiment)
    with (
        StopOnSignal() as stop,
        assembly.preemption_notice(experiment) as notice,
        assembly.stall_watch(experiment, workdir) as watch,
    ):
        controller = assembly.controller_of(
            experiment,
            workdir,
            checkpoints,
            progress,
            stop=lambda: agreement.any(stop.requested or bool(notice and notice.received)),
            save_due=assembly.save_due(experiment, agreement),
            watch=watch.loop,
            guard=assembly.guard_of(experiment, workdir, agreement),
            train_actions=[lambda _: lock.check()],
        )
        restored = controller.restore_checkpoint()
        warm = None
        if not restored:
            warm = warm_start.begin(experiment.trainer, config.init, agree=agreement.of_chief)
        workdir.create(config.to_dict())  # not before the checkpoint was seen to fit
        progress.say(announcements.start(experiment.hardware, experiment.trainer))
        for line in changes:
            progress.say(f"Changed since the run was started: {line}")
        if restored:
            progress.say(f"Resumed from {restored}.")
            partial = checkpoints.unmatched
            if partial:
                progress.say(announcements.partial(partial))
            left = {"left": partial.left(), "dropped": partial.dropped()} if partial else {}
            workdir.event("resume", controller.step, path=restored, changes=changes, **left)
        else:
            if warm:
                progress.say(announcements.warm(warm))
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
    agreement.meet()  # no process goes while another writes
    if controller.stopped:
        progress.say(announcements.stopped(controller.step, workdir.path))
        return STOPPED
    progress.say(announcements.done(workdir.path))
    return DONE


def evaluate(experiment: Experiment, workdir: Workdir) -> int:
    """Evaluates the newest checkpoint of a run; returns the exit code."""
    _require_run(experiment, workdir)
    agreement = Agreement(experiment.hardware)
    checkpoints = assembly.checkpoints_of(experiment, workdir, agreement, reads_only=True)
    controller = assembly.controller_of(
        experiment, workdir, checkpoints, assembly.progress_of(experiment)
    )
    if not controller.restore_checkpoint():
        raise UsageError(f"{workdir.path} has no checkpoint to evaluate: train first.")
    _write_evaluation(workdir, controller)
    agreement.meet()
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
    progress = assembly.progress_of(experiment)
    checkpoints = assembly.checkpoints_of(experiment, workdir, Agreement(), reads_only=True)
    with StopOnSignal() as stop:
        controller = assembly.controller_of(experiment, workdir, checkpoints, progress)
        seen = 0
        progress.say(f"Waiting for checkpoints in {workdir.checkpoints}.")
        while not stop.requested:
            new = [step for step in checkpoints.commits.steps() if step > seen]
            if not new:
                _wait(stop, seconds=1.0)
                continue
            seen = new[0]
            with contextlib.suppress(Damaged):  # deleted since, to keep the number that is kept
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
    from ctl.preflight import blueprint, looks  # with the kit for tests, which no other mode needs

    if experiment.hardware.cluster:
        raise UsageError("--mode=check runs in one process: unset TF_CONFIG.")
    say(f"Checking {experiment.config.trainer}, which takes about a minute.")
    return looks.look(blueprint.Blueprint(experiment, config_path), say)


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
        assembly.sayer(experiment)(f"The old run is now {aside}.")
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
    from ctl.aot import report, survey  # private parts of TensorFlow, which no other mode needs

    outcomes = survey.survey(config, config_path, asked, find_batch=find_batch, say=say)
    say(report.table(outcomes))
    path = report.write(outcomes, workdir.path)
    say(f"{report.LIMITS} All figures: {path}")
    return 0 if all(outcome.compiled for outcome in outcomes) else 1


def _require_run(experiment: Experiment, workdir: Workdir) -> None:
    workdir.check_run()
    workdir.check_config(experiment.config.to_dict())


def _write_evaluation(workdir: Workdir, controller: Controller) -> None:
    evaluation = controller.evaluate()
    if evaluation is None:  # stopped before its end
        return
    workdir.write_result({**workdir.result(), "step": controller.step, "eval": evaluation})
