"""Writes a trained trainer in formats that need neither ctl nor the trainer's code."""

from collections.abc import Mapping
import ctypes
import importlib.metadata
import json
import os
import pathlib
import shutil
from typing import Any

import tensorflow as tf

import ctl
from ctl.errors import UsageError
from ctl.loop import inference
from ctl.loop.checkpoints.files import flush
from ctl.loop.exports import formats
from ctl.trainer import StandardTrainer

DESCRIPTION = "export.json"
_PYTHON_OPS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>


def write_version(
    trainer: StandardTrainer, folder: pathlib.Path, notes: Mapping[str, Any]
) -> pathlib.Path:
    """Writes one version, completely or not at all.

        <folder>/<step>/saved_model.pb, model.keras, ...    the files of the trainer's formats
                        export.json                         signatures, versions and notes

    Args:
        trainer: the result of `inference.restore_trainer`.
        folder: the folder of all versions; each is a folder whose name is the step, as TensorFlow
            Serving requires.
        notes: entries to add to the description.

    Returns:
        The folder of the version.

    Raises:
        UsageError: the model cannot be exported.
    """
    writers = formats.select(trainer.export_formats)
    step = int(trainer.global_step.numpy())
    version, temporary = folder / str(step), folder / f".{step}.new"
    signatures = {}
    for name, function in trainer.export_signatures().items():
        signatures[name] = _name_outputs(inference.make_function(trainer, function))
        _check_operations(name, signatures[name])
    _recover(version)
    temporary.mkdir(parents=True)
    for write in writers:
        write(trainer, signatures, temporary)
    described = {name: _describe(signature) for name, signature in signatures.items()}
    description = {"step": step, **notes, "signatures": described, "versions": _versions()}
    (temporary / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
    _publish(temporary, version)
    return version


def _name_outputs(function: Any) -> Any:
    """Returns the concrete function with a dict of outputs, as signatures require."""

    def named(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        outputs = function(features)
        if isinstance(outputs, Mapping):
            flat = dict(outputs)
        elif isinstance(outputs, list | tuple):
            flat = {f"output_{index}": output for index, output in enumerate(outputs)}
        else:
            flat = {"outputs": outputs}
        if not all(tf.is_tensor(value) for value in flat.values()):
            raise UsageError(
                "serve returned nested outputs, but an exported model returns a tensor, or a flat dict "
                "or list of tensors: override serve(features)."
            )
        return {name: tf.identity(value) for name, value in flat.items()}

    return tf.function(
        named, input_signature=function.input_signature, autograph=False
    ).get_concrete_function()


def _check_operations(name: str, signature: Any) -> None:
    """Raises UsageError for Python functions, which exist in this process only."""
    graph = signature.graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    for node in nodes:
        if node.op in _PYTHON_OPS:
            raise UsageError(
                f"The signature {name} calls Python (tf.py_function or tf.numpy_function, {node.name}), "
                "which an exported model cannot contain: use TensorFlow operations, or override "
                "serve(features)."
            )


def _describe(signature: Any) -> dict[str, Any]:
    inputs = signature.structured_input_signature[0][0]
    outputs = signature.structured_outputs
    return {
        kind: {k: {"dtype": v.dtype.name, "shape": v.shape.as_list()} for k, v in values.items()}
        for kind, values in (("inputs", inputs), ("outputs", outputs))
    }


def _versions() -> dict[str, str]:
    tf_keras = importlib.metadata.version("tf_keras")
    return {"tensorflow": tf.__version__, "ctl": ctl.__version__, "tf_keras": tf_keras}


def _publish(temporary: pathlib.Path, version: pathlib.Path) -> None:
    """Renames a complete version; a server that watches the folder never sees a part of one."""
    for path in sorted(temporary.rglob("*"), reverse=True):
        flush(path)
    old = version.with_name(f".{version.name}.old")
    if version.exists() and _exchange(temporary, version):
        temporary.rename(old)  # it is now the earlier version
    elif version.exists():  # a folder with files cannot be replaced
        version.rename(old)
        temporary.rename(version)
    else:
        temporary.rename(version)
    flush(version.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Exchanges two folders atomically; returns False if the system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # of Linux
    if function is None:
        return False
    paths = [os.fsencode(path.absolute()) for path in (one, other)]
    return bool(function(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)


def _recover(version: pathlib.Path) -> None:
    """Restores the version if a process was killed between its two renames, and cleans up."""
    old = version.with_name(f".{version.name}.old")
    if old.exists() and not version.exists():
        old.rename(version)
    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(version.with_name(f".{version.name}.new"), ignore_errors=True)
