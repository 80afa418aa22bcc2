"""Splits slot variables, and also gradients, over the replicas (`optimizer.shard_state`).

This is stage 1 of ZeRO (Rajbhandari et al. 2020): every replica holds the slots of its slice of each
variable, updates this slice from the reduced gradient, and gathers the new values of the others. The
optimizer itself computes the updates, of variables that hold slices. With `gradients`, stage 2, it keeps
the slices of the reduced gradients only.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.configs.options import TrainerOptions
from ctl.errors import UsageError, type_name
from ctl.keras import precision
from ctl.keras.precision import Optimizer
from ctl.optimizers import CLASSES, ELEMENTWISE, arguments
from ctl.parts.replica_values import SlicedSlot, SliceLayout, make_gather
from ctl.private import classes
from ctl.rows import packs, waits
from ctl.update import gradients, reduction
from ctl.update.gradients import Gradient, Slice
from ctl.update.part import Building, GlobalUpdate, Part
from ctl.update.plan import Plan

# The optimizers that update each element from that element's gradient and slots alone.
_ELEMENTWISE = tuple(arguments.load("optimizer.name", CLASSES[name]) for name in ELEMENTWISE)
_BUCKET = 4 * 2**20  # the least bytes of slices per collective, except for the last one


class ShardedSlots(Part):
    """Makes every optimizer of a step keep the slots of its slices, and maybe their gradients."""

    def __init__(self, options: TrainerOptions):
        self._dtype: tf.DType | None = None
        if options.shard_state == "gradients":
            self.reduce = self._reduce

    def create(self, plan: Plan, model: tf_keras.Model) -> None:
        """Rejects a step in which nothing would split the gradients."""
        self._dtype = plan.reduce_dtype
        if self.reduce and plan.own_train_step:
            raise UsageError(
                "optimizer.shard_state=gradients splits the gradients in ctl's own step, but this "
                "trainer overrides train_step: override replica_step, or set optimizer.shard_state=true."
            )

    def prepare(self, optimizer: Optimizer, building: Building) -> None:
        """Splits the slot variables of an optimizer before it creates them."""
        shard(optimizer, building.strategy)

    def _reduce(
        self, contributions: Sequence[Gradient], loss: tf.Tensor, variables: Sequence[tf.Variable],
        *, loss_scale: tf.Tensor | None, optimizer: Optimizer,
    ) -> GlobalUpdate:  # fmt: skip
        """Sums gradients and loss over the replicas, and cuts out this replica's slices.

        TensorFlow has a reduce-scatter for NCCL only. So each pack of gradients is summed completely,
        and freed once its slices are copied. Sparse gradients stay complete, and so do those of
        variables that another optimizer updates.
        """
        context = tf.distribute.get_replica_context()
        sizes = [_bytes(each) for each in contributions]
        sums, totals = list(contributions), list[tf.Tensor]()
        # One call for each pack: the results of a call exist only once all of its packs are summed.
        for pack in packs.split(sizes, packs.size(context.strategy)):
            share = tf.zeros_like(loss) if totals else loss
            part, value = reduction.all_reduce(
                [contributions[i] for i in pack], share, dtype=self._dtype
            )
            totals.append(value)
            for i, each in zip(pack, part, strict=True):
                layout = _layout_of(optimizer, variables[i])
                sums[i] = each
                if layout is not None and isinstance(each, tf.Tensor):
                    # A slice of rows shares the memory of its tensor, and would keep the whole pack.
                    own = layout.cut(each, context.replica_id_in_sync_group)
                    sums[i] = Slice(tf.raw_ops.DeepCopy(x=own), layout.body)
        waits.observe((contributions, loss), totals)
        if loss_scale is not None:
            sums = gradients.unscale(sums, loss_scale)
        return GlobalUpdate(variables, sums, totals[0])


def saved_bytes(optimizer: Optimizer, slots: int, replicas: int) -> int:
    """Returns the memory that `optimizer.shard_state` would save on each replica.

    Args:
        optimizer: the optimizer of the first model.
        slots: the bytes of the slot variables of all optimizers.
        replicas: the number of replicas.
    """
    try:
        check_elementwise(precision.inner(optimizer))
    except UsageError:
        return 0
    return slots - slots // replicas


def shard(optimizer: Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Makes an optimizer keep the slots of a slice of each variable on each replica.

    Call it before `optimizer.build`. On one replica it changes nothing: its slice is everything.

    Args:
        optimizer: a tf_keras optimizer, which may be a LossScaleOptimizer.
        strategy: the strategy of the model; mirrored variables, on one machine or several.

    Raises:
        UsageError: the update of an element depends on other elements, or may depend on them.
    """
    inner = precision.inner(optimizer)
    check_elementwise(inner)
    if strategy.num_replicas_in_sync > 1:
        # The user and checkpoints know this object, so it cannot be wrapped.
        classes.extend(inner, _Sharded)
        inner._ctl_shards = inner._no_dependency(_Shards(strategy))


