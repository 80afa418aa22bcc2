"""The arithmetic of a training step on one replica."""

from ctl.replica.gather import all_gather, positions
from ctl.replica.metrics import update as update_metric
from ctl.replica.row_mask import Examples, current, examples
from ctl.replica.row_mask import current_mask as present

__all__ = ["Examples", "all_gather", "current", "examples", "positions", "present", "update_metric"]
