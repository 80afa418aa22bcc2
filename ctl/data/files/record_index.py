"""Indexes of TFRecord files: the offsets of the records, computed once and then read from a cache.

An index is a file of little-endian 64-bit integers: a format, a version, the size and the modification
time of the record file, where it is damaged or -1, a checksum of the offsets, the offset of each record,
and the offset after the last one. It is kept in the folder `.ctl_index` beside the record file, or in
the user's cache folder if that cannot be written. It is valid for the size and the modification time
of the record file. An index is written under another name and renamed, so that processes that build
the same index at the same time do not disturb each other.
"""

import collections
from collections.abc import Sequence
import concurrent.futures
import functools
import hashlib
import os
import struct
import sys
import time
from typing import Any, NamedTuple
import uuid
import zlib

import google_crc32c
import numpy as np
import tensorflow as tf

from ctl.errors import UsageError
from ctl.hardware.file_systems import open_url

FOLDER = ".ctl_index"
HEAD, TAIL = 12, 4  # bytes of a record before its data (length, checksum) and after it (checksum)
_MAGIC = int.from_bytes(b"ctlindex", "little")
_VERSION = 1
_HEADER = 6  # integers before the offsets
_THREADS = 16
_LOCAL_BLOCK, _REMOTE_BLOCK = 2**16, 2**22  # bytes read at a time; a remote read has a high latency
_GZIP = b"\x1f\x8b"
_PROGRESS_SECONDS = 5.0


class FileIndex(NamedTuple):
    """The offsets of the records of one file.

    Attributes:
        path: the record file.
        offsets: [records + 1] int64, where each record begins, and where the last one ends.
        damaged_at: the offset of a record whose length is damaged or that is not complete; the
            records after it cannot be located. None if the file is complete.
    """

    path: str
    offsets: np.ndarray
    damaged_at: int | None


def load(paths: Sequence[str], folder: str | None = None) -> list[FileIndex]:
    """Returns the index of each file, from the cache or by reading the files in parallel.

    Args:
        paths: TFRecord files, or URLs of them.
        folder: where to keep the indexes; None: beside each local file, or in the user's cache folder.

    Raises:
        UsageError: a file is compressed or empty.
    """
    begin = shown = time.monotonic()
    indexes: list[FileIndex] = []
    with concurrent.futures.ThreadPoolExecutor(min(_THREADS, len(paths))) as pool:
        for index in pool.map(lambda path: _load_or_build(path, folder), paths):
            indexes.append(index)
            if time.monotonic() - shown > _PROGRESS_SECONDS:
                shown = time.monotonic()
                line = f"Indexing records: {len(indexes)} of {len(paths)} files"
                print(f"{line}, {shown - begin:.0f} s", file=sys.stderr, flush=True)
    return indexes


def find_files(files: str | Sequence[str], caller: str) -> list[str]:
    """Returns the files that paths and patterns name; the files of each pattern are sorted.

    Args:
        files: paths or patterns of paths.
        caller: the name of the function or command that reads them, as the subject of a message.

    Raises:
        UsageError: a pattern matches no file, or a file is named twice.
    """
    patterns = [files] if isinstance(files, str) else [str(pattern) for pattern in files]
    paths: list[str] = []
    for pattern in patterns:
        if is_local(pattern):
            matches = [p for p in sorted(tf.io.gfile.glob(pattern)) if not tf.io.gfile.isdir(p)]
        else:
            _client.cache_clear()  # so that each call reads the credentials again
            file_system, path = _open(pattern)
            found = file_system.glob(path, detail=True)
            matches = [
                file_system.unstrip_protocol(p) for p in sorted(found) if found[p]["type"] == "file"
            ]
        if not matches:
            raise UsageError(
                f"{caller} finds no file that matches {pattern!r}: fix the pattern, or data.dir."
            )
        paths += matches
    if not paths:
        raise UsageError(f"{caller} requires at least one file or pattern.")
    path, count = collections.Counter(paths).most_common(1)[0]
    if count > 1:
        raise UsageError(f"{caller} got {path} {count} times: name each file once.")
    return paths


def is_local(path: str) -> bool:
    """Returns whether a path is in a local file system, without a scheme such as gs://."""
    return "://" not in path


@functools.lru_cache
def _client(root: str) -> Any:
    """Returns the file system of a bucket: one for all files, since it takes 0.1 s to make one."""
    return open_url(root)[0]


