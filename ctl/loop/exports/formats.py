"""The formats of an exported model.

A new format is a function and a row of `FORMATS`. A trainer names its formats in `export_formats`.
"""

from collections.abc import Callable, Iterable, Mapping
import pathlib
import tempfile
from typing import Any

import tensorflow as tf

from ctl.errors import UsageError, did_you_mean
from ctl.loop import inference
from ctl.replica.step.engine import engine_of
from ctl.trainer import StandardTrainer

# Writes files into a folder. Its arguments are the trainer, which is restored for inference, the
# concrete function of each signature by name, and the folder.
Writer = Callable[[StandardTrainer, Mapping[str, Any], pathlib.Path], None]


def select(names: Iterable[str]) -> list[Writer]:
    """Returns the writers of formats by their names.

    Raises:
        UsageError: there is no such format.
    """
    for name in names:
        if name not in FORMATS:
            raise UsageError(f"export_formats contains {name!r}{did_you_mean(name, list(FORMATS))}")
    return [FORMATS[name] for name in names]


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


def _find_resources(trainer: StandardTrainer, signatures: Iterable[Any]) -> list[Any]:
    """Returns the variables and tables of the signatures, which the SavedModel must reach."""
    captured = {id(tensor) for s in signatures for tensor in s.captured_inputs}
    objects = tf.train.TrackableView(trainer).descendants()
    for item in engine_of(trainer).step.checkpoint_items().values():
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
    except Exception:  # any error that the user's get_config raises
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


FORMATS: dict[str, Writer] = {
    "saved_model": _write_saved_model,
    "keras": _write_keras,
    "tflite": _write_tflite,
}
