"""TensorBoardWriter: writes logged values as scalars for TensorBoard."""

from collections.abc import Mapping
import pathlib
from typing import Any

import tensorflow as tf

from ctl import errors
from ctl.configs import overrides
from ctl.loop.writers.writer import TRAIN, Record, Writer


class TensorBoardWriter(Writer):
    """Writes each split to its own folder, under the same tags, so that they share charts.

    Args:
        controller: the `Controller`, with Orbit's managers of summaries.
        folder: the folder of the summaries, which has one for each split.
    """

    title = "The summaries"

    def __init__(self, controller: Any, folder: pathlib.Path):
        self._training = controller.summary_manager
        # A controller without an evaluator has no manager for evaluations.
        self._evaluation = getattr(controller, "eval_summary_manager", self._training)
        self._folder = folder

    def begin(self, config: Mapping[str, Any], *, is_new: bool) -> None:
        """Writes the config, as a text and for the HParams plugin."""
        if not is_new:
            return
        from tensorboard.plugins.hparams import api as hparams

        values = overrides.flatten(config)
        # Written to the parent of the two folders, whose scalars are then the metrics of this session.
        writer = tf.summary.create_file_writer(str(self._folder))
        with writer.as_default():
            hparams.hparams({k: _as_hparam(v) for k, v in values.items()}, self._folder.parent.name)
            lines = "\n".join(f"    {k} = {errors.show_value(v)}" for k, v in values.items())
            tf.summary.text("config", _as_utf8(lines), step=0)
        writer.close()

    def write(self, record: Record) -> None:
        """Writes the numbers of a record; a dataset of an evaluation gets a subfolder, as in Orbit."""
        summaries = self._training if record.split == TRAIN else self._evaluation
        is_training = record.split == TRAIN
        summaries.write_summaries(record.numbers() if is_training else _as_scalars(record))
        # Otherwise the destructor of the writer would meet a full disk, and it cannot report it.
        summaries.flush()


def _as_scalars(record: Record) -> dict[str, Any]:
    """Returns the values, with nested mappings and a separate name for each list element."""
    scalars: dict[str, Any] = {}
    for name, value in record.values.items():
        nested = Record(
            record.split, record.step, value if isinstance(value, Mapping) else {name: value}
        )
        scalars |= {name: _as_scalars(nested)} if isinstance(value, Mapping) else nested.numbers()
    return scalars


def _as_hparam(value: Any) -> bool | int | float | str:
    if isinstance(value, bool | int | float):
        return value
    return _as_utf8(value if isinstance(value, str) else errors.show_value(value))


def _as_utf8(text: str) -> str:
    """Escapes what UTF-8 does not have: the name of a file may hold half of a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()
