"""TensorBoardWriter: writes logged values as scalars for TensorBoard."""

from collections.abc import Mapping
import contextlib
import dataclasses
import os
import pathlib
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ctl import errors
from ctl.configs import overrides
from ctl.loop.writers.writer import TRAIN, Record, Writer

if TYPE_CHECKING:
    from ctl.loop.controller import Controller

_SPEED = "speed/"
_SOURCES = "sources/"
# The first part of a name -> the prefix of its tag, and what it is. TensorBoard sorts charts by prefix
# and tag, so that these come after the loss and most metrics, whose tags have no prefix.
_TAGS = {
    "loss": ("", "The mean of the last inner loop, or of the evaluation"),
    "learning_rate": ("", "The learning rate of the next update"),
    "epoch": (_SPEED, "How often the training data has been read"),
    "examples_per_second": (_SPEED, "The mean speed, without the first loop"),
    "examples_per_second_last_loop": (_SPEED, "The speed of the last loop"),
    "milliseconds_per_step": (_SPEED, "The time of a step in the last loop"),
    "input_wait": (_SPEED, "The share of the time in which steps waited for batches, from 0 to 1"),
    "peak_memory_gib": (_SPEED, "The largest memory of the process so far, in GiB"),
    "gpu_peak_memory_gib": (_SPEED, "The largest memory of TensorFlow on a GPU so far, in GiB"),
    "gpu_memory_gib": (_SPEED, "The memory in use on the GPUs, in GiB"),
    "gpu_utilization": (_SPEED, "The share of the time in which the GPUs computed, from 0 to 1"),
    "workers": (_SPEED, "The seconds of the last loop in each worker"),
    "examples": (_SOURCES, "The examples that were evaluated, or that a source of the data gave"),
    "epochs": (_SOURCES, "How often the examples of a source of the data were read"),
}


class TensorBoardWriter(Writer):
    """Writes each split to its own folder, under the same tags, so that they share charts.

    The tags of the loss and the metrics are their names; `_TAGS` has the others.

    Args:
        controller: the `Controller`, with Orbit's managers of summaries.
        folder: the folder of the summaries, which has one for each split.
    """

    title = "The summaries"

    def __init__(self, controller: "Controller", folder: pathlib.Path):
        self._training = controller.summary_manager
        # A controller without an evaluator has no manager for evaluations.
        self._evaluation: Any = getattr(controller, "eval_summary_manager", self._training)
        self._folder = folder
        self._lost = 0  # records that did not reach their file

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
        is_training = record.split == TRAIN
        summaries = self._training if is_training else self._evaluation
        folders = {"": record.numbers()} if is_training else _split_by_dataset(record)
        root = self._folder / ("train" if is_training else "eval")
        sizes = {folder: _size(root / folder) for folder, numbers in folders.items() if numbers}
        for folder, numbers in folders.items():
            with summaries.summary_writer(folder).as_default():
                for name, value in numbers.items():
                    prefix, description = _TAGS.get(name.partition("/")[0], ("", None))
                    tf.summary.scalar(prefix + name, value, record.step, description)
        # Otherwise the destructor of the writer would meet a full disk, and it cannot report it.
        summaries.flush()
        # TensorFlow ignores a failed write.
        if any(_size(root / folder) <= size for folder, size in sizes.items()):
            self._lost += 1
            if self._lost == 1:
                errors.print_line(
                    f"A record could not be written to {root} (step {record.step}), so TensorBoard does "
                    "not show it: check the disk."
                )

    def close(self, status: str) -> None:
        """Prints how many records are missing."""
        if self._lost > 1:
            errors.print_line(f"{self._lost} records are missing in {self._folder}.")


def _size(folder: pathlib.Path) -> int:
    """Returns the bytes of the files in a folder."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.is_file())
    return 0


def _split_by_dataset(record: Record, folder: str = "") -> dict[str, dict[str, int | float]]:
    """Returns the numbers of an evaluation by the folder of their dataset, which is a nested mapping."""
    others = {name: v for name, v in record.values.items() if not isinstance(v, Mapping)}
    result = {folder: dataclasses.replace(record, values=others).numbers()}
    for name in record.values.keys() - others.keys():
        inner = dataclasses.replace(record, values=record.values[name])
        result |= _split_by_dataset(inner, os.path.join(folder, name))
    return result


def _as_hparam(value: Any) -> bool | int | float | str:
    if isinstance(value, bool | int | float):
        return value
    return _as_utf8(value if isinstance(value, str) else errors.show_value(value))


def _as_utf8(text: str) -> str:
    """Escapes what UTF-8 does not have: the name of a file may hold half of a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()
