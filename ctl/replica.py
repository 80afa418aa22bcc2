"""What the code of a step can ask about its replica: its rows, and those of the others.

Each name is imported when it is first used (PEP 562): `import ctl.replica` does not import TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctl.built.metric_updates import update as update_metric
    from ctl.rows.gather import all_gather, positions
    from ctl.rows.means import mean_of_rows
    from ctl.rows.row_mask import Rows, current, examples
    from ctl.rows.row_mask import current_mask as present
    from ctl.rows.views import views

_NAMES = {
    "Rows": "rows.row_mask:Rows",
    "all_gather": "rows.gather:all_gather",
    "current": "rows.row_mask:current",
    "examples": "rows.row_mask:examples",
    "mean_of_rows": "rows.means:mean_of_rows",
    "positions": "rows.gather:positions",
    "present": "rows.row_mask:current_mask",
    "update_metric": "built.metric_updates:update",
    "views": "rows.views:views",
}
__all__ = [
    "Rows", "all_gather", "current", "examples", "mean_of_rows", "positions", "present", "update_metric",
    "views",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'ctl.replica' has no attribute {name!r}")
    module, _, attribute = _NAMES[name].partition(":")
    return getattr(importlib.import_module(f"ctl.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
