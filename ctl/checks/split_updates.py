"""Rejects collectives and numbers of replicas in parts of the update, and in optimizers.

Their gradients are already those of the global batch, and so is every value that they need. The table of
what ctl replaces in TensorFlow notes where the code of an update uses one, whoever calls it.
"""

from collections.abc import Callable, Sequence
import os
import traceback
from typing import Any

import tensorflow as tf

from ctl.built.observers import Observer
from ctl.configs.error_location import user_frame
from ctl.errors import UsageError
from ctl.rows import row_mask
from ctl.rows.row_mask import Rows

_NAMES = ("num_replicas_in_sync", "replica_id_in_sync_group", "all_reduce", "all_gather")
_GENERATED = "__autograph_generated_file"
# What is called between the user's code and this file.
_BETWEEN = (
    __file__, os.path.join("private", "replaced.py"), f"{os.sep}autograph{os.sep}",
)  # fmt: skip


class SplitUpdates(Observer):
    """Checks the updates of a step."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Raises a UsageError if the user's code in an update depends on the split."""
        plan = self.step.plan
        if plan.layout.replicas == 1 or plan.options.allow_row_coupling:
            return
        for place, name in rows.trace.split_uses.items():
            raise UsageError(
                f"{place} uses {name} in an optimizer or a part of the update, whose gradients are "
                "already those of the global batch, so that the update depends on how the batch is "
                "split: leave it out, or accept it with allow_row_coupling=True "
                "(runtime.allow_row_coupling)."
            )


def number(original: property) -> property:
    """Returns a property of a strategy or a replica context that notes its use in updates."""
    read: Callable[[Any], Any] = original.fget  # type: ignore[assignment]

    def noted(self: Any) -> Any:
        _note(read.__name__)
        return read(self)

    return property(noted, doc=original.__doc__)


def collective(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a collective of a replica context, and notes its use in updates."""
    _note(original.__name__)
    return original(*args, **kwargs)


def _note(name: str) -> None:
    rows = row_mask.current() if row_mask.in_step() else None
    if rows is None or not rows.update:
        return
    code = (frame.f_code for frame, _ in traceback.walk_stack(None))
    file = next(
        each.co_filename
        for each in code
        if each.co_name not in _NAMES and not any(x in each.co_filename for x in _BETWEEN)
    )
    if _GENERATED in file or user_frame(
        [(file, 1)]
    ):  # and not TensorFlow's own code, or that of ctl
        op = tf.no_op()  # of a graph, it has the lines before their translation by AutoGraph
        stack = traceback.extract_stack() if op is None else op.traceback
        place = user_frame([(each.filename, each.lineno or 0) for each in stack])
        if place is not None:
            rows.trace.split_uses.setdefault(place, name)
