"""Reads IDX datasets, the format of MNIST and Fashion-MNIST (described on Y. LeCun's MNIST page).

A file is two zero bytes, a type byte, the number of axes, each axis' length as a big-endian uint32,
then the values, big-endian, the last axis fastest. It may be gzipped.
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
_MAX_AXES = 32  # as many as every numpy takes
_PREFIXES = {"train": "train", "eval": "t10k"}


def idx(directory: str | pathlib.Path, split: str) -> Arrays:
    """The images and labels of one split of an IDX dataset.

        source = ctl.data.idx("experiments/data/mnist", "train")

    Args:
        directory: a folder with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the same
            with `t10k` for evaluation, each with or without `.gz`. Some programs unpack them as
            `train-images.idx3-ubyte`: that is found too.
        split: "train" or "eval".

    Returns:
        A source of `image` (as in the file: [28, 28] uint8 for MNIST) and `label` (int32, or as in
        the file if that holds fractions).

    Raises:
        UsageError: a file is missing, truncated, corrupt, or does not match its partner.
    """
    if split not in _PREFIXES:
        raise UsageError(f"An IDX dataset has no split {split!r}: choose one of {[*_PREFIXES]}.")
    images_path = _find(directory, f"{_PREFIXES[split]}-images")
    labels_path = _find(directory, f"{_PREFIXES[split]}-labels")
    images, labels = read(images_path), read(labels_path)
    if labels.ndim != 1:
        raise UsageError(
            f"{labels_path} has {labels.ndim} axes, want one, a label an example: it is not a file "
            "of labels, fetch it again."
        )
    if len(images) != len(labels):
        raise UsageError(
            f"{images_path} has {len(images)} examples and {labels_path} has {len(labels)}: "
            "the two files are not of one dataset, fetch them again."
        )
    whole = np.issubdtype(labels.dtype, np.integer)
    return Arrays({"image": images, "label": labels.astype(np.int32) if whole else labels})


def read(path: str | pathlib.Path) -> np.ndarray:
    """Reads one IDX file.

    Args:
        path: the file, gzipped or not (its first bytes tell).

    Returns:
        The array, in this machine's byte order. It has at least one value.

    Raises:
        UsageError: the file cannot be read, or is not a whole IDX file.
    """
    content = _content(pathlib.Path(path))
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise UsageError(
            f"{path} is not an IDX file, its first bytes are {content[:4]!r}: fetch it again."
        )
    axes, dtype = content[3], np.dtype(_TYPES[content[2]])
    start = 4 + 4 * axes
    if not 1 <= axes <= _MAX_AXES or len(content) < start:
        raise UsageError(
            f"{path} is truncated or corrupt, {len(content)} bytes with a header of {axes} axes: "
            "fetch it again."
        )
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", count=axes, offset=4))
    want, found = math.prod(shape) * dtype.itemsize, len(content) - start
    if want != found or want == 0:
        raise UsageError(
            f"{path} is truncated or corrupt, its header says {shape}, {want} bytes, and {found} "
            "follow: fetch it again."
        )
    values = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)


def _find(directory: str | pathlib.Path, stem: str) -> pathlib.Path:
    folder = pathlib.Path(directory)
    if not os.path.isdir(folder):  # pathlib raises where a name is too long
        raise UsageError(f"There is no folder {folder}: set data.dir to a folder of IDX files.")
    found = sorted(path for path in folder.glob(f"{stem}[-.]idx*") if path.is_file())
    if not found:
        raise UsageError(
            f"{folder} has no file {stem}-idxN-ubyte or {stem}-idxN-ubyte.gz: put the dataset's "
            "four files there, or set data.dir to the folder that has them."
        )
    return found[0]


def _content(path: pathlib.Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} is a broken gzip file ({error}): fetch it again.") from None
