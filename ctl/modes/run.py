"""Holds experiment, workdir, processes, progress, checkpoints and controller of a run, and tries one."""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import dataclasses
import pathlib
import shutil
import sys
from typing import Any

from ml_collections import config_dict

from ctl.configs import durations
from ctl.configs.keys import BY_NAME
from ctl.configs.values import SERVERS
from ctl.errors import UsageError, print_line
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.actions import registry
from ctl.loop.actions.action import Action, check_action
from ctl.loop.actions.leaks import MemoryGrowth, Retraces
from ctl.loop.actions.learning_rate import LearningRate
from ctl.loop.checkpoints import warm_start
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.controller import Controller, RollbackPolicy
from ctl.loop.lock import RunLock
from ctl.loop.metric_log import MetricLog, make_writers
from ctl.loop.profiler import Profiler
from ctl.loop.progress import Progress, ProgressBar
from ctl.loop.reporter import Reporter
from ctl.loop.stop import StopRequest
from ctl.loop.timing import WallClock
from ctl.loop.watchdog import Watchdog
from ctl.loop.workdir import Workdir
from ctl.modes import DONE, Arguments, experiment
from ctl.replica.step.engine import engine_of


class RunParts:
    """One run of an experiment, in its workdir. Constructing it writes nothing.

    Args:
        arguments: the command line.
        evaluates: whether the run evaluates, and so needs an evaluator and its data.
        reads_only: whether the run only restores checkpoints and never saves one.
        built: the experiment; by default it is built from the arguments.

    Attributes:
        experiment: strategy, trainer and evaluator.
        config: the experiment's config, with the global batch size resolved.
        trainer: the experiment's trainer.
        workdir: the folder of the run.
        is_chief: whether this process is the one that prints and writes.
        processes: the processes of the run.
        progress: prints the progress; prints nothing in a process that is not the chief.
        clock: divides the time of the process among its activities.
        checkpoints: saves and restores the trainer.
    """

    def __init__(
        self,
        arguments: Arguments,
        *,
        evaluates: bool = True,
        reads_only: bool = False,
        built: experiment.Experiment | None = None,
    ):
        self.experiment = built or experiment.build(
            arguments.config, arguments.config_path, evaluates=evaluates
        )
        self.config = self.experiment.config
        if arguments.dry_run:
            self.config = shorten(self.config)
        self.trainer = self.experiment.trainer
        self.workdir = arguments.workdir
        self._check_store(reads_only)
        self._config_path = arguments.config_path
        self._actions = arguments.actions
        self.is_chief = self.experiment.hardware.is_chief
        # The same group everywhere in the run, so that all its collective calls have one order.
        self.processes = ProcessGroup(self.experiment.hardware)
        self.progress = self._make_progress()
        self.clock = WallClock(started=arguments.started)
        self._metrics = MetricLog(
            make_writers(self.config.summaries.writers, self.workdir.path, self._config_path)
            if self.is_chief
            else (),
            checkpoint_folder=self.workdir.checkpoints,
            print_line=self.progress.print_line,
        )
        self.checkpoints = Checkpointer(
            self.workdir.checkpoints,
            self.trainer,
            keep=self.config.train.checkpoints_to_keep,
            keep_every=self.config.train.checkpoint_keep_every,
            background=self._writes_in_background(),
            is_chief=self.is_chief,
            has_own_folder=self.workdir.store is not None,
            processes=self.processes,
            partial=arguments.allow_partial_restore,
            reads_only=reads_only,
        )

    @property
    def record(self) -> dict[str, Any]:
        """The config, and what else the updates depend on: what config.json holds."""
        inputs: dict[str, Any] = {"init": warm_start.describe_files(self.config.init)}
        inputs |= engine_of(self.trainer).pipeline.descriptions
        return {**self.config.to_dict(), "inputs": inputs}

    def all_open_store(self, stop: StopRequest) -> contextlib.AbstractContextManager[None]:
        """Owns and copies a run whose --workdir is a URL, in a `with` block; collective.

        Args:
            stop: requests that the run stops, when another process has taken over.
        """
        store, workdir, progress = self.workdir.store, self.workdir, self.progress
        if not store:
            return contextlib.nullcontext()

        def on_durable(step: int, size: int, seconds: float) -> None:
            progress.durable = max(step, progress.durable or 0)
            path = f"{workdir.name}/checkpoints/ckpt-{step}"
            workdir.event("durable", step, path=path, bytes=size, upload_seconds=seconds)

        return store.all_open(
            self.processes,
            is_chief=self.is_chief,
            on_lost=lambda: stop.request(owner="lost"),
            on_durable=on_durable,
            print_line=progress.print_line,
        )

    def make_controller(
        self,
        *,
        stop: StopRequest | None = None,
        watchdog: Watchdog | None = None,
        profiler: Profiler | None = None,
        rollback: RollbackPolicy | None = None,
        actions: Iterable[Callable[[Any], Any]] = (),
        records: bool = True,
    ) -> Controller:
        """Makes the controller.

        Args:
            stop: requests that the run saves and stops.
            watchdog: reports inner loops that hang.
            profiler: profiles some of the inner loops.
            rollback: decides which batches to skip.
            actions: called at the end of inner loops and evaluations.
            records: whether to write its loops and evaluations to the summaries and events of the run.
        """
        train = self.config.train
        checkpoint_interval, checkpoint_seconds = durations.split_interval(
            train.checkpoint_interval
        )
        summary_interval, summary_seconds = durations.split_interval(train.summary_interval)
        return Controller(
            trainer=self.trainer,
            evaluator=self.experiment.evaluator,
            steps_per_loop=train.steps_per_loop,
            checkpoints=self.checkpoints,
            checkpoint_interval=checkpoint_interval,
            checkpoint_seconds=checkpoint_seconds,
            summary_dir=self._summary_folder("train") if records else None,
            eval_summary_dir=self._summary_folder("eval") if records else None,
            reporter=Reporter(
                self.trainer,
                progress=self.progress,
                on_event=self.workdir.event if records else None,
                checkpoint_folder=self.workdir.checkpoints,
                metrics=self._metrics if records else None,
                steps_per_epoch=self.experiment.steps_per_epoch,
                clock=self.clock,
                profiler=profiler,
            ),
            stop=stop,
            processes=self.processes,
            watchdog=watchdog,
            rollback=rollback,
            summary_interval=summary_interval or None,
            summary_seconds=summary_seconds,
            actions=actions,
            workdir=self.workdir.path,
            is_chief=self.is_chief,
            last_step=train.steps,
        )

    def make_actions(self, *, trains: bool = True) -> list[Action]:
        """Makes the actions of the config, of the trainer, and the ones that watch every run.

        Args:
            trains: whether the run trains; if not, only actions at evaluations are made, without those
                of `train.best`, and none stops the run.
        """
        evaluator = self.experiment.evaluator
        configured = registry.make_actions(
            self.config, self._config_path, workdir=self.workdir, trains=trains
        )
        actions = [
            check_action(action, evaluator)
            for action in (*configured, *self.trainer.build_actions(), *self._actions)
        ]
        if trains:
            return [*actions, LearningRate(), Retraces(), MemoryGrowth()]
        for action in actions:
            action.may_stop = False
        return [action for action in actions if action.at == "eval"]

    def broadcast_rollback_policy(self) -> RollbackPolicy:
        """Makes the rollback policy, with the chief's earlier decisions in every process."""
        # Only the chief reads the file: the workdir of another process may be another folder.
        earlier = self.workdir.rollbacks() if self.is_chief else []
        earlier = self.processes.broadcast_json_from_chief(earlier)
        return RollbackPolicy(record=self.workdir.write_rollbacks, earlier=earlier)

    def _make_progress(self) -> Progress:
        total, steps_per_epoch = self.config.train.steps, self.experiment.steps_per_epoch
        if self.is_chief and sys.stdout.isatty():
            return ProgressBar(total=total, steps_per_epoch=steps_per_epoch)
        write = print_line if self.is_chief else lambda line: None
        return Progress(total=total, steps_per_epoch=steps_per_epoch, write=write)

    def _summary_folder(self, split: str) -> str | None:
        has_writer = "tensorboard" in self.config.summaries.writers
        return self.workdir.summaries(split) if has_writer else None

    def _check_store(self, reads_only: bool) -> None:
        """Rejects keys of runs in an object store, if the workdir is a folder."""
        for name in () if reads_only or self.workdir.store else ("local_dir", "upload_grace"):
            if self.config.train[name] != BY_NAME[f"train.{name}"].default:
                raise UsageError(
                    f"train.{name} has no effect without a --workdir in an object store, such as "
                    f"gs://bucket/run: name one, or remove train.{name}."
                )

    def _writes_in_background(self) -> bool:
        """Returns whether a thread writes the checkpoints; several processes write and wait."""
        writing = self.config.train.checkpoint_writing
        one_process = self.experiment.hardware.cluster is None
        if writing == "background" and not one_process:
            raise UsageError(
                "train.checkpoint_writing=background requires a run in one process: choose auto or "
                "blocking."
            )
        return one_process and writing in ("auto", "background")


