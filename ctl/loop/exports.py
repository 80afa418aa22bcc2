"""Exports trained models in formats that need neither ctl nor the trainer's code.

A new format is a function and a row of `FORMATS`. A trainer names its formats in `export_formats`.
"""

from collections.abc import Callable, Iterable, Mapping
import ctypes
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import tensorflow as tf
import tf_keras

from ctl.built.inner_loop import step_of
from ctl.errors import UsageError, did_you_mean
from ctl.loop import inference
from ctl.loop.actions import best_checkpoint
from ctl.loop.actions.action import LoopAction
from ctl.loop.checkpoints.files import report_write_errors
from ctl.loop.disk import find_reason, flush, make_folder
from ctl.loop.workdir import Workdir
from ctl.trainer import StandardTrainer
from ctl.version import find_version


class ExportModel(LoopAction):
    """Writes the best or the last checkpoint in the formats of the trainer.

        ExportModel("best", workdir=Workdir("runs/mine"))

    Args:
        which: "best" or "last".
        workdir: has the folder of the versions, and the best checkpoints.
    """

    everywhere = True  # does nothing at a boundary; `end` is called everywhere

    def __init__(self, which: str, *, workdir: Workdir):
        self._which = which
        self._workdir = workdir
        self._exported: dict[str, str] = {}

    @classmethod
    def from_config(cls, config: Any, workdir: Workdir) -> "ExportModel":
        """Makes the action of a config; see registry.py."""
        return cls(config.train.export, workdir=workdir)

    def end(self) -> None:
        """Exports the model in the chief; the other processes wait for it at the end of the run."""
        controller = self.controller
        if not controller.is_chief:
            return
        assert controller.checkpoints and controller.trained_step is not None
        path = controller.checkpoints.path(controller.trained_step)
        if self._which == "best":
            path = best_checkpoint.find_best(self._workdir.best)
        step, self._exported = export_checkpoint(
            type(controller.trainer),
            controller.trainer.options,
            path,
            self._workdir.exports,
            global_batch_size=controller.trainer.global_batch_size,
        )
        controller.reporter.record("export", step, **self._exported)
        controller.reporter.print_line(f"Exported {path} to {self._exported['path']}.")

    def result(self) -> dict[str, Any]:
        """Returns the path of the model, its checkpoint and the kind of its weights."""
        return {"export": self._exported} if self._exported else {}


def export_checkpoint(
    trainer_class: type, options: Any, path: str, folder: pathlib.Path, *, global_batch_size: int
) -> tuple[int, dict[str, str]]:
    """Restores a checkpoint for inference and exports it, with averaged weights if there are any.

    Args:
        trainer_class: the class that was trained.
        options: the options of the training.
        path: the checkpoint.
        folder: the folder of the versions.
        global_batch_size: the batch size of the training.

    Returns:
        The step; and the path of the version, its checkpoint, and the kind of its weights.

    Raises:
        UsageError: the model cannot be exported.
        Failure: it cannot be written.
    """
    trainer = inference.restore_trainer(
        trainer_class, options, path, global_batch_size=global_batch_size
    )
    parts = step_of(trainer).parts
    weights = next((part.evaluated for part in parts if part.evaluated), "plain")
    notes = {"checkpoint": path, "weights": weights}
    with report_write_errors(str(folder), pathlib.Path(path).parent):
        make_folder(folder)
        version = write_version(trainer, folder, notes)
    return int(trainer.global_step.numpy()), {"path": str(version), **notes}


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
    for name in trainer.export_formats:
        if name not in FORMATS:
            raise UsageError(f"export_formats contains {name!r}{did_you_mean(name, list(FORMATS))}")
    step = int(trainer.global_step.numpy())
    version, temporary = folder / str(step), folder / f".{step}.new"
    signatures = {}
    for name, function in trainer.export_signatures().items():
        signatures[name] = _name_outputs(inference.make_function(trainer, function))
        _check_operations(name, signatures[name])
    _recover(version)
    temporary.mkdir(parents=True)
    for name in trainer.export_formats:
        FORMATS[name](trainer, signatures, temporary)
    described = {name: _describe(signature) for name, signature in signatures.items()}
    versions = dict(tensorflow=tf.__version__, ctl=find_version(), tf_keras=tf_keras.__version__)
    description = {"step": step, **notes, "signatures": described, "versions": versions}
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


