"""Runs a trainer on one split of the batches, and keeps what came of it as arrays."""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.data.input_pipeline import InputPipeline
from ctl.evaluator import StandardEvaluator
from ctl.testing.devices import make_strategy
from ctl.testing.overflow import copies
from ctl.testing.splits import RATE, Split
from ctl.trainer import StandardTrainer

Name = tuple[str, str]  # the kind of a quantity, and its own name


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run on every split.

    Attributes:
        make: the trainer's class, or a function with the arguments of its constructor.
        examples: name -> [examples, ...] array, in the order that batches take them.
        optimizer: makes the optimizer; None for plain SGD.
        options: the trainer's; those that the split or the comparison decides are replaced.
        steps: how many are trained.
    """

    make: Callable[..., StandardTrainer]
    examples: dict[str, np.ndarray]
    optimizer: Callable[[], Any] | None
    options: TrainerOptions
    steps: int

    @property
    def name(self) -> str:
        """The trainer's name."""
        return getattr(self.make, "__name__", None) or str(self.make)

    def rows(self, first: int, count: int) -> dict[str, np.ndarray]:
        """Rows of the endless repetition of the examples."""
        total = len(next(iter(self.examples.values())))
        indexes = np.arange(first, first + count) % total
        return {name: values[indexes] for name, values in self.examples.items()}


@dataclasses.dataclass(frozen=True)
class Copies:
    """The replicas' copies of a variable, where they are not the same.

    Attributes:
        name: its kind and name.
        step: after which step.
        distance: the largest difference of an element.
        moved: the replicas whose copy is not what it was before the step.
        of: how many replicas there are.
    """

    name: Name
    step: int
    distance: float
    moved: tuple[int, ...]
    of: int


@dataclasses.dataclass(frozen=True)
class Record:
    """What a trainer computed on one split.

    Attributes:
        split: the split.
        weights: the trainable variables before the first step.
        steps: after each step, quantity -> value; an "update" is what a variable moved by.
        evaluation: what an evaluation of the first weights gave, or nothing.
        copies: the variables whose copies differ.
        names: the variables', in order.
    """

    split: Split
    weights: dict[str, np.ndarray]
    steps: list[dict[Name, np.ndarray]]
    evaluation: dict[Name, np.ndarray]
    copies: list[Copies]
    names: tuple[Name, ...] = ()


def build(plan: Plan, split: Split, **changes: Any) -> StandardTrainer:
    """The trainer of a split, fed with the plan's examples in their order.

    Args:
        plan: what to run.
        split: how.
        **changes: of the options.
    """
    settled: dict[str, Any] = dict(
        xla="off",
        placement="stream",
        logical_shards=0,
        all_reduce_dtype="",
        loss_scale=0.0,
        norms=False,
        prefetch=1,
        gradient_accumulation_steps=split.micro_batches,
    )
    if plan.options.on_non_finite == "stop":
        settled["on_non_finite"] = "ignore"
    options = dataclasses.replace(plan.options, **{**settled, **changes})
    make, strategy = plan.make, make_strategy(split.replicas)

    def dataset(part: str) -> tf.data.Dataset:
        # The last batch of an evaluation is a partial one.
        rows = plan.rows(0, 2 * split.batch - 1) if part == "eval" else plan.examples
        return tf.data.Dataset.from_tensor_slices(rows)

    if isinstance(make, type):  # its own data is not needed, not even to be there
        body = {"build_dataset": lambda self, part, context: dataset(part)}
        make = type(make.__name__, (make,), body)
    trainer = make(
        strategy=strategy,
        global_batch_size=split.batch,
        optimizer=plan.optimizer or (lambda: tf_keras.optimizers.SGD(RATE)),
        options=options,
    )
    if not isinstance(make, type):
        feed = InputPipeline(
            lambda part, _: dataset(part),
            strategy=strategy,
            seed=options.seed,
            prefetch=1,
            build_scope=trainer.building,
        )
        trainer.feed = feed
        trainer.train_dataset = feed.training_dataset(split.batch, start=0)
    return trainer


