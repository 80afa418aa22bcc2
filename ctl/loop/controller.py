"""Orbit's Controller with boundaries at absolute steps."""

from collections.abc import Callable, Iterable, Mapping
import contextlib
import math
import time
from typing import Any

import orbit
import tensorflow as tf

from ctl.errors import Failure, NonFiniteStep, UsageError
from ctl.evaluator import Interrupted, StandardEvaluator
from ctl.hardware import coordinator, devices, gpu
from ctl.loop.checkpoints.checkpointer import Checkpointer
from ctl.loop.checkpoints.manager import CheckpointManager
from ctl.loop.progress import Progress
from ctl.loop.rollback import RollbackPolicy
from ctl.loop.throughput import Throughput
from ctl.trainer import StandardTrainer

Event = Callable[..., None]


class Controller(orbit.Controller):
    """Trains, saves and evaluates at the same steps, wherever the run was resumed.

        controller = Controller(trainer=trainer, evaluator=ctl.StandardEvaluator(trainer),
                                steps_per_loop=100, checkpoints=Checkpoints("ckpts", trainer))
        controller.train_and_evaluate(train_steps=1000, eval_interval=500)

    Orbit counts intervals from where a loop happened to end; here a checkpoint, an evaluation and a
    loop's report fall on multiples of their intervals.

    Attributes:
        outputs: the last loop's loss and metrics.
        evaluation: the last evaluation's, or None.
        evaluated_step: the step that it was at.
        stopped: whether training ended early, at the wish of `stop`.
    """

    def __init__(
        self,
        *,
        trainer: StandardTrainer,
        evaluator: StandardEvaluator | None = None,
        steps_per_loop: int = 100,
        checkpoints: Checkpointer | None = None,
        checkpoint_interval: int = 0,
        save_due: Callable[[float], bool] | None = None,
        summary_dir: str | None = None,
        eval_summary_dir: str | None = None,
        progress: Progress | None = None,
        on_event: Event | None = None,
        stop: Callable[[], bool] | None = None,
        gpu_usage: Callable[[], dict[str, float]] | None = None,
        watch: Callable[[int], contextlib.AbstractContextManager[None]] | None = None,
        guard: RollbackPolicy | None = None,
        train_actions: Iterable[orbit.Action] | None = None,
        eval_actions: Iterable[orbit.Action] | None = None,
    ):
        """Takes what to run and when.

        Args:
            trainer: what to train.
            evaluator: what to evaluate by.
            steps_per_loop: steps between two looks of the host; a loop ends at its multiples.
            checkpoints: where to save.
            checkpoint_interval: steps between two saves; 0 for the end only.
            save_due: asked between loops, with the seconds since the last save, whether to save.
            summary_dir: where the training's summaries go.
            eval_summary_dir: where the evaluation's go.
            progress: what prints.
            on_event: called as on_event(name, step, **fields) for what is worth a record.
            stop: asked between loops whether to save and end.
            gpu_usage: tells numbers to show and to summarize beside a loop's outputs; those of the
                GPUs, where they train, if not given.
            watch: what a loop runs inside of, called with the step that it begins at.
            guard: which batches are left out, where the trainer's `on_non_finite` is "rollback".
            train_actions: called with each loop's outputs.
            eval_actions: called with each evaluation's outputs.

        Raises:
            UsageError: rollbacks are asked for, and there are no checkpoints.
        """
        self._rolls_back = trainer.options.on_non_finite == "rollback"
        if self._rolls_back and checkpoints is None:
            raise UsageError("on_non_finite=rollback goes back to `checkpoints`: give some.")
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
        self._progress = progress
        self._on_event = on_event or (lambda *_, **__: None)
        self._stop = stop or (lambda: False)
        self._gpu_usage = gpu_usage or (gpu.read_usage if _on_gpu(trainer.strategy) else dict)
        self._watch = watch or (lambda _: contextlib.nullcontext())
        self._guard = guard or RollbackPolicy()
        self._speed = Throughput(batch=trainer.global_batch_size)
        self._saving = CheckpointManager(
            trainer,
            checkpoints,
            interval=checkpoint_interval,
            due=save_due,
            on_event=self._on_event,
            print_line=self.print_line,
        )

    @property
    def step(self) -> int:
        """The global step."""
        return int(self.global_step.numpy())

    @property
    def checkpoints(self) -> Checkpointer | None:
        """Where it saves."""
        return self._saving.checkpoints

    @property
    def examples_per_second(self) -> float | None:
        """Speed of training, after the first loop and without evaluating and saving."""
        return self._speed.examples_per_second

    def train(self, steps: int, checkpoint_at_completion: bool = True) -> None:
        """Trains until `global_step` is `steps`, or until asked to stop.

        Args:
            steps: the global step to train to.
            checkpoint_at_completion: whether to save at the end, whatever the interval.
        """
        self._train_until(steps, end=steps)
        if checkpoint_at_completion or self.stopped:
            self.save_checkpoint()

    def train_and_evaluate(
        self, train_steps: int, eval_steps: int = -1, eval_interval: int | None = None
    ) -> dict[str, Any] | None:
        """Trains and evaluates by turns, and evaluates at the end.

        Args:
            train_steps: the global step to train to.
            eval_steps: batches an evaluation; -1 for the whole dataset.
            eval_interval: steps between two evaluations; 0 or None for the end only.

        Returns:
            The last evaluation, or None when asked to stop before it.
        """
        while self.step < train_steps and not self.stopped:
            until = min(train_steps, _next_multiple(self.step, eval_interval or train_steps))
            self._train_until(until, end=train_steps)
            if self.stopped or until == train_steps:
                self.save_checkpoint()
            if not self.stopped:
                self.evaluate(eval_steps)
                if self.stopped:
                    self.save_checkpoint()
        return self.evaluation

    def evaluate(self, steps: int = -1) -> dict[str, Any] | None:
        """Evaluates now.

        Args:
            steps: how many batches; -1 for the whole dataset.

        Returns:
            Numbers by name, or None when asked to stop before the end.
        """
        self._require("evaluator", for_method="evaluate")
        self.evaluator.stop = self._stop
        try:
            with self._summaries(self.eval_summary_manager):
                outputs = self.evaluator.evaluate(tf.constant(steps, tf.int32))
        except Interrupted:
            self.stopped = True
            return None
        for action in self.eval_actions:
            action(outputs)
        self.evaluation, self.evaluated_step = as_numbers(outputs), self.step
        self._summarize(self.eval_summary_manager, self.evaluation)
        if self._progress:
            self._progress.evaluated(self.step, self.evaluation)
        self._on_event("eval", self.step, **self.evaluation)
        return self.evaluation

    def restore_checkpoint(self, checkpoint_path: str | None = None) -> str | None:
        """Restores a checkpoint, the newest if none is named; returns its path, if there is one."""
        return self._saving.restore(checkpoint_path)

    def save_checkpoint(self) -> None:
        """Saves a checkpoint, unless this step's is there already."""
        self._saving.save()

    def wait_for_checkpoint(self) -> None:
        """Waits until the checkpoint that is being written is whole."""
        self._saving.wait()

    def _train_until(self, until: int, *, end: int) -> None:
        if self._rolls_back and self._saving.saved_step is None:
            self.save_checkpoint()  # there is to be a way back from the first step on
        while self.step < until and not self.stopped:
            boundary = min(until, _next_multiple(self.step, self.steps_per_loop))
            if self._saving.interval:
                boundary = min(boundary, _next_multiple(self.step, self._saving.interval))
            try:
                self._train_to(self._guard.until(self.step, boundary), end=end)
            except NonFiniteStep as error:
                self._after_non_finite(error)
                continue
            if self._saving.is_due():
                self.save_checkpoint()
            self.stopped = self._stop()

    def _train_to(self, boundary: int, *, end: int) -> None:
        if self._guard.leaves_out(self.step):
            self.trainer.pass_over(1)
            return
        self._train_loop(boundary - self.step, end=end)
        if self.step > boundary and coordinator.is_coordinated(self.trainer.strategy):
            self._on_event("repeated", self.step, steps=self.step - boundary)
        elif self.step != boundary:
            raise UsageError(
                f"A loop to step {boundary} ended at step {self.step}: let train_step add 1 to "
                "self.global_step."
            )

    def _after_non_finite(self, error: NonFiniteStep) -> None:
        """Ends the run, or goes back to the last checkpoint, to go on without the batch."""
        policy = self.trainer.options.on_non_finite
        self._on_event("non_finite", error.step, policy=policy, tensor=error.tensor)
        if not self._rolls_back:
            raise error
        self._guard.leave_out(error)
        path = self._saving.restore(before=error.step + 1)
        if path is None:
            raise Failure(f"{error.what} There is no checkpoint left to go back to: start anew.")
        self._on_event("rollback", self.step, left_out=error.step, path=path)
        self.print_line(
            f"{error.what} Back to step {self.step}, and on without that batch "
            f"(rollback {self._guard.rollbacks})."
        )

    def _train_loop(self, steps: int, *, end: int) -> None:
        start = time.perf_counter()
        with (
            self._summaries(self.summary_manager),
            tf.summary.record_if(False),
            self._watch(self.step),
        ):
            outputs = self._train_steps(steps)
            self.outputs = as_numbers(outputs)  # waits for the devices, so that the time is whole
        self._speed.add(steps, seconds=time.perf_counter() - start)
        self._check_loss()
        for action in self.train_actions:
            action(outputs)
        speed = self.examples_per_second
        rate = {"examples_per_second": speed} if speed else {}
        usage = self._gpu_usage()
        self._summarize(self.summary_manager, {**self.outputs, **rate, **usage})
        if self._progress:
            self._progress.trained(
                self.step,
                {**self.outputs, **usage},
                examples_per_second=speed,
                seconds_left=self._speed.seconds_for(end - self.step),
            )

    def _check_loss(self) -> None:
        """Sees what no look at gradients did: of a step of one's own, or of parameter servers."""
        loss = self.outputs.get("loss")
        policy = self.trainer.options.on_non_finite
        if policy != "ignore" and isinstance(loss, float) and not math.isfinite(loss):
            self._on_event("non_finite", self.step, policy="stop", tensor="the loss")
            raise Failure(
                f"The loss of the loop that ended at step {self.step} is {loss}. Nothing was saved "
                "since: take a smaller learning rate or clip the gradients, or let such losses pass by "
                "train.on_non_finite=ignore."
            )

    def _train_steps(self, steps: int) -> Mapping[str, Any]:
        """A loop of the trainer; what is not finite in it is recorded."""
        outputs = self.trainer.train(tf.constant(steps, tf.int32)) or {}
        report = self.trainer.non_finite
        if report:
            self._on_event(
                "non_finite",
                report.step,
                policy="skip",
                tensor=report.tensor,
                count=report.count,
            )
            self.print_line(
                f"Left out {report.count} of {steps} updates: step {report.step} {report}."
            )
        return outputs

    def print_line(self, line: str) -> None:
        """Prints a line, where this process prints."""
        if self._progress:
            self._progress.print_line(line)

    def _summaries(
        self, manager: orbit.utils.SummaryManager
    ) -> contextlib.AbstractContextManager[Any]:
        with self._saving.writing("The summaries"):  # the first call makes the file
            writer: contextlib.AbstractContextManager[Any] = manager.summary_writer().as_default()
        return writer

    def _summarize(self, manager: orbit.utils.SummaryManager, outputs: Mapping[str, Any]) -> None:
        with self._saving.writing("The summaries"):
            manager.write_summaries(outputs)
            manager.flush()


def as_numbers(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as Python numbers, nested mappings kept."""
    return {
        name: as_numbers(value)
        if isinstance(value, Mapping)
        else orbit.utils.get_value(value).tolist()
        if tf.is_tensor(value)
        else value
        for name, value in outputs.items()
    }


def _on_gpu(strategy: tf.distribute.Strategy) -> bool:
    return any("GPU" in device for device in devices.replica_devices(strategy))


def _next_multiple(step: int, interval: int) -> int:
    """The first multiple of `interval` after `step`."""
    return (step // interval + 1) * interval
