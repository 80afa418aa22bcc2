"""The inner loop of a `StandardTrainer`: its step, its data, its compiled form and its error reports."""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import functools
import logging
import pkgutil
from typing import TYPE_CHECKING, Any, Protocol

import orbit
import tensorflow as tf
import tf_keras

from ctl.built.attributes import Owner
from ctl.built.built_step import BuiltStep
from ctl.built.explanations import explained
from ctl.built.state import Trackable
from ctl.data.input_pipeline import InputPipeline
from ctl.data.source import Batch, Data, Nest, Source
from ctl.errors import NonFiniteStep, UsageError
from ctl.keras.precision import Optimizer
from ctl.update.gradients import Gradient
from ctl.update.microbatches import first_rows, unpack
from ctl.update.non_finite import SPIKE, NonFiniteReport
from ctl.update.plan import Plan
from ctl.update.preprocessing import Hooks

if TYPE_CHECKING:
    from ctl.compile.compiled_loop import CompiledLoop

_LOG = logging.getLogger("ctl")
_MOST_READ = 16  # batches of a dataset that are read for one batch of the checks
_READ_BATCH = "ctl.built.bad_rows:read_batch"
_FIND_ROWS = "ctl.built.bad_rows:find_non_finite"  # imported for a step that is not finite
_COMPILE = "ctl.compile.compiled_loop:compile_loop"  # imported if XLA compiles the loop
_RESERVED = "self.{name} belongs to orbit.StandardTrainer: give your attribute another name."


class TrainerOwner(Owner, Hooks, Protocol):
    """What ctl reads of a `StandardTrainer` below its class."""

    build_dataset: Callable[..., Data]
    build_model: Callable[[], tf_keras.Model]
    build_optimizer: Callable[[Any], Optimizer]
    build_metrics: Callable[[], dict[str, tf_keras.metrics.Metric]]
    weighted_metrics: Sequence[str] | None
    transform_gradients: Callable[..., Sequence[Gradient]]
    checkpoint_items: Callable[[], dict[str, Trackable]]
    replica_step: Callable[[Batch], tf.Tensor]
    train_step: Callable[[Any], None]
    train_dataset: Any  # this one and those below belong to Orbit's class
    _train_dataset: Any
    _train_iter: Any
    _train_loop_fn: Any
    _train_options: Any
    _ctl_loop: "InnerLoop"

    @property
    def compute_dtype(self) -> tf.DType:
        """The dtype that layers compute in."""


