"""Fetches runs and checkpoints from an object store."""

from collections.abc import Callable
import json
import pathlib
import re
from typing import Any

import google_crc32c

from ctl import errors
from ctl.configs.values import is_weight_file
from ctl.errors import UsageError
from ctl.loop.bucket.local import folder_of
from ctl.loop.bucket.store import Store
from ctl.loop.checkpoints.files import CheckpointFiles

# The files from which a run is resumed, and which the commands read.
TEXTS = ("config.json", "result.json", "rollbacks.json", "events.jsonl", "metrics.jsonl")
CHECKPOINTS, BEST = "checkpoints", "best"
_MARKER = re.compile(r"(?:(.*)/)?ckpt-(\d+)\.whole")
_BLOCK = 2**20


def texts(store: Store, folder: pathlib.Path) -> None:
    """Fetches the files of `TEXTS`; one that the store does not have is removed."""
    for name in TEXTS:
        content = store.retry(store.read, name)
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def markers(store: Store, folder: str) -> dict[int, str]:
    """Returns the names of the markers in a folder of checkpoints, by step."""
    found = {name: _MARKER.fullmatch(name) for name in store.retry(store.list, folder)}
    return {int(m[2]): name for name, m in found.items() if m and (m[1] or "") == folder}


def newest(
    store: Store,
    folder: pathlib.Path,
    *,
    print_line: Callable[[str], None] = errors.print_line,
    before: int | None = None,
) -> int | None:
    """Fetches the newest complete checkpoint of a run; returns its step, or None."""
    where = CHECKPOINTS if markers(store, CHECKPOINTS) else ""
    for step in sorted(markers(store, where), reverse=True):
        if before is None or step < before:
            fault = checkpoint(store, folder, where, step)
            if fault is None:
                return step
            print_line(f"Skipped {store.url}/{where and where + '/'}ckpt-{step}: {fault}.")
    return None


def checkpoint(store: Store, folder: pathlib.Path, where: str, step: int) -> str | None:
    """Fetches a checkpoint, unless the local one is the same.

    Args:
        store: the folder of the run, or of checkpoints.
        folder: the local copy of that folder.
        where: the folder of the checkpoint in it; "" for the folder itself.
        step: the step of the checkpoint.

    Returns:
        What is wrong with it, or None.
    """
    prefix = f"{where}/" if where else ""
    name = f"{prefix}ckpt-{step}.whole"
    content = store.retry(store.read, name)
    try:
        marker: dict[str, Any] = json.loads(content or b"")
        sizes, checksums = dict(marker["files"]), dict(marker.get("crc32c", {}))
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its marker cannot be read"
    local = CheckpointFiles(folder / where)
    path = folder / name
    if path.exists() and path.read_bytes() == content and not local.fault(step):
        return None
    present = store.retry(store.list, where)
    for file, size in sizes.items():
        actual = present.get(f"{prefix}{file}")
        if actual != size:
            return f"{file} has {actual} bytes, not {size}" if actual else f"{file} is missing"
    local.remove(step)
    for file in sizes:
        store.retry(store.download, f"{prefix}{file}", folder / where / file)
        if file in checksums and checksum(folder / where / file) != checksums[file]:
            local.remove(step)
            return f"{file} does not have the checksum of its marker"
    path.write_bytes(content or b"")
    return local.fault(step)


def checksum(path: pathlib.Path) -> int:
    """Returns the CRC-32C of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = google_crc32c.extend(value, block)
    return value


def run(url: str, name: str = "", *, every: bool = False, texts_only: bool = False) -> pathlib.Path:
    """Makes a local copy of a run to read, with one checkpoint; returns its folder.

    Args:
        url: the folder of a run, or of checkpoints.
        name: the checkpoint: "best", a step, or "" for the newest one and the best ones.
        every: fetch all checkpoints.
        texts_only: fetch no checkpoint.
    """
    store, folder = Store(url), folder_of(url, "read")
    texts(store, folder)
    if texts_only:
        return folder
    if not name:
        newest(store, folder)
    for where in (CHECKPOINTS, BEST):
        steps, local = markers(store, where), CheckpointFiles(folder / where)
        for step in set(local.steps()) - set(steps):
            local.remove(step)  # the run has deleted it since an earlier copy
        for step in steps:
            if every or name == str(step) or (where == BEST and not name.isdecimal()):
                checkpoint(store, folder, where, step)
    return folder


def path(name: str, *, texts_only: bool = False) -> str:
    """Returns the local path of a run, a checkpoint or a file of weights; fetches it from a URL.

    Args:
        name: a path, which is returned as it is, or a URL.
        texts_only: fetch no checkpoint of a run.

    Raises:
        UsageError: there is nothing of this name.
    """
    if not errors.is_url(name):
        return name
    parent, _, last = name.rstrip("/").removesuffix(".index").rpartition("/")
    if is_weight_file(name):
        store, folder = Store(parent), folder_of(parent, "read")
        if last not in store.retry(store.list):
            raise UsageError(f"{name} does not exist: name another file of weights.")
        store.retry(store.download, last, folder / last)
        return str(folder / last)
    step = last.removeprefix("ckpt-")
    if last == step or not step.isdecimal():
        folder = run(name, texts_only=texts_only)
        if any(folder.iterdir() if folder.is_dir() else ()):
            return str(folder)
        raise UsageError(f"{name} has no run and no complete checkpoint: name another URL.")
    store, folder = Store(parent), folder_of(parent, "read")
    fault = checkpoint(store, folder, "", int(step))
    if fault:
        raise UsageError(f"{name} cannot be used, since {fault}: name another checkpoint.")
    return str(folder / f"ckpt-{step}")
