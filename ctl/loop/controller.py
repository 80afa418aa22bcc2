"""Orbit's Controller with boundaries at absolute steps."""

from collections.abc import Callable, Iterable, Sequence
import pathlib
from typing import Any

import orbit
import tensorflow as tf

from ctl.errors import Failure, NonFiniteStep, UsageError
from ctl.evaluator import Interrupted, StandardEvaluator
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.actions.action import ActionList, as_action
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.manager import CheckpointManager
from ctl.loop.loop_monitor import LoopMonitor, StepSummaries
from ctl.loop.reporter import Reporter, as_numbers
from ctl.loop.stop import StopRequest
from ctl.loop.timing import Timer
from ctl.loop.watchdog import Watchdog
from ctl.loop.writers.tensorboard import TensorBoardWriter
from ctl.trainer import StandardTrainer

ROLLBACK_LIMIT = 10  # rollbacks of one run

Decision = dict[str, Any]  # {"step": 33, "tensor": "the loss"}, as in rollbacks.json


class RollbackPolicy:
    """Decides which batches a run skips after it was rolled back to its last checkpoint.

        rollback = RollbackPolicy(record=workdir.write_rollbacks)
        rollback.skip(error)                # a NonFiniteStep; then restore the last checkpoint
        rollback.steps                      # ... train up to each of these steps, and skip its batch

    A decision is permanent. The batch of a step is a function of the seed and the step alone, so a run
    that is killed and resumed skips the same batches.

    Args:
        record: called with all decisions whenever one is added, to save them.
        earlier: the decisions that `record` saved.
    """

    def __init__(
        self,
        *,
        record: Callable[[Sequence[Decision]], None] | None = None,
        earlier: Sequence[Decision] = (),
    ):
        self._record = record or (lambda decisions: None)
        self._decisions = list(earlier)

    @property
    def steps(self) -> list[int]:
        """The steps whose batches are skipped, one for each rollback of the run."""
        return [decision["step"] for decision in self._decisions]

    def skip(self, error: NonFiniteStep) -> None:
        """Decides to skip the batch of a step from now on.

        Raises:
            Failure: the limit is reached.
        """
        count = len(self._decisions)
        if count >= ROLLBACK_LIMIT:
            raise Failure(
                f"{error.what} The run was rolled back {count} times, which is its limit: "
                "check the data, lower the learning rate, or clip the gradients."
            )
        self._decisions.append({"step": error.step, "tensor": error.tensor})
        # Recorded before the checkpoint is restored: a run killed in between skips the batch too.
        self._record(self._decisions)


