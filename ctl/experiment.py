"""A checked config -> strategy, trainer, evaluator and Controller; one function a mode."""

import dataclasses
import importlib.metadata
import logging
import re
import time
from typing import Any

from ml_collections import config_dict
import tensorflow as tf

from ctl import announcements, locate, optimizers
from ctl.errors import UsageError
from ctl.evaluator import StandardEvaluator
from ctl.hardware import gpu, strategies, tpu
from ctl.loop.checkpoints import Checkpoints, step_of
from ctl.loop.controller import Controller
from ctl.loop.progress import Progress
from ctl.loop.stop import StopOnSignal
from ctl.loop.workdir import Workdir
from ctl.options import Clip, Section, TrainerOptions
from ctl.trainer import StandardTrainer

DONE, STOPPED = 0, 75
_PACKAGES = ("ctl", "tensorflow", "tf_keras", "tf-models-official", "numpy")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What a config comes to on this machine.

    Attributes:
        config: with the global batch size filled in.
        hardware: the strategy and why.
        trainer: the trainer.
        evaluator: the evaluator, for the modes that evaluate.
    """

    config: config_dict.ConfigDict
    hardware: strategies.Hardware
    trainer: StandardTrainer
    evaluator: StandardEvaluator | None


def build(
    config: config_dict.ConfigDict, config_path: str, *, evaluates: bool = True
) -> Experiment:
    """Builds everything, and writes nothing.

    Args:
        config: a checked config.
        config_path: the file that it is from, which the trainer's path is relative to.
        evaluates: whether the evaluation data is needed.

    Raises:
        UsageError: the config cannot be right with this trainer or on this machine.
    """
    cls = locate.trainer_class(config.trainer, config_path)
    if config.runtime.deterministic:
        tf.config.experimental.enable_op_determinism()
    hardware = _hardware(config.runtime)
    config = resolved(config, hardware.strategy.num_replicas_in_sync)
    options = trainer_options(config)
    trainer = cls(
        strategy=hardware.strategy,
        global_batch_size=config.data.global_batch_size,
        optimizer=optimizers.factory(
            config.optimizer,
            global_batch_size=config.data.global_batch_size,
            steps=config.train.steps,
            jit=config.runtime.xla != "off",
        ),
        options=options,
    )
    evaluator = None
    if evaluates:
        size = config.eval.global_batch_size or None
        evaluator = StandardEvaluator(trainer, global_batch_size=size)
        trainer.feed.data("eval")
    _refuse_unread(options, config, cls)
    return Experiment(config, hardware, trainer, evaluator)


def _hardware(runtime: config_dict.ConfigDict) -> strategies.Hardware:
    if tpu.asked(runtime):
        strategy = tpu.build(**runtime.tpu.to_dict())
        return strategies.Hardware(strategy, "tpu", tpu.topology(strategy))
    gpu.set_memory(growth=runtime.gpu.memory_growth, limit_mib=runtime.gpu.memory_limit_mib)
    return strategies.build(runtime.strategy, logical_devices=runtime.logical_devices)


def resolved(config: config_dict.ConfigDict, replicas: int) -> config_dict.ConfigDict:
    """A copy of the config with the global batch size filled in."""
    config = config_dict.ConfigDict(config.to_dict())
    if config.data.per_replica_batch_size:
        config.data.global_batch_size = config.data.per_replica_batch_size * replicas
        config.data.per_replica_batch_size = 0
    return config.lock()


def trainer_options(config: config_dict.ConfigDict) -> TrainerOptions:
    """The trainer's options that a resolved config holds."""
    data = {"dir": config.data.dir, "tfrecord": config.data.tfrecord.to_dict()}
    return TrainerOptions(
        seed=config.seed,
        precision=config.runtime.precision,
        loss_scale=config.runtime.loss_scale,
        xla=config.runtime.xla,
        placement=config.data.placement,
        logical_shards=config.runtime.logical_shards,
        all_reduce_dtype=config.runtime.all_reduce.dtype,
        gradient_accumulation_steps=config.optimizer.gradient_accumulation_steps,
        clip=Clip(**config.optimizer.clip.to_dict()),
        norms=config.train.norms,
        prefetch=config.data.prefetch,
        data=Section(data, "data"),
        model=Section(config.model.to_dict(), "model"),
    )


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
    config = experiment.config
    if fresh:
        _move_aside(workdir)
    changes = workdir.check_config(config.to_dict(), allow_change=allow_change)
    checkpoints = Checkpoints(
        workdir.checkpoints, experiment.trainer, keep=config.train.checkpoints_to_keep
    )
    reached = checkpoints.latest_step() or 0
    if reached >= config.train.steps and _complete(workdir, reached, evaluates):
        evaluation = workdir.result().get("eval") or {}
        print(announcements.complete(reached, evaluation, config), flush=True)
        return DONE
    progress = Progress(total=config.train.steps)
    with StopOnSignal() as stop:
        controller = _controller(experiment, workdir, checkpoints, progress, stop)
        restored = controller.restore_checkpoint() if reached else None
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
    if controller.stopped:
        progress.say(announcements.stopped(controller.step, workdir.path))
        return STOPPED
    progress.say(announcements.done(workdir.path))
    return DONE


