"""The commands `ctl NAME ...` that are not modes of an experiment.

A new command is a row of `COMMANDS` and a module of that name.
"""

import argparse
from collections.abc import Sequence
import importlib
from typing import NoReturn

from ctl.errors import UsageError

# Name -> what the command does. The module of that name has a function main(arguments), which returns
# the exit code.
COMMANDS = {
    "new": "create a project of images, segmentation, text, tables or a GAN, with tests and CI",
    "diff": "list what differs between two runs, or between two checkpoints",
    "report": "write an HTML page about one run, or a comparison of several",
    "keys": "list or search the config keys",
    "convert": "convert record files, to read them in random order",
    "launch": "start and supervise the processes of a run on this machine",
}


def run(arguments: Sequence[str]) -> int:
    """Runs a command.

    Args:
        arguments: the name of the command and its arguments.

    Raises:
        UsageError: the arguments are wrong; the message is one line.
    """
    module = importlib.import_module(f"ctl.commands.{arguments[0]}")
    return module.main(arguments[1:])


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line.

        parser = Parser("ctl report", "ctl report RUN...", "One HTML page about a run.")

    Args:
        prog: the command, such as "ctl report".
        form: the usage, for the message about a mistake.
        text: its first line is the text of `--help`.
    """

    def __init__(self, prog: str, form: str, text: str | None):
        super().__init__(prog=prog, description=str(text).partition("\n")[0])
        self._form = form

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(f"{self.prog}: {message}: write {self._form}.")