class Controller(orbit.Controller):
    """Trains, saves and evaluates at the same steps, no matter where a run was resumed.

        controller = Controller(trainer=trainer, evaluator=ctl.StandardEvaluator(trainer),
                                steps_per_loop=100, checkpoints=Checkpointer("ckpts", trainer))
        controller.train_and_evaluate(train_steps=1000, eval_interval=500)

    Orbit counts intervals from the step at which a loop happens to end. Here checkpoints, evaluations
    and the ends of inner loops fall on multiples of their intervals. Every process of a run must call
    the same methods in the same order, since the processes communicate in all of them.

    Args:
        trainer: runs the inner loops.
        evaluator: evaluates the trainer's model.
        steps_per_loop: steps of an inner loop, which ends at multiples of this number.
        checkpoints: reads and writes the checkpoints; None to save nothing.
        checkpoint_interval: steps between two checkpoints; 0 for the end only.
        checkpoint_seconds: seconds between two checkpoints, in addition; 0 for no limit.
        summary_dir: the folder of the training summaries.
        eval_summary_dir: the folder of the evaluation summaries.
        reporter: prints, logs and records the progress; by default it only writes summaries.
        stop: a request to save and end, which is checked after each inner loop.
        processes: the processes of the run; by default this one only.
        watchdog: reports inner loops that hang.
        rollback: decides which batches to skip, if the trainer's `on_non_finite` is "rollback".
        summary_interval: steps between two writes of `tf.summary` calls in a step; by default
            `steps_per_loop`.
        summary_seconds: if not 0, seconds between them instead.
        train_actions: called with each loop's outputs in every process.
        eval_actions: called with each evaluation's outputs in every process.
        actions: further actions, called at their own boundaries; see `ctl.Action` and `ctl.as_action`.
        workdir: the folder of the run, for actions.
        is_chief: whether this process is the one that prints and writes.
        last_step: the step at which actions end, unless one ends training earlier; 0 for the end of
            each call of `train`.

    Attributes:
        actions: the `ActionList` of the run.
        outputs: the last loop's loss and metrics.
        evaluation: the last evaluation's loss and metrics, or None.
        evaluated_step: the step of that evaluation.
        stopped: whether training was interrupted, to be resumed later.
        trained_step: the step at which training ended; None before.

    Raises:
        UsageError: on_non_finite is "rollback" and there are no checkpoints, or an action cannot
            work in this run.
    """

    def __init__(
        self,
        *,
        trainer: StandardTrainer,
        evaluator: StandardEvaluator | None = None,
        steps_per_loop: int = 100,
        checkpoints: Checkpointer | None = None,
        checkpoint_interval: int = 0,
        checkpoint_seconds: float = 0.0,
        summary_dir: str | None = None,
        eval_summary_dir: str | None = None,
        reporter: Reporter | None = None,
        stop: StopRequest | None = None,
        processes: ProcessGroup | None = None,
        watchdog: Watchdog | None = None,
        rollback: RollbackPolicy | None = None,
        summary_interval: int | None = None,
        summary_seconds: float = 0.0,
        train_actions: Iterable[orbit.Action] | None = None,
        eval_actions: Iterable[orbit.Action] | None = None,
        actions: Iterable[Callable[[Any], Any]] = (),
        workdir: pathlib.Path | None = None,
        is_chief: bool = True,
        last_step: int = 0,
    ):
        self._rolls_back = trainer.options.on_non_finite == "rollback"
        if self._rolls_back and checkpoints is None:
            raise UsageError("on_non_finite=rollback requires `checkpoints` to go back to.")
        super().__init__(
            trainer=trainer,
            evaluator=evaluator,
            strategy=trainer.strategy,
            global_step=trainer.global_step,
            steps_per_loop=steps_per_loop,
            summary_dir=summary_dir,
            eval_summary_dir=eval_summary_dir,
        )
        self.outputs: dict[str, Any] = {}
        self.evaluation: dict[str, Any] | None = None
        self.evaluated_step: int | None = None
        self.stopped = False
        self.trained_step: int | None = None
        self.workdir = workdir
        self.checkpoints = checkpoints
        self.is_chief = is_chief
        self.processes = processes or ProcessGroup()
        self._stop = stop or StopRequest()
        self._last_step = last_step
        self._has_restored = False  # since the last evaluation
        self._evaluation_timer = Timer(0)
        self._rollback = rollback or RollbackPolicy()
        self.reporter = reporter or Reporter(trainer)
        self.reporter.metrics.add(TensorBoardWriter(self))
        self._manager = CheckpointManager(
            trainer,
            checkpoints,
            self.reporter,
            interval=checkpoint_interval,
            seconds=checkpoint_seconds,
        )
        self._monitor = LoopMonitor(
            trainer,
            self.reporter,
            summaries=self.summary_manager,
            step_summaries=StepSummaries(
                trainer,
                interval=summary_interval or steps_per_loop,
                seconds=summary_seconds,
                print_line=self.reporter.print_line,
            ),
            watchdog=watchdog,
        )
        orbit_actions = [as_action(action, at="train") for action in train_actions or ()]
        orbit_actions += [as_action(action, at="eval") for action in eval_actions or ()]
        self.actions = ActionList([*orbit_actions, *actions], self)

    @property
    def step(self) -> int:
        """The global step."""
        return int(self.global_step.numpy())

    def train(self, steps: int, checkpoint_at_completion: bool = True) -> None:
        """Trains until `global_step` is `steps`, or until a stop is requested.

        When it returns, all checkpoints are complete, including those that a thread writes.
        """
        while self.step < steps and not self._has_ended:  # again after a rollback
            self._train_loop(steps, end=steps)
        if checkpoint_at_completion or self._has_ended:
            self.save_checkpoint()
        self.end_training()

    def train_and_evaluate(
        self,
        train_steps: int,
        eval_steps: int = -1,
        eval_interval: int | None = None,
        eval_seconds: float = 0.0,
    ) -> dict[str, Any] | None:
        """Trains and evaluates alternately, and evaluates at the end.

        Args:
            train_steps: the global step to train to.
            eval_steps: batches per evaluation; -1 for the complete dataset.
            eval_interval: steps between two evaluations; 0 or None for the end only.
            eval_seconds: seconds between two evaluations; 0 for no limit.

        Returns:
            The last evaluation, or None if a stop was requested before it.
        """
        self._evaluation_timer = Timer(eval_seconds)
        while self.step < train_steps and not self._has_ended:
            until = next_boundary(self.step, train_steps, (eval_interval or 0,))
            # A checkpoint is saved before the evaluation of its step, so that the states of actions in
            # it do not include that evaluation: it is repeated.
            if self._has_restored and self.step and eval_interval and not self.step % eval_interval:
                until = self.step
            self._train_loop(until, end=train_steps)
            # Before the last evaluation, so that a run killed in it need not train again.
            if self._has_ended or self.step == train_steps:
                self.save_checkpoint()
            if self.step < until and not self._has_ended and not self._evaluation_timer.due:
                continue  # rolled back, maybe to before an earlier evaluation
            if not self.stopped:
                self.evaluate(eval_steps)
                if self._has_ended:
                    self.save_checkpoint()
        self.end_training()
        return self.evaluation

    def evaluate(self, steps: int = -1) -> dict[str, Any] | None:
        """Evaluates `steps` batches; -1 for the complete dataset.

        Returns:
            Loss and metrics by name, or by split and name; None if a stop was requested before the end.
        """
        self._require("evaluator", for_method="evaluate")
        # An evaluation may take longer than a cloud waits after its notice, so it checks for a stop.
        self.evaluator.any_process_stops = self.any_process_stops
        self.evaluator.processes, self.evaluator.is_chief = self.processes, self.is_chief
        try:
            summaries = self.reporter.summary_writer(self.eval_summary_manager)
            with self.reporter.clock.measure("evaluation"), summaries:
                outputs = self.evaluator.evaluate(tf.constant(steps, tf.int32))
        except Interrupted:
            self.stopped = True
            return None
        self._has_restored = False
        self._evaluation_timer.restart()
        self.evaluation = numbers = as_numbers(outputs)
        self.evaluated_step = self.step
        self.reporter.evaluation_ended(self.step, numbers)
        with self.reporter.summary_writer(self.eval_summary_manager, flush=True):
            self.actions.run("eval", numbers)
        return numbers

    def end_training(self) -> None:
        """Waits until all checkpoints are complete, and ends the actions unless interrupted.

        `train` and `train_and_evaluate` call it.
        """
        self.trained_step = self.step
        # An action may restore a checkpoint, and the thread that writes the last one reads the trainer.
        self._manager.wait()
        if not self.stopped and (self.step >= self._last_step or self.actions.stop_reason):
            self.actions.end()

    def restore_checkpoint(self, checkpoint_path: str | None = None) -> str | None:
        """Restores a checkpoint, by default the newest; returns its path, or None without one."""
        path = self._all_restore(checkpoint_path)
        # A run that was killed in an evaluation repeats it; the chief has the file that shows it.
        is_missing = not self.reporter.metrics.has_evaluation(self.step)
        self._has_restored = self.processes.any_process(is_missing) or self.actions.has("eval")
        return path

    def save_checkpoint(self) -> None:
        """Saves a checkpoint, unless this step has one already."""
        with self.reporter.clock.measure("saving"):
            self._manager.save(self.actions.get_notes)

    def any_process_stops(self) -> bool:
        """Returns whether a stop was requested in any process; every process must call it."""
        return self.processes.any_process(self._stop.requested)

    def _train_loop(self, until: int, *, end: int) -> None:
        """Runs inner loops until `global_step` is `until`; the run ends at `end`."""
        if self._rolls_back and self._manager.saved_step is None:
            self.save_checkpoint()  # a rollback from the first steps needs a checkpoint, too
        while self.step < until and not self._has_ended and not self._evaluation_timer.due:
            first = self.step
            if first in self._rollback.steps:  # a batch before the boundary of an earlier rollback
                self.trainer.global_step.assign_add(1)
            else:
                intervals = (self.steps_per_loop, self._manager.interval)
                others = (*self.reporter.profiler.edges, *self._rollback.steps)
                boundary = next_boundary(first, until, intervals, others)
                steps = boundary - first
                try:
                    with self._monitor.measure(steps):
                        self.outputs = self._monitor.read(self.trainer.train(tf.constant(steps)))
                except NonFiniteStep as error:
                    self._all_roll_back(error)
                    self._has_restored = self.actions.has("eval")
                    return  # to repeat the evaluations after the checkpoint
                self._monitor.check(boundary, steps=steps, outputs=self.outputs)
                self._monitor.all_measure_waiting(self.processes)
                with self.reporter.summary_writer(self.summary_manager):
                    self.actions.run("train", self.outputs)
                self.reporter.loop_ended(self.step, self.outputs, last_step=end)
            # All processes make the same decision: the chief's clock and a signal to any process count.
            if self._manager.all_due(self.processes):
                self.save_checkpoint()
            self._evaluation_timer.all_due(self.processes)
            self.stopped = self.processes.any_process(self._stop.requested)

    def _all_roll_back(self, error: NonFiniteStep) -> None:
        """Restores the last checkpoint and skips the batch from now on, or ends the run.

        The trainer checks reduced values, so every process calls this for the same step.

        Raises:
            NonFiniteStep: the trainer's `on_non_finite` is not "rollback".
            Failure: no checkpoint is left, or the limit of rollbacks is reached.
        """
        policy, reporter = self.trainer.options.on_non_finite, self.reporter
        reporter.record("non_finite", error.step, policy=policy, tensor=error.tensor)
        if policy != "rollback":
            raise error
        self._rollback.skip(error)
        # A checkpoint of the step itself was saved before its batch was read.
        path = self._all_restore(before=error.step + 1)
        if path is None:
            raise Failure(
                f"{error.what} No checkpoint is left to go back to: start again with --fresh."
            )
        reporter.metrics.restore(self.step)
        reporter.record("rollback", self.step, left_out=error.step, path=path)
        reporter.print_line(
            f"{error.what} Back to step {self.step}; that batch is skipped from now on "
            f"(rollback {len(self._rollback.steps)})."
        )

    def _all_restore(self, path: str | None = None, *, before: int | None = None) -> str | None:
        """Restores the trainer and the actions; returns the path, or None without a checkpoint."""
        path, notes = self._manager.all_restore(path, before=before)
        self.actions.set_notes(notes)
        return path

    @property
    def _has_ended(self) -> bool:
        return self.stopped or self.actions.stop_reason is not None


def next_boundary(step: int, end: int, intervals: Iterable[int], others: Iterable[int] = ()) -> int:
    """Returns the first boundary after `step`: a multiple of an interval, another one, or `end`.

    Args:
        step: the current step.
        end: the step that no loop passes.
        intervals: numbers of steps; 0 for an interval without multiples.
        others: further boundaries.
    """
    multiples = [(step // interval + 1) * interval for interval in intervals if interval]
    return min([end, *multiples, *(other for other in others if other > step)])
