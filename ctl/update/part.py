"""Parts of the update: what an option, or the code of a user, adds to the updates of a step.

A part of ctl is a subclass of `Part` in a file of its own, and a `Key` in `ctl/parts/config.py` that
names it, from which docs/reference/generate.py makes the option. The step calls all parts alike, and
knows none by name.

A part has no rows: numbers that it draws by `ctl.random` (or, in ctl, by `random.draws`) are a function
of the seed, the step and the update, the same on every replica. docs/your-part.md shows parts of users.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import pkgutil
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.configs.option_keys import PARTS
from ctl.configs.options import TrainerOptions
from ctl.keras.precision import Optimizer
from ctl.update.gradients import Gradient
from ctl.update.plan import Plan

LAYERS = "layers"  # the name, among the results of a loop, of what there is for each variable
AVERAGES = "ema"  # the name, in a checkpoint, of averaged weights, and the scope of their variables


@dataclasses.dataclass
class GlobalUpdate:
    """The update of a global batch on one replica; the gradients and the loss are those of all replicas.

    Attributes:
        variables: the variables to train.
        gradients: their gradients, unscaled and not clipped, complete or slices; None for a variable
            that has none.
        loss: scalar.
        changes: variables, and the values that `reduce` computed for `after`.
        sparse: the ids of the variables that have sparse gradients.
    """

    variables: Sequence[tf.Variable]
    gradients: list[Gradient]
    loss: tf.Tensor
    changes: list[tuple[tf.Variable, tf.Tensor]] = dataclasses.field(default_factory=list)
    sparse: Collection[int] = ()

    def is_sparse(self, variable: tf.Variable) -> bool:
        """Returns whether the loss reads only some rows of a variable, as it does of an embedding.

        Its gradient is a `tf.IndexedSlices` then, unless an option made it dense.
        """
        return id(variable) in self.sparse


@dataclasses.dataclass(frozen=True)
class Building:
    """What is known while the optimizers of a step are prepared.

    Attributes:
        models: the built models by name; "" is the name of the first one.
        optimizer: the optimizer of the first model.
        strategy: the strategy of the step.
        parts: all parts.
        make_plain: returns the optimizer that a function makes.
        source: makes optimizers from a config, if it is a `ctl.optimizers.FromConfig`.
        complete: whether there will be no further models.
    """

    models: Mapping[str, tf_keras.Model]
    optimizer: Optimizer
    strategy: tf.distribute.Strategy
    parts: "Sequence[Part]"
    make_plain: Callable[[Callable[[], Optimizer]], Optimizer]
    source: object
    complete: bool

    def prepare(self, optimizer: Optimizer) -> Optimizer:
        """Lets all parts prepare an optimizer, and returns it."""
        for part in self.parts:
            part.prepare(optimizer, self)
        return optimizer

    def make(self, build: Callable[[], Optimizer]) -> Optimizer:
        """Returns the optimizer that a function makes, prepared by all parts."""
        return self.prepare(self.make_plain(build))


class Part:
    """The base class of parts; every method does nothing, unless a subclass overrides it.

        class Noise(ctl.Part):
            def before(self, update):
                update.gradients = [None if g is None else g + noise(g) for g in update.gradients]

    Attributes:
        reduce: sums the gradients in place of the all-reduce of the step. It gets this replica's
            gradients and its share of the loss, the variables, the scale of the gradients or None, and
            the optimizer. The sums may be slices, whose type is `gradients.Slice`.
        evaluated: the word for the weights that `exchange` sets, if it sets any.
        restored: whether a skipped step restores the variables of `state`; False for a part that leaves
            them unchanged by itself.
    """

    reduce: Callable[..., GlobalUpdate] | None = None
    evaluated: str = ""
    restored: bool = True

    @property
    def name(self) -> str:
        """The name of the part in messages."""
        return type(self).__name__

    # While a step is built, in the strategy's scope, in this order.

    def prepare(self, optimizer: Optimizer, building: Building) -> None:
        """Prepares an optimizer before it creates its slot variables: the first one, or one it made."""

    def create(self, plan: Plan, model: tf_keras.Model) -> None:
        """Creates the variables of the part; the optimizer has its slot variables.

        Args:
            plan: the resolved options: `plan.options`, `plan.dtype` and `plan.layout.replicas`.
            model: the first model.

        Raises:
            UsageError: the trainer has a method that the part cannot work with.
        """

    # Before each inner loop.

    def add_models(self, models: Mapping[str, tf_keras.Model]) -> None:
        """Prepares the models that were created since the last call.

        Args:
            models: all models by name. Those that are not built have no variables yet.
        """

    def configure(self, optimizer: Optimizer, models: Mapping[str, tf_keras.Model]) -> None:
        """Prepares an optimizer, of any model; the trace of a step calls it, too."""

    def changes(self) -> Collection[int]:
        """Returns the steps from which on a step is another one, and must be traced again."""
        return ()

    def begin(self, step: int) -> None:
        """Prepares the steps from one on, up to the next of `changes`."""

    # In a step, on each replica. Nothing but a return value of `before` can be kept for `after`, because
    # the replicas are traced in turns.

    def before(self, update: GlobalUpdate) -> Any:
        """Is called before the update is clipped and applied; may replace its gradients.

        Whether the gradients are finite is decided before: a NaN that a part makes is not skipped.
        """

    def after(self, update: GlobalUpdate, before: Any, applied: tf.Tensor | bool) -> None:
        """Is called after the update was applied or skipped.

        Args:
            update: the update.
            before: what `before` returned.
            applied: scalar, the same on every replica; True if no step can be skipped.
        """

    def end_step(self, optimizer: Optimizer, applied: tf.Tensor | bool) -> None:
        """Is called at the end of a step, which may have had several updates.

        Args:
            optimizer: the optimizer whose `iterations` counts the applied steps.
            applied: as for `after`; whether all updates were applied.
        """

    # After an inner loop; `check` is called after the first one, and after each trace.

    def results(self, *, all_skipped: bool) -> dict[str, Any]:
        """Returns the part's results of the loop: name -> scalar, or a dict of them.

        Args:
            all_skipped: whether no step was applied, so that means over the applied steps are NaN.
        """
        return {}

    def reset(self) -> None:
        """Resets the results."""

    def check(self, models: Mapping[str, tf_keras.Model], trained: Collection[tf.Variable]) -> None:
        """Raises UsageError if the part lacks what the first steps have created or trained.

        Args:
            models: all models by name.
            trained: the variables that the steps train.
        """

    # Checkpoints, evaluations and descriptions.

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds, by name. The names must never change."""
        return {}

    def restart(self, *, keep: Collection[int] = ()) -> None:
        """Sets the state to its first values, for weights that were loaded without it.

        Args:
            keep: the ids of the variables of the state that keep their values.
        """

    def exchange(self) -> None:
        """Exchanges the weights of the models with those that are evaluated; twice has no effect."""

    def describe(self, models: Collection[tf_keras.Model], replicas: int) -> dict[str, str]:
        """Returns what a user must know of the updates: name of a row of `ctl explain` -> its text."""
        return {}


