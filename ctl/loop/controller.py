"""Orbit's Controller with boundaries at absolute steps."""

from collections.abc import Iterable
import contextlib
import math
import time
from typing import Any

import orbit
import tensorflow as tf

from ctl.errors import Failure, NonFiniteStep, UsageError
from ctl.evaluator import Interrupted, StandardEvaluator
from ctl.hardware import coordinator
from ctl.hardware.collectives import ProcessGroup
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.manager import CheckpointManager
from ctl.loop.reporter import Reporter, as_numbers
from ctl.loop.rollback import RollbackPolicy
from ctl.loop.stop import StopRequest
from ctl.loop.watchdog import Watchdog
from ctl.trainer import StandardTrainer


class Controller(orbit.Controller):
    """Trains, saves and evaluates at the same steps, no matter where a run was resumed.

        controller = Controller(trainer=trainer, evaluator=ctl.StandardEvaluator(trainer),
                                steps_per_loop=100, checkpoints=Checkpointer("ckpts", trainer))
        controller.train_and_evaluate(train_steps=1000, eval_interval=500)

    Orbit counts intervals from the step at which a loop happens to end. Here checkpoints, evaluations
    and the ends of inner loops fall on multiples of their intervals. Every process of a run must call
    the same methods in the same order, since the processes communicate in all of them.

    Attributes:
        outputs: the last loop's loss and metrics.
        evaluation: the last evaluation's loss and metrics, or None.
        evaluated_step: the step of that evaluation.
        stopped: whether training ended early, on request.
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
        train_actions: Iterable[orbit.Action] | None = None,
        eval_actions: Iterable[orbit.Action] | None = None,
    ):
        """Connects the parts of a run.

        Args:
            trainer: runs the inner loops.
            evaluator: evaluates the trainer's model.
            steps_per_loop: steps of an inner loop, which ends at multiples of this number.
            checkpoints: where to save; by default nothing is saved.
            checkpoint_interval: steps between two checkpoints; 0 for the end only.
            checkpoint_seconds: seconds between two checkpoints, in addition; 0 for no limit.
            summary_dir: the folder of the training summaries.
            eval_summary_dir: the folder of the evaluation summaries.
            reporter: prints, summarizes and records what happens; by default only summarizes.
            stop: checked after each inner loop: whether to save and end.
            processes: the processes of the run; by default this one only.
            watchdog: reports inner loops that hang.
            rollback: decides which batches to skip, if the trainer's `on_non_finite` is "rollback".
            train_actions: called with each loop's outputs.
            eval_actions: called with each evaluation's outputs.

        Raises:
            UsageError: on_non_finite is "rollback" and there are no checkpoints.
        """
        # Without checkpoints the first non-finite step would end the run: say so before it starts.
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
            train_actions=train_actions,
            eval_actions=eval_actions,
        )
        self.outputs: dict[str, Any] = {}
        self.evaluation: dict[str, Any] | None = None
        self.evaluated_step: int | None = None
        self.stopped = False
        self._stop = stop or StopRequest()
        self._processes = processes or ProcessGroup()
        self._watch = watchdog.loop if watchdog else lambda step: contextlib.nullcontext()
        self._rollback = rollback or RollbackPolicy()
        self._reporter = reporter or Reporter(trainer)
        self._manager = CheckpointManager(
            trainer,
            checkpoints,
            interval=checkpoint_interval,
            seconds=checkpoint_seconds,
            on_event=self._reporter.record,
            print_line=self._reporter.print_line,
        )

    @property
    def step(self) -> int:
        """The global step."""
        return int(self.global_step.numpy())

    @property
    def checkpoints(self) -> Checkpointer | None:
        """Reads and writes the checkpoints."""
        return self._manager.checkpoints

    @property
    def examples_per_second(self) -> float | None:
        """The speed of training after the first loop, without evaluating and saving."""
        return self._reporter.throughput.examples_per_second

    def train(self, steps: int, checkpoint_at_completion: bool = True) -> None:
        """Trains until `global_step` is `steps`, or until a stop is requested."""
        self._train_loop(steps, end=steps)
        if checkpoint_at_completion or self.stopped:
            self.save_checkpoint()

    def train_and_evaluate(
        self, train_steps: int, eval_steps: int = -1, eval_interval: int | None = None
    ) -> dict[str, Any] | None:
        """Trains and evaluates alternately, and evaluates at the end.

        Args:
            train_steps: the global step to train to.
            eval_steps: batches per evaluation; -1 for the complete dataset.
            eval_interval: steps between two evaluations; 0 or None for the end only.

        Returns:
            The last evaluation, or None if a stop was requested before it.
        """
        while self.step < train_steps and not self.stopped:
            until = min(train_steps, _next_multiple(self.step, eval_interval or train_steps))
            self._train_loop(until, end=train_steps)
            # Before the last evaluation, so that a run killed in it need not train again.
            if self.stopped or until == train_steps:
                self.save_checkpoint()
            if not self.stopped:
                self.evaluate(eval_steps)
                if self.stopped:
                    self.save_checkpoint()
        return self.evaluation

    def evaluate(self, steps: int = -1) -> dict[str, Any] | None:
        """Evaluates `steps` batches; -1 for the complete dataset.

        Returns:
            Loss and metrics by name, or None if a stop was requested before the end.
        """
        self._require("evaluator", for_method="evaluate")
        # An evaluation may take longer than a cloud waits after its notice, so it checks for a stop.
        self.evaluator.any_process_stops = self.any_process_stops
        try:
            with self._reporter.summary_writer(self.eval_summary_manager):
                outputs = self.evaluator.evaluate(tf.constant(steps, tf.int32))
        except Interrupted:
            self.stopped = True
            return None
        for action in self.eval_actions:
            action(outputs)
        self.evaluation, self.evaluated_step = as_numbers(outputs), self.step
        self._reporter.evaluation_ended(self.step, self.evaluation, self.eval_summary_manager)
        return self.evaluation

    def restore_checkpoint(self, checkpoint_path: str | None = None) -> str | None:
        """Restores a checkpoint, by default the newest; returns its path, or None without one."""
        return self._manager.all_restore(checkpoint_path)

    def save_checkpoint(self) -> None:
        """Saves a checkpoint, unless this step has one already."""
        self._manager.save()

    def wait_for_checkpoint(self) -> None:
        """Waits until the checkpoint that a thread is writing is complete."""
        self._manager.wait()

    def any_process_stops(self) -> bool:
        """Whether a stop was requested in any process; every process must call it."""
        return self._processes.any_process(self._stop.requested)

    def _train_loop(self, until: int, *, end: int) -> None:
        """Runs inner loops until `global_step` is `until`, of a run that ends at `end`."""
        if self._rolls_back and self._manager.saved_step is None:
            self.save_checkpoint()  # a rollback from the first steps needs a checkpoint, too
        while self.step < until and not self.stopped:
            first = self.step
            if self._rollback.skips(first):  # a batch before the boundary of an earlier rollback
                self.trainer.global_step.assign_add(1)
            else:
                boundary = self._next_boundary(first, until)
                begin = time.perf_counter()
                try:
                    with (
                        self._reporter.summary_writer(self.summary_manager),
                        # The user's own summaries are written once per loop, and not in each step.
                        tf.summary.record_if(False),
                        self._watch(first),
                    ):
                        outputs = self.trainer.train(tf.constant(boundary - first, tf.int32)) or {}
                        # Waits for the devices, so that the time below is all of the loop's.
                        self.outputs = as_numbers(outputs)
                except NonFiniteStep as error:
                    self._all_roll_back(error)
                    continue
                steps, seconds = boundary - first, time.perf_counter() - begin
                self._reporter.throughput.add(steps, seconds=seconds)
                self._check_step(boundary)
                if self.trainer.non_finite_report:
                    self._reporter.steps_skipped(self.trainer.non_finite_report, steps=steps)
                self._check_loss()
                for action in self.train_actions:
                    action(outputs)
                self._reporter.loop_ended(
                    self.step, self.outputs, self.summary_manager, last_step=end
                )
            # Every process comes here at the same step, and decides the same: the chief's clock and a
            # signal to any process count for all.
            due = self._manager.is_due_by_step()
            if self._manager.seconds and not due:
                due = bool(self._processes.broadcast_from_chief(self._manager.is_due_by_time()))
            if due:
                self.save_checkpoint()
            self.stopped = self._processes.any_process(self._stop.requested)

    def _next_boundary(self, step: int, until: int) -> int:
        """The step at which an inner loop that begins at `step` ends."""
        boundary = min(until, _next_multiple(step, self.steps_per_loop))
        if self._manager.interval:
            boundary = min(boundary, _next_multiple(step, self._manager.interval))
        return self._rollback.boundary(step, boundary)

    def _all_roll_back(self, error: NonFiniteStep) -> None:
        """Restores the last checkpoint, to skip the batch from now on; or ends the run."""
        # The trainer checks reduced values, so that every process comes here.
        policy = self.trainer.options.on_non_finite
        self._reporter.record("non_finite", error.step, policy=policy, tensor=error.tensor)
        if not self._rolls_back:
            raise error
        self._rollback.skip(error)
        # A checkpoint of the step itself was saved before its batch was read.
        path = self._manager.all_restore(before=error.step + 1)
        if path is None:
            raise Failure(
                f"{error.what} No checkpoint is left to go back to: start again with --fresh."
            )
        self._reporter.record("rollback", self.step, left_out=error.step, path=path)
        self._reporter.print_line(
            f"{error.what} Back to step {self.step}; that batch is skipped from now on "
            f"(rollback {self._rollback.rollbacks})."
        )

    def _check_step(self, boundary: int) -> None:
        """Checks that the loop ended where it should; a coordinator may repeat steps."""
        if self.step > boundary and coordinator.is_coordinated(self.trainer.strategy):
            self._reporter.record("repeated", self.step, steps=self.step - boundary)
        elif self.step != boundary:
            raise UsageError(
                f"A loop to step {boundary} ended at step {self.step}: train_step must add 1 to "
                "self.global_step."
            )

    def _check_loss(self) -> None:
        """Ends the run if the loss is not finite although the trainer reported no such step."""
        # A user's own `replica_step`, or a parameter server, may apply updates that are not checked.
        loss = self.outputs.get("loss")
        policy = self.trainer.options.on_non_finite
        if policy != "ignore" and isinstance(loss, float) and not math.isfinite(loss):
            self._reporter.record("non_finite", self.step, policy="stop", tensor="the loss")
            raise Failure(
                f"The loss of the loop that ended at step {self.step} is {loss}. Nothing was saved "
                "since: lower the learning rate, clip the gradients, or continue with such losses by "
                "train.on_non_finite=ignore."
            )


def _next_multiple(step: int, interval: int) -> int:
    """The first multiple of `interval` after `step`."""
    return (step // interval + 1) * interval
