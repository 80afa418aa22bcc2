"""The run of an experiment in its workdir: what the modes that train or evaluate and `ctl.Run` share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import importlib
import os
import sys
import time
from typing import Any

from ctl.built.inner_loop import pipeline_of
from ctl.configs import loading
from ctl.configs.keys import BY_NAME
from ctl.errors import UsageError, print_line, type_name
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.actions import registry
from ctl.loop.actions.action import Action, check_action
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.controller import Controller
from ctl.loop.metric_log import MetricLog, make_writers
from ctl.loop.progress import Progress
from ctl.loop.reporter import Reporter
from ctl.loop.stop import StopOnSignal
from ctl.loop.timing import WallClock
from ctl.modes import Arguments, experiment, messages, results

_DRY_RUN = "ctl.modes.dry_run"
_PROGRESS_BAR = "ctl.loop.progress_bar:ProgressBar"  # of a terminal
_WARM_START = "ctl.loop.checkpoints.warm_start"  # if the section `init` names weights


class ExperimentRun:
    """One run of an experiment, in its workdir. Constructing it writes nothing.

        run = ExperimentRun(arguments)
        run.all_begin(run.make_actions())
        with run.watching():
            run.record_start()
            run.train(1000, evaluates=True)
            run.record_end()

    Every process of a run must call the same methods in the same order.

    Args:
        arguments: the command line.
        evaluates: whether the run evaluates, and so needs an evaluator and its data.
        reads_only: whether the run only restores checkpoints and never saves one.
        built: the experiment; by default it is built from the arguments.
        prints: whether the chief prints the progress.

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
        stop: requests that the run saves and stops.
        controller: trains, saves and evaluates; from `all_begin` on.
        has_ended: whether training has ended, and its actions as well.
    """

    controller: Controller

    def __init__(
        self, arguments: Arguments,
        *, evaluates: bool = True, reads_only: bool = False,
        built: experiment.Experiment | None = None, prints: bool = True,
    ):  # fmt: skip
        self.experiment = built or experiment.build(
            arguments.config, arguments.config_path, evaluates=evaluates
        )
        self.config = self.experiment.config
        if arguments.dry_run:
            self.config = loading.load(_DRY_RUN + ":shorten")(self.config)
        self.trainer = self.experiment.trainer
        self.workdir = arguments.workdir
        self._check_store(reads_only)
        self._config_path = arguments.config_path
        self._actions = arguments.actions
        # The same group everywhere in the run, so that all its collective calls have one order.
        self.processes = ProcessGroup(self.experiment.hardware)
        self.is_chief = self.processes.is_chief
        self.progress = self._make_progress(prints)
        self.clock = WallClock(started=arguments.started)
        names = self.config.summaries.writers
        summarizes = "tensorboard" in names and self.workdir.writes
        self._metrics = MetricLog(
            make_writers(
                names if self.workdir.writes else (), self.workdir.path, self._config_path
            ),
            summary_folder=self.workdir.path / "summaries" if summarizes else None,
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
        init = self.config.init
        has_weights = bool(init.checkpoint or init.models)
        self._warm_start = importlib.import_module(_WARM_START) if has_weights else None
        self.stop = StopOnSignal()
        self.has_ended = False
        self._start = 0.0
        self._changes: Sequence[str] = ()
        self._restored: str | None = None
        self._loaded: dict[str, Any] = {}  # the fields of the event about weights of other runs
        self._begin_lines: list[str] = []

    @property
    def record(self) -> dict[str, Any]:
        """The config, and what else the updates depend on: what config.json holds."""
        files = self._warm_start.describe_files(self.config.init) if self._warm_start else {}
        inputs = {"init": files, **pipeline_of(self.trainer).descriptions}
        return {**self.config.to_dict(), "inputs": inputs}

    def all_open_store(self) -> contextlib.AbstractContextManager[None]:
        """Owns and copies a run whose --workdir is a URL, in a `with` block; collective."""
        store, workdir, progress = self.workdir.store, self.workdir, self.progress
        if not store:
            return contextlib.nullcontext()

        def on_durable(step: int, size: int, seconds: float) -> None:
            progress.durable = max(step, progress.durable or 0)
            path = f"{workdir.name}/checkpoints/ckpt-{step}"
            workdir.event("durable", step, path=path, bytes=size, upload_seconds=seconds)

        return store.all_open(
            self.processes,
            on_lost=lambda: self.stop.request(owner="lost"),
            on_durable=on_durable,
            print_line=progress.print_line,
        )

    def make_controller(
        self, *, actions: Iterable[Callable[[Any], Any]] = (), records: bool = True
    ) -> Controller:
        """Makes the controller.

        Args:
            actions: called at the end of inner loops and evaluations.
            records: whether to write its loops and evaluations to the summaries and events of the run.
        """
        train = self.config.train
        return Controller(
            trainer=self.trainer,
            evaluator=self.experiment.evaluator,
            steps_per_loop=train.steps_per_loop,
            checkpoints=self.checkpoints,
            checkpoint_interval=train.checkpoint_interval,
            reporter=Reporter(
                self.trainer,
                progress=self.progress,
                on_event=self.workdir.event if records else None,
                workdir=self.workdir,
                metrics=self._metrics if records else None,
                steps_per_epoch=self.experiment.steps_per_epoch,
                clock=self.clock,
                summary_interval=train.summary_interval,
            ),
            stop=self.stop,
            processes=self.processes,
            actions=actions,
        )

    def make_actions(self, *, trains: bool = True) -> list[Action]:
        """Makes the actions of the config, of the trainer, and the ones that watch every run.

        Args:
            trains: whether the run trains; if not, only actions at evaluations are made, without those
                of `train.best`, and none stops the run.
        """
        configured = registry.make_actions(
            self.config, self._config_path, workdir=self.workdir, trains=trains
        )
        own = self.trainer.build_actions()
        if not isinstance(own, Sequence):
            raise UsageError(f"build_actions returned {type_name(own)}, but must return a list.")
        actions = [
            check_action(action, self.experiment.evaluator)
            for action in (*configured, *own, *self._actions)
        ]
        if trains:
            return [*actions, *registry.make_watching(self.config, self.workdir)]
        for action in actions:
            action.may_stop = False
        return [action for action in actions if action.at == "eval"]

    def check_weights(self, *, fresh: bool = False) -> None:
        """Checks the weights that a new run starts from, before anything in the folder changes.

        Args:
            fresh: whether the run in the folder is going to be moved aside.
        """
        if self._warm_start and (fresh or not self.checkpoints.files.steps()):
            moved = self.workdir.path if fresh else None
            self._warm_start.check(self.trainer, self.config.init, moved=moved)

    def all_begin(self, actions: Sequence[Action], changes: Sequence[str] = ()) -> None:
        """Restores the newest checkpoint; without one, loads the weights that `init` names.

        Args:
            actions: called at the end of inner loops and evaluations, and around the training.
            changes: one line for each change of the config since the run was started.
        """
        self._changes = changes
        self.controller = self.make_controller(actions=actions)
        self._restored = self.controller.restore_checkpoint()
        # A run that an action has ended, and that was killed before its result, must not train on. Only
        # the chief knows the changes.
        continues = self.processes.any_process(results.changes_stop(changes))
        if self._restored and not continues:
            notes = self.checkpoints.files.notes(self.controller.step)
            self.controller.resume_stop(notes.get("stopped"))
        loaded = []
        if self._warm_start and not self._restored:
            loaded = self._warm_start.all_load(self.trainer, self.config.init, self.processes)
            self._loaded = self._warm_start.record(loaded)
        self._begin_lines = [f"Changed since the run was started: {line}" for line in changes]
        self._begin_lines += [f"Resumed from {self._restored}."] if self._restored else []
        if self.checkpoints.unmatched:
            self._begin_lines.append(messages.restored_in_part(self.checkpoints.unmatched))
        self._begin_lines += map(str, loaded)

    def is_complete(self, step: int, changes: Sequence[str], *, evaluates: bool) -> bool:
        """Returns whether a run whose last checkpoint is of this step has nothing left to do.

        Args:
            step: the step.
            changes: as for `all_begin`.
            evaluates: whether the run must have been evaluated.
        """
        steps = self.config.train.steps
        return results.is_complete(
            self.workdir, step, steps=steps, evaluates=evaluates, changes=changes
        )

    def print_start(self) -> None:
        """Prints where the run starts or resumes."""
        for line in self._begin_lines:
            self.progress.print_line(line)

    def resume_end(self) -> None:
        """Leaves a run that is complete as its last process left it, also with its best weights."""
        result, actions = self.workdir.result(), self.controller.actions
        self.controller.resume_stop(result.get("stopped"), has_ended=True)
        self.has_ended = True
        if (result.get("best") or {}).get("restored") and "BestCheckpoint" in actions:
            actions["BestCheckpoint"].end()

    def record_start(self) -> None:
        """Writes the config and the first event.

        Call `all_begin` first, so that a run whose checkpoint does not match leaves the config alone.
        """
        controller, workdir = self.controller, self.workdir
        workdir.create(self.record)
        fields = controller.actions.start()
        before = workdir.last_workers() if self.is_chief else None
        cluster = self.experiment.hardware.cluster
        workers = cluster.num_workers if cluster else 1
        if self._restored:
            partial = self.checkpoints.unmatched
            left = {"left": partial.left(), "dropped": partial.dropped()} if partial else {}
            fields = {"path": self._restored, "changes": list(self._changes), **left, **fields}
            workdir.event("resume", controller.step, **fields, workers=workers)
            if before not in (None, workers):
                workdir.event("workers", controller.step, before=before, after=workers)
                line = f"The number of workers has changed from {before} to {workers}."
                self.progress.print_line(line)
        else:
            path = os.path.abspath(self._config_path) if self._config_path else ""
            fields = {"config": path, **fields, **self._loaded}
            workdir.event("start", controller.step, **fields, workers=workers)
        controller.reporter.metrics.begin(
            self.config.to_dict(), step=controller.step, is_new=not self._restored
        )
        self.clock.mark_started()
        self._start = time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Lets the actions watch the training in the `with` block; `record_end` records its duration."""
        with self.controller.actions.around_training():
            self._start = time.monotonic()
            yield

    def must_end(self, step: int) -> bool:
        """Returns whether training that reached a step must end there, by the config or an action."""
        return step >= self.config.train.steps or bool(self.controller.actions.stop_reason)

    def train(self, end: int, *, evaluates: bool, eval_steps: int = -1) -> None:
        """Trains until the global step is `end`, or until something ends or stops the run.

        If there is no step to train, it completes what is left of the end of training.

        Args:
            end: the global step.
            evaluates: whether to evaluate at the intervals of the config and at the end.
            eval_steps: batches per evaluation; -1 for the complete dataset.
        """
        controller, config = self.controller, self.config.eval
        self.has_ended = False
        is_last = max(end, controller.step) >= self.config.train.steps
        if controller.evaluator and config.before_training and controller.step == 0:
            controller.evaluate(eval_steps)
        if not evaluates:
            controller.train(end, is_last=is_last)
        elif controller.step < end and not controller.actions.stop_reason:
            controller.train_and_evaluate(end, eval_steps, config.interval, is_last=is_last)
        else:  # killed or stopped between the last checkpoint and the end of training
            if controller.evaluated_step != controller.step:
                controller.evaluate(eval_steps)
            controller.end_training(is_last=is_last)
        # A stop that is requested at the last step leaves the end of training to the next process.
        trained = int(controller.trained_step or 0)
        self.has_ended = not controller.stopped and self.must_end(trained)

    def record_end(self) -> None:
        """Writes `result.json` and the last event.

        No result is written for a step at which training must end but has not: the run would count as
        complete, and no later process would restore the best checkpoint or export the model.
        """
        controller = self.controller
        seconds = time.monotonic() - self._start
        result = results.make_result(self.experiment, controller, seconds)
        if not controller.outputs:  # only evaluated: keep what was recorded of the training
            result |= results.read_training(self.workdir)
            # The process that trained may have been killed before its result.
            outputs = self.checkpoints.files.notes(result["step"]).get("outputs")
            result |= {"train": outputs} if outputs else {}
        if self.has_ended or not self.must_end(result["step"]):
            self.workdir.write_result(result)
        reason = (controller.actions.stop_reason or {}).get("reason")
        reasons = {**self.stop.reasons, **({"reason": reason} if reason else {})}
        self.workdir.event(
            "stop" if controller.stopped else "end",
            result["step"],
            **reasons,
            seconds=controller.reporter.seconds(),
        )

    def _make_progress(self, prints: bool) -> Progress:
        options: dict[str, Any] = dict(
            total=self.config.train.steps,
            steps_per_epoch=self.experiment.steps_per_epoch,
            evaluates=bool(self.experiment.evaluator and self.config.eval.interval),
        )
        prints = prints and self.is_chief
        if prints and sys.stdout.isatty():
            return loading.load(_PROGRESS_BAR)(**options)
        return Progress(**options, write=print_line if prints else lambda line: None)

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
