"""Fetches runs and checkpoints from an object store."""

from collections.abc import Callable
import contextlib
import json
import pathlib
from typing import Any

import google_crc32c

from ctl import errors
from ctl.configs.values import is_weight_file
from ctl.errors import UsageError
from ctl.loop.bucket.local import folder_of
from ctl.loop.bucket.store import Store
from ctl.loop.checkpoints.files import MARKER, CheckpointFiles, group_by_step

# The files from which a run is resumed, and which the commands read.
TEXTS = ("config.json", "result.json", "rollbacks.json", "events.jsonl", "metrics.jsonl")
CHECKPOINTS, BEST = "checkpoints", "best"
_BLOCK = 2**20


def texts(store: Store, folder: pathlib.Path) -> None:
    """Fetches the files of `TEXTS`; one that the store does not have is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TEXTS:
        content = store.retry(store.read, name)
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            (folder / name).write_bytes(content)


def steps(store: Store, where: str = CHECKPOINTS) -> list[int]:
    """Returns the steps of the checkpoints in a folder that have a marker, ascending."""
    files = group_by_step(store.retry(store.list, where))
    return sorted(step for step, names in files.items() if names[0].endswith(MARKER))


def newest(
    store: Store,
    folder: pathlib.Path,
    *,
    print_line: Callable[[str], None] = errors.print_line,
) -> None:
    """Fetches the newest complete checkpoint of a run, or of a folder of checkpoints."""
    where = CHECKPOINTS if steps(store) else ""
    for step in reversed(steps(store, where)):
        fault = checkpoint(store, folder, where, step)
        if fault is None:
            return
        print_line(f"Skipped {store.url}/{where and where + '/'}ckpt-{step}: {fault}.")


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
    name = f"{prefix}ckpt-{step}{MARKER}"
    content = store.retry(store.read, name) or b""
    local, path = CheckpointFiles(folder / where), folder / name
    if path.exists() and path.read_bytes() == content and not local.fault(step):
        return None
    local.remove(step)
    fault = _fetch_files(store, folder, where, content)
    if fault:
        local.remove(step)
    else:
        path.write_bytes(content)
    return fault or local.fault(step)


def _fetch_files(store: Store, folder: pathlib.Path, where: str, marker: bytes) -> str | None:
    present = store.retry(store.list, where)
    try:
        content: dict[str, Any] = json.loads(marker)
        sizes, sums = dict(content["files"]), dict(content.get("crc32c", {}))
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its marker cannot be read"
    for name, size in sizes.items():
        if present.get(name) != size:
            return f"{name} has {present.get(name, 'no')} bytes, not {size}"
    for name in sizes:
        path = folder / where / name
        store.retry(store.download, f"{where}/{name}".lstrip("/"), path)
        if name in sums and checksum(path) != sums[name]:
            return f"{name} does not have the checksum of its marker"
    return None


def checksum(path: pathlib.Path) -> int:
    """Returns the CRC-32C of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = google_crc32c.extend(value, block)
    return value


def run(
    store: Store,
    folder: pathlib.Path,
    name: str = "",
    *,
    every: bool = False,
    texts_only: bool = False,
) -> None:
    """Makes a local copy of a run, or of a folder of checkpoints.

    Args:
        store: the folder in the store.
        folder: the local folder.
        name: the checkpoint: "best", a step, or "" for the newest one and the best ones.
        every: fetch all checkpoints.
        texts_only: fetch no checkpoint.
    """
    texts(store, folder)
    if texts_only:
        return
    if not name:
        newest(store, folder)
    for where in (CHECKPOINTS, BEST):
        present, local = steps(store, where), CheckpointFiles(folder / where)
        for step in set(local.steps()) - set(present):
            local.remove(step)  # the run has deleted it since an earlier copy
        for step in present:
            if every or name == str(step) or (where == BEST and not name.isdecimal()):
                checkpoint(store, folder, where, step)


def path(name: str, which: str = "", *, texts_only: bool = False) -> str:
    """Returns the local path of a run, a checkpoint or a file of weights; fetches it from a URL.

    Args:
        name: a path, which is returned as it is, or a URL.
        which: the checkpoint of a run, as in `run`.
        texts_only: fetch no checkpoint of a run.

    Raises:
        UsageError: there is nothing of this name.
    """
    if not errors.is_url(name):
        return name
    url = name.rstrip("/").removesuffix(".index")
    parent, _, last = url.rpartition("/")
    if is_weight_file(name):
        # Web servers, such as those of Hugging Face, do not list folders.
        store, folder = Store(parent), folder_of(parent, "read")

        def download() -> bool:
            with contextlib.suppress(FileNotFoundError):
                store.download(last, folder / last)
                return True
            return False

        if not store.retry(download):
            raise UsageError(f"{name} does not exist: name another file of weights.")
        return str(folder / last)
    step = last.removeprefix("ckpt-")
    if last != step and step.isdecimal():
        folder = folder_of(parent, "read")
        fault = checkpoint(Store(parent), folder, "", int(step))
        if fault:
            raise UsageError(f"{name} cannot be used, since {fault}: name another checkpoint.")
        return str(folder / last)
    folder = folder_of(url, "read")
    run(Store(url), folder, which, texts_only=texts_only)
    if not any(folder.iterdir()):
        raise UsageError(f"{name} has no run and no complete checkpoint: name another URL.")
    return str(folder)
