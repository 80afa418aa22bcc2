"""Parts of the step: what an option adds to the updates, in one file for each.

A new part is a subclass of `Part` in a file of its own, and a row of `PARTS`. Its option is a field of
`TrainerOptions` and a `Key` in `ctl/replica/config.py`; tests/configs/options_test.py lists the fields,
and docs/reference is generated again. The step calls all parts alike and knows none of them by name.

In a step, a part draws numbers that all rows share by `ctl.random.normal(shape, shared=True, name=...)`:
they are a function of the seed and the step, the same on every replica. `row_mask.current().step` is the
step. A sparse gradient is a `tf.IndexedSlices`, whose rows may repeat.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import contextlib
import dataclasses
import pkgutil
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.replica.arithmetic.gradients import Gradient

# Option of a trainer -> the part that it adds if it is set, module:class in this package. The parts are
# called in this order: norms and histograms describe gradients that the parts before them have changed.
PARTS = {
    "compression": "compression:Compression",
    "histogram_interval": "histograms:GradientHistograms",
    "norms": "norms:Norms",
    "ema_decay": "ema:ExponentialMovingAverage",
    "shard_state": "sharded_optimizer:ShardedSlots",
    # The last part, because it freezes layers, whose variables the others must know.
    "optimizer_groups": "parameter_groups:ParameterGroups",
    "weight_decay_exclude": "parameter_groups:ParameterGroups",
}
LAYERS = "layers"  # the name, among the results of a loop, of what there is for each variable
AVERAGES = "ema"  # the name, in a checkpoint, of averaged weights, and the scope of their variables
# The options whose parts only trainings need.
ONLY_TRAINING = tuple(option for option in PARTS if option != "ema_decay")
# The options whose updates depend on the split, so that comparisons of splits leave them out.
DEPENDS_ON_SPLIT = ("compression",)


@dataclasses.dataclass
class GlobalUpdate:
    """The update of a global batch on one replica; the gradients and the loss are those of all replicas.

    Attributes:
        variables: the variables to train.
        gradients: their gradients, unscaled and not clipped, complete or slices; None for a variable
            that has none.
        loss: scalar.
        changes: variables, and the values that `reduce` computed for `after`.
    """

    variables: Sequence[tf.Variable]
    gradients: list[Gradient]
    loss: tf.Tensor
    changes: list[tuple[tf.Variable, tf.Tensor]] = dataclasses.field(default_factory=list)


class Part:
    """The base class of parts; every method does nothing, unless a subclass overrides it.

    Args:
        options: the trainer's options, with every duration as a number of steps.

    Attributes:
        reduce: sums the gradients in place of the all-reduce of the step. It gets this replica's
            gradients and its share of the loss, the variables, the scale of the gradients or None, and
            the optimizer. The sums may be slices, whose type is `slices.Slice`.
        evaluated: the word for the weights that `evaluating` sets, if it sets any.
    """

    reduce: Callable[..., GlobalUpdate] | None = None
    evaluated: str = ""

    def __init__(self, options: TrainerOptions):
        self.options = options

    # While a step is built, in the strategy's scope, in this order.

    def prepare_slots(self, optimizer: Any, strategy: tf.distribute.Strategy) -> None:
        """Prepares an optimizer before it creates its slot variables."""

    def prepare(
        self,
        models: Mapping[str, tf_keras.Model],
        optimizer: Any,
        *,
        make: Callable[[Callable[[], Any]], Any],
        source: Any,
        complete: bool,
    ) -> None:
        """Prepares models, and the optimizer of the first one before it creates its slot variables.

        Args:
            models: the built models by name; "" is the name of the first one.
            optimizer: the optimizer of the first model.
            make: returns the optimizer that a function makes, with `prepare_slots` of all parts.
            source: makes optimizers from a config, if it is a `ctl.optimizers.FromConfig`.
            complete: whether there will be no further models.
        """

    def create(self, plan: Any, model: tf_keras.Model) -> None:
        """Creates the variables of the part; the optimizer has its slot variables.

        Args:
            plan: the resolved options, a `ctl.replica.step.plan.Plan`.
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

    def configure(self, optimizer: Any, models: Mapping[str, tf_keras.Model]) -> None:
        """Prepares an optimizer, of any model; the trace of a step calls it, too."""

    def check_ready(self) -> None:
        """Raises UsageError if the models must not be trained or saved now."""

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

    def end_step(self, optimizer: Any, applied: tf.Tensor | bool) -> None:
        """Is called at the end of a step, which may have had several updates.

        Args:
            optimizer: the optimizer whose `iterations` counts the applied steps.
            applied: as for `after`; whether all updates were applied.
        """

    # After each inner loop.

    def results(self, *, all_skipped: bool) -> dict[str, Any]:
        """Returns the part's results of the loop: name -> scalar, or a dict of them.

        Args:
            all_skipped: whether no step was applied, so that means over the applied steps are NaN.
        """
        return {}

    def reset(self) -> None:
        """Resets the results."""

    def check(self, models: Mapping[str, tf_keras.Model], trained: Collection[tf.Variable]) -> None:
        """Raises UsageError if the part lacks what the steps have created or trained.

        Args:
            models: all models by name.
            trained: the variables that the steps train.
        """

    def notes(self) -> list[str]:
        """Returns lines for the user after the first loop, such as why the part had no effect."""
        return []

    # Checkpoints, evaluations and descriptions.

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds, by name. The names must never change."""
        return {}

    def restart(self, *, keep: Collection[int] = ()) -> None:
        """Sets the state to its first values, for weights that were loaded without it.

        Args:
            keep: the ids of the variables of the state that keep their values.
        """

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Sets the weights that are evaluated within a `with` block."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Sets the weights that are evaluated for good, in a model that is not trained any more."""

    def variables(self) -> dict[str, list[Any]]:
        """Returns the variables that one replica holds, by a word for a table of the memory."""
        return {}

    @classmethod
    def saved_bytes(cls, optimizer: Any, slots: int, replicas: int) -> int:
        """Returns the memory that the part would save on each replica if its option were true.

        Args:
            optimizer: the optimizer of the first model.
            slots: the bytes of the slot variables of all optimizers.
            replicas: the number of replicas.
        """
        return 0

    def describe(self, models: Collection[tf_keras.Model], replicas: int) -> dict[str, str]:
        """Returns what a user must know of the updates: name of a row of `ctl explain` -> its text."""
        return {}


def open_parts(options: TrainerOptions) -> list[Part]:
    """Returns the parts that options ask for, in the order of `PARTS`."""
    names = dict.fromkeys(name for option, name in PARTS.items() if getattr(options, option))
    return [load(name)(options) for name in names]


def load(name: str) -> type[Part]:
    """Imports the part of a row of `PARTS`."""
    cls: type[Part] = pkgutil.resolve_name(f"ctl.replica.parts.{name}")
    return cls
