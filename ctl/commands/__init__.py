"""The commands `ctl NAME ...` that are not modes of an experiment, one file each."""

from collections.abc import Sequence
import importlib

# Name -> what the command does. The module of that name has a function main(arguments), which returns
# the exit code.
COMMANDS = {
    "new": "create a small project with a trainer, a config, tests and CI",
    "diff": "list what differs between two runs, or between two checkpoints",
    "report": "write an HTML page about one run, or a comparison of several",
    "keys": "list or search the config keys",
}


def run(arguments: Sequence[str]) -> int:
    """Runs a command.

    Args:
        arguments: the name of the command and its arguments.

    Raises:
        UsageError: the arguments are wrong; the message is one line.
    """
    module = importlib.import_module(f"ctl.commands.{arguments[0]}")
    code: int = module.main(arguments[1:])
    return code