def check_elementwise(inner: Any) -> None:
    """Raises UsageError unless the update of an element depends on this element alone.

    Args:
        inner: a tf_keras optimizer, but no LossScaleOptimizer.
    """
    # The class itself: the update of a subclass may do anything.
    if type(inner) not in _ELEMENTWISE:
        raise UsageError(
            f"optimizer.shard_state updates slices of variables, and the optimizer is {type_name(inner)}"
            ", whose update of an element may depend on other elements: set "
            "optimizer.shard_state=false, or choose "
            f"{', '.join(each.__name__ for each in _ELEMENTWISE)} of tf_keras."
        )
    for argument in arguments.WHOLE:
        if getattr(inner, argument, None):
            raise UsageError(
                f"optimizer.shard_state updates slices of variables, and {argument} of the optimizer "
                f"requires complete ones: {arguments.REPLACED[argument]}, and remove it."
            )


def held_variables(optimizer: Optimizer) -> list[tf.Variable]:
    """Returns the variables of a built optimizer as replicas hold them: slices, if they are split.

    Args:
        optimizer: a tf_keras optimizer, but no LossScaleOptimizer.
    """
    held = [getattr(variable, "slices", variable) for variable in optimizer.variables]
    for each in (optimizer, *getattr(optimizer, "_ctl_groups", ())):
        shards = getattr(each, "_ctl_shards", None)
        held += shards.slices.values() if shards else ()
    return held


def _bytes(gradient: Gradient) -> int:
    """Returns the bytes of a dense gradient that are known; sparse ones are sent by themselves."""
    if not isinstance(gradient, tf.Tensor):
        return 0
    return (gradient.shape.num_elements() or 0) * gradient.dtype.size


def _layout_of(optimizer: Optimizer, variable: tf.Variable) -> SliceLayout | None:
    """Returns the layout of the slices that an optimizer updates; None if it is complete."""
    for each in gradients.optimizers_of(optimizer):
        shards = getattr(each, "_ctl_shards", None)
        if shards and each._var_key(variable) in shards.layouts:
            return shards.layouts[each._var_key(variable)]
    return None


class _Shards:
    """The state that a sharded optimizer has in addition to its own.

    Args:
        strategy: the strategy of the variables.

    Attributes:
        gather: gathers slices of all processes.
        slices: key of a model variable -> the variable that holds the replicas' slices of its value.
        layouts: key of a model variable -> its layout.
        keys: key of a variable of slices -> key of the model variable.
        slots: id of a slot variable -> the complete slot.
        children: name of an attribute -> the list of complete slots that a checkpoint has.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        self.strategy = strategy
        self.gather = make_gather(strategy)
        self.slices: dict[Any, tf.Variable] = {}
        self.layouts: dict[Any, SliceLayout] = {}
        self.keys: dict[Any, Any] = {}
        self.slots: dict[int, SlicedSlot] = {}
        self.children: dict[str, Any] = {}

    def complete(self, variables: Iterable[Any]) -> list[Any]:
        """Returns the complete slot in place of each slot variable that holds slices."""
        return [self.slots.get(id(variable), variable) for variable in variables]


class _Sharded(tf_keras.optimizers.Optimizer):
    """Overrides the methods of an optimizer's class that depend on its slot variables."""

    _ctl_shards: _Shards

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates the slot variables of the slices of model variables."""
        if getattr(self, "_built", False):
            return
        shards, slices = self._ctl_shards, []
        for variable in var_list:
            layout = SliceLayout(variable.shape, shards.strategy.num_replicas_in_sync)
            # Holds the weights from the start of each update on. It is a variable, because tf_keras'
            # updates assign one, and a mirrored one, because they scatter into it, which TensorFlow
            # rejects for variables that are local to a replica.
            slices.append(
                tf.Variable(
                    tf.zeros([layout.length], getattr(variable, "true_dtype", variable.dtype)),
                    name=variable.name.partition(":")[0],
                    trainable=False,
                )
            )
            key = super()._var_key(variable)
            shards.layouts[key], shards.slices[key] = layout, slices[-1]
            shards.keys[super()._var_key(slices[-1])] = key
        super().build(slices)

    def add_variable_from_reference(
        self, model_variable: tf.Variable, *args: Any, **kwargs: Any
    ) -> tf.Variable:
        """Creates a slot variable for the slices of a model variable."""
        slot = super().add_variable_from_reference(model_variable, *args, **kwargs)
        shards = self._ctl_shards
        layout = shards.layouts[self._var_key(model_variable)]
        shards.slots[id(slot)] = SlicedSlot(slot, layout, shards.strategy, shards.gather)
        return slot

    @property
    def variables(self) -> Any:
        """The counters, and the slot variables as complete tensors."""
        variables = super().variables
        return type(variables)(self._ctl_shards.complete(variables))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient, tf.Variable]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Updates each replica's slices, and gathers the new values; call it in a replica context."""
        pairs = list(grads_and_vars)
        if not skip_gradients_aggregation and kwargs.pop("experimental_aggregate_gradients", True):
            pairs = self.aggregate_gradients(pairs)
        pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        shards = self._ctl_shards
        keys = [self._var_key(variable) for _, variable in pairs]
        slices = [shards.slices[key] for key in keys]
        layouts = [shards.layouts[key] for key in keys]
        variables = [variable for _, variable in pairs]

        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        values = [layout.cut(v, replica) for v, layout in zip(variables, layouts, strict=True)]
        _assign(shards.strategy, slices, values)
        updates = [
            (self._cut_gradient(gradient, layout, replica), variable)
            for (gradient, _), layout, variable in zip(pairs, layouts, slices, strict=True)
        ]
        result = super().apply_gradients(updates, name=name, skip_gradients_aggregation=True)
        _assign(shards.strategy, variables, _gather_values(slices, layouts), constrain=True)
        return result

    def _cut_gradient(self, gradient: Gradient, layout: SliceLayout, replica: Any) -> Gradient:
        if isinstance(gradient, Slice):
            return gradient.values
        if not isinstance(gradient, tf.IndexedSlices):
            return layout.cut(gradient, replica)
        # These divide by the root of gathered elements, whose rounding depends on their position.
        if isinstance(self, tf_keras.optimizers.RMSprop | tf_keras.optimizers.Adagrad):
            raise UsageError(
                f"optimizer.shard_state cannot keep the bits of {type(self).__name__} with sparse "
                "gradients, such as of an embedding: set optimizer.shard_state=false, or choose another "
                "optimizer, such as Adam."
            )
        return layout.cut_rows(gradients.sum_rows(gradient), replica)

    def _var_key(self, variable: tf.Variable) -> Any:
        """Returns the key of the model variable, even for the variable that holds its slices.

        Weight decay, learning rates and slots are keyed by it.
        """
        key = super()._var_key(variable)
        return self._ctl_shards.keys.get(key, key)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        shards = self._ctl_shards
        children = dict(super()._trackable_children(save_type, **kwargs))
        for name, child in children.items():
            if isinstance(child, list) and any(id(item) in shards.slots for item in child):
                # The same object in each call, because a checkpoint knows its parts by identity.
                if name not in shards.children:
                    wrapped = tf.__internal__.tracking.wrap(shards.complete(child))
                    shards.children[name] = wrapped
                children[name] = shards.children[name]
        return children


