"""The internal state of a `StandardTrainer`: its plan, data, step, inner loop and error reports."""

from collections.abc import Iterator
import contextlib
import functools
import logging
from typing import Any

import orbit
import tensorflow as tf

from ctl.configs.error_location import user_line
from ctl.data.data_errors import report_data_errors
from ctl.data.input_pipeline import InputPipeline
from ctl.errors import NonFiniteStep, UsageError
from ctl.replica.keras3 import detection, policies
from ctl.replica.measure.non_finite import NonFiniteReport
from ctl.replica.random import draws
from ctl.replica.step import out_of_memory, preprocessing, xla
from ctl.replica.step.attributes import Attributes, freezing
from ctl.replica.step.compiled_loop import compile_loop
from ctl.replica.step.microbatches import first_rows, unpack
from ctl.replica.step.plan import Plan
from ctl.replica.step.preprocessing import preprocess
from ctl.replica.step.replica_step import ReplicaStep
from ctl.replica.updates.unfreezing import Unfreezing

_LOG = logging.getLogger("ctl")
_UNSAVED = (
    "%s assigns a variable that the trainer does not hold: it is in no checkpoint, and a skipped step "
    "does not restore it. Make it an attribute of the trainer, of a layer or of a tf.Module that the "
    "trainer holds."
)
_RESERVED = "self.{name} belongs to orbit.StandardTrainer: give your attribute another name."
_MERGE_CALL = "`merge_call` called while defining a new graph"  # of tf.distribute's own error


