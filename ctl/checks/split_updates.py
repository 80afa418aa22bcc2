"""Rejects collectives and numbers of replicas in parts of the update, and names updates by hand.

Gradients in an update are already those of the global batch, and so is every value that it needs. The
table of what ctl replaces in TensorFlow notes where the code of an update uses one, whoever calls it.
"""

from collections.abc import Callable, Sequence
import os
import sys
import traceback
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.built.observers import Observer
from ctl.configs.error_location import user_frame
from ctl.errors import UsageError
from ctl.graphs.assignments import find_assignments
from ctl.rows import row_mask
from ctl.rows.row_mask import Rows
from ctl.update.snapshot import handles
from ctl.version import FOLDER

_COUNT = "num_replicas_in_sync"
_NAMES = (_COUNT, "replica_id_in_sync_group", "all_reduce", "all_gather")
# Its functions scale_regularization_loss and compute_average_loss read the number for the user.
_SCALES = os.path.join("ops", "nn_impl_distribute.py")
_OWN = tuple(
    f"{os.path.dirname(x)}{os.sep}" for x in (f"{FOLDER}/", tf.__file__, tf_keras.__file__)
)
# What is called between the user's code and this file.
_BETWEEN = __file__, os.path.join("private", "replaced.py"), f"{os.sep}autograph{os.sep}"


class SplitUpdates(Observer):
    """Checks the updates of a step."""

    def search(self, operations: Sequence[Any], rows: Rows) -> None:
        """Raises a UsageError if the user's code in an update depends on the split.

        Prints a line if the code computes the update itself, and one replica has no split to compare.
        """
        plan, own = self.step.plan, handles(self.step.attributes.trained_variables())
        if (
            rows.earlier is None
            and plan.layout.replicas == 1  # those of several are compared with one
            and not self.step.update.variables
            and any(id(x.handle) in own for x in find_assignments(operations))
        ):
            self.warn_once(
                "replica_step updates the model itself, and only `ctl check` tests whether that "
                "update depends on how the batch is split: call self.minimize instead."
            )
        is_split = plan.layout.replicas > 1 and not plan.options.allow_row_coupling
        for place, name in rows.trace.split_uses.items() if is_split else ():
            raise UsageError(
                f"{place} uses {name} in an optimizer or a part of the update, whose gradients are "
                "already those of the global batch: leave it out, since the update depends on how the "
                "batch is split, or accept it with allow_row_coupling=True (runtime.allow_row_coupling)."
            )


def number(original: property) -> property:
    """Returns a property of a strategy or a replica context that notes its use in a step.

    The number of replicas is that of `Trace.replicas` for code other than TensorFlow's and ctl's.
    """
    read: Callable[[Any], Any] = original.fget  # type: ignore[assignment]

    def noted(self: Any) -> Any:
        rows = row_mask.current() if row_mask.in_step() else None
        file = sys._getframe(1).f_code.co_filename
        is_users = file.endswith(_SCALES) or not file.startswith(_OWN)
        if rows is not None and read.__name__ == _COUNT and is_users:
            if not rows.update:
                rows.trace.call.setdefault("replica_count", {})[_find_line() or file] = None
            if rows.trace.replicas is not None:
                return rows.trace.replicas
        _note(read.__name__)
        return read(self)

    return property(noted)


def collective(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a collective of a replica context, and notes its use in updates."""
    _note(original.__name__)
    return original(*args, **kwargs)


def _note(name: str) -> None:
    rows = row_mask.current() if row_mask.in_step() else None
    if rows is None or not rows.update:
        return
    codes = (frame.f_code for frame, _ in traceback.walk_stack(None))
    files = (code.co_filename for code in codes if code.co_name not in _NAMES)
    file = next(file for file in files if not any(part in file for part in _BETWEEN))
    # Code of TensorFlow, or of ctl, may use it. Rows have a graph here, as eager code has no observers.
    if rows.graph and ("__autograph_generated_file" in file or user_frame([(file, 1)])):
        place = _find_line()
        if place is not None:
            rows.trace.split_uses.setdefault(place, name)


def _find_line() -> str | None:
    """Returns the line of the user's code that is running, before its translation by AutoGraph."""
    return user_frame([(each.filename, each.lineno) for each in tf.no_op().traceback])