def _open(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and its path there."""
    file_system = _client("/".join(url.split("/")[:3]))
    from fsspec.core import strip_protocol  # an optional package, which `open_url` requires

    return file_system, strip_protocol(url)


def masked_crc32c(checksums: np.ndarray) -> np.ndarray:
    """Masks CRC-32C checksums, uint32, as TFRecord files store them (TensorFlow's crc32c.h)."""
    rotated = (checksums >> np.uint32(15)) | (checksums << np.uint32(17))
    return rotated + np.uint32(0xA282EAD8)


def _load_or_build(path: str, folder: str | None) -> FileIndex:
    size, changed = stat(path)
    version = [_MAGIC, _VERSION, size, changed]
    candidates = _cache_paths(path, folder)
    for cached in candidates:
        index = _read(cached, path, version)
        if index is not None:
            return index
    index = _build(path, size)
    body = index.offsets.astype("<i8").tobytes()
    damaged_at = -1 if index.damaged_at is None else index.damaged_at
    header = np.array([*version, damaged_at, zlib.crc32(body)], "<i8")
    any(_write(cached, header.tobytes() + body) for cached in candidates)  # the first that can be
    return index


def stat(path: str) -> tuple[int, int]:
    """Returns the size of a file, and a number that differs once it has changed."""
    if is_local(path):
        status = tf.io.gfile.stat(path)
        return status.length, status.mtime_nsec
    file_system, name = _open(path)
    info = file_system.info(name)
    marks = [str(info.get(key)) for key in ("ETag", "etag", "generation", "mtime", "created")]
    digest = hashlib.blake2b(" ".join(marks).encode(), digest_size=7).digest()
    return info["size"], int.from_bytes(digest, "big")


def _cache_paths(path: str, folder: str | None) -> list[str]:
    """Returns the files in which the index of a file may be, in the order of preference."""
    parent, name = os.path.split(path if "://" in path else os.path.abspath(path))
    # Files of the same name in different folders share a cache folder.
    unique = f"{name}.{hashlib.blake2b(parent.encode(), digest_size=8).hexdigest()}"
    if folder is not None:
        return [os.path.join(folder, unique)]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    in_cache = os.path.join(cache, "ctl", "records", unique)
    # A bucket of data may belong to others, and each file there costs.
    return [os.path.join(parent, FOLDER, name), in_cache] if is_local(path) else [in_cache]


def _read(cached: str, path: str, version: list[int]) -> FileIndex | None:
    """Reads an index; None if it does not exist, is damaged, or is of another version of the file."""
    try:
        with open_file(cached) as file:
            content = file.read()
    except OSError:
        return None
    if len(content) % 8 or len(content) <= 8 * _HEADER:
        return None
    numbers = np.frombuffer(content, "<i8")
    *found, damaged_at, checksum = numbers[:_HEADER].tolist()
    if found != version or checksum != zlib.crc32(content[8 * _HEADER :]):
        return None
    offsets, size = numbers[_HEADER:], version[2]
    if offsets.min() < 0 or offsets.max() > size or (np.diff(offsets) < HEAD + TAIL).any():
        return None  # a file beside the data may be of someone else
    return FileIndex(path, offsets, None if damaged_at < 0 else damaged_at)


def _write(cached: str, content: bytes) -> bool:
    """Writes an index; returns False if the folder cannot be written."""
    if not is_local(cached):  # an object is written completely or not at all
        file_system, name = _open(cached)
        try:
            file_system.pipe_file(name, content)
        except Exception:  # the file systems of fsspec raise errors without a common base class
            return False
        return True
    try:
        write_file(cached, content)
    except tf.errors.OpError:
        return False
    return True


def write_file(path: str, content: bytes) -> None:
    """Writes a file atomically, since several processes may write it at the same time."""
    temporary = f"{path}.{uuid.uuid4().hex}"
    tf.io.gfile.makedirs(os.path.dirname(path) or ".")
    with tf.io.gfile.GFile(temporary, "wb") as file:
        file.write(content)
    tf.io.gfile.rename(temporary, path, overwrite=True)


def open_file(path: str) -> Any:
    """Opens a local file, or a URL, to read bytes."""
    # TensorFlow's GFile would read 512 KiB after each seek, and fsspec 5 MiB ahead.
    if is_local(path):
        return open(path, "rb", buffering=0)
    file_system, name = _open(path)
    return file_system.open(name, "rb", cache_type="none")


def _build(path: str, size: int) -> FileIndex:
    """Finds the records of a file by their lengths, without reading long records."""
    if size == 0:
        raise UsageError(f"{path} is empty: write the file again, or remove it.")
    block_size = _LOCAL_BLOCK if is_local(path) else _REMOTE_BLOCK
    read_length = struct.Struct("<Q").unpack_from
    parts, damaged_at, offset = [], None, 0
    with open_file(path) as file:
        if is_gzip(file.read(HEAD)):
            raise UsageError(
                f"{path} is compressed, so its records cannot be read in random order: convert it by "
                "ctl convert, or read it in order by tf.data.TFRecordDataset."
            )
        while offset < size and damaged_at is None:
            file.seek(offset)
            start, block = offset, file.read(block_size)
            last, records = start + len(block) - HEAD, []
            while offset <= last:
                records.append(offset)
                offset += HEAD + TAIL + read_length(block, offset - start)[0]
            if not records:  # fewer bytes than the head of a record
                damaged_at = start
                break
            valid = _count_valid(block, np.array(records) - start)
            if valid < len(records):
                damaged_at = records[valid]
            elif offset > size:
                damaged_at = records[-1]
            parts.append(np.array(records))
    end = size if damaged_at is None else damaged_at
    offsets = np.concatenate([*parts, [end]]).astype(np.int64)
    return FileIndex(path, offsets[: np.searchsorted(offsets, end) + 1], damaged_at)


def is_gzip(head: bytes) -> bool:
    """Returns whether a file is gzipped, from its first `HEAD` bytes."""
    # The first bytes of a gzip file may also be the length of a record.
    return head.startswith(_GZIP) and not _count_valid(head.ljust(HEAD), np.array([0]))


def _count_valid(block: bytes, places: np.ndarray) -> int:
    """Returns how many records come before the first whose length has a wrong checksum."""
    heads = [block[place : place + HEAD] for place in places.tolist()]
    checksums = np.array([google_crc32c.value(head[:8]) for head in heads], np.uint32)
    stored = np.frombuffer(b"".join(heads), [("length", "<u8"), ("checksum", "<u4")])["checksum"]
    wrong = np.flatnonzero(masked_crc32c(checksums) != stored)
    return int(wrong[0]) if len(wrong) else len(places)
