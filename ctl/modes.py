"""What the program does with an experiment: one function a mode."""

from collections.abc import Callable, Sequence
import contextlib
import importlib.metadata
import logging
import time
from typing import Any

import tensorflow as tf

from ctl import announcements, optimizers
from ctl.aot.slices import Slice
from ctl.errors import UsageError
from ctl.experiment import Experiment
from ctl.loop import warm_start
from ctl.loop.agreement import Agreement
from ctl.loop.checkpoints import Checkpoints, Damaged
from ctl.loop.commits import Commits
from ctl.loop.controller import Controller
from ctl.loop.guard import Guard
from ctl.loop.lock import RunLock
from ctl.loop.preemption import GceNotice
from ctl.loop.progress import Progress, say
from ctl.loop.stall import StallWatch
from ctl.loop.stop import StopOnSignal
from ctl.loop.workdir import Workdir
from ctl.preflight.blueprint import Blueprint
from ctl.preflight.looks import look

DONE, STOPPED = 0, 75
_PACKAGES = ("ctl", "tensorflow", "tf_keras", "tf-models-official", "numpy")


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
    checkpoints = _checkpoints(experiment, workdir, agreement, partial=allow_partial)
    reached = agreement.of_chief(checkpoints.latest_step() or 0)
    if reached >= config.train.steps and agreement.any(_complete(workdir, reached, evaluates)):
        evaluation = workdir.result().get("eval") or {}
        _say(experiment)(announcements.complete(reached, evaluation, config))
        return DONE
    progress = _progress(experiment)
    with (
        StopOnSignal() as stop,
        _notice(experiment) as notice,
        _stall_watch(experiment, workdir) as watch,
    ):
        controller = _controller(
            experiment,
            workdir,
            checkpoints,
            progress,
            stop=lambda: agreement.any(stop.requested or bool(notice and notice.received)),
            save_due=_save_due(experiment, agreement),
            watch=watch.loop,
            guard=_guard(experiment, workdir, agreement),
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
        result = _result(experiment, controller, time.monotonic() - start)
        workdir.write_result(result if controller.outputs else {**result, **_training(workdir)})
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
    checkpoints = _checkpoints(experiment, workdir, agreement, reads_only=True)
    controller = _controller(experiment, workdir, checkpoints, _progress(experiment))
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
    progress = _progress(experiment)
    checkpoints = _checkpoints(experiment, workdir, Agreement(), reads_only=True)
    with StopOnSignal() as stop:
        controller = _controller(experiment, workdir, checkpoints, progress)
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


def _notice(experiment: Experiment) -> contextlib.AbstractContextManager[GceNotice | None]:
    if experiment.config.train.preemption_notice == "none":
        return contextlib.nullcontext()
    return GceNotice()


def _guard(experiment: Experiment, workdir: Workdir, agreement: Agreement) -> Guard:
    """What was decided before, in every process as in the chief, whose folder it is in."""
    chief = experiment.hardware.is_chief
    earlier = workdir.rollbacks() if chief else []
    steps = range(agreement.of_chief(len(earlier)))
    if not chief:
        earlier = [{} for _ in steps]
    return Guard(
        limit=experiment.config.train.rollback_limit,
        record=workdir.write_rollbacks,
        earlier=[
            {**earlier[i], "step": agreement.of_chief(earlier[i].get("step", 0))} for i in steps
        ],
    )


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
        _say(experiment)(f"The old run is now {aside}.")
        lock.follow(aside)
    return workdir.check_config(experiment.config.to_dict(), allow_change=allow_change)


def _progress(experiment: Experiment) -> Progress:
    return Progress(total=experiment.config.train.steps, write=_say(experiment))


def _say(experiment: Experiment) -> Callable[[str], None]:
    """Prints a line; of several processes the chief alone does."""
    return say if experiment.hardware.is_chief else lambda line: None


def _checkpoints(
    experiment: Experiment, workdir: Workdir, agreement: Agreement, **reading: bool
) -> Checkpoints:
    return Checkpoints(
        workdir.checkpoints,
        experiment.trainer,
        keep=experiment.config.train.checkpoints_to_keep,
        keep_every=experiment.config.train.checkpoint_keep_every,
        background=_in_background(experiment),
        is_chief=experiment.hardware.is_chief,
        agreement=agreement,
        on_restored=lambda: _take_learning_rate(experiment),
        **reading,
    )


def _take_learning_rate(experiment: Experiment) -> None:
    """The config's, where it is constant: a checkpoint's own is that of the config of then."""
    config = experiment.config
    if config.optimizer.schedule == "constant":
        rate = optimizers.learning_rate(config.optimizer, config.data.global_batch_size)
        experiment.trainer.optimizer.learning_rate = rate


def check(experiment: Experiment, config_path: str) -> int:
    """Looks at an experiment before a long run, and writes nothing.

    Returns:
        The exit code: 1 where something would go wrong.
    """
    if experiment.hardware.cluster:
        raise UsageError("--mode=check runs in one process: unset TF_CONFIG.")
    say(f"Checking {experiment.config.trainer}, which takes about a minute.")
    return look(Blueprint(experiment, config_path), say)


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


def _save_due(experiment: Experiment, agreement: Agreement) -> Callable[[float], bool] | None:
    """Whether to save because of the time; the chief's clock decides."""
    limit = experiment.config.train.checkpoint_seconds
    if not limit:
        return None
    chief = experiment.hardware.is_chief
    return lambda seconds: agreement.any(chief and seconds >= limit)


def _in_background(experiment: Experiment) -> bool:
    """Whether a thread writes checkpoints; several processes save together, each waiting."""
    asked = experiment.config.train.checkpoint_writing
    alone = experiment.hardware.cluster is None
    if asked == "background" and not alone:
        raise UsageError(
            "train.checkpoint_writing=background is for a run in one process: choose auto or blocking."
        )
    return asked == "background" or (asked == "auto" and alone)


def _controller(
    experiment: Experiment,
    workdir: Workdir,
    checkpoints: Checkpoints,
    progress: Progress,
    **watching: Any,
) -> Controller:
    return Controller(
        trainer=experiment.trainer,
        evaluator=experiment.evaluator,
        steps_per_loop=experiment.config.train.steps_per_loop,
        checkpoints=checkpoints,
        checkpoint_interval=experiment.config.train.checkpoint_interval,
        summary_dir=workdir.summaries("train"),
        eval_summary_dir=workdir.summaries("eval"),
        progress=progress,
        on_event=workdir.event,
        **watching,
    )


def _stall_watch(experiment: Experiment, workdir: Workdir) -> StallWatch:
    """Every process has one: the data that hangs may be another's than the chief's."""
    trainer = experiment.trainer
    return StallWatch(
        experiment.config.train.stall_seconds,
        step_of=lambda: int(trainer.global_step.numpy()),
        data_kind=lambda: trainer.feed.kinds["train"],
        on_event=workdir.event,
    )


def _complete(workdir: Workdir, reached: int, evaluates: bool) -> bool:
    result = workdir.result()
    return result.get("step") == reached and (not evaluates or bool(result.get("eval")))


def _result(experiment: Experiment, controller: Controller, seconds: float) -> dict[str, Any]:
    return {
        "step": controller.step,
        "train": controller.outputs,
        "eval": controller.evaluation if controller.evaluated_step == controller.step else None,
        "examples_per_second": controller.examples_per_second,
        "seconds": seconds,
        "strategy": experiment.hardware.name,
        "replicas": experiment.trainer.layout.replicas,
        "versions": _versions(),
    }


def _training(workdir: Workdir) -> dict[str, Any]:
    """What an earlier process recorded of the training, for one that only evaluated."""
    kept = ("train", "examples_per_second")
    return {name: value for name, value in workdir.result().items() if name in kept}


def _versions() -> dict[str, str]:
    found = {"tensorflow": tf.__version__}
    for name in _PACKAGES:
        try:
            found.setdefault(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            logging.getLogger("ctl").debug("%s is not installed as a package", name)
    return found


def _write_evaluation(workdir: Workdir, controller: Controller) -> None:
    evaluation = controller.evaluate()
    if evaluation is None:  # stopped before its end
        return
    workdir.write_result({**workdir.result(), "step": controller.step, "eval": evaluation})