def evaluate(experiment: Experiment, workdir: Workdir) -> int:
    """Evaluates the newest checkpoint of a run; returns the exit code."""
    _require_run(experiment, workdir)
    progress = Progress(total=experiment.config.train.steps)
    checkpoints = Checkpoints(workdir.checkpoints, experiment.trainer)
    if checkpoints.latest_step() is None:
        raise UsageError(f"{workdir.path} has no checkpoint to evaluate: train first.")
    controller = _controller(experiment, workdir, checkpoints, progress, None)
    controller.restore_checkpoint()
    _write_evaluation(workdir, controller)
    return DONE


def continuous_eval(experiment: Experiment, workdir: Workdir) -> int:
    """Evaluates each checkpoint of a run as it appears, up to that of `train.steps`.

    Returns:
        The exit code: done, or stopped by a signal.
    """
    _require_run(experiment, workdir)
    steps = experiment.config.train.steps
    progress = Progress(total=steps)
    checkpoints = Checkpoints(workdir.checkpoints, experiment.trainer)
    with StopOnSignal() as stop:
        controller = _controller(experiment, workdir, checkpoints, progress, stop)
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


def _move_aside(workdir: Workdir) -> None:
    aside = workdir.move_aside()
    if aside:
        print(f"The old run is now {aside}.", flush=True)


def _require_run(experiment: Experiment, workdir: Workdir) -> None:
    workdir.check_run()
    workdir.check_config(experiment.config.to_dict())


def _controller(
    experiment: Experiment,
    workdir: Workdir,
    checkpoints: Checkpoints,
    progress: Progress,
    stop: StopOnSignal | None,
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
        stop=lambda: stop is not None and stop.requested,
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


def _refuse_unread(options: TrainerOptions, config: config_dict.ConfigDict, cls: type) -> None:
    """Refuses keys that this experiment sets and its trainer never reads: they have no effect."""
    from ctl import defaults

    default = defaults.flat(defaults.defaults())
    values = defaults.flat(config)
    assert isinstance(options.data, Section) and isinstance(options.model, Section)
    unread = [k for k in options.data.unread() if values[k] != default[k]] + options.model.unread()
    # What the step reads while it runs is not read yet.
    source = locate.source(cls)
    unread = [k for k in unread if not re.search(rf"\b{k.rpartition('.')[-1]}\b", source)]
    if unread:
        raise UsageError(
            f"{unread[0]} has no effect: {config.trainer} never reads self.options.{unread[0]}; take "
            "the key out of the config, or read it."
        )
