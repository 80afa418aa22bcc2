"""Parses the command line: the flags and the changes of the config. Reports a mistake in one line.

absl parses the flags, but `ml_collections.config_flags` is not used: by default it looks for changes of
the config in sys.argv instead of the arguments that are parsed, and it runs the config file during
parsing, before an unknown flag is reported. An error in the file or an unknown key then ends the program
with a traceback and exit code 1, where ctl prints one line and exits with 2.
"""

from collections.abc import Iterable, Sequence
import itertools
import re

from absl import flags
from ml_collections import config_dict

from ctl import errors
from ctl.configs import keys, loading, overrides, validation
from ctl.configs.modes import MODES
from ctl.errors import UsageError

DEFAULT_MODE = "train_and_eval"
_OWN = [flag for mode in MODES.values() for flag in mode.own]
SWITCHES = {
    "fresh": "start from scratch: move the existing run in the workdir aside",
    "allow_config_change": "resume although the config changes the computed updates",
    "allow_partial_restore": "resume from a checkpoint that matches the variables only in part",
    "dry_run": "train, evaluate and save for two steps, and leave nothing behind",
    "help": "print this text",
    "version": "print the versions of ctl and TensorFlow",
    **{flag.name: flag.text for flag in _OWN if not flag.example},
}
# Flag -> an example of its value, and what it does.
VALUES = {
    "config": ("FILE", "the experiment; --config.KEY=VALUE changes one of its keys"),
    "mode": ("MODE", "one of the modes"),
    "workdir": ("FOLDER", "the folder of the run, or its URL; runs/<experiment> by default"),
    "checkpoint": ("best", "with eval and export: best, a step, or a path; by default the newest"),
    "sweep": (
        "optimizer.learning_rate=1e-3,3e-3",
        "one run per value; repeat it for the product; get_sweep: the values of the config file; "
        "tpe:20 or random:20: 20 runs whose values Optuna chooses",
    ),
    "sweep_parallel": ("2", "the number of runs of a sweep at the same time; 1 by default"),
    **{flag.name: (flag.example, flag.text) for flag in _OWN if flag.example},
}
_CONFIG_KEY = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)
_FLAG = re.compile("(-+)([^=]+)(.*)", re.DOTALL)
_NAMES = "ctl.configs.unknown_names"
TWO_CONFIGS = "--config is given twice: name one file, and change its keys by --config.KEY=VALUE."
Changes = list[tuple[str, str | None]]


def parse(argv: Sequence[str], commands: Iterable[str] = ()) -> tuple[flags.FlagValues, Changes]:
    """Parses the command line.

    Args:
        argv: the program's name and its arguments.
        commands: the names of the commands, for messages.

    Returns:
        The flags, and the changes of the config as pairs of a key's full name and its new value as
        text, or None for `--config.KEY` without a value.

    Raises:
        UsageError: the command line is wrong; the message is one line.
    """
    values = _define_flags()
    values["help"].value = len(argv) == 1
    try:
        arguments = values.read_flags_from_files(list(argv[1:]), force_gnu=False)
        arguments, changes = _split_changes([use_underscores(argument) for argument in arguments])
        _check_arguments(arguments)
        positional = _take_positional(values, values([argv[0], *arguments])[1:])
    except UsageError:
        raise
    except flags.UnrecognizedFlagError as error:
        describe = loading.load(f"{_NAMES}:describe_flag")
        raise UsageError(describe(error.flagname, error.flagvalue)) from None
    except (flags.Error, ValueError) as error:  # raised by absl, such as for a missing --flagfile
        message = str(error).removeprefix("ERROR:: ")
        raise UsageError(f"The command line cannot be read: {message}") from None
    if positional:
        raise UsageError(loading.load(f"{_NAMES}:describe_argument")(positional[0], commands))
    if not (values.help or values.version):
        _check_flags(values)
    return values, changes


def use_underscores(argument: str) -> str:
    """Returns an argument with underscores for the dashes in the name of a flag or a config key.

    Names that the experiment chooses, such as those of losses, are not changed.
    """
    flag = _FLAG.fullmatch(argument)
    if not flag or "-" not in flag[2]:
        return argument
    name = flag[2].replace("-", "_")
    _, dot, key = name.partition(".")
    return argument if dot and key not in keys.BY_NAME else f"{flag[1]}{name}{flag[3]}"


def load_config(flag: str | None, changes: Changes) -> config_dict.ConfigDict:
    """Loads the config, changes it, and validates it.

    Args:
        flag: the value of --config; None for the default config, whose trainer need not be set.
        changes: the changes of the command line.

    Raises:
        UsageError: the config is wrong, or a change is, which is reported before the config file runs.
    """
    known = keys.defaults()
    for name, text in changes:
        if flag is None or not name.startswith("model."):  # the file defines the keys of `model`
            overrides.change(known, name, text)
    keys.check_values(overrides.flatten(known))
    if flag is None:
        keys.check_rules(overrides.flatten({"runtime": known.runtime, "train": known.train}))
        return known
    config = loading.load_config(flag)
    for name, text in changes:
        overrides.change(config, name, text)
    validation.check_config(config)
    config.data.dir = loading.find_data(config.data.dir, flag.partition(":")[0])
    return config


