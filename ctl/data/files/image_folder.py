"""Images in a folder with one subfolder per class."""

from collections.abc import Sequence
import os

import tensorflow as tf

from ctl.data.source import Batch, RowSource
from ctl.errors import UsageError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")


def image_folder(
    folder: str,
    *,
    size: Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
    dtype: str = "float32",
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
        dtype: "float32", or "uint8", a quarter of the memory in a batch and in a cache. The default
            `preprocess` of a trainer scales uint8 images to [0, 1], and no others.

    Raises:
        UsageError: the folder has no subfolders, or one of them has no images; or a wrong dtype.
    """
    if dtype not in ("float32", "uint8"):
        raise UsageError(
            f"ctl.data.image_folder got dtype={dtype!r}, but requires 'float32' or 'uint8'."
        )
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

    def __init__(
        self,
        paths: Sequence[str],
        labels: Sequence[int],
        *,
        classes: Sequence[str],
        size: Sequence[int] | None,
        dtype: tf.DType,
    ):
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
        # The first image of an animation.
        image = tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
        image = tf.ensure_shape(image, [None, None, 3])
        if self._size is not None:
            image = tf.image.resize(image, self._size, antialias=True)
            image = image if self._dtype.is_floating else tf.round(image)
        return {"image": tf.cast(image, self._dtype), "label": label}
