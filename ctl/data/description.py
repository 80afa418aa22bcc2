"""Describes data by what the examples of a step depend on, without reading an example."""

from collections.abc import Sequence
import os
from typing import Any
import zlib

import numpy as np

from ctl.data.kinds import Kind
from ctl.data.source import Source

_MAX_LISTED = 3  # files; of more there is a digest
_MAX_SIZES = 1000  # files whose sizes are read, since a network disk takes a millisecond for each


def describe(data: Kind) -> dict[str, Any]:
    """Returns the number of examples, the names and sizes of their files, and a digest of the index.

    The index is the offsets of records and the lengths of sequences.
    """
    source = data.source
    if source is None:
        unit = "batches" if data.in_batches else "examples"
        return {unit: "unknown" if data.count is None else data.count}
    leaves = _leaves(source)
    indexes = [each for leaf in leaves for each in (leaf.record_offsets, leaf.lengths)]
    content = b"".join(np.asarray(each, "<i8").tobytes() for each in indexes if each is not None)
    description = {
        "examples": len(source),
        "sources": [len(leaf) for leaf in leaves] if len(leaves) > 1 else None,
        "files": ", ".join(describe_files(leaf.files) for leaf in leaves if leaf.files),
        "index": content and f"{zlib.crc32(content):08x}",
    }
    return {name: value for name, value in description.items() if value}


def describe_files(files: Sequence[str]) -> str:
    """Returns the names and sizes of files, for messages and comparisons.

    Names are relative to the folder that the files have in common, so that it may be moved.
    """
    paths = [str(path) for path in files]
    prefix = os.path.commonprefix(paths)  # noqa: RUF071 - also of URLs; cut at the last slash
    start, few = prefix.rfind("/") + 1, len(paths) <= _MAX_SIZES
    sizes = [f" ({os.path.getsize(p):,} bytes)" if few and os.path.isfile(p) else "" for p in paths]
    names = [path[start:] + size for path, size in zip(paths, sizes, strict=True)]
    if len(names) > _MAX_LISTED:
        return f"{len(names):,} files, digest {zlib.crc32(repr(names).encode()):08x}"
    return ", ".join(names)


def _leaves(source: Source) -> list[Source]:
    """Returns the sources that a source reads, or that those read; itself if it reads none."""
    return [leaf for each in source.inner_sources for leaf in _leaves(each)] or [source]
