"""Images in files: IDX datasets, and folders with one subfolder per class.

An IDX file, the format of MNIST and Fashion-MNIST (described on Y. LeCun's MNIST page), has two zero
bytes, a type byte, the number of axes, the length of each axis as a big-endian uint32, and the values in
big-endian order, the last axis varying fastest. It may be gzipped.
"""

from collections.abc import Iterator, Sequence
import contextlib
import gzip
import math
import os
import pathlib
from typing import Any
import zlib

import numpy as np
import tensorflow as tf

from ctl.data.source import Arrays, Batch, RowSource
from ctl.errors import UsageError, check_local
from ctl.hardware import host

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_AXES = 32  # supported by every numpy version; numpy 2 supports 64
_BLOCK = 2**18  # bytes that are read at a time
# Pixels of an image, or of each byte of its file, that are always decoded.
_MOST_PIXELS, _MOST_EXPANSION = 2.0**26, 100.0
_PREFIXES = {"train": "train", "eval": "t10k"}
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")


def image_folder(
    folder: str,
    *,
    size: Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
    dtype: str = "uint8",
) -> "ImageFolder":
    """Returns the images in the subfolders of a folder, labelled by their subfolder.

        ctl.data.image_folder("flowers/train", size=(180, 180))

    An example has the features `image`, [height, width, 3] from 0 to 255, and `label`, an int64: the
    position of the subfolder's name in `classes`.

    Args:
        folder: a folder in any file system that TensorFlow supports.
        size: (height, width) to which images are resized (bilinear, with antialiasing); None: not
            resized, so that `ctl.data.augmented` must crop images of different sizes to one.
        classes: the names of the subfolders in the order of their labels; None: all, sorted. Pass
            the classes of the training data to the evaluation data, if classes may be missing there.
        dtype: "uint8", which the default `preprocess` of a trainer scales to [0, 1]; or "float32",
            which it leaves as it is: resized without rounding, in four times the memory.

    Raises:
        UsageError: the folder has no subfolders, or one of them has no images; or a wrong dtype.
    """
    if dtype not in ("float32", "uint8"):
        raise UsageError(
            f"ctl.data.image_folder got dtype={dtype!r}, but requires 'float32' or 'uint8'."
        )
    if not str(folder).startswith("gs://"):  # which TensorFlow reads itself
        check_local("ctl.data.image_folder", folder)
    if not tf.io.gfile.isdir(folder):
        raise UsageError(f"{folder} is not a folder: set data.dir to the folder of the classes.")
    if classes is None:
        names = sorted(name.rstrip("/") for name in tf.io.gfile.listdir(folder))
        classes = [
            name
            for name in names
            if not name.startswith(".") and tf.io.gfile.isdir(os.path.join(folder, name))
        ]
    if not classes:
        raise UsageError(f"{folder} has no subfolders, but requires one per class with its images.")
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        subfolder = os.path.join(folder, name)
        if not tf.io.gfile.isdir(subfolder):
            raise UsageError(f"{folder} has no subfolder {name!r}: fix `classes`, or create it.")
        images = sorted(
            file for file in tf.io.gfile.listdir(subfolder) if file.lower().endswith(SUFFIXES)
        )
        if not images:
            raise UsageError(
                f"{subfolder} has no images ({', '.join(SUFFIXES)}): remove it, or add images."
            )
        paths += [os.path.join(subfolder, file) for file in images]
        labels += [label] * len(images)
    return ImageFolder(paths, labels, classes=classes, size=size, dtype=tf.as_dtype(dtype))


