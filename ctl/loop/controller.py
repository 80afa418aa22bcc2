"""Orbit's Controller with boundaries at absolute steps."""

from collections.abc import Callable, Iterable, Mapping
import functools
from typing import Any

import orbit
import tensorflow as tf

from ctl.errors import Failure, LateUsageError, NonFiniteStep, UsageError
from ctl.evaluator import Interrupted, StandardEvaluator
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.actions.action import ActionList
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.manager import CheckpointManager
from ctl.loop.loop_monitor import LoopMonitor, StepSummaries
from ctl.loop.reporter import Reporter, as_numbers
from ctl.loop.stop import StopRequest
from ctl.loop.timing import Every, Timer
from ctl.trainer import StandardTrainer

ROLLBACK_LIMIT = 10  # rollbacks of one run

RollbackEntry = dict[str, Any]  # {"step": 33, "tensor": "the loss"}, as in rollbacks.json


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
        checkpoint_interval: when to save: a number of steps, a time, such as "30 minutes", or an
            `Every`; 0 for the end only.
        reporter: prints, logs and records the progress, and knows the folder of the run.
        stop: a request to save and end, which is checked after each inner loop.
        processes: the processes of the run; by default this one only.
        actions: called at their own boundaries, and around loops; see `ctl.Action` and `ctl.as_action`.

    Attributes:
        actions: the `ActionList` of the run.
        workdir: the path of the run's folder; None without one.
        is_chief: whether this process is the one that prints and writes.
        outputs: the last loop's loss and metrics.
        evaluation: the last evaluation's loss and metrics, or None.
        evaluated_step: the step of that evaluation.
        stopped: whether training was interrupted, to be resumed later.
        trained_step: the step at which training ended; None before.
        has_other_weights: whether an action has restored another checkpoint after training.

    Raises:
        UsageError: on_non_finite is "rollback" and there are no checkpoints, or an action cannot
            work in this run.
    """

    def __init__(
        self,
        *, trainer: StandardTrainer, evaluator: StandardEvaluator | None = None,
        steps_per_loop: int = 100, checkpoints: Checkpointer | None = None,
        checkpoint_interval: int | str | Every = 0, reporter: Reporter | None = None,
        stop: StopRequest | None = None, processes: ProcessGroup | None = None,
        actions: Iterable[Callable[[Any], Any]] = (),
    ):  # fmt: skip
        self._rolls_back = trainer.options.on_non_finite == "rollback"
        if self._rolls_back and checkpoints is None:
            raise UsageError("on_non_finite=rollback requires `checkpoints` to go back to.")
        self.reporter = reporter or Reporter(trainer)
        folder = self.reporter.metrics.summary_folder
        super().__init__(
            trainer=trainer,
            evaluator=evaluator,
            strategy=trainer.strategy,
            global_step=trainer.global_step,
            steps_per_loop=steps_per_loop,
            summary_dir=str(folder / "train") if folder else None,
            eval_summary_dir=str(folder / "eval") if folder else None,
        )
        self.outputs: dict[str, Any] = {}
        self.evaluation: dict[str, Any] | None = None
        self.evaluated_step: int | None = None
        self.stopped = False
        self.trained_step: int | None = None
        self.has_other_weights = False
        self.workdir = self.reporter.workdir.path if self.reporter.workdir else None
        self.checkpoints = checkpoints
        self.processes = processes or ProcessGroup()
        self.is_chief = self.processes.is_chief
        self.stop = stop or StopRequest()
        self._has_restored = False  # since the last evaluation
        self._evaluation_timer = Timer(0)
        self.reporter.metrics.write_summaries(self)
        self._manager = CheckpointManager(
            trainer, checkpoints, self.reporter, Every.of(checkpoint_interval)
        )
        summaries = self.reporter.summary_interval
        self._monitor = LoopMonitor(
            trainer,
            self.reporter,
            summaries=self.summary_manager,
            step_summaries=StepSummaries(
                trainer,
                every=summaries if summaries != Every() else Every(steps_per_loop),
                print_line=self.reporter.print_line,
            ),
        )
        self.actions = ActionList(actions, self)

    @functools.cached_property
    def _rollbacks(self) -> list[RollbackEntry]:
        """The decisions to skip batches, those of the chief in every process; collective.

        A decision is permanent. The batch of a step is a function of the seed and the step alone, so a
        run that is killed and resumed skips the same batches.
        """
        workdir = self.reporter.workdir
        # Only the chief reads the file: the workdir of another process may be another folder.
        earlier = workdir.rollbacks() if workdir and self.is_chief else []
        return self.processes.broadcast_json_from_chief(earlier)

    @property
    def _skipped(self) -> list[int]:
        """The steps whose batches are skipped, one for each rollback of the run."""
        return [decision["step"] for decision in self._rollbacks]

    @property
    def step(self) -> int:
        """The global step."""
        return int(self.global_step.numpy())

    def train(
        self, steps: int, checkpoint_at_completion: bool = True, *, is_last: bool = True
    ) -> None:
        """Trains until `global_step` is `steps`, or until a stop is requested.

        When it returns, all checkpoints are complete, including those that a thread writes.

        Args:
            steps: the global step to train to.
            checkpoint_at_completion: whether to save at the end.
            is_last: whether the run ends at that step, and its actions with it.
        """
        while self.step < steps and not self._has_ended:  # again after a rollback
            self._train_loop(steps, end=steps)
        if checkpoint_at_completion or self._has_ended:
            self.save_checkpoint()
        self.end_training(is_last=is_last)

    def train_and_evaluate(
        self,
        train_steps: int,
        eval_steps: int = -1,
        eval_interval: int | str | Every | None = None,
        *,
        is_last: bool = True,
    ) -> dict[str, Any] | None:
        """Trains and evaluates alternately, and evaluates at the end.

        Args:
            train_steps: the global step to train to.
            eval_steps: batches per evaluation; -1 for the complete dataset.
            eval_interval: when to evaluate: a number of steps, a time, such as "30 minutes", or an
                `Every`; 0 or None for the end only.
            is_last: whether the run ends at that step, and its actions with it.

        Returns:
            The last evaluation, or None if a stop was requested before it.
        """
        every = Every.of(eval_interval or 0)
        self._evaluation_timer = Timer(every.seconds)
        while self.step < train_steps and not self._has_ended:
            until = next_boundary(self.step, train_steps, every)
            # A checkpoint is saved before the evaluation of its step, so that the states of actions in
            # it do not include that evaluation: it is repeated.
            if self._has_restored and self.step and every.next(self.step - 1) == self.step:
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
        self.end_training(is_last=is_last)
        return self.evaluation

    def evaluate(self, steps: int = -1) -> dict[str, Any] | None:
        """Evaluates `steps` batches; -1 for the complete dataset.

        Returns:
            Loss and metrics by name, or by split and name; None if a stop was requested before the end.
        """
        self._require("evaluator", for_method="evaluate")
        try:
            summaries = self.reporter.summary_writer(self.eval_summary_manager)
            with self.reporter.clock.measure("evaluation"), summaries:
                # An evaluation may take longer than a cloud waits after its notice, so it checks for a
                # stop.
                outputs = self.evaluator.evaluate(
                    tf.constant(steps, tf.int32),
                    processes=self.processes,
                    stop=self.any_process_stops,
                )
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

    def withdraw_stop(self) -> None:
        """Withdraws the request that has stopped an earlier call, such as of `train`."""
        self.stop.withdraw()
        self.stopped = False

    def begin_training(self) -> None:
        """Continues after the step at which an earlier call of `train` has ended training."""
        self.trained_step = None

    def resume_stop(self, reason: dict[str, Any] | None, *, has_ended: bool = False) -> None:
        """Continues a run that an action has ended in an earlier process.

        Args:
            reason: the step and the reason; None if no action has ended it.
            has_ended: whether that process has also completed the end of training.
        """
        self.actions.stop_reason = reason
        if has_ended:
            self.trained_step = self.step

    def end_training(self, *, is_last: bool = True) -> None:
        """Waits until all checkpoints are complete, and ends the actions unless interrupted.

        `train` and `train_and_evaluate` call it.

        Args:
            is_last: whether the run ends here, also if no action has ended it.
        """
        self.trained_step = self.step
        # An action may restore a checkpoint, and the thread that writes the last one reads the trainer.
        self._manager.wait()
        if not self.stopped and (is_last or self.actions.stop_reason):
            self.actions.end()

    def replace_weights(self, step: int, outputs: Mapping[str, Any] | None) -> None:
        """Notes that an action has restored a checkpoint of another step, after training.

        Args:
            step: the step of that checkpoint.
            outputs: its evaluation.
        """
        self.evaluation, self.evaluated_step = dict(outputs) if outputs else None, step
        self.has_other_weights = True

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
            self._manager.save(self.get_notes)

    def get_notes(self) -> dict[str, Any]:
        """Returns the notes for a checkpoint: those of the actions, and the outputs of the last loop."""
        outputs = {"outputs": self.outputs} if self.outputs else {}
        return {**self.actions.get_notes(), **outputs}

    def any_process_stops(self) -> bool:
        """Returns whether a stop was requested in any process; every process must call it."""
        return self.processes.any_process(self.stop.requested)

    def _train_loop(self, until: int, *, end: int) -> None:
        """Runs inner loops until `global_step` is `until`; the run ends at `end`."""
        if self._rolls_back and self._manager.saved_step is None:
            self.save_checkpoint()  # a rollback from the first steps needs a checkpoint, too
        while self.step < until and not self._has_ended and not self._evaluation_timer.due:
            first = self.step
            if first in self._skipped:  # a batch before the boundary of an earlier rollback
                self.trainer.global_step.assign_add(1)
            else:
                others = (*self.actions.loops_end_at, *self._skipped)
                every = Every(self.steps_per_loop, at=others)
                boundary = next_boundary(first, until, every, self._manager.every)
                steps = boundary - first
                try:
                    # The actions come first, so that the time in which one of them writes does not
                    # count as steps.
                    with self.actions.around(first, boundary), self._monitor.measure(steps):
                        self.outputs = self._monitor.read(self.trainer.train(tf.constant(steps)))
                except LateUsageError:  # the steps before it are complete
                    self.save_checkpoint()
                    self._manager.wait()
                    raise
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
            self.stopped = self.processes.any_process(self.stop.requested)

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
        count = len(self._rollbacks)
        if count >= ROLLBACK_LIMIT:
            raise Failure(
                f"{error.what} The run was rolled back {count} times, which is its limit: "
                "check the data, lower the learning rate, or clip the gradients."
            )
        self._rollbacks.append({"step": error.step, "tensor": error.tensor})
        # Recorded before the checkpoint is restored: a run killed in between skips the batch too.
        if reporter.workdir:
            reporter.workdir.write_rollbacks(self._rollbacks)
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
            f"(rollback {count + 1})."
        )

    def _all_restore(self, path: str | None = None, *, before: int | None = None) -> str | None:
        """Restores the trainer and the actions; returns the path, or None without a checkpoint."""
        path, notes = self._manager.all_restore(path, before=before)
        self.has_other_weights = False
        self.actions.set_notes(notes)
        return path

    @property
    def _has_ended(self) -> bool:
        return self.stopped or self.actions.stop_reason is not None


def next_boundary(step: int, end: int, *intervals: Every) -> int:
    """Returns the first step of an interval after `step`, or `end` if that comes before."""
    return int(min(end, *(every.next(step) for every in intervals)))