def record(
    trainer: StandardTrainer,
    plan: Plan,
    split: Split,
    *,
    evaluate: bool,
    names: Sequence[Name] = (),
) -> Record:
    """Evaluates the trainer where asked, trains it, and keeps everything.

    Args:
        trainer: what `build` made.
        plan: what to run.
        split: how.
        evaluate: whether to evaluate before the first step.
        names: those of the variables of another trainer of the plan, to give these.
    """
    found = variables(trainer, names)
    evaluation = {}
    if evaluate:
        results = StandardEvaluator(trainer).evaluate(tf.constant(-1))
        evaluation = {("evaluation", k): v for k, v in _numbers(results)}
    before = {name: value_of(trainer, v) for name, v in found.items()}
    weights = {name: value for (kind, name), value in before.items() if kind == "update"}
    steps, apart = [], []
    for step in range(plan.steps):
        old = {name: copies(trainer.strategy, v) for name, v in found.items()}
        outputs = trainer.train(tf.constant(1)) or {}
        values: dict[Name, np.ndarray] = {
            ("loss" if k == "loss" else "metric", k): v
            for k, v in _numbers(outputs)
            if k not in ("loss_scale", "skipped_steps")
        }
        for name, variable in found.items():
            value = value_of(trainer, variable)
            values[name] = value - before[name] if name[0] == "update" else value
            before[name] = value
            apart += _apart(name, step, old[name], copies(trainer.strategy, variable), variable)
        steps.append(values)
    return Record(split, weights, steps, evaluation, apart, tuple(found))


def variables(trainer: StandardTrainer, names: Sequence[Name] = ()) -> dict[Name, tf.Variable]:
    """Every variable of numbers that a trainer keeps, by kind and name.

    Args:
        trainer: whose.
        names: those of another trainer of the same kind, whose layers Keras numbered otherwise.
    """
    found: dict[Name, tf.Variable] = {}
    seen: set[int] = set()
    for kind, variable in _each(trainer):
        number = variable.dtype.is_floating or variable.dtype.is_integer
        if id(variable) in seen or not number:
            continue
        seen.add(id(variable))
        name, count = variable.name, 2
        while (kind, name) in found:
            name, count = f"{variable.name}#{count}", count + 1
        found[kind, name] = variable
    if [kind for kind, _ in names] == [kind for kind, _ in found]:
        return dict(zip(names, found.values(), strict=True))
    return found


def value_of(trainer: StandardTrainer, variable: tf.Variable) -> np.ndarray:
    """What a variable is worth to who reads it outside of the replicas."""
    own = copies(trainer.strategy, variable)
    if len(own) > 1 and _is_local(variable):
        if variable.aggregation == tf.VariableAggregation.SUM:
            return np.sum(own, axis=0)
        if variable.aggregation == tf.VariableAggregation.MEAN:
            return np.mean(own, axis=0)
    return own[0]


def _each(trainer: StandardTrainer) -> Iterator[tuple[str, tf.Variable]]:
    for held in tf.nest.flatten(_plain(trainer.checkpoint_items())):
        if isinstance(held, tf_keras.Model | tf_keras.layers.Layer):
            statistics = {id(v) for v in statistics_of(held)}
            for v in held.trainable_variables:
                yield "update", v
            for v in held.non_trainable_variables:
                yield ("statistic" if id(v) in statistics else "state"), v
        elif isinstance(held, tf.Variable):
            yield ("update" if held.trainable else "state"), held
        elif hasattr(held, "apply_gradients"):
            of = held.variables
            for v in of() if callable(of) else of:
                yield "state", v


def statistics_of(model: tf_keras.layers.Layer) -> list[tf.Variable]:
    """The moving statistics of a model's normalizations."""
    names = ("moving_mean", "moving_variance")
    found = [getattr(layer, name, None) for layer in model._flatten_layers() for name in names]
    return [variable for variable in found if variable is not None]


def _plain(held: Any) -> Any:
    """Lists and dicts without what Keras wraps them in, which `tf.nest` takes for leaves."""
    if isinstance(held, dict):
        return {name: _plain(value) for name, value in held.items()}
    if isinstance(held, list | tuple):
        return [_plain(value) for value in held]
    return held


def _is_local(variable: tf.Variable) -> bool:
    return variable.synchronization == tf.VariableSynchronization.ON_READ


def _apart(
    name: Name, step: int, old: list[np.ndarray], new: list[np.ndarray], variable: tf.Variable
) -> list[Copies]:
    # Each replica's part of a sum is its own.
    if _is_local(variable) and variable.aggregation == tf.VariableAggregation.SUM:
        return []
    if all(np.array_equal(copy, new[0], equal_nan=True) for copy in new):
        return []
    moved = [r for r, (a, b) in enumerate(zip(old, new, strict=True)) if not np.array_equal(a, b)]
    wide = [copy.astype(np.float64) for copy in new]
    distance = max(float(np.abs(copy - wide[0]).max(initial=0.0)) for copy in wide)
    return [Copies(name, step, distance, tuple(moved), len(new))]


def _numbers(outputs: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for name, value in outputs.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
            continue
        array = np.asarray(value)
        if array.dtype.kind in "fiub":
            yield f"{prefix}{name}", array.astype(np.float64)
