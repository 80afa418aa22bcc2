"""The arguments of a command. Importing this module does not import TensorFlow."""

import argparse
from typing import NoReturn

from ctl.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line.

    parser = Parser("ctl report", "ctl report RUN...", "One HTML page about a run.")
    """

    def __init__(self, prog: str, form: str, description: str):
        """Makes a parser without arguments.

        Args:
            prog: the command, such as "ctl report".
            form: how to write it, for the message about a mistake.
            description: what it does, for `--help`.
        """
        super().__init__(prog=prog, description=description)
        self._form = form

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        raise UsageError(f"{self.prog}: {message}: write {self._form}.")