def describe_flags() -> dict[str, str]:
    """Returns each flag with an example of its value -> what it does."""
    texts = {f"--{name}={example}": text for name, (example, text) in VALUES.items()}
    return texts | {f"--{name}": text for name, text in SWITCHES.items()}


def _take_positional(values: flags.FlagValues, positional: list[str]) -> list[str]:
    """Sets --mode and --config from `MODE CONFIG` or `CONFIG`; returns the other arguments."""
    rest, has_mode = [], bool(values["mode"].present)
    for argument in positional:
        if argument in MODES and not has_mode:
            values["mode"].value, has_mode = argument, True
        elif re.search(r"\.py(:|$)", argument) and values.config is None:
            values["config"].value = argument
        else:
            rest.append(argument)
    return rest


def _define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    for name, (_, text) in VALUES.items():
        default = DEFAULT_MODE if name == "mode" else None
        define = flags.DEFINE_multi_string if name == "sweep" else flags.DEFINE_string
        define(name, default, text, flag_values=values)
    for name, text in SWITCHES.items():
        short = "h" if name == "help" else None
        flags.DEFINE_boolean(name, False, text, flag_values=values, short_name=short)
    return values


def _split_changes(arguments: list[str]) -> tuple[list[str], Changes]:
    """Separates --config.KEY=VALUE, --config.KEY VALUE and --noconfig.KEY from other arguments."""
    others: list[str] = []
    changes: Changes = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        match = _CONFIG_KEY.fullmatch(argument)
        if not match:
            others.append(argument)
            continue
        negated, name, value = match.groups()
        if negated and value is not None:
            raise UsageError(f"{argument} has a value: write --config.{name}={value}.")
        if negated:
            value = "false"
        elif value is None and remaining and not re.match("-+[a-z]", remaining[0]):
            value = remaining.pop(0)
        changes.append((name, value))
    return others, changes


def _check_arguments(arguments: list[str]) -> None:
    """Rejects a repeated --config, and flags without a value, for which absl takes the next flag."""
    for argument, following in itertools.pairwise([*arguments, "-"]):
        name, equals, value = argument.lstrip("-").partition("=")
        missing = not value if equals else following.startswith("-")
        if argument.startswith("-") and name in VALUES and missing:
            raise UsageError(f"--{name} has no value: write --{name}={VALUES[name][0]}.")
        if name in SWITCHES and equals and value.lower() not in ("true", "false", "1", "0"):
            raise UsageError(f"--{name} is {value!r}, but must be true or false.")
    if sum(re.match("--?config(=|$)", argument) is not None for argument in arguments) > 1:
        raise UsageError(TWO_CONFIGS)


def _check_flags(values: flags.FlagValues) -> None:
    if errors.is_url(values.workdir or ""):
        _check_url(values)
    if values.config is None and values.mode != "devices":
        raise UsageError(
            "No experiment is named: add its file, such as experiments/mnist.py; see --help."
        )
    if values.sweep_parallel is not None and values.sweep is None:
        raise UsageError("--sweep_parallel has no effect without --sweep: remove it.")
    if values.mode not in MODES:
        raise UsageError(
            f"--mode is {values.mode!r}{errors.did_you_mean(values.mode, list(MODES))}"
        )
    for own in MODES[values.mode].own:
        own.check(values[own.name].value or "")
    for flag in dict.fromkeys(itertools.chain(*(mode.flags for mode in MODES.values()))):
        if values[flag].value in (None, False) or flag in MODES[values.mode].flags:
            continue
        modes = [name for name, mode in MODES.items() if flag in mode.flags]
        condition = (
            f"without --mode={modes[0]}" if len(modes) == 1 else f"with --mode={values.mode}"
        )
        raise UsageError(f"--{flag} has no effect {condition}: remove it.")


def _check_url(values: flags.FlagValues) -> None:
    """Raises UsageError for what only works in a folder of a file system."""
    mode = MODES.get(values.mode)
    if values.fresh:
        raise UsageError(
            f"--fresh does not move objects: name another --workdir than {values.workdir}, or move that "
            "folder by the tools of the object store."
        )
    if values.sweep is not None or values.dry_run or (mode and not mode.workdir):
        what = f"--mode={values.mode}" if mode and not mode.workdir else "a sweep or a dry run"
        errors.check_local(f"The --workdir of {what}", values.workdir)
