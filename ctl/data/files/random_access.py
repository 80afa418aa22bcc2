"""Examples of a Python dataset with random access: Hugging Face, TensorFlow Datasets, PyTorch."""

from collections.abc import Callable, Mapping, Sequence
import threading
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from ctl.data.source import Batch, Source
from ctl.errors import UsageError, type_name


def random_access(
    dataset: Any, parse: Callable[[Any], Mapping[str, Any]] | None = None
) -> "RandomAccess":
    """Returns the examples of a dataset that has a length and `dataset[index]`.

        ctl.data.random_access(datasets.load_dataset("mnist", split="train"))       # Hugging Face
        ctl.data.random_access(tfds.data_source("mnist", split="train"))            # TFDS

    The seed and the step of the run choose the examples, as for every source: shuffle neither the
    dataset nor its files. Python reads the examples, one batch at a time and in this process; use
    `ctl.data.records` or `ctl.data.cached` where that is too slow.

    Args:
        dataset: an object with `__len__` and `__getitem__`, such as a `datasets.Dataset` of Hugging
            Face, a `tfds.data_source` or a map-style dataset of PyTorch. The same index must give the
            same example in each call. If it has `__getitems__`, one call reads a batch.
        parse: makes an example, a dict of numbers, texts or arrays of equal shapes, from what the
            dataset returns; by default it is the example. Images of PIL become uint8 arrays.

    Raises:
        UsageError: there is no random access, or no example, or the first one is not a dict.
    """
    if isinstance(dataset, Mapping):
        raise UsageError(
            f"ctl.data.random_access got {type_name(dataset)} of {', '.join(map(repr, dataset))}: "
            f"choose one, such as dataset[{next(iter(dataset), 'train')!r}]."
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"ctl.data.random_access got {type_name(dataset)}, which has no len() and [index]: read it "
            "by ctl.data.generator, or write it to record files for ctl.data.records."
        )
    return RandomAccess(dataset, parse or (lambda example: example))


class RandomAccess(Source):
    """Examples that Python reads by their index.

    Args:
        dataset: the dataset.
        parse: makes an example, a dict, from what the dataset returns.
    """

    def __init__(self, dataset: Any, parse: Callable[[Any], Mapping[str, Any]]):
        self._dataset = dataset
        self._parse = parse
        self._lock = threading.Lock()
        if not len(dataset):
            raise UsageError("ctl.data.random_access got a dataset without examples.")
        example = parse(self._read([0])[0])
        if not isinstance(example, Mapping):
            raise UsageError(
                f"ctl.data.random_access got examples of type {type_name(example)}, but requires dicts: "
                'pass parse=lambda example: {"x": example[0], "label": example[1]}, for example.'
            )
        arrays = {name: np.asarray(value) for name, value in example.items()}
        for name, value in arrays.items():
            if value.dtype == object:
                raise UsageError(
                    f"ctl.data.random_access got the feature {name!r}, {type_name(example[name])}, "
                    "which is no array: convert it, or leave it out by parse."
                )
        self._specs = {
            name: tf.TensorSpec(value.shape, tf.string if value.dtype.kind in "US" else value.dtype)
            for name, value in arrays.items()
        }

    def __len__(self) -> int:
        """The number of examples."""
        return len(self._dataset)

    def gather(self, indexes: tf.Tensor) -> Batch:
        """Reads examples by Python."""
        types = [spec.dtype for spec in self._specs.values()]
        values = tf.numpy_function(self._read_batch, [indexes], types, stateful=False)
        batch = dict(zip(self._specs, tf.nest.flatten(values), strict=True))
        for name, spec in self._specs.items():
            batch[name] = tf.ensure_shape(batch[name], [indexes.shape[0], *spec.shape])
        return batch

    def _read_batch(self, indexes: np.ndarray) -> list[np.ndarray]:
        # Several threads read batches, but few datasets can be read by more than one at a time.
        with self._lock:
            examples = [self._parse(example) for example in self._read(indexes.tolist())]
        columns = []
        for name, spec in self._specs.items():
            values = [example[name] for example in examples]
            dtype, is_text = spec.dtype.as_numpy_dtype, spec.dtype == tf.string
            rows = [np.asarray(value) for value in values]
            for index, row in zip(indexes, rows, strict=True):
                # NumPy would make 0 of 0.5, NaN of None, and "5" of 5.
                can_cast = np.can_cast(row.dtype, dtype, "same_kind")
                if not (row.dtype.kind in "US" if is_text else can_cast):
                    _reject(index, name, f"type {row.dtype}", spec.dtype.name)
                if row.shape != tuple(spec.shape):
                    _reject(index, name, f"shape {list(row.shape)}", list(spec.shape))
            # An array of numpy's own strings would drop zero bytes at the end.
            column = np.array(values if is_text else rows, dtype)
            columns.append(column.reshape([len(rows), *spec.shape]))
        return columns

    def _read(self, indexes: list[int]) -> Sequence[Any]:
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(indexes)
        return [self._dataset[index] for index in indexes]


def _reject(index: int, name: str, found: str, first: Any) -> NoReturn:
    raise UsageError(
        f"Example {index} has {name!r} of {found}, but the first one {first}: make them equal by parse."
    )