class ImageFolder(RowSource):
    """Image files with labels; no image is read before it is needed.

    Args:
        paths: the images.
        labels: the label of each image.
        classes: the name of each label.
        size: as for `image_folder`.
        dtype: the dtype of an image.
    """

    version = "1"

    def __init__(
        self, paths: Sequence[str], labels: Sequence[int],
        *, classes: Sequence[str], size: Sequence[int] | None, dtype: tf.DType,
    ):  # fmt: skip
        self.classes = list(classes)
        self._size = None if size is None else tuple(size)
        self._dtype = dtype
        with tf.init_scope(), tf.device("CPU:0"):
            self._paths = tf.constant(paths)
            self._labels = tf.constant(labels, tf.int64)
        self.files = list(paths)
        self._count = len(paths)

    def __len__(self) -> int:
        """The number of images."""
        return self._count

    def read(self, indexes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns paths and labels."""
        return tf.gather(self._paths, indexes), tf.gather(self._labels, indexes)

    def parse(self, row: tuple[tf.Tensor, tf.Tensor]) -> Batch:
        """Reads and decodes an image."""
        path, label = row
        image = tf.ensure_shape(_decode(tf.io.read_file(path)), [None, None, 3])
        if self._size is not None:
            image = tf.image.resize(image, self._size, antialias=True)
            image = image if self._dtype.is_floating else tf.round(image)
        return {"image": tf.cast(image, self._dtype), "label": label}


def _decode(content: tf.Tensor) -> tf.Tensor:
    """Decodes an image, or the first one of an animation.

    A small PNG or JPEG file may declare a size that takes gigabytes: that is an error before they are
    allocated.
    """
    head = tf.strings.join([tf.strings.substr(content, 0, 24), b"\0" * 24])
    sides = tf.reshape(tf.cast(tf.io.decode_raw(head, tf.uint8)[16:24], tf.float64), [2, 4])
    of_png = tf.reduce_prod(tf.reduce_sum(sides * [2.0**24, 2.0**16, 2.0**8, 1.0], axis=1))
    of_png = tf.where(tf.strings.substr(head, 0, 4) == b"\x89PNG", of_png, 0.0)
    pixels = tf.cond(
        tf.strings.substr(head, 0, 3) == b"\xff\xd8\xff",
        lambda: tf.reduce_prod(tf.cast(tf.io.extract_jpeg_shape(content)[:2], tf.float64)),
        lambda: of_png,
    )
    size = tf.cast(tf.strings.length(content), tf.float64)
    is_possible = (pixels <= _MOST_PIXELS) | (pixels <= _MOST_EXPANSION * size)
    check = tf.debugging.Assert(is_possible, ["it declares far more pixels than its file can have"])
    with tf.control_dependencies([check] if check is not None else []):  # None outside of a graph
        return tf.io.decode_image(content, channels=3, expand_animations=False)


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
    images, labels = read_idx(images_path), read_idx(labels_path)
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
    features = {"image": images, "label": labels.astype(np.int32) if is_integer else labels}
    return Arrays(features, files=[str(images_path), str(labels_path)])


def read_idx(path: str | pathlib.Path) -> np.ndarray:
    """Reads one IDX file.

    Args:
        path: the file; its first bytes show whether it is gzipped.

    Returns:
        An array of at least one value, in the byte order of this machine.

    Raises:
        UsageError: the file cannot be read, or is not a complete IDX file.
    """
    with _open(pathlib.Path(path)) as file:
        head = file.read(4)
        if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _TYPES:
            raise UsageError(
                f"{path} is not an IDX file, its first bytes are {head!r}: download it again."
            )
        axes, dtype = head[3], np.dtype(_TYPES[head[2]])
        sizes = file.read(4 * axes)
        if not 1 <= axes <= _MAX_AXES or len(sizes) < 4 * axes:
            raise UsageError(
                f"{path} is truncated or corrupt, it has {4 + len(sizes)} bytes and its header declares "
                f"{axes} axes: download it again."
            )
        # The product is computed with Python's integers: a corrupt header may declare 2**127 values,
        # and nothing of that size may be allocated. A gzipped file may have more than it declares.
        shape = tuple(int(n) for n in np.frombuffer(sizes, ">u4"))
        expected, content = math.prod(shape) * dtype.itemsize, bytearray()
        most = expected if expected <= (host.memory_limit() or expected) else 0
        while len(content) <= most and (block := file.read(_BLOCK)):
            content += block
    if expected != len(content) or expected == 0:
        raise UsageError(
            f"{path} is truncated, corrupt or too large: its header declares shape {shape}, {expected} "
            f"bytes, but {len(content)} could be read: download it again."
        )
    # Native byte order is faster to compute with. Types of one byte are not copied.
    values = np.frombuffer(content, dtype).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)


def _find(directory: str | pathlib.Path, stem: str) -> pathlib.Path:
    check_local("ctl.data.idx", directory)
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


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[Any]:
    try:
        with path.open("rb") as file:
            is_zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            yield gzip.GzipFile(fileobj=file) if is_zipped else file
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None)
        what = f"cannot be read: {reason}" if reason else f"is a corrupt gzip file ({error})"
        raise UsageError(f"{path} {what}: download it again.") from None
