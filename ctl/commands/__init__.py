"""Commands that are not modes of an experiment: `ctl NAME ...`, one file each.

Importing this module does not import TensorFlow.
"""

from collections.abc import Sequence
import importlib

# Name -> module of this package with a function main(arguments) that returns the exit code.
COMMANDS = {"report": "report"}


def run(arguments: Sequence[str]) -> int:
    """Runs a command.

    Args:
        arguments: the name of the command and its arguments.

    Raises:
        UsageError: the arguments are wrong; the message is one line.
    """
    module = importlib.import_module(f"ctl.commands.{COMMANDS[arguments[0]]}")
    code: int = module.main(arguments[1:])
    return code
