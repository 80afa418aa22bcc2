"""ctl launch: starts and supervises the processes of a run; the same as `python -m ctl.launch`."""

from ctl.launch import main

__all__ = ["main"]
