"""Compares the processes of a run: they must have the same config, code, data and variables.

Otherwise they train on, with other updates than those of any of the configs, or wait for each other.
"""

from collections.abc import Iterator, Mapping
import contextlib
import importlib.metadata
import json
import logging
import os
import pathlib
import sys
import sysconfig
from typing import Any
import zlib

from ml_collections import config_dict
import numpy as np
import tensorflow as tf
import tf_keras

from ctl.configs import overrides
from ctl.data.distribution import disable_autotune
from ctl.data.kinds import Kind
from ctl.data.source import RowSource, Source
from ctl.errors import UsageError
from ctl.hardware.collectives import ProcessGroup
from ctl.replica.step.inner_loop import loop_of
from ctl.trainer import StandardTrainer
from ctl.version import find_version

# What belongs to the machine: each may have its own disk and devices.
_OF_MACHINES = ("data.dir", "data.cache", "data.prefetch", "runtime.devices", "train.local_dir")
_MAX_SHOWN = 3  # differences in a message
_SAMPLE = 16  # examples of each source
_PACKAGES = ("tf-models-official", "numpy")


def compare(processes: ProcessGroup, what: str, facts: Mapping[str, Any]) -> None:
    """Collective: checks that all processes of a run have the same facts.

    Args:
        processes: the processes.
        what: what the facts describe, for the message.
        facts: name -> a value of JSON types.

    Raises:
        UsageError: they differ; in every process.
    """
    text = json.dumps(facts, sort_keys=True, default=str)
    if len({checksum for (checksum,) in processes.gather([_checksum(text)])}) == 1:
        return
    first, *others = map(json.loads, processes.gather_text(text))
    for (name, _), other in zip(processes.members[1:], others, strict=True):
        absent = "absent"
        pairs = [
            (key, first.get(key, absent), other.get(key, absent)) for key in {**first, **other}
        ]
        shown = [f"{key}: {_show(one)} -> {_show(two)}" for key, one, two in pairs if one != two]
        if shown:
            more = f"; and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
            raise UsageError(
                f"{name} was started with {what} ({'; '.join(shown[:_MAX_SHOWN])}{more}): start "
                f"all processes with that of {processes.members[0][0]}."
            )


def compare_programs(
    processes: ProcessGroup,
    config: config_dict.ConfigDict,
    trainer: type[StandardTrainer],
) -> None:
    """Collective: compares the configs, the versions of packages and the code of the processes."""
    if processes.is_single:
        return
    values = overrides.flatten(config).items()
    own = {
        k: v for k, v in values if k not in _OF_MACHINES and not k.startswith("runtime.cluster.")
    }
    compare(processes, "another config", own)
    compare(processes, "other versions", versions())
    compare(processes, "other code", _code(trainer))


@contextlib.contextmanager
def comparing_variables(processes: ProcessGroup) -> Iterator[None]:
    """Compares each variable before it is created; TensorFlow would wait, or fail without a cause."""

    def create(next_creator: Any, **arguments: Any) -> Any:
        if tf.executing_eagerly():
            name, shape = arguments.get("name") or "a variable", arguments.get("shape")
            compare(processes, "another model", {str(name): str(shape)})
        return next_creator(**arguments)

    with contextlib.nullcontext() if processes.is_single else tf.variable_creator_scope(create):
        yield


def compare_trainers(processes: ProcessGroup, trainer: StandardTrainer) -> None:
    """Collective: compares the data, of which it reads a few examples, and the variables."""
    pipeline = loop_of(trainer).pipeline
    if not processes.is_single:
        data: dict[str, Any] = dict(pipeline.descriptions)
        for split in pipeline.descriptions:
            data[f"values of {split}"] = _sample(pipeline.data(split))
        compare(processes, "another copy of the data", overrides.flatten(data))
        saved = loop_of(trainer).step.attributes.state()
        compare(
            processes, "another model", {f"{i} {v.name}": str(v.shape) for i, v in enumerate(saved)}
        )


def versions() -> dict[str, str]:
    """Returns the versions of ctl and of the packages that determine its results."""
    # TensorFlow's package has another name on each kind of hardware: tensorflow_cpu, tensorflow_tpu.
    # The wheel of ctl has a copy of tf_keras, which is no package of its own.
    found = {
        "ctl": find_version(), "tensorflow": tf.__version__, "tf_keras": tf_keras.__version__
    }  # fmt: skip
    for name in _PACKAGES:
        try:
            found.setdefault(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            logging.getLogger("ctl").debug("%s is not installed as a package", name)
    return found


def _code(trainer: type[StandardTrainer]) -> dict[str, str]:
    """Returns file -> checksum of the imported modules of the project, which are not installed."""
    own, paths = trainer.__module__.partition(".")[0], sysconfig.get_paths()
    folder = os.path.dirname(getattr(sys.modules.get(trainer.__module__), "__file__", None) or ".")
    installed = [paths["stdlib"], paths["platstdlib"], os.path.dirname(os.path.dirname(__file__))]
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