class Engine:
    """Runs a trainer's loops. It is a single attribute of the trainer, apart from the user's own.

    Create it in the trainer's `build_scope`, once its model is built.

    Args:
        trainer: the `StandardTrainer`.
        plan: the resolved options.
        pipeline: the training and evaluation data.
        unfreezing: the layers that are frozen until a step.

    Attributes:
        step: the step of one replica.
        compiled_loop: the inner loop as one XLA program; None unless the plan says so.
        own_dataset: whether the user has set `train_dataset`, and so decides on the position in it.
        checks_copies: whether the first inner loop ends with a comparison of the replicas' variables.
    """

    def __init__(self, trainer: Any, plan: Plan, pipeline: InputPipeline, unfreezing: Unfreezing):
        self.plan = plan
        self.pipeline = pipeline
        self.step = ReplicaStep(
            plan,
            Attributes(trainer, unfreezing),
            preprocess=functools.partial(preprocess, trainer),
            function=trainer.replica_step,
            global_step=trainer.global_step,
            first_batch=self.first_batch,
        )
        self.own_dataset = False
        self.checks_copies = plan.layout.replicas > 1
        self._trainer = trainer
        self._data_step: int | None = None  # the global step that the data iterator stands at
        self._traced: Any = None  # what the current trace depends on
        self.compiled_loop = None
        if plan.xla == "loop":
            self.compiled_loop = compile_loop(
                self.step.run,
                plan=plan,
                pipeline=pipeline,
                strategy=trainer.strategy,
                global_step=trainer.global_step,
                input_wait=self.step.results.input_wait,
            )

    def prepare_loop(self, steps: int) -> None:
        """Moves the data to `global_step`, and prepares models and optimizers that were added since.

        Args:
            steps: the number of steps of the loop.
        """
        self.step.check_not_averaged()
        # The base class keeps its own attributes on the same object; its `train` uses these two.
        if not isinstance(self._trainer._train_options, orbit.StandardTrainerOptions):
            raise UsageError(_RESERVED.format(name="_train_options"))
        if not callable(self._trainer._train_loop_fn or callable):
            raise UsageError(_RESERVED.format(name="_train_loop_fn"))
        for name in ("replica_step", "train_step"):
            if name in vars(self._trainer):  # the step is made of the methods of the class
                raise UsageError(
                    f"self.{name} was assigned to the trainer, which has no effect: define {name} "
                    "in its class."
                )
        # A subclass creates further models after this engine, or between two loops.
        self.step.attributes.key_new_models(self.plan.options.seed)
        self.step.add_models()
        step = int(self._trainer.global_step.numpy())
        has_other_chunks = self.compiled_loop is not None and self.compiled_loop.fit(steps)
        if not self.own_dataset and (self._data_step != step or has_other_chunks):
            # Orbit's `train` reads these attributes; the public setter would mark the data as the
            # user's own.
            self._trainer._train_dataset = self.training_data(step)
            self._trainer._train_iter = None
        self._data_step = None  # unknown until the loop has ended without an error

    def split(self, count: int) -> Iterator[int]:
        """Splits the next steps where layers are unfrozen, or gradients begin to be compressed.

        Args:
            count: the number of steps.

        Yields:
            The number of steps of each part, once the trainer is prepared for it.
        """
        return self.step.split(int(self._trainer.global_step.numpy()), count)

    def retrace_if_changed(self) -> None:
        """Drops the trace of the inner loop if it would compute something else by now.

        A trace contains the variables that were trainable, so that freezing a layer would have no
        effect; and it compresses or measures, or not.
        """
        attributes, traced = self.step.attributes, self._state()
        if traced == self._traced:
            return
        self._traced = traced
        # A user's own step may pass other variables, or another optimizer.
        if not (self.plan.own_replica_step or self.plan.own_train_step):
            attributes.check_slot_variables()
        self._trainer._train_loop_fn = None  # Orbit's attribute: the next loop is made again
        if self.compiled_loop:
            self.compiled_loop.compile_again()

    def finish_loop(self) -> NonFiniteReport | None:
        """Returns the report of the steps that were not finite.

        Raises:
            NonFiniteStep: there were some, and the options do not say to skip them.
            UsageError: the replicas hold different values of a variable, after the first loop.
        """
        self._data_step = int(self._trainer.global_step.numpy())
        # Read after the loop: its trace may build further layers, and the step of a GAN may freeze and
        # unfreeze a model while it is traced.
        self._traced = self._state()
        self.step.check_complete()
        self._warn_unsaved()
        if self.checks_copies:
            self.checks_copies = False
            self.step.check_variables()
        recorder = self.step.update.recorder
        report = recorder.take() if recorder else None
        if report and self.plan.options.on_non_finite != "skip":
            batch_size = self.plan.layout.global_batch_size
            raise NonFiniteStep(report, self.pipeline.example_indexes(batch_size, report.step))
        return report

    @contextlib.contextmanager
    def trace_scope(self) -> Iterator[None]:
        """Sets the trainer's precision for the code that is traced inside.

        Layers that a first call creates, and losses such as Huber's, read the global precision.
        """
        with (
            policies.precision_scope(self.plan.options.precision),
            detection.report_mixture(),
        ):
            yield

    def report_errors(self) -> contextlib.AbstractContextManager[None]:
        """Turns TensorFlow's errors in an inner loop into a UsageError of one line."""
        return _report_errors(self._trainer, self.plan, self.pipeline)

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Gives the model the averaged weights within a `with` block, if there are any."""
        return self.step.ema.swapped() if self.step.ema else contextlib.nullcontext()

    def use_own_dataset(self) -> None:
        """Leaves the position in the data to the user, who has set `train_dataset`."""
        self.plan.check_own_dataset()
        self.own_dataset = True

    def _warn_unsaved(self) -> None:
        for place in self.step.update.unsaved:
            _LOG.warning(_UNSAVED, place)
        self.step.update.unsaved.clear()  # a later trace lists its own

    def _state(self) -> Any:
        """Returns what the traced step depends on, besides its batch and its variables."""
        return (
            [freezing(layer) for layer in self.step.attributes.layers()],
            self.step.attributes.optimizers(),
            self.step.is_compressed(),
            self.step.results.measures_waiting,
        )

    def first_batch(self) -> Any:
        """Returns the next batch of the first replica, of at least four rows, and its row mask."""
        trainer = self._trainer
        if self.own_dataset:
            element = unpack(next(iter(trainer.train_dataset)))
            return first_rows(element, trainer.strategy)
        step, layout = int(trainer.global_step.numpy()), self.plan.layout
        batch_size = max(layout.global_batch_size, 4 * layout.replicas)
        return unpack(self.pipeline.first_batch(batch_size, step))

    def training_data(self, step: int) -> Any:
        """Returns the distributed training data from a global step on."""
        batch_size = self.plan.layout.global_batch_size
        if not self.compiled_loop:
            return self.pipeline.training_dataset(batch_size, start=step)
        # The rest of the chunk belongs to the step that the data leaves.
        self.compiled_loop.discard_chunk()
        return self.pipeline.training_chunks(
            batch_size,
            start=step,
            size=self.compiled_loop.size,
            indexes_only=self.plan.options.placement == "device",
        )


def engine_of(trainer: Any) -> Engine:
    """Returns the engine of a `StandardTrainer`, for the other packages of ctl."""
    return trainer._ctl_engine


@contextlib.contextmanager
def _report_errors(trainer: Any, plan: Plan, pipeline: InputPipeline) -> Iterator[None]:
    """Turns TensorFlow's errors about data, branches, XLA and memory into a UsageError of one line.

    Args:
        trainer: the `StandardTrainer`.
        plan: its resolved options.
        pipeline: its training data.

    Raises:
        UsageError: one of these errors was raised inside.
    """

    def find_unreadable() -> str:
        step = int(trainer.global_step.numpy())
        indexes = pipeline.example_indexes(plan.layout.global_batch_size, step)
        return pipeline.find_unreadable("train", indexes)

    try:
        with (
            draws.report_problems(),
            preprocessing.report_problems(),
            report_data_errors("training", pipeline.element_spec, find_unreadable),
        ):
            yield
    except tf.errors.OutOfRangeError:
        step = int(trainer.global_step.numpy())
        raise UsageError(
            f"The training data ended after step {step}: return at least one complete global batch of "
            "examples, or a dataset that repeats."
        ) from None
    except RuntimeError as error:
        if _MERGE_CALL not in str(error):
            raise
        raise UsageError(
            f"{user_line(error) or 'The step'} updates variables, or reduces over the replicas, in "
            "a branch or a loop that depends on a tensor, or in a tf.function of its own, which "
            "tf.distribute does not support on several replicas: select values by tf.where, or "
            "decide between two inner loops. To unfreeze a layer, set its trainable in "
            "train_loop_begin, after which ctl traces the step again."
        ) from error
    except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
        reason = xla.explain(error)
        if not reason:
            raise
        raise UsageError(f"{reason}, or choose runtime.xla=off.") from error
    except tf.errors.ResourceExhaustedError as error:
        if not out_of_memory.is_out_of_memory(error):
            raise
        raise UsageError(out_of_memory.advice(plan, out_of_memory.measure(trainer))) from error
