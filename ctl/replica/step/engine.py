"""The internal state of a `StandardTrainer`: its plan, data, step, inner loop and error reports."""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import orbit
import tensorflow as tf

from ctl.data.autograph import convert
from ctl.data.input_pipeline import InputPipeline
from ctl.errors import NonFiniteStep, UsageError
from ctl.replica.arithmetic import precision, row_mask
from ctl.replica.arithmetic.snapshot import Snapshot
from ctl.replica.checks import copies, random_search, row_coupling
from ctl.replica.measure.non_finite import NonFiniteReport
from ctl.replica.random import dropout
from ctl.replica.step import keras_version
from ctl.replica.step.compiled_loop import compile_loop
from ctl.replica.step.empty_batches import pad_rows
from ctl.replica.step.loop_results import LoopResults
from ctl.replica.step.microbatches import Batch, row_count, unpack
from ctl.replica.step.plan import Plan
from ctl.replica.step.preprocessing import preprocess
from ctl.replica.step.step import Step
from ctl.replica.step.step_errors import report_errors
from ctl.replica.step.trainer_attributes import TrainerAttributes
from ctl.replica.updates.ema import ExponentialMovingAverage
from ctl.replica.updates.unfreezing import Unfreezing

_RESERVED = "self.{name} belongs to orbit.StandardTrainer: give your attribute another name."


