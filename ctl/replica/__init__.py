"""The arithmetic of a training step on one replica. Imports nothing of the other rooms."""

from ctl.replica.row_mask import Examples, current, examples, present

__all__ = ["Examples", "current", "examples", "present"]