def _gather_values(
    slices: Sequence[tf.Variable], layouts: Sequence[SliceLayout]
) -> list[tf.Tensor]:
    """Gathers the slices of all replicas, in few collectives; returns complete values.

    The numbers are copied and not added to zeros, which would change -0.0.
    """
    context = tf.distribute.get_replica_context()
    values = [tf.convert_to_tensor(variable) for variable in slices]
    results: list[Any] = [None] * len(values)
    for places in _buckets(values):
        bodies = [values[i][: layouts[i].body] for i in places]
        sizes = [layouts[i].body for i in places]
        gathered = tf.zeros([context.num_replicas_in_sync, 0], bodies[0].dtype)
        if sum(sizes):
            gathered = context.all_gather(tf.concat(bodies, axis=0)[tf.newaxis], axis=0)
            gathered = tf.ensure_shape(gathered, [context.num_replicas_in_sync, sum(sizes)])
        for i, body in zip(places, tf.split(gathered, sizes, axis=1), strict=True):
            results[i] = layouts[i].join(body, values[i][layouts[i].body :])
    return results


def _buckets(slices: Sequence[tf.Tensor]) -> list[list[int]]:
    """Groups slices of the same dtype, by number, for one collective each.

    A bucket is closed once it has `_BUCKET` bytes, so that its buffers can be freed before the next
    one is gathered: one collective for all would need two more copies of the weights.
    """
    buckets: list[list[int]] = []
    opened: dict[tf.DType, list[int]] = {}
    for i, value in enumerate(slices):
        if value.dtype not in opened:
            opened[value.dtype] = []
            buckets.append(opened[value.dtype])
        bucket = opened[value.dtype]
        bucket.append(i)
        elements = sum(slices[place].shape.num_elements() for place in bucket)
        if elements * value.dtype.size >= _BUCKET:
            del opened[value.dtype]
    return buckets


def _assign(
    strategy: tf.distribute.Strategy,
    variables: Sequence[tf.Variable],
    values: Sequence[tf.Tensor],
    *,
    constrain: bool = False,
) -> None:
    """Assigns each replica's values to its copies of variables; call it in a replica context."""

    def assign(variable: tf.Variable, value: tf.Tensor) -> None:
        if constrain and variable.constraint is not None:
            value = variable.constraint(value)
        variable.assign(value)

    def update(strategy: tf.distribute.Strategy, *values: Any) -> None:
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(variable, assign, args=(value,), group=False)

    tf.__internal__.distribute.interim.maybe_merge_call(update, strategy, *values)
