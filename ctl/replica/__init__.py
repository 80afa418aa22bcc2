"""The arithmetic of a training step on one replica.

Each name is imported when it is first used (PEP 562): `ctl.replica.config` does not import TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl.replica.arithmetic.gather import all_gather, positions
    from ctl.replica.arithmetic.row_mask import Rows, current, examples
    from ctl.replica.arithmetic.row_mask import current_mask as present
    from ctl.replica.step.metric_updates import update as update_metric

_NAMES = {
    "Rows": "replica.arithmetic.row_mask:Rows",
    "all_gather": "replica.arithmetic.gather:all_gather",
    "current": "replica.arithmetic.row_mask:current",
    "examples": "replica.arithmetic.row_mask:examples",
    "positions": "replica.arithmetic.gather:positions",
    "present": "replica.arithmetic.row_mask:current_mask",
    "update_metric": "replica.step.metric_updates:update",
}
__all__ = ["Rows", "all_gather", "current", "examples", "positions", "present", "update_metric"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'ctl.replica' has no attribute {name!r}")
    module, _, attribute = _NAMES[name].partition(":")
    return getattr(importlib.import_module(f"ctl.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
