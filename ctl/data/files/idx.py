"""Reads IDX datasets, the format of MNIST and Fashion-MNIST (described on Y. LeCun's MNIST page).

A file has two zero bytes, a type byte, the number of axes, the length of each axis as a big-endian
uint32, and the values in big-endian order, the last axis varying fastest. It may be gzipped.
"""

import gzip
import math
import os
import pathlib
import zlib

import numpy as np

from ctl.data.source import Arrays
from ctl.errors import UsageError

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_AXES = 32  # supported by every numpy version; numpy 2 supports 64
_PREFIXES = {"train": "train", "eval": "t10k"}


def idx(directory: str | pathlib.Path, split: str) -> Arrays:
    """Reads the images and labels of one split of an IDX dataset.

        source = ctl.data.idx("experiments/data/mnist", "train")

    Args:
        directory: a folder with `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`, and the
            same with `t10k` for evaluation, each with or without `.gz`. The name
            `train-images.idx3-ubyte`, which some programs create, is also accepted.
        split: "train" or "eval".

    Returns:
        A source of `image` (shape and dtype as in the file: [28, 28] uint8 for MNIST) and `label`
        (int32; with the dtype of the file if that is a floating-point type).

    Raises:
        UsageError: a file is missing, truncated or corrupt, or images and labels do not match.
    """
    if split not in _PREFIXES:
        raise UsageError(f"An IDX dataset has no split {split!r}: choose one of {[*_PREFIXES]}.")
    images_path = _find(directory, f"{_PREFIXES[split]}-images")
    labels_path = _find(directory, f"{_PREFIXES[split]}-labels")
    images, labels = read(images_path), read(labels_path)
    if labels.ndim != 1:
        raise UsageError(
            f"{labels_path} has {labels.ndim} axes, but a file of labels must have one: download it "
            "again."
        )
    if len(images) != len(labels):
        raise UsageError(
            f"{images_path} has {len(images)} examples and {labels_path} has {len(labels)}: "
            "the two files do not belong to the same dataset, download them again."
        )
    # TensorFlow's sparse cross-entropy requires int32 or int64 labels; MNIST stores bytes.
    is_integer = np.issubdtype(labels.dtype, np.integer)
    return Arrays({"image": images, "label": labels.astype(np.int32) if is_integer else labels})


def read(path: str | pathlib.Path) -> np.ndarray:
    """Reads one IDX file.

    Args:
        path: the file; its first bytes show whether it is gzipped.

    Returns:
        An array of at least one value, in the byte order of this machine.

    Raises:
        UsageError: the file cannot be read, or is not a complete IDX file.
    """
    content = _content(pathlib.Path(path))
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise UsageError(
            f"{path} is not an IDX file, its first bytes are {content[:4]!r}: download it again."
        )
    axes, dtype = content[3], np.dtype(_TYPES[content[2]])
    start = 4 + 4 * axes
    if not 1 <= axes <= _MAX_AXES or len(content) < start:
        raise UsageError(
            f"{path} is truncated or corrupt, it has {len(content)} bytes and its header declares "
            f"{axes} axes: download it again."
        )
    # The product is computed with Python's integers: a corrupt header may declare 2**127 values,
    # and nothing of that size may be allocated.
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", count=axes, offset=4))
    expected, actual = math.prod(shape) * dtype.itemsize, len(content) - start
    if expected != actual or expected == 0:
        raise UsageError(
            f"{path} is truncated or corrupt, its header declares shape {shape}, {expected} bytes, "
            f"but {actual} follow: download it again."
        )
    # Native byte order is faster to compute with. Types of one byte are not copied.
    values = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)


def _find(directory: str | pathlib.Path, stem: str) -> pathlib.Path:
    folder = pathlib.Path(directory)
    if not os.path.isdir(folder):  # pathlib raises an OSError if a name is too long
        raise UsageError(f"Folder {folder} does not exist: set data.dir to a folder of IDX files.")
    paths = sorted(path for path in folder.glob(f"{stem}[-.]idx*") if path.is_file())
    if not paths:
        raise UsageError(
            f"{folder} has no file {stem}-idxN-ubyte or {stem}-idxN-ubyte.gz: copy the four files "
            "of the dataset there, or set data.dir to the folder that has them."
        )
    return paths[0]


def _content(path: pathlib.Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} is a corrupt gzip file ({error}): download it again.") from None
