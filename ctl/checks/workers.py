"""Compares the processes of a run: they must have the same config, code, data and variables.

Otherwise they train on, with other updates than those of any of the configs, or wait for each other.
"""

from collections.abc import Iterable, Iterator, Mapping
import contextlib
import functools
import json
import os
import pathlib
import re
import sys
import sysconfig
from typing import Any
import zlib

from ml_collections import config_dict
import numpy as np
import tensorflow as tf

from ctl.configs import overrides
from ctl.configs.options import TrainerOptions
from ctl.data.distribution import disable_autotune
from ctl.data.input_pipeline import InputPipeline
from ctl.data.kinds import Kind
from ctl.data.source import RowSource, Source
from ctl.errors import UsageError
from ctl.hardware import strategies
from ctl.hardware.collectives import ProcessGroup
from ctl.version import FOLDER, versions

# What belongs to the machine: each may have its own disk and devices.
_OF_MACHINES = ("data.dir", "data.cache", "data.prefetch", "runtime.devices", "train.local_dir")
_CODE, _ABSENT = "other code", "absent"
_MAX_SHOWN = 3  # differences in a message
_SAMPLE = 16  # examples of each source


def compare(processes: ProcessGroup, what: str, facts: Mapping[str, Any]) -> None:
    """Collective: checks that all processes of a run have the same facts.

    Args:
        processes: the processes.
        what: what the facts describe, for the message.
        facts: name -> a value of JSON types.

    Raises:
        UsageError: they differ; in every process.
    """
    text = json.dumps(facts, sort_keys=True, default=_text)
    if len({checksum for (checksum,) in processes.gather([_checksum(text)])}) == 1:
        return
    first, *others = map(json.loads, processes.gather_text(text))
    for (name, _), other in zip(processes.members[1:], others, strict=True):
        # A process may have imported fewer modules than another one, such as those of the chief.
        keys = [k for k in {**first, **other} if what != _CODE or (k in first and k in other)]
        pairs = [(key, first.get(key, _ABSENT), other.get(key, _ABSENT)) for key in keys]
        shown = [f"{key}: {_show(one)} -> {_show(two)}" for key, one, two in pairs if one != two]
        if shown:
            more = f"; and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
            raise UsageError(
                f"{name} was started with {what} ({'; '.join(shown[:_MAX_SHOWN])}{more}): start "
                f"all processes with that of {processes.members[0][0]}."
            )


def _text(value: Any) -> str:
    """Returns the text of any value, without the address of an object."""
    return re.sub(r" at 0x\w+", "", str(value))


@functools.lru_cache(maxsize=1)  # its functions are traced once
def processes_of(strategy: tf.distribute.Strategy) -> ProcessGroup:
    """Returns the processes of a strategy."""
    return ProcessGroup(strategies.of_strategy(strategy))


def compare_configs(processes: ProcessGroup, config: config_dict.ConfigDict) -> None:
    """Collective: compares the configs of the processes."""
    values = overrides.flatten(config).items()
    own = {k: v for k, v in values if not k.startswith("runtime.cluster.")}
    _compare_values(processes, "another config", own)


def compare_programs(
    processes: ProcessGroup, options: TrainerOptions, global_batch_size: int, function: Any
) -> None:
    """Collective: compares the options, the versions of packages and the code of the processes.

    Args:
        processes: the processes.
        options: the options of the step.
        global_batch_size: its number of rows.
        function: the class of the trainer, or the loss function.
    """
    values = {**options.by_key(), "global_batch_size": global_batch_size}
    _compare_values(processes, "other options", values)
    compare(processes, "other versions", versions())
    compare(processes, _CODE, _code(function))


def _compare_values(processes: ProcessGroup, what: str, values: Mapping[str, Any]) -> None:
    compare(processes, what, {k: v for k, v in values.items() if k not in _OF_MACHINES})


@contextlib.contextmanager
def compare_new_variables(processes: ProcessGroup) -> Iterator[None]:
    """Compares each variable before it is created; TensorFlow would wait, or fail without a cause."""

    def create(next_creator: Any, **arguments: Any) -> Any:
        if tf.executing_eagerly():
            name, shape = arguments.get("name") or "a variable", arguments.get("shape")
            compare(processes, "another model", {str(name): str(shape)})
        return next_creator(**arguments)

    with tf.variable_creator_scope(create):
        yield


def compare_models(processes: ProcessGroup, variables: Iterable[tf.Variable]) -> None:
    """Collective: compares the names and shapes of all variables of a step."""
    shapes = {f"{i} {v.name}": str(v.shape) for i, v in enumerate(variables)}
    compare(processes, "another model", shapes)


def compare_data(processes: ProcessGroup, data: InputPipeline | Iterable[str]) -> None:
    """Collective: compares the data, of which it reads a few examples, or its descriptions."""
    facts: dict[str, Any] = {}
    if isinstance(data, InputPipeline):
        facts |= data.descriptions
        facts |= {f"values of {split}": _sample(data.data(split)) for split in data.descriptions}
    else:
        facts |= {f"data {i}": description for i, description in enumerate(data)}
    compare(processes, "another copy of the data", overrides.flatten(facts))


def _code(function: Any) -> dict[str, str]:
    """Returns file -> checksum of the imported modules of the project, which are not installed."""
    module = getattr(function, "__module__", None) or ""
    own, paths = module.partition(".")[0], sysconfig.get_paths()
    folder = os.path.dirname(getattr(sys.modules.get(module), "__file__", None) or ".")
    installed = [paths["stdlib"], paths["platstdlib"], str(FOLDER)]
    code = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        parts = pathlib.Path(file).parts
        is_installed = {"site-packages", "dist-packages"} & {*parts} or any(
            file.startswith(path + os.sep) for path in installed
        )
        is_own = name.partition(".")[0] == own or not is_installed
        if file.endswith(".py") and is_own and not name.startswith("__autograph_generated"):
            with contextlib.suppress(OSError):
                code[os.path.relpath(file, folder)] = (
                    f"{_checksum(pathlib.Path(file).read_bytes()):08x}"
                )
    return code


def _sample(data: Kind) -> Any:
    """Returns a checksum of a few examples; None if each process has examples of its own."""
    if data.selects_rows or data.is_split_by_strategy:
        return None
    if data.source is None:
        examples = disable_autotune(data.dataset.take(_SAMPLE))
        return f"{_checksum([_values(example) for example in examples]):08x}"
    leaves, found = [data.source], []
    while leaves:
        source = leaves.pop()
        leaves += source.inner_sources
        if not source.inner_sources:
            found.append(_values(_read(source)))
    return f"{_checksum(found):08x}"


def _read(source: Source) -> Any:
    count = len(source)
    indexes = tf.constant(np.unique(np.linspace(0, count - 1, _SAMPLE).astype(np.int64)))
    # Before it is parsed: machines may decode an image by other instructions.
    return source.read(indexes) if isinstance(source, RowSource) else source.gather(indexes)


def _values(structure: Any) -> list[Any]:
    arrays = [np.asarray(value) for value in tf.nest.flatten(structure, expand_composites=True)]
    return [a.tolist() if a.dtype == object else (a.shape, a.tobytes()) for a in arrays]


def _checksum(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


def _show(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
