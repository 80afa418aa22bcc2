"""What a person reads on the screen, a line at a time. Loads no TensorFlow."""

import os
import sys


def say(line: str) -> None:
    """Prints a line. A reader that has gone, as `| tee` after Ctrl-C, does not end the run."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open, for all lines to come
