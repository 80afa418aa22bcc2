"""The part that the program and `ctl.Run` share: restore or load, train, and record both."""

from collections.abc import Iterator, Sequence
import contextlib
import os
import time

from ctl.configs import durations
from ctl.loop import goodput, watchdog
from ctl.loop.actions.action import Action
from ctl.loop.checkpoints import warm_start
from ctl.loop.profiler import Profiler
from ctl.loop.stop import GceNotice, StopOnSignal
from ctl.loop.watchdog import Watchdog
from ctl.modes import messages, results
from ctl.modes.run import RunParts
from ctl.replica.step.engine import engine_of


class Session:
    """The part of a run that one process computes. Every process must call the same methods.

        session = Session(run, stop, actions=run.make_actions(), config_path="my_model.py")
        with session.watching():
            session.all_restore()
            session.record_start()
            session.train(1000, evaluates=True)
            session.record_end()

    Args:
        run: the run.
        stop: requests that the run saves and stops.
        actions: called at the end of inner loops and evaluations.
        config_path: the config file, or "".
        changes: one line for each change of the config since the run was started.

    Attributes:
        controller: the controller of the run.
        has_ended: whether training has ended, and its actions as well.
    """

    def __init__(
        self,
        run: RunParts,
        stop: StopOnSignal,
        *,
        actions: Sequence[Action],
        config_path: str,
        changes: Sequence[str] = (),
    ):
        self._run = run
        self._stop = stop
        config = run.config.train
        self._profiler = Profiler(
            config.profile,
            folder=run.workdir.summaries("train"),
            print_line=run.progress.print_line,
            on_event=run.workdir.event,
        )
        # Every process has one, since the input pipeline that hangs need not be the chief's.
        self._watchdog = Watchdog(
            watchdog.STALL_SECONDS,
            read_step=lambda: int(run.trainer.global_step.numpy()),
            data_type=lambda: engine_of(run.trainer).pipeline.data_types["train"],
            on_event=run.workdir.event,
        )
        self.controller = run.make_controller(
            stop=stop,
            watchdog=self._watchdog,
            profiler=self._profiler,
            rollback=run.broadcast_rollback_policy(),
            actions=actions,
        )
        self._start = 0.0
        self._config_path = os.path.abspath(config_path) if config_path else ""
        self._changes = list(changes)
        self._restored: str | None = None
        self._loaded: list[warm_start.LoadedWeights] = []
        self.has_ended = False

    def all_restore(self) -> None:
        """Restores the newest checkpoint; without one, loads the weights that `init` names."""
        run = self._run
        self._restored = self.controller.restore_checkpoint()
        # A run that an action has ended, and that was killed before its result, must not train on. Only
        # the chief knows the changes.
        continues = run.processes.any_process(results.changes_stop(self._changes))
        if self._restored and not continues:
            notes = run.checkpoints.files.notes(self.controller.step)
            self.controller.actions.stop_reason = notes.get("stopped")
        if not self._restored:
            self._loaded = warm_start.all_load(run.trainer, run.config.init, run.processes)

    def print_start(self) -> None:
        """Prints where the run starts or resumes."""
        print_line = self._run.progress.print_line
        for line in self._changes:
            print_line(f"Changed since the run was started: {line}")
        if self._restored:
            print_line(f"Resumed from {self._restored}.")
        if self._run.checkpoints.unmatched:
            print_line(messages.restored_in_part(self._run.checkpoints.unmatched))
        for loaded in self._loaded:
            print_line(messages.loaded_weights(loaded))

    def record_start(self) -> None:
        """Writes the config and the first event.

        Call `all_restore` first, so that a run whose checkpoint does not match leaves the config alone.
        """
        run, controller = self._run, self.controller
        run.workdir.create(run.record)
        lost = goodput.find_lost(run.workdir.path, controller.step) if run.is_chief else {}
        workers_before = goodput.find_workers(run.workdir.path) if run.is_chief else None
        cluster = run.experiment.hardware.cluster
        workers = cluster.num_workers if cluster else 1
        if self._restored:
            partial = run.checkpoints.unmatched
            left = {"left": partial.left(), "dropped": partial.dropped()} if partial else {}
            fields = {"path": self._restored, "changes": self._changes, **left, **lost}
            run.workdir.event("resume", controller.step, **fields, workers=workers)
            if workers_before not in (None, workers):
                run.workdir.event("workers", controller.step, before=workers_before, after=workers)
                line = f"The number of workers has changed from {workers_before} to {workers}."
                run.progress.print_line(line)
        else:
            loaded = warm_start.record(self._loaded)
            fields = {"config": self._config_path, **lost, **loaded}
            run.workdir.event("start", controller.step, **fields, workers=workers)
        controller.reporter.metrics.begin(
            run.config.to_dict(), step=controller.step, is_new=not self._restored
        )
        run.clock.mark_started()
        self._start = time.monotonic()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the training in the `with` block, whose duration `record_end` records.

        It profiles on SIGUSR1, reports loops that hang, and stops the run before this machine is
        preempted, if the config requires it.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._profiler.on_signal())
            if self._run.config.train.preemption_notice != "none":
                stack.enter_context(GceNotice(self._stop))
            stack.enter_context(self._watchdog)
            self._start = time.monotonic()
            yield

    def must_end(self, step: int) -> bool:
        """Returns whether training that reached a step must end there, by the config or an action."""
        return step >= self._run.config.train.steps or bool(self.controller.actions.stop_reason)

    def train(self, end: int, *, evaluates: bool, eval_steps: int = -1) -> None:
        """Trains until the global step is `end`, or until something ends or stops the run.

        If there is no step to train, it completes what is left of the end of training.

        Args:
            end: the global step.
            evaluates: whether to evaluate at the intervals of the config and at the end.
            eval_steps: batches per evaluation; -1 for the complete dataset.
        """
        controller, config = self.controller, self._run.config.eval
        self.has_ended = False
        if controller.evaluator and config.before_training and controller.step == 0:
            controller.evaluate(eval_steps)
        if not evaluates:
            controller.train(end)
        elif controller.step < end and not controller.actions.stop_reason:
            interval, seconds = durations.split_interval(config.interval)
            controller.train_and_evaluate(
                end, eval_steps=eval_steps, eval_interval=interval, eval_seconds=seconds
            )
        else:  # killed or stopped between the last checkpoint and the end of training
            if controller.evaluated_step != controller.step:
                controller.evaluate(eval_steps)
            controller.end_training()
        # A stop that is requested at the last step leaves the end of training to the next session.
        trained = int(controller.trained_step or 0)
        self.has_ended = not controller.stopped and self.must_end(trained)

    def record_end(self) -> None:
        """Writes `result.json` and the last event.

        No result is written for a step at which training must end but has not: the run would count as
        complete, and no later process would restore the best checkpoint or export the model.
        """
        run, controller = self._run, self.controller
        seconds = time.monotonic() - self._start
        result = results.make_result(run.experiment, controller, seconds)
        if not controller.outputs:  # only evaluated: keep what was recorded of the training
            result |= results.read_training(run.workdir)
        if run.is_chief:
            result |= results.measure_run(run.workdir, controller)
        if self.has_ended or not self.must_end(result["step"]):
            run.workdir.write_result(result)
        ended_by = {
            k: v for k, v in (controller.actions.stop_reason or {}).items() if k == "reason"
        }
        run.workdir.event(
            "stop" if controller.stopped else "end",
            result["step"],
            **{**self._stop.reasons, **ended_by},
            seconds=controller.reporter.seconds(),
        )