DRY_STEPS = 2  # of training, and of each evaluation


def dry_run(arguments: Arguments, train: Callable[[Arguments], int]) -> int:
    """Trains in a temporary folder; returns the exit code.

    Args:
        arguments: the command line; its workdir is not touched.
        train: trains a run.
    """
    with _temporary_workdir(arguments.workdir) as workdir:
        code = train(dataclasses.replace(arguments, workdir=workdir, fresh=False))
    if workdir.writes:
        passed = f"{DRY_STEPS} steps with their evaluations, checkpoints and actions passed"
        result = passed if code == DONE else "stopped"
        print_line(f"Dry run: {result}, and nothing was kept.")
    return code


def shorten(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """Returns a locked copy of a config that trains two steps, and saves and evaluates after each.

    Args:
        config: the config, after the trainer was built from it: the optimizer and its schedule are
            those of the complete run.
    """
    short = config_dict.ConfigDict(config.to_dict())
    with short.ignore_type():
        short.train.update(
            steps=DRY_STEPS,
            steps_per_loop=1,
            checkpoint_interval=1,
            checkpoint_keep_every=0,
        )
        short.eval.interval = 1
        # No writers to a server, which would keep the run.
        short.summaries.writers = [n for n in short.summaries.writers if n not in SERVERS]
    return short.lock()


@contextlib.contextmanager
def _temporary_workdir(workdir: Workdir) -> Iterator[Workdir]:
    """Yields a folder next to the workdir, so on the same disk and for all processes of the run."""
    folder = workdir.path if workdir.path.name else workdir.path.absolute()  # "." has no name
    path = folder.with_name(f"{folder.name}.dry_run")
    parents = [parent for parent in path.parents if not parent.exists()]
    temporary = Workdir(path, writes=workdir.writes)
    if workdir.writes and temporary.has_run():
        _remove_killed(path)
    try:
        yield temporary
    finally:
        if workdir.writes:
            if temporary.has_run():
                shutil.rmtree(path, ignore_errors=True)
            for parent in parents:
                with contextlib.suppress(OSError):  # not empty: something else uses it now
                    parent.rmdir()


def _remove_killed(path: pathlib.Path) -> None:
    """Removes the folder of a killed dry run; raises UsageError if another one is in progress."""
    with RunLock(path) as lock:
        lock.acquire()
        shutil.rmtree(path)
