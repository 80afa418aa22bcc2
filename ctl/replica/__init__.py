"""The arithmetic of a training step on one replica."""

from ctl.replica.row_mask import Examples, current, current_mask, examples

present = current_mask  # the public name

__all__ = ["Examples", "current", "examples", "present"]