class InnerLoop:
    """Runs the steps between two returns of `train`; the only attribute of ctl in a trainer.

    Create it in the trainer's `build_scope`, once its model is built.

    Args:
        trainer: the `StandardTrainer`.
        step: the step of one replica, whose function is `trainer.replica_step`.
        pipeline: the training and evaluation data.

    Attributes:
        trainer: the same as the argument.
        step: the step of one replica.
        plan: the resolved options of the step.
        compiled_loop: the inner loop as one XLA program; None unless the plan says so.
        own_dataset: whether the user has set `train_dataset`, and so decides on the position in it.
    """

    def __init__(self, trainer: TrainerOwner, step: BuiltStep, pipeline: InputPipeline):
        self.step = step
        step.first_batch = self.first_batch
        self.plan = plan = step.plan
        self.pipeline = pipeline
        self.own_dataset = False
        self.trainer = trainer
        self._begun = 0  # the global step that the last loop began with
        # The iterator of the checks over the user's dataset, the number of the batch, and the batch.
        self._own: tuple[Iterator[Nest], int, Nest] | None = None
        self._data_step: int | None = None  # the global step that the data iterator stands at
        self.compiled_loop: CompiledLoop | None = None
        if plan.xla == "loop":
            self.compiled_loop = pkgutil.resolve_name(_COMPILE)(
                self.step.run,
                plan=plan,
                pipeline=pipeline,
                strategy=trainer.strategy,
                global_step=trainer.global_step,
                input_wait=self.step.results.input_wait,
            )

    def prepare(self, steps: int) -> None:
        """Moves the data to `global_step`, and prepares models and optimizers that were added since.

        Args:
            steps: the number of steps of the loop.
        """
        # The base class keeps its own attributes on the same object; its `train` uses these two.
        if not isinstance(self.trainer._train_options, orbit.StandardTrainerOptions):
            raise UsageError(_RESERVED.format(name="_train_options"))
        if not callable(self.trainer._train_loop_fn or callable):
            raise UsageError(_RESERVED.format(name="_train_loop_fn"))
        for name in ("replica_step", "train_step"):
            if name in vars(self.trainer):  # the step is made of the methods of the class
                raise UsageError(
                    f"self.{name} was assigned to the trainer, which has no effect: define {name} "
                    "in its class."
                )
        # A subclass creates further models after this object, or between two loops.
        self.step.prepare()
        self._begun = step = int(self.trainer.global_step.numpy())
        has_other_chunks = self.compiled_loop is not None and self.compiled_loop.fit(steps)
        if not self.own_dataset and (self._data_step != step or has_other_chunks):
            # Orbit's `train` reads these attributes; the public setter would mark the data as the
            # user's own.
            self.trainer._train_dataset = self.training_data(step)
            self.trainer._train_iter = None
        self._data_step = None  # unknown until the loop has ended without an error

    def retrace_if_changed(self) -> None:
        """Drops the trace of the inner loop if it would compute something else by now."""
        if self.step.must_trace(search=True):
            self.trainer._train_loop_fn = None  # Orbit's attribute: the next loop is made again
            if self.compiled_loop:
                self.compiled_loop.compile_again()

    def finish_loop(self) -> NonFiniteReport | None:
        """Returns the report of the steps that were not finite.

        Raises:
            NonFiniteStep: there were some, and the options do not say to skip them.
            UsageError: the replicas hold different values of a variable, after the first loop; or the
                batch of step 1, 2, 4, ... shows that a loss depends on how the batch is split.
        """
        self._data_step = step = int(self.trainer.global_step.numpy())
        self.step.finish_loop()
        # Few batches, because each check computes with one, and early ones, to stop a wrong run early.
        powers = [2**i for i in range(step.bit_length()) if self._begun < 2**i <= step]
        if self._source is None:  # a dataset is read from its beginning
            powers = [min(each, _MOST_READ - 1) for each in powers[-1:] if self._begun < _MOST_READ]
        self.step.repeat_checks([functools.partial(self._read, each) for each in powers])
        if step >= _MOST_READ:
            self._own = None
        recorder = self.step.update.recorder
        report = recorder.take() if recorder else None
        if report and self.plan.options.on_non_finite != "skip":
            batch_size = self.plan.layout.global_batch_size
            is_spike = report.tensor == SPIKE
            rows = () if is_spike else pkgutil.resolve_name(_FIND_ROWS)(self, report.step)
            indexes = self.pipeline.example_indexes(batch_size, report.step)
            raise NonFiniteStep(report, indexes, rows)
        return report

    @contextlib.contextmanager
    def report_errors(self) -> Iterator[None]:
        """Turns TensorFlow's errors in an inner loop into a UsageError of one line."""

        def find_indexes() -> list[int] | None:
            step = int(self.trainer.global_step.numpy())
            return self.pipeline.example_indexes(self.plan.layout.global_batch_size, step)

        def read() -> tuple[Any, list[int] | None]:
            read_batch = pkgutil.resolve_name(_READ_BATCH)
            return read_batch(self, int(self.trainer.global_step.numpy())), find_indexes()

        data_errors = self.pipeline.report_errors("training", "train", find_indexes)
        with explained(self, read), data_errors:
            yield

    def use_own_dataset(self) -> None:
        """Leaves the position in the data to the user, who has set `train_dataset`."""
        self.plan.check_own_dataset()
        self.own_dataset, self._own = True, None

    def first_batch(self, part: float = 0.0) -> tuple[Batch, tf.Tensor | None]:
        """Returns a batch of the first replica, of at least four rows, and its row mask.

        Args:
            part: how much of the epoch lies between the next batch and this one, from 0 to 1.
        """
        source = self._source
        if part and source is None and (self.own_dataset or part != 0.5):
            raise StopIteration  # one more batch of a dataset must be enough
        if self.own_dataset:
            return self._read(self._own[1] if self._own else 0)
        epoch = len(source) // self.plan.layout.global_batch_size if source else _MOST_READ
        return self._read(int(self.trainer.global_step.numpy()) + int(part * epoch))

    def _read(self, step: int) -> tuple[Batch, tf.Tensor | None]:
        if self.own_dataset:
            with futures.ThreadPoolExecutor(1) as thread:  # in no replica, where it cannot be read
                return thread.submit(self._read_own, step).result()
        layout = self.plan.layout
        # Several rows, because the search for losses that combine rows compares them.
        batch_size = max(layout.global_batch_size, 4 * layout.replicas)
        return unpack(self.pipeline.first_batch(batch_size, step))

    def _read_own(self, number: int) -> tuple[Batch, tf.Tensor | None]:
        """Returns a batch of the user's dataset, which is read once, beside the training."""
        dataset, strategy = self.trainer.train_dataset, self.trainer.strategy
        iterator, last, batch = self._own or (iter(dataset), -1, None)
        if iterator is dataset:  # the training would miss the batch
            _warn_of_iterator()
            raise StopIteration
        for _ in range(number - last):
            batch = next(iterator)
        self._own = iterator, max(last, number), batch
        return first_rows(unpack(batch), strategy)

    @property
    def _source(self) -> Source | None:
        return None if self.own_dataset else self.pipeline.training_source()

    def training_data(self, step: int) -> tf.distribute.DistributedDataset:
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


@functools.cache
def _warn_of_iterator() -> None:
    _LOG.warning(
        "train_dataset is an iterator, of which no batch is left for the search for losses that combine "
        "rows: it compares only rows that it makes up. Set the dataset."
    )


# What the other packages of ctl read of a `StandardTrainer`.


def loop_of(trainer: TrainerOwner) -> InnerLoop:
    """Returns the inner loop of a trainer."""
    return trainer._ctl_loop


def plan_of(trainer: TrainerOwner) -> Plan:
    """Returns the resolved options of a trainer."""
    return loop_of(trainer).plan


def step_of(trainer: TrainerOwner) -> BuiltStep:
    """Returns the step of one replica of a trainer."""
    return loop_of(trainer).step


def pipeline_of(trainer: TrainerOwner) -> InputPipeline:
    """Returns the data of a trainer."""
    return loop_of(trainer).pipeline
