"""What a run of an experiment is put together from, as its config says."""

from collections.abc import Callable
import contextlib
from typing import Any

from ctl import optimizers
from ctl.errors import UsageError, print_line
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.controller import Controller
from ctl.loop.preemption import GceNotice
from ctl.loop.progress import Progress
from ctl.loop.rollback import RollbackPolicy
from ctl.loop.watchdog import Watchdog
from ctl.loop.workdir import Workdir
from ctl.modes.experiment import Experiment


def sayer(experiment: Experiment) -> Callable[[str], None]:
    """Prints a line; of several processes the chief alone does."""
    return print_line if experiment.hardware.is_chief else lambda line: None


def progress_of(experiment: Experiment) -> Progress:
    """What tells how far the run is."""
    return Progress(total=experiment.config.train.steps, write=sayer(experiment))


def checkpoints_of(
    experiment: Experiment, workdir: Workdir, processes: ProcessGroup, **reading: bool
) -> Checkpointer:
    """The run's checkpoints; `reading` says how they may be read."""
    return Checkpointer(
        workdir.checkpoints,
        experiment.trainer,
        keep=experiment.config.train.checkpoints_to_keep,
        keep_every=experiment.config.train.checkpoint_keep_every,
        background=_in_background(experiment),
        is_chief=experiment.hardware.is_chief,
        processes=processes,
        on_restored=lambda: _take_learning_rate(experiment),
        **reading,
    )


def _take_learning_rate(experiment: Experiment) -> None:
    """The config's, where it is constant: a checkpoint's own is that of the config of then."""
    config = experiment.config
    if config.optimizer.schedule == "constant":
        rate = optimizers.learning_rate(config.optimizer, config.data.global_batch_size)
        experiment.trainer.optimizer.learning_rate = rate


def _in_background(experiment: Experiment) -> bool:
    """Whether a thread writes checkpoints; several processes save together, each waiting."""
    asked = experiment.config.train.checkpoint_writing
    alone = experiment.hardware.cluster is None
    if asked == "background" and not alone:
        raise UsageError(
            "train.checkpoint_writing=background is for a run in one process: choose auto or blocking."
        )
    return asked == "background" or (asked == "auto" and alone)


def controller_of(
    experiment: Experiment,
    workdir: Workdir,
    checkpoints: Checkpointer,
    progress: Progress,
    **watching: Any,
) -> Controller:
    """What trains and evaluates; `watching` are further arguments of a `Controller`."""
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


def save_due(experiment: Experiment, processes: ProcessGroup) -> Callable[[float], bool] | None:
    """Whether to save because of the time; the chief's clock decides."""
    limit = experiment.config.train.checkpoint_seconds
    if not limit:
        return None
    chief = experiment.hardware.is_chief
    return lambda seconds: processes.any_process(chief and seconds >= limit)


def stall_watch(experiment: Experiment, workdir: Workdir) -> Watchdog:
    """Every process has one: the data that hangs may be another's than the chief's."""
    trainer = experiment.trainer
    return Watchdog(
        experiment.config.train.stall_seconds,
        step_of=lambda: int(trainer.global_step.numpy()),
        data_kind=lambda: trainer.feed.kinds["train"],
        on_event=workdir.event,
    )


def preemption_notice(
    experiment: Experiment,
) -> contextlib.AbstractContextManager[GceNotice | None]:
    """What tells that this machine is about to go, where the config asks for it."""
    if experiment.config.train.preemption_notice == "none":
        return contextlib.nullcontext()
    return GceNotice()


def guard_of(experiment: Experiment, workdir: Workdir, processes: ProcessGroup) -> RollbackPolicy:
    """What was decided before, in every process as in the chief, whose folder it is in."""
    chief = experiment.hardware.is_chief
    earlier = workdir.rollbacks() if chief else []
    steps = range(processes.broadcast_from_chief(len(earlier)))
    if not chief:
        earlier = [{} for _ in steps]
    return RollbackPolicy(
        limit=experiment.config.train.rollback_limit,
        record=workdir.write_rollbacks,
        earlier=[
            {**earlier[i], "step": processes.broadcast_from_chief(earlier[i].get("step", 0))}
            for i in steps
        ],
    )