def open_parts(
    options: TrainerOptions,
    own: Sequence[Part] = (),
    transform: Callable[[], Any] | None = None,
) -> list[Part]:
    """Returns the parts of a user, and those that options ask for, in the order of `PARTS`.

    Args:
        options: the trainer's options.
        own: what `build_parts` returned, or the argument of `ctl.Step`.
        transform: returns `transform_gradients`; None if there is none.
    """
    names = dict.fromkeys(name for option, name in PARTS.items() if getattr(options, option))
    parts: list[Part] = _load("own:open_own")(own, transform) if own or transform else []
    return parts + [_load(name)(options) for name in names]


def _load(name: str) -> Any:
    return pkgutil.resolve_name(f"ctl.parts.{name}")


def variables_of_state(part: Part) -> dict[str, list[Any]]:
    """Returns the variables of the state of a part that one replica holds, by the names of the state."""

    def find(item: Any) -> list[Any]:
        held = [item] if isinstance(item, tf.Variable) else [*getattr(item, "variables", ())]
        values = [item]
        if isinstance(item, tf.Module):
            values = tf.nest.flatten([v for k, v in vars(item).items() if k[0] != "_"])
        return held + [value.local for value in values if hasattr(value, "local")]

    state = part.state().items()
    return {name: [v for each in tf.nest.flatten(item) for v in find(each)] for name, item in state}


def restored_variables(parts: Sequence[Part]) -> list[Any]:
    """Returns the variables of parts that one replica holds, which a skipped update does not change."""
    states = [variables_of_state(part) for part in parts if part.restored]
    return [v for state in states for variables in state.values() for v in variables]
