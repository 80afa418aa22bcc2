"""ctl launch: starts and supervises the processes of a run; the same as `python -m ctl.launch`."""

from collections.abc import Sequence

from ctl import launch


def main(arguments: Sequence[str]) -> int:
    """Runs the launcher with the arguments of the command; returns the exit code."""
    return launch.main(["ctl launch", *arguments])