class Engine:
    """Runs a trainer's steps. It is a single attribute of the trainer, apart from the user's own.

    Create it in the trainer's `build_scope`, once its model is built.

    Args:
        trainer: the `StandardTrainer`.
        plan: the resolved options.
        pipeline: the training and evaluation data.
        unfreezing: the layers that are frozen until a step.

    Attributes:
        step: computes and applies updates.
        attributes: the trainer's models, optimizers and variables.
        results: the mean loss of an inner loop, and its other results.
        ema: the average of the weights; None unless the options ask for it.
        compiled_loop: the inner loop as one XLA program; None unless the plan says so.
        own_dataset: whether the user has set `train_dataset`, and so decides on the position in it.
        checks_copies: whether the first inner loop ends with a comparison of the replicas' variables.
    """

    def __init__(self, trainer: Any, plan: Plan, pipeline: InputPipeline, unfreezing: Unfreezing):
        self.plan = plan
        self.pipeline = pipeline
        self.attributes = TrainerAttributes(trainer, unfreezing)
        self.step = Step(plan, trainer.global_step, self.attributes.assignable)
        self.results = LoopResults(trainer, plan, self.step)
        if self.step.compression:
            self.step.compression.add_models([trainer.model])
        if self.step.norms:
            self.step.norms.build(trainer.model.trainable_variables)
        decay = plan.options.ema_decay
        self.ema: ExponentialMovingAverage | None = None
        if decay:
            self.ema = ExponentialMovingAverage(
                trainer.model, decay=decay, strategy=trainer.strategy, dtype=plan.dtype
            )
        self._trainer = trainer
        self._data_step: int | None = None  # the global step that the data iterator stands at
        self.own_dataset = False
        self._trainable: tuple[bool, ...] | None = None  # for each layer, in the current trace
        self._compresses = False  # in the current trace
        self.checks_copies = plan.layout.replicas > 1
        self.compiled_loop = None
        if plan.xla == "loop":
            step, wait = self.replica_train_step, self.results.input_wait
            self.compiled_loop = compile_loop(trainer, plan, pipeline, step, wait)
        # The step is traced later, so it draws by row from the first step on.
        dropout.key_random_layers(trainer.model, plan.options.seed)

    @contextlib.contextmanager
    def rows(
        self,
        batch: Batch,
        mask: tf.Tensor | None,
        *,
        existing: int | tf.Tensor | None = None,
        earlier: Callable[[], tf.Tensor] | None = None,
    ) -> Iterator[row_mask.Examples]:
        """Sets the rows of one replica in a `with` block; enter it in a replica context.

        Args:
            batch: this replica's rows.
            mask: [rows] mask of the rows that exist; None if all exist.
            existing: the number of rows that the input pipeline gave this replica; all by default.
            earlier: in an evaluation, the number of rows in the earlier global batches.

        Raises:
            UsageError: the code inside draws random numbers that depend on how the batch is split.
        """
        # Data has float32 masks in every precision, which a metric in float64 cannot always use.
        mask = None if mask is None else tf.cast(mask, self.plan.dtype)
        count, options = row_count(batch), self.plan.options
        first_row, _ = row_mask.row_range(count if existing is None else existing)
        allow = options.allow_row_coupling
        trace = None if earlier else row_coupling.make_trace((batch, mask), allow=allow)
        # Random layers are keyed by the consumed batches, not by `iterations`: a batch after a skipped
        # one draws the same numbers whether or not the update was skipped.
        with (
            row_mask.examples(
                mask,
                first_row=tf.cast(first_row, tf.int64),
                step=self._trainer.global_step.read_value(),
                count=count,
                seed=options.seed,
                allow_unkeyed=options.allow_unkeyed_random,
                earlier=earlier,
                compiled=self.plan.xla in ("loop", "step"),
                parts=1 if earlier else self.plan.parts_per_replica,
                trace=trace,
            ) as rows,
            row_coupling.search(rows, self.plan.layout.replicas, self._first_batch),
            # In eager execution each step draws again, and nothing is detected.
            random_search.check_host_random(self._trainer)
            if not (options.allow_unkeyed_random or tf.executing_eagerly())
            else contextlib.nullcontext(),
            random_search.search(rows, (batch, mask)),
        ):
            yield rows

    def replica_train_step(self, batch: Batch, mask: tf.Tensor | None) -> tf.Tensor:
        """Runs one replica's step; call it in a replica context.

        A skipped step leaves no trace in the loss, metrics, and variables that the trainer assigns.

        Args:
            batch: this replica's rows.
            mask: [rows] mask of the rows that exist; None if all exist.

        Returns:
            The result of `replica_step`.
        """
        trainer, existing = self._trainer, row_count(batch)
        if self.plan.layout.replicas * self.plan.parts > 1:
            batch, mask = pad_rows(batch, mask, existing, least=self.plan.parts_per_replica)
        with self.rows(batch, mask, existing=existing) as rows:
            # The forward pass runs before anything is known of the gradients, so its assignments can
            # only be undone.
            once, summed, _ = self.attributes.assignable()
            snapshot = Snapshot([*once, *summed] if self.results.may_skip() else [])
            loss = convert(trainer.replica_step)(preprocess(trainer, batch))
            # Decided while tracing: a step that can never be skipped has no ops for it.
            applied: tf.Tensor | bool = True
            if rows.applied:
                # An own `replica_step` may contain several updates, with one entry each.
                applied = tf.reduce_all(rows.applied)
                snapshot.restore_unless(applied)
            self.results.update(loss, applied)
            # Last, so that the average uses the moving statistics at the end of the step.
            if self.ema:
                self.ema.update(trainer.optimizer.iterations, applied)
        return loss

    def retrace_if_changed(self) -> None:
        """Drops the trace of the inner loop if a layer was frozen or unfrozen since the last call.

        A trace contains the variables that were trainable, so the change would have no effect.
        """
        trainable, compression = self.attributes.trainable(), self.step.compression
        compresses = bool(compression and compression.is_active)
        if (trainable, compresses) == (self._trainable, self._compresses):
            return
        self._trainable, self._compresses = trainable, compresses
        # A user's own step may pass other variables, or another optimizer.
        if not (self.plan.own_replica_step or self.plan.own_train_step):
            self.attributes.check_slot_variables()
        self._trainer._train_loop_fn = None  # Orbit's attribute: the next loop is made again
        if self.compiled_loop:
            self.compiled_loop.compile_again()

    def prepare_loop(self) -> None:
        """Moves the data to `global_step`, and prepares models and optimizers that were added since."""
        self.check_not_averaged()
        # The base class keeps its own attributes on the same object; its `train` uses these two.
        if not isinstance(self._trainer._train_options, orbit.StandardTrainerOptions):
            raise UsageError(_RESERVED.format(name="_train_options"))
        if not callable(self._trainer._train_loop_fn or callable):
            raise UsageError(_RESERVED.format(name="_train_loop_fn"))
        # A subclass creates further models after this engine, or between two loops.
        self.attributes.key_new_models(self.plan.options.seed)
        self.add_models()
        step = int(self._trainer.global_step.numpy())
        if not self.own_dataset and self._data_step != step:
            # Orbit's `train` reads these attributes; the public setter would mark the data as the
            # user's own.
            self._trainer._train_dataset = self.training_data(step)
            self._trainer._train_iter = None
        self._data_step = None  # unknown until the loop has ended without an error

    def finish_loop(self) -> NonFiniteReport | None:
        """Returns the report of the steps that were not finite.

        Raises:
            NonFiniteStep: there were some, and the options do not say to skip them.
            UsageError: the replicas hold different values of a variable, after the first loop.
        """
        self._data_step = int(self._trainer.global_step.numpy())
        # Read after the loop: its trace may build further layers, and the step of a GAN may freeze and
        # unfreeze a model while it is traced.
        self._trainable = self.attributes.trainable()
        for user in (self.ema, self.step.compression):
            if user:
                user.check_complete(self.attributes.models())
        if self.checks_copies:
            self.checks_copies = False
            copies.check_copies(self.checkpoint_items())
        report = self.step.recorder.take() if self.step.recorder else None
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
            precision.precision_scope(self.plan.options.precision),
            keras_version.report_keras3(),
        ):
            yield

    def report_errors(self) -> contextlib.AbstractContextManager[None]:
        """Turns TensorFlow's errors in an inner loop into a UsageError of one line."""
        return report_errors(self._trainer, self.plan, self.pipeline)

    def checkpoint_items(self) -> dict[str, Any]:
        """Returns every model, optimizer and variable of the trainer, by the attribute's name."""
        self.add_models()
        items = self.attributes.checkpoint_items()
        own: dict[str, Any] = {"spikes": self.step.loss_spikes}
        if self.ema:
            own["ema"] = self.ema.state
        if self.step.compression:
            own["compression"] = self.step.compression.state
        # The names in every checkpoint, unless a subclass has an attribute of the same name.
        return items | {f"ctl_{k}" if k in items else k: state for k, state in own.items()}

    def averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        """Gives the model the averaged weights within a `with` block, if there are any."""
        return self.ema.swapped() if self.ema else contextlib.nullcontext()

    def check_not_averaged(self) -> None:
        """Raises UsageError within `averaged_weights`, whose weights must not be trained or saved."""
        if self.ema:
            self.ema.check_not_swapped()

    def use_own_dataset(self) -> None:
        """Leaves the position in the data to the user, who has set `train_dataset`."""
        self.plan.check_own_dataset()
        self.own_dataset = True

    def add_models(self) -> None:
        """Prepares further models and optimizers of a subclass, such as a discriminator.

        Raises UsageError if the compression, or a pattern of the options, has no effect on any of them.
        """
        for user in (self.ema, self.step.compression):
            if user:
                user.add_models(self.attributes.models())
        if self.step.compression:
            self.step.compression.check_effect()
        self.attributes.apply_groups(self.plan.options)

    def _first_batch(self) -> Any:
        """Returns the next batch of the first replica, and its row mask."""
        trainer = self._trainer
        if self.own_dataset:
            element = unpack(next(iter(trainer.train_dataset)))
            select = trainer.strategy.experimental_local_results
            return tf.nest.map_structure(lambda value: select(value)[0], element)
        step = int(trainer.global_step.numpy())
        return unpack(self.pipeline.first_batch(self.plan.layout.global_batch_size, step))

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
