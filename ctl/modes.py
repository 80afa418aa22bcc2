"""What the program does with an experiment: one function a mode."""

from collections.abc import Callable
import importlib.metadata
import logging
import time
from typing import Any

import tensorflow as tf

from ctl import announcements, optimizers
from ctl.errors import UsageError
from ctl.experiment import Experiment
from ctl.loop.agreement import Agreement
from ctl.loop.checkpoints import Checkpoints, step_of
from ctl.loop.controller import Controller
from ctl.loop.lock import RunLock
from ctl.loop.progress import Progress, say
from ctl.loop.stall import StallWatch
from ctl.loop.stop import StopOnSignal
from ctl.loop.workdir import Workdir

DONE, STOPPED = 0, 75
_PACKAGES = ("ctl", "tensorflow", "tf_keras", "tf-models-official", "numpy")


def train(
    experiment: Experiment,
    workdir: Workdir,
    *,
    evaluates: bool,
    fresh: bool,
    allow_change: bool,
) -> int:
    """Trains to `train.steps`, evaluating by the way and at the end where asked.

    Args:
        experiment: what `build` returned.
        workdir: the run's folder; a run in it is resumed.
        evaluates: whether to evaluate.
        fresh: move a run in the folder aside first.
        allow_change: go on though the config's arithmetic changed.

    Returns:
        The exit code.
    """
    with RunLock(workdir.path) as lock:
        return _train(
            experiment, workdir, lock, evaluates=evaluates, fresh=fresh, allow_change=allow_change
        )


def _train(
    experiment: Experiment,
    workdir: Workdir,
    lock: RunLock,
    *,
    evaluates: bool,
    fresh: bool,
    allow_change: bool,
) -> int:
    config = experiment.config
    agreement = Agreement(experiment.hardware)
    changes = _prepare(experiment, workdir, lock, fresh=fresh, allow_change=allow_change)
    agreement.meet()  # the folder is as it is to be
    checkpoints = _checkpoints(experiment, workdir)
    reached = agreement.of_chief(checkpoints.latest_step() or 0)
    if reached >= config.train.steps and agreement.any(_complete(workdir, reached, evaluates)):
        evaluation = workdir.result().get("eval") or {}
        _say(experiment)(announcements.complete(reached, evaluation, config))
        return DONE
    progress = _progress(experiment)
    with StopOnSignal() as stop, _stall_watch(experiment, workdir) as watch:
        controller = _controller(
            experiment,
            workdir,
            checkpoints,
            progress,
            stop=lambda: agreement.any(stop.requested),
            watch=watch.loop,
            train_actions=[lambda _: lock.check()],
        )
        restored = controller.restore_checkpoint(checkpoints.path(reached)) if reached else None
        if (
            config.optimizer.schedule == "constant"
        ):  # the checkpoint's own is that of the old config
            rate = optimizers.learning_rate(config.optimizer, config.data.global_batch_size)
            experiment.trainer.optimizer.learning_rate = rate
        workdir.create(config.to_dict())  # not before the checkpoint was seen to fit
        progress.say(announcements.start(experiment.hardware, experiment.trainer))
        for line in changes:
            progress.say(f"Changed since the run was started: {line}")
        if restored:
            progress.say(f"Resumed from {restored}.")
            workdir.event("resume", controller.step, path=restored, changes=changes)
        else:
            workdir.event("start", controller.step)
        start = time.monotonic()
        if evaluates and controller.step >= config.train.steps:
            controller.evaluate()
        elif evaluates:
            controller.train_and_evaluate(config.train.steps, eval_interval=config.eval.interval)
        else:
            controller.train(config.train.steps)
        result = _result(experiment, controller, time.monotonic() - start)
        workdir.write_result(result if controller.outputs else {**result, **_training(workdir)})
        signal = {"signal": stop.received.name} if stop.received else {}
        workdir.event("stop" if controller.stopped else "end", controller.step, **signal)
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
    checkpoints = _checkpoints(experiment, workdir)
    latest = agreement.of_chief(checkpoints.latest_step() or -1)
    if latest < 0:
        raise UsageError(f"{workdir.path} has no checkpoint to evaluate: train first.")
    controller = _controller(experiment, workdir, checkpoints, _progress(experiment))
    controller.restore_checkpoint(checkpoints.path(latest))
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
    checkpoints = _checkpoints(experiment, workdir)
    with StopOnSignal() as stop:
        controller = _controller(experiment, workdir, checkpoints, progress)
        seen = -1
        while not stop.requested:
            latest = tf.train.latest_checkpoint(str(workdir.checkpoints))
            if latest and step_of(latest) != seen:
                controller.restore_checkpoint(latest)
                seen = step_of(latest)
                _write_evaluation(workdir, controller)
            elif seen < 0:
                progress.say(f"Waiting for a checkpoint in {workdir.checkpoints}.")
                seen = 0
            if seen >= steps:
                return DONE
            _wait(stop, seconds=1.0)
    return STOPPED


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


def _checkpoints(experiment: Experiment, workdir: Workdir) -> Checkpoints:
    return Checkpoints(
        workdir.checkpoints,
        experiment.trainer,
        keep=experiment.config.train.checkpoints_to_keep,
        is_chief=experiment.hardware.is_chief,
    )


def _require_run(experiment: Experiment, workdir: Workdir) -> None:
    workdir.check_run()
    workdir.check_config(experiment.config.to_dict())


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
    workdir.write_result({**workdir.result(), "step": controller.step, "eval": evaluation})
