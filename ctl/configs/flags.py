"""The program's flags, and what is wrong with a command line, in one line. Loads no TensorFlow."""

from collections.abc import Sequence
import itertools
import re

from absl import flags

from ctl import errors
from ctl.configs import defaults, overrides
from ctl.errors import UsageError

MODES = (
    "train_and_eval",
    "train",
    "eval",
    "continuous_eval",
    "check",
    "aot_compile",
    "explain",
    "devices",
)
SWITCHES = {
    "fresh": "Start anew: move the run in the folder aside.",
    "allow_config_change": "Resume though the arithmetic changed.",
    "allow_partial_restore": "Resume from a checkpoint that fits in part.",
    "find_batch": "With --mode=aot_compile: find the largest batch that fits.",
    "help": "Show this.",
}
_CONFIG_KEY = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)
Changes = list[tuple[str, str | None]]


def parse(argv: Sequence[str]) -> tuple[flags.FlagValues, Changes]:
    """Parses the command line.

    Args:
        argv: the program's name, then its arguments.

    Returns:
        The flags, and the changes of the config: full name of a key -> its text, or None.

    Raises:
        UsageError: whatever is wrong with it, in one line.
    """
    values = _flags()
    try:
        arguments, changes = _split(values.read_flags_from_files(list(argv[1:]), force_gnu=False))
        rest = values([argv[0], *arguments])
    except UsageError:
        raise
    except flags.UnrecognizedFlagError as error:
        raise UsageError(_unknown_flag(error.flagname)) from None
    except (flags.Error, ValueError) as error:  # what absl says: a switch's value, a --flagfile
        told = str(error).removeprefix("ERROR:: ")
        raise UsageError(f"The command line cannot be read: {told}") from None
    if len(rest) > 1:
        raise UsageError(_stray(rest[1]))
    if not values.help:
        _check_flags(values)
    return values, changes


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    texts = {
        "config": (None, "The experiment, FILE.py; --config.KEY=VALUE changes a key of it."),
        "workdir": (None, "The run's folder; runs/<experiment> if not given."),
        "mode": (MODES[0], f"One of {', '.join(MODES)}."),
        "topology": (None, "With --mode=aot_compile: the TPU slices, such as v5e:2x2,v5p:2x2x1."),
    }
    for name, (default, text) in texts.items():
        flags.DEFINE_string(name, default, text, flag_values=values)
    for name, text in SWITCHES.items():
        flags.DEFINE_boolean(name, False, text, flag_values=values)
    return values


def _split(arguments: list[str]) -> tuple[list[str], Changes]:
    """Takes --config.KEY=VALUE and its other spellings out of the command line."""
    others: list[str] = []
    changes: Changes = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        found = _CONFIG_KEY.fullmatch(argument)
        if not found:
            others.append(argument)
            continue
        no, name, value = found.groups()
        if no and value is not None:
            raise UsageError(f"{argument} has a value: write --config.{name}={value}.")
        if no:
            value = "false"
        elif value is None and waiting and not re.match("-+[a-z]", waiting[0]):
            value = waiting.pop(0)
        changes.append((name, value))
    _check_given(others)
    return others, changes


def _check_given(arguments: list[str]) -> None:
    """Refuses what absl would take for a value, or let the last one win."""
    wanted = {"config": "FILE", "workdir": "FOLDER", "mode": "MODE", "topology": "SLICE"}
    for argument, following in itertools.pairwise([*arguments, "-"]):
        name, equals, value = argument.lstrip("-").partition("=")
        missing = not value if equals else following.startswith("-")
        if argument.startswith("-") and name in wanted and missing:
            raise UsageError(f"--{name} has no value: write --{name}={wanted[name]}.")
        if name in SWITCHES and equals and value.lower() not in ("true", "false", "1", "0"):
            raise UsageError(f"--{name} is {value!r}, want true or false.")
    if sum(re.match("--?config(=|$)", argument) is not None for argument in arguments) > 1:
        raise UsageError(
            "--config is given twice: give one, and change keys by --config.KEY=VALUE."
        )


def _check_flags(values: flags.FlagValues) -> None:
    if values.config is None and values.mode != "devices":
        raise UsageError("No experiment is named: add --config=FILE, such as experiments/mnist.py.")
    if values.mode not in MODES:
        raise UsageError(f"--mode is {values.mode!r}{errors.did_you_mean(values.mode, MODES)}")
    for name in ("fresh", "allow_config_change", "allow_partial_restore"):
        if values[name].value and not values.mode.startswith("train"):
            raise UsageError(f"--{name} has no effect with --mode={values.mode}: leave it out.")
    for name in ("topology", "find_batch"):
        if values[name].value and values.mode != "aot_compile":
            raise UsageError(f"--{name} has no effect but with --mode=aot_compile: leave it out.")
    if values.workdir is not None and values.mode in ("check", "devices"):
        raise UsageError(f"--workdir has no effect with --mode={values.mode}: leave it out.")


def _unknown_flag(name: str) -> str:
    known = {flag: f"--{flag}" for flag in _flags()}
    keys = overrides.flat(defaults.defaults())
    full = {key: f"--config.{key}" for key in keys}
    last = {key.rpartition(".")[-1]: f"--config.{key}" for key in reversed(keys)}
    return f"There is no flag --{name}{errors.did_you_mean(name, known, full, last)}"


def _stray(argument: str) -> str:
    key = argument.partition("=")[0]
    mend = "write --config=FILE --mode=MODE"
    if argument.endswith(".py"):
        mend = f"write --config={argument}"
    elif argument in MODES:
        mend = f"write --mode={argument}"
    elif key in overrides.flat(defaults.defaults()):
        mend = f"write --config.{argument}"
    return f"{argument!r} is not a flag: {mend}."
