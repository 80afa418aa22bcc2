"""Runs a ctl trainer, which reads the examples of the comparison instead of its own data."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.built.build import seed_and_precision
from ctl.built.flops import list_graphs
from ctl.built.inner_loop import loop_of, step_of
from ctl.configs import group_values
from ctl.configs.keys import KEYS
from ctl.configs.options import TrainerOptions
from ctl.data.autograph import convert, traced
from ctl.data.input_pipeline import InputPipeline
from ctl.data.source import Nest
from ctl.evaluator import StandardEvaluator
from ctl.keras import models
from ctl.testing.comparison import tolerance_of
from ctl.testing.contents import Contents, Names, contents_of, named_leaves
from ctl.testing.logical_devices import make_strategy
from ctl.testing.loop_record import LoopRecord
from ctl.testing.splits import RATE, Split
from ctl.testing.subjects import base, noise
from ctl.testing.subjects.base import Attempts, Calibration, RowValues, Subject, Terms, attempt
from ctl.trainer import StandardTrainer
from ctl.update.microbatches import unpack
from ctl.update.preprocessing import call_sample_weight

# Options that the splits or the comparison determine.
_FIXED: dict[str, Any] = dict(
    xla="off", placement="stream", logical_shards=0, all_reduce_dtype="",
    loss_scale=0.0, norms="",
    histogram_interval=0, prefetch=1,
    **{key.option: key.default for key in KEYS if key.depends_on_split},
)  # fmt: skip
_REPORTED_ONLY = ("loss_scale", "skipped_steps")  # outputs that need not be equal


class TrainerRun(base.SplitRun):
    """A trainer that is built for a split. It always starts with the same weights, by its seed.

    Args:
        subject: what to run.
        split: how the global batch is split.
        **changes: options to change.

    Raises:
        UsageError: ctl rejects the trainer on this split.
    """

    def __init__(self, subject: "TrainerSubject", split: Split, **changes: Any):
        self.trainer = subject.build(split, **changes)
        super().__init__(subject, split, self.trainer.strategy)

    @property
    def contents(self) -> Contents:
        """Everything that a step may change, with what the last step created."""
        return contents_of(self.trainer)

    def step(self, number: int) -> Any:
        """Trains a step, and returns what it reports."""
        outputs = self.trainer.train(tf.constant(1)) or {}
        return {name: value for name, value in outputs.items() if name not in _REPORTED_ONLY}

    def evaluate(self) -> dict[str, Any]:
        """Evaluates the examples, of which the last batch is a partial one."""
        return dict(StandardEvaluator(self.trainer).evaluate(tf.constant(-1)))


@dataclasses.dataclass(frozen=True)
class TrainerSubject(Subject):
    """A ctl trainer: `factory` is its class, or a function with the arguments of its constructor.

    Attributes:
        optimizer: makes the optimizer to compare in addition to plain SGD; None for no other one.
        options: options of the trainer. Those that the split or the comparison determines are
            replaced.
    """

    optimizer: Callable[[], Any] | None = None
    options: TrainerOptions = dataclasses.field(default_factory=TrainerOptions)

    # Without the cast, the difference of float64 outputs and float32 targets is an error.
    attempts: ClassVar[Attempts] = (("float64", True), ("float64", False), ("float32", False))

    def start(self, split: Split, **changes: Any) -> TrainerRun:
        """Builds the trainer of a split, with some options changed."""
        return TrainerRun(self, split, **changes)

    def accepting(self) -> "TrainerSubject":
        """Returns the subject with `allow_row_coupling`."""
        options = dataclasses.replace(self.options, allow_row_coupling=True)
        return dataclasses.replace(self, options=options)

    def calibrate(self, run: base.SplitRun, record: LoopRecord) -> Calibration:
        """Takes the tolerance of float32 if a method of the trainer casts to it."""
        assert isinstance(run, TrainerRun)
        narrow = self.precision == "float64" and find_narrow(run.trainer)
        if narrow:
            return Calibration(tolerance_of("float32"), why=f"computed in float64, but {narrow}")
        return Calibration(tolerance_of(self.precision))

    def find_narrow(self, run: base.SplitRun) -> str:
        """Names the line of a cast to float64 of rows, or random numbers, that are computed before."""
        assert isinstance(run, TrainerRun)
        return noise.find_cast(list_graphs(run.trainer))

    def has_own_optimizers(self, run: base.SplitRun) -> bool:
        """Returns whether the trainer has more optimizers than the plain SGD of the comparison."""
        return self.optimizer is not None or len(run.contents.optimizers) > 1

    def rows(self, split: Split, *, training: bool = True) -> RowValues | None:
        """Returns the outputs and losses of the single rows, without accumulation."""
        split = Split(split.batch, split.replicas)
        return attempt(lambda: compute_rows(self.build(split), split.batch, training=training))

    def terms(self, batch: int, names: Sequence[Names]) -> Terms:
        """Returns the gradients of the rows and of the regularization losses, and the weights."""
        return compute_terms(self.build(Split(batch)), names)

    def scaled_records(
        self, run: base.SplitRun, scale: float
    ) -> tuple[LoopRecord, LoopRecord, float] | None:
        """Makes a step in float16 under two loss scales, if the trainer has a step of its own."""
        assert isinstance(run, TrainerRun)
        cls, standard = type(run.trainer), StandardTrainer
        if cls.replica_step is standard.replica_step and cls.train_step is standard.train_step:
            return None
        narrow, split = dataclasses.replace(self, precision="float16"), Split(2)
        runs = [narrow.start(split, loss_scale=each) for each in (1.0, scale)]
        scaled = tf_keras.mixed_precision.LossScaleOptimizer
        if not all(isinstance(each.trainer.optimizer, scaled) for each in runs):
            return None
        plain, other = (each.record(steps=1) for each in runs)
        return plain, other, 4 * tolerance_of("float16")

    def build(self, split: Split, **changes: Any) -> StandardTrainer:
        """Builds the trainer of a split, which reads the examples in their order."""
        stops = {"on_non_finite": "ignore"} if self.options.on_non_finite == "stop" else {}
        parts: dict[str, Any] = {"micro_batches": split.micro_batches, "precision": self.precision}
        groups = self.options.optimizer_groups
        if self.plain or not self.optimizer:
            parts["optimizer_groups"] = group_values.without(groups, "optimizer")
        options = dataclasses.replace(self.options, **{**_FIXED, **stops, **parts, **changes})
        factory = self.factory
        if isinstance(factory, type):
            # A subclass, so that the trainer never calls its own build_dataset: its data may be absent.
            body = {"build_dataset": lambda trainer, part, _: self._dataset(part, split.batch)}
            factory = type(factory.__name__, (factory,), body)
        # Layers without a name of their own are numbered by process, and options name them by pattern.
        models.reset_names()
        trainer: StandardTrainer = factory(
            strategy=make_strategy(split.replicas),
            global_batch_size=split.batch,
            optimizer=(None if self.plain else self.optimizer) or _make_sgd,
            options=options,
        )
        inner_loop = loop_of(trainer)
        if not isinstance(factory, type):
            inner_loop.pipeline = InputPipeline(
                lambda part, _: self._dataset(part, split.batch),
                strategy=trainer.strategy,
                seed=options.seed,
                prefetch=1,
                build_scope=functools.partial(seed_and_precision, options),
            )
            trainer.train_dataset = inner_loop.pipeline.training_dataset(split.batch, start=0)
        if self.plain:
            _replace_own_optimizers(trainer)
        inner_loop.step.checks_copies = False  # the report names the difference and its cause
        return trainer

    def _dataset(self, part: str, batch: int) -> tf.data.Dataset:
        """Makes the dataset that replaces the trainer's own.

        An evaluation has `2 * batch - 1` rows, so that its last batch is a partial one.
        """
        rows = (
            self.select([i % self.count for i in range(2 * batch - 1)]) if part == "eval" else self
        )
        return tf.data.Dataset.from_tensor_slices(rows.examples)


def _make_sgd() -> Any:
    return tf_keras.optimizers.SGD(RATE)


def _replace_own_optimizers(trainer: StandardTrainer) -> None:
    """Replaces the optimizers that the trainer makes itself, such as the second one of a GAN.

    An update by Adam does not show a wrong factor of the gradient.
    """

    def is_replaced(item: Any) -> bool:  # a user's own optimizer may have other methods
        is_optimizer = isinstance(item, tf_keras.optimizers.Optimizer)
        has_scale = isinstance(item, tf_keras.mixed_precision.LossScaleOptimizer)
        own = is_optimizer and type(item).__module__.startswith("tf_keras.")
        return own and not has_scale and item is not trainer.optimizer

    def replace(item: Any) -> Any:
        if isinstance(item, dict):
            return {name: replace(value) for name, value in item.items()}
        if isinstance(item, list | tuple):
            return [replace(value) for value in item]
        return _make_sgd() if is_replaced(item) else item

    for name, value in trainer.checkpoint_items().items():
        if any(is_replaced(item) for _, item in named_leaves(value)):
            with trainer.build_scope():
                setattr(trainer, name, replace(value))


def find_narrow(trainer: StandardTrainer) -> str:
    """Names a method that returns fewer digits than float64, due to a cast in its code; "" if none."""

    def probe() -> str:
        batch, row_mask = _first_batch(trainer)

        @traced
        def compute() -> Any:
            outputs, losses, _ = _row_values(trainer, batch, row_mask)
            return outputs, losses

        specs = compute.get_concrete_function().structured_outputs
        for hook, values in zip(("forward", "per_example_loss"), specs, strict=True):
            for value in tf.nest.flatten(values):
                if value.dtype.is_floating and value.dtype != tf.float64:
                    return f"{hook} returns {value.dtype.name}"
        return ""

    return attempt(probe) or ""


def compute_rows(trainer: StandardTrainer, batch_size: int, *, training: bool) -> RowValues:
    """Computes the rows of the first batch.

    Args:
        trainer: the trainer, on any replicas.
        batch_size: global batch size.
        training: whether `forward` computes as in training, or as in evaluation.
    """
    strategy = trainer.strategy

    def replica(batch: Nest, row_mask: Any) -> Any:
        outputs, losses, weights = _row_values(trainer, batch, row_mask, training=training)
        return tf.nest.flatten(outputs), losses, weights

    def join(values: Any) -> np.ndarray:
        return np.concatenate(strategy.experimental_local_results(values))[:batch_size]

    compute = traced(lambda *args: strategy.run(replica, args=args))
    outputs, losses, weights = compute(*_first_batch(trainer))
    return RowValues([join(values) for values in outputs], join(losses), join(weights))


def compute_terms(trainer: StandardTrainer, names: Sequence[Names]) -> Terms:
    """Computes the gradients of the rows and of the regularization losses, with the initial weights.

    An update is no combination of them if rows depend on each other, or if a trainer's own step adds
    another loss.

    Args:
        trainer: the trainer on one replica.
        names: `Record.names` of another run.
    """
    variables = step_of(trainer).attributes.trained_variables()
    rows, row_mask = _first_batch(trainer)

    @traced
    def compute_gradients() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            _, losses, _ = _row_values(trainer, rows, row_mask)
            penalties = convert(trainer.regularization_losses)()
            terms = [*tf.unstack(losses), tf.add_n([tf.zeros([], losses.dtype), *penalties])]
        return [_flatten(tape.gradient(t, variables), variables) for t in terms]

    columns = [np.asarray(v, np.float64) for v in compute_gradients()]
    weights = np.asarray(_flatten(variables, variables), np.float64)
    by_id = {id(v): name for name, v in contents_of(trainer).name_variables(names).items()}
    return Terms(
        rows=np.stack(columns[:-1], axis=1),
        penalty=columns[-1][:, np.newaxis],
        weights=weights[:, np.newaxis],
        names=tuple(by_id[id(v)] for v in variables),
    )


def _first_batch(trainer: StandardTrainer) -> tuple[Any, Any]:
    """Returns the first distributed batch and its row mask."""
    return unpack(next(iter(loop_of(trainer).training_data(0))))


def _row_values(
    trainer: StandardTrainer, batch: Nest, row_mask: Any, *, training: bool = True
) -> Any:
    """Returns outputs, losses and sample weights of one replica's rows."""
    with step_of(trainer).rows(batch, row_mask):
        batch = convert(trainer.preprocess)(batch)
        outputs = convert(trainer.forward)(batch, training=training)
        losses = convert(trainer.per_example_loss)(batch, outputs)
        weights = call_sample_weight(trainer, batch, training=training)
    return outputs, losses, tf.ones_like(losses) if weights is None else weights


def _flatten(values: Sequence[Any], variables: Sequence[tf.Variable]) -> tf.Tensor:
    """Concatenates all elements; zeros for a gradient that is None."""
    tensors = [
        tf.zeros_like(variable) if value is None else tf.convert_to_tensor(value)
        for value, variable in zip(values, variables, strict=True)
    ]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
