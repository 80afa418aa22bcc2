"""The arithmetic of a training step on one replica."""

from ctl.replica.arithmetic.gather import all_gather, positions
from ctl.replica.arithmetic.row_mask import Rows, current, examples
from ctl.replica.arithmetic.row_mask import current_mask as present
from ctl.replica.step.metrics import update as update_metric

__all__ = ["Rows", "all_gather", "current", "examples", "positions", "present", "update_metric"]
