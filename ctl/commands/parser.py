"""Parses the arguments of a command."""

import argparse
from typing import NoReturn

from ctl.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a mistake in one line.

        parser = Parser("ctl report", "ctl report RUN...", "One HTML page about a run.")

    Args:
        prog: the command, such as "ctl report".
        form: the usage, for the message about a mistake.
        description: the text of `--help`.
    """

    def __init__(self, prog: str, form: str, description: str):
        super().__init__(prog=prog, description=description)
        self._form = form

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(f"{self.prog}: {message}: write {self._form}.")
