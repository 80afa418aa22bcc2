"""Updates the variables of some groups by optimizers of their own (`optimizer.groups`).

The step, the clipping and the checkpoint know a single optimizer: the one of the other variables, which
passes on the gradients of the groups.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.errors import UsageError
from ctl.keras.precision import Optimizer
from ctl.private import classes


def attach(optimizer: Optimizer, groups: Sequence[tuple[Optimizer, Sequence[tf.Variable]]]) -> None:
    """Makes an optimizer pass on the gradients of some variables; call it before its `build`.

    Args:
        optimizer: a tf_keras optimizer, which may be a LossScaleOptimizer.
        groups: other optimizers, each with the variables that it updates.

    Raises:
        UsageError: one of the other optimizers updates other variables, too.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    others = [other for other, _ in groups]
    if any(others.count(o) > 1 or o is inner or getattr(o, "_built", False) for o in others):
        raise UsageError(
            "An optimizer of optimizer.groups is that of other variables, too: pass a function that "
            "makes a new one, and name all patterns of one optimizer in one group."
        )
    members = {inner._var_key(v): i for i, (_, own) in enumerate(groups) for v in own}
    # The user and checkpoints know this object, so it cannot be wrapped.
    classes.extend(inner, _Grouped)
    inner._ctl_groups = others  # an attribute that checkpoints hold
    inner._ctl_members = inner._no_dependency(members)


class _Grouped(tf_keras.optimizers.Optimizer):
    """Overrides the methods of an optimizer's class that get all variables."""

    _ctl_groups: Sequence[Any]
    _ctl_members: Mapping[Any, int]

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Creates the slot variables of all groups."""
        if getattr(self, "_built", False):
            return
        own, *others = self._split([(v, v) for v in var_list])
        super().build([v for _, v in own])
        for optimizer, pairs in zip(self._ctl_groups, others, strict=True):
            optimizer.build([v for _, v in pairs])
        # By its keys, ctl knows the variables that have slots.
        self._index_dict.update({self._var_key(v): -1 for pairs in others for _, v in pairs})

    @property
    def variables(self) -> Any:
        """The counters and slot variables of all groups."""
        variables = super().variables
        return type(variables)([*variables, *(v for o in self._ctl_groups for v in o.variables)])

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, tf.Variable]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Updates the variables of each group by its optimizer; call it in a replica context."""
        pairs = list(grads_and_vars)
        if not skip_gradients_aggregation and kwargs.pop("experimental_aggregate_gradients", True):
            pairs = self.aggregate_gradients(pairs)
        own, *others = self._split([pair for pair in pairs if pair[0] is not None])
        # All count the same updates, by which their schedules proceed, also those that have no gradient.
        for optimizer, share in zip(self._ctl_groups, others, strict=True):
            if share:
                optimizer.apply_gradients(share, skip_gradients_aggregation=True)
            else:
                optimizer._internal_apply_gradients([])
        if not own:
            return super()._internal_apply_gradients([])
        return super().apply_gradients(own, name=name, skip_gradients_aggregation=True)

    def _split(self, pairs: Sequence[tuple[Any, tf.Variable]]) -> list[list[tuple[Any, Any]]]:
        """Returns the pairs of this optimizer, and those of each group."""
        parts: list[list[tuple[Any, Any]]] = [[] for _ in range(1 + len(self._ctl_groups))]
        for pair in pairs:
            parts[1 + self._ctl_members.get(self._var_key(pair[1]), -1)].append(pair)
        return parts
