"""Makes the runs of a sweep: their values and names."""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
from typing import Any

from ctl.configs import flags as command_line
from ctl.configs import overrides
from ctl.configs.error_location import error_location
from ctl.configs.flags import Changes
from ctl.configs.loading import import_file
from ctl.errors import UsageError, type_name
from ctl.loop.workdir import name_values

FROM_FILE = "get_sweep"  # the value of --sweep that calls the function of this name


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        name: the name of its folder, which depends on its values only.
        values: full name of a key -> value, as text for the command line.
        fingerprint: a hash of its config: a run that is done is skipped only if it is unchanged.
    """

    name: str
    values: dict[str, str]
    fingerprint: str


def make_runs(config: str, changes: Changes, sweeps: Sequence[str]) -> list[SweepRun]:
    """Makes the runs of a sweep, and checks the config of each.

    Args:
        config: the flag --config.
        changes: the changes of the config that all runs have.
        sweeps: the values of --sweep: KEY=VALUE,VALUE,... each, or "get_sweep".

    Raises:
        UsageError: a key or a value is wrong, or two runs are the same.
    """
    if FROM_FILE not in sweeps:
        combinations = _multiply([_parse(text) for text in sweeps])
    elif len(sweeps) == 1:
        combinations = _read_file(config)
    else:
        raise UsageError(f"--sweep={FROM_FILE} cannot be combined with another --sweep.")
    runs: dict[str, SweepRun] = {}  # by fingerprint
    for values in combinations:
        run = make_run(config, changes, values, name_values(values))
        if runs.setdefault(run.fingerprint, run) is not run:
            other = runs[run.fingerprint].name
            raise UsageError(f"{other} and {run.name} of the sweep are the same run: remove one.")
    return list(runs.values())


def make_run(config: str, changes: Changes, values: dict[str, str], name: str) -> SweepRun:
    """Makes a run, and checks its config."""
    complete = command_line.load_config(config, [*changes, *values.items()])
    return SweepRun(name, values, fingerprint(complete))


def _parse(text: str) -> tuple[str, list[str]]:
    """Splits KEY=VALUE,VALUE at the commas outside of brackets and quotes."""
    key, equals, rest = text.partition("=")
    values = re.findall(r"""(?:[^,\[({'"]|\[[^]]*\]|\([^)]*\)|\{[^}]*\}|'[^']*'|"[^"]*")+""", rest)
    if not equals or not key or not values or ",".join(values) != rest:
        raise UsageError(
            f"--sweep is {text!r}, but must be KEY=VALUE,VALUE,..., such as "
            f"--sweep=optimizer.learning_rate=1e-3,3e-3, --sweep={FROM_FILE}, or --sweep=tpe:20."
        )
    return key, values


def _multiply(values: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, str]]:
    """Returns the combinations of keys with their values."""
    names, choices = [name for name, _ in values], [each for _, each in values]
    if len({*names}) < len(names):
        raise UsageError("--sweep names a key twice: give all its values at once, KEY=VALUE,VALUE.")
    return [dict(zip(names, each, strict=True)) for each in itertools.product(*choices)]


def call(config: str, *arguments: Any) -> Any:
    """Calls `get_sweep` of a config file."""
    path = pathlib.Path(config.partition(":")[0])
    function = getattr(import_file(path), FROM_FILE, None)
    if not callable(function):
        raise UsageError(
            f"{path} has no {FROM_FILE}(): define one that returns a dict of lists, such as "
            '{"optimizer.learning_rate": [1e-3, 3e-3]}.'
        )
    try:
        return function(*arguments)
    except Exception as error:
        raise UsageError(f"{FROM_FILE}() fails: {error_location(error, path)}") from error


def _read_file(config: str) -> list[dict[str, str]]:
    """Calls `get_sweep`: {key: [value, ...]} for the product, or a list of one {key: value} per run."""
    result = call(config)
    lists = list(result.values()) if isinstance(result, Mapping) else result
    expected = list | tuple if isinstance(result, Mapping) else Mapping
    is_valid = isinstance(lists, list | tuple) and lists
    if not is_valid or not all(isinstance(each, expected) and each for each in lists):
        raise UsageError(
            f"{FROM_FILE}() of {config} returned {type_name(result)}, but must return a dict of "
            "non-empty lists, whose product is run, or a list of dicts, one per run."
        )
    if isinstance(result, Mapping):
        return _multiply([(k, [as_text(e) for e in v]) for k, v in result.items()])
    return [{key: as_text(value) for key, value in each.items()} for each in result]


def as_text(value: Any) -> str:
    """Returns a value as the command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def fingerprint(config: Any) -> str:
    """Returns a hash of a config."""
    content = json.dumps(overrides.flatten(config), sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()