def _publish(temporary: pathlib.Path, version: pathlib.Path) -> None:
    """Renames a complete version; a server that watches the folder never sees a part of one."""
    for path in (*sorted(temporary.rglob("*"), reverse=True), temporary):
        flush(path)
    old = version.with_name(f".{version.name}.old")
    is_exchanged = version.exists() and _exchange(temporary, version)
    if version.exists() and not is_exchanged:  # a folder with files cannot be replaced
        version.rename(old)
    # After an exchange it is the earlier version.
    temporary.rename(old if is_exchanged else version)
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


# Writes files into a folder. Its arguments are the trainer, which is restored for inference, the
# concrete function of each signature by name, and the folder.
WriteFormat = Callable[[StandardTrainer, Mapping[str, Any], pathlib.Path], None]


def _write_saved_model(
    trainer: StandardTrainer, signatures: Mapping[str, Any], folder: pathlib.Path
) -> None:
    """Writes saved_model.pb, variables/ and assets/."""
    module = tf.Module()
    module.signatures_by_name = signatures
    module.resources = _find_resources(trainer, signatures.values())
    try:
        tf.saved_model.save(module, str(folder), signatures=signatures)
    except (AssertionError, ValueError) as error:  # TensorFlow's errors of a resource without owner
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"The model cannot be exported ({reason}): make variables and tables attributes of the "
            "trainer or of its model."
        ) from error
    # TensorFlow ignores an error with which it deletes this folder.
    shutil.rmtree(folder / "variables" / "variables_temp", ignore_errors=True)


def _find_resources(trainer: StandardTrainer, signatures: Iterable[Any]) -> list[Any]:
    """Returns the variables and tables of the signatures, which the SavedModel must reach."""
    captured = {id(tensor) for s in signatures for tensor in s.captured_inputs}
    objects = tf.train.TrackableView(trainer).descendants()
    for item in step_of(trainer).checkpoint_items().values():
        objects += tf.train.TrackableView(item).descendants()
    resources = {}
    for value in objects:
        name = "handle" if isinstance(value, tf.Variable) else "_resource_handle"
        if id(getattr(value, name, captured)) in captured:
            resources[id(value)] = value
    return list(resources.values())


def _write_keras(
    trainer: StandardTrainer, signatures: Mapping[str, Any], folder: pathlib.Path
) -> None:
    """Writes the bare model without `preprocess`, or its weights if it has no `get_config`."""
    model = trainer.model
    inference.unwrap(model._flatten_layers())
    try:
        model.save(folder / "model.keras")
    except Exception as error:  # any error that the user's get_config raises
        if find_reason(error):
            raise
        (folder / "model.keras").unlink(missing_ok=True)
        model.save_weights(folder / "model.weights.h5")


def _write_tflite(
    trainer: StandardTrainer, signatures: Mapping[str, Any], folder: pathlib.Path
) -> None:
    """Writes model.tflite, with the signatures of the SavedModel."""
    if not hasattr(tf, "lite"):
        raise UsageError(
            f"TensorFlow {tf.__version__} has no tf.lite: convert the SavedModel with another version."
        )
    with tempfile.TemporaryDirectory(dir=folder.parent) as saved:
        _write_saved_model(trainer, signatures, pathlib.Path(saved))
        converter = tf.lite.TFLiteConverter.from_saved_model(saved, signature_keys=list(signatures))
        try:
            content = converter.convert()
        except Exception as error:  # the converter's errors have no common class
            reason = " ".join(str(error).split())[:300]
            raise UsageError(
                f"The model cannot be converted to TensorFlow Lite ({reason}): leave tflite out of "
                "export_formats, or override serve(features) without these operations."
            ) from error
    (folder / "model.tflite").write_bytes(content)


FORMATS: dict[str, WriteFormat] = {
    "saved_model": _write_saved_model,
    "keras": _write_keras,
    "tflite": _write_tflite,
}
