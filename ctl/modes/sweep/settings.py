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
_MAX_RUNS = 10_000


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        name: the name of its folder, which depends on its values only.
        values: full name of a key -> value, as text for the command line.
        config: its complete config.
        fingerprint: a hash of the config: a run that is done is skipped only if it is unchanged.
    """

    name: str
    values: dict[str, str]
    config: Any
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
    command_line.load_config(config, changes)  # reports mistakes outside of the values
    if FROM_FILE in sweeps:
        if len(sweeps) > 1:
            raise UsageError(f"--sweep={FROM_FILE} cannot be combined with another --sweep.")
        combinations = _from_file(config)
    else:
        combinations = _product(dict(map(_parse, sweeps)), len(sweeps))
    runs: dict[str, SweepRun] = {}  # by fingerprint
    for values in combinations:
        complete = command_line.load_config(config, [*changes, *values.items()])
        run = SweepRun(name_values(values), values, complete, _fingerprint(complete))
        if run.fingerprint in runs:
            other = runs[run.fingerprint].name
            raise UsageError(f"{other} and {run.name} of the sweep are the same run: remove one.")
        runs[run.fingerprint] = run
    return list(runs.values())


def _parse(text: str) -> tuple[str, list[str]]:
    """Splits KEY=VALUE,VALUE at the commas outside of brackets and quotes."""
    key, equals, rest = text.partition("=")
    values = re.findall(r"""(?:[^,\[({'"]|\[[^]]*\]|\([^)]*\)|\{[^}]*\}|'[^']*'|"[^"]*")+""", rest)
    if not equals or not key or not values or ",".join(values) != rest:
        raise UsageError(
            f"--sweep is {text!r}, but must be KEY=VALUE,VALUE,..., such as "
            f"--sweep=optimizer.learning_rate=1e-3,3e-3, or --sweep={FROM_FILE}."
        )
    return key, values


def _product(values: Mapping[str, Sequence[str]], count: int) -> list[dict[str, str]]:
    if len(values) < count:
        raise UsageError("--sweep names a key twice: give all its values at once, KEY=VALUE,VALUE.")
    combinations = [
        dict(zip(values, combination, strict=True))
        for combination in itertools.islice(itertools.product(*values.values()), _MAX_RUNS + 1)
    ]
    if len(combinations) > _MAX_RUNS:
        raise UsageError(f"The sweep has more than {_MAX_RUNS} runs: reduce the values.")
    return combinations


def _from_file(config: str) -> list[dict[str, str]]:
    """Calls `get_sweep` of the config file.

    `get_sweep` returns {key: [value, ...]} for the product, or a list of one {key: value} per run.
    """
    path = pathlib.Path(config.partition(":")[0])
    function = getattr(import_file(path), FROM_FILE, None)
    if not callable(function):
        raise UsageError(
            f"{path} has no {FROM_FILE}(): define one that returns a dict of lists, such as "
            '{"optimizer.learning_rate": [1e-3, 3e-3]}.'
        )
    try:
        result = function()
    except Exception as error:
        raise UsageError(f"{FROM_FILE}() fails: {error_location(error, path)}") from error
    if isinstance(result, Mapping) and result:
        if all(isinstance(v, list | tuple) and v for v in result.values()):
            return _product({k: [_as_text(e) for e in v] for k, v in result.items()}, len(result))
    elif (
        isinstance(result, list | tuple) and result and all(isinstance(r, Mapping) for r in result)
    ):
        return [{key: _as_text(value) for key, value in each.items()} for each in result]
    raise UsageError(
        f"{FROM_FILE}() of {path} returned {type_name(result)}, but must return a dict of non-empty "
        "lists, whose product is run, or a list of dicts, one per run."
    )


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fingerprint(config: Any) -> str:
    content = json.dumps(overrides.flatten(config), sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()
