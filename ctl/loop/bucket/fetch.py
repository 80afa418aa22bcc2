"""Fetches runs and checkpoints from an object store."""

from collections.abc import Iterable
import functools
import json
import pathlib

import google_crc32c

from ctl.configs.values import is_weight_file
from ctl.errors import UsageError, print_line
from ctl.loop import json_files
from ctl.loop.bucket.local import LocalCopy, folder_of
from ctl.loop.checkpoints.files import MARKER, CheckpointFiles, find_fault, group_by_step

# The files from which a run is resumed, and which the commands read.
TEXTS = ("config.json", "result.json", "rollbacks.json", "events.jsonl", "metrics.jsonl")
CHECKPOINTS, BEST = "checkpoints", "best"
_BLOCK = 2**20


def steps(names: Iterable[str], where: str = CHECKPOINTS) -> list[int]:
    """Returns the steps of the checkpoints in a folder that have a marker, ascending.

    Args:
        names: the names in the folder of the run.
        where: the folder of the checkpoints in it; "" for the folder itself.
    """
    prefix = where and f"{where}/"
    files = group_by_step(name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return sorted(step for step, parts in files.items() if parts[0].endswith(MARKER))


def checkpoint(local: LocalCopy, where: str, step: int) -> str | None:
    """Fetches a checkpoint, unless the local one is the same.

    Args:
        local: the copy of the folder of a run, or of checkpoints.
        where: the folder of the checkpoint in it; "" for the folder itself.
        step: the step of the checkpoint.

    Returns:
        What is wrong with it, or None.
    """
    store, folder = local.store, local.folder / where
    files, prefix, name = CheckpointFiles(folder), where and f"{where}/", f"ckpt-{step}{MARKER}"
    marker = store.retry(store.read, prefix + name)
    if not files.fault(step) and (folder / name).read_bytes() == marker:
        return None
    files.remove(step)
    fault = find_fault(marker, store.retry(store.list, where).get)
    if fault or marker is None:
        return fault
    content = json.loads(marker)
    sums = content.get("crc32c", {})  # empty if someone else has copied the folder of a run
    for file in content["files"]:
        if not store.retry(store.download, prefix + file, folder / file):
            fault = f"{file} was deleted"  # by the run, just now
        elif file in sums and checksum(folder / file) != sums[file]:
            fault = f"{file} does not have the checksum of its marker"
    if fault:
        files.remove(step)
    else:
        (folder / name).write_bytes(marker)
    return fault


def checksum(path: pathlib.Path) -> int:
    """Returns the CRC-32C of a file."""
    with path.open("rb") as file:
        return functools.reduce(google_crc32c.extend, iter(lambda: file.read(_BLOCK), b""), 0)


def run(local: LocalCopy, name: str = "", *, every: bool = False, texts_only: bool = False) -> None:
    """Makes a local copy of a run, or of a folder of checkpoints, up to date.

    Args:
        local: the copy.
        name: the checkpoint: "best", a step, or "" for the newest complete one and the best ones.
        every: fetch all checkpoints.
        texts_only: fetch no checkpoint.
    """
    store, folder = local.store, local.folder
    names = store.retry(store.list)
    folder.mkdir(parents=True, exist_ok=True)
    for text in TEXTS:
        _fetch_text(local, text, names.get(text))
    for where in () if texts_only else ("", CHECKPOINTS, BEST):
        present, files = steps(names, where), CheckpointFiles(folder / where)
        for step in set(files.steps()) - set(present):
            files.remove(step)  # the run has deleted it since an earlier copy
        if not every and not name and where != BEST:
            _fetch_newest(local, where, present)
            continue
        for step in reversed(present):
            if every or name == str(step) or (where == BEST and not name.isdecimal()):
                _fetch_checkpoint(local, where, step, prints=not every)


def _fetch_newest(local: LocalCopy, where: str, present: Iterable[int]) -> None:
    """Fetches the newest complete one of the checkpoints of a folder."""
    newest_first = sorted(present, reverse=True)
    if newest_first and not any(_fetch_checkpoint(local, where, step) for step in newest_first):
        # Training from scratch would replace what the user may still be able to repair.
        raise UsageError(
            f"{local.store.url} has checkpoints, but none of them can be read: fix the objects, or name "
            "another --workdir."
        )


def _fetch_checkpoint(local: LocalCopy, where: str, step: int, *, prints: bool = True) -> bool:
    """Fetches a checkpoint; returns whether it is complete, and prints a line if it is not."""
    fault = checkpoint(local, where, step)
    if fault and prints:
        print_line(f"Skipped {local.store.url}/{where and where + '/'}ckpt-{step}: {fault}.")
    return not fault


def _fetch_text(local: LocalCopy, name: str, size: int | None) -> None:
    """Fetches a text of a run, twice if it arrives with another size or with lines that are damaged."""
    path = local.folder / name
    for _ in range(2):
        if not local.store.retry(local.store.download, name, path):
            path.unlink(missing_ok=True)
            return
        content = path.read_bytes()
        is_log = path.suffix == ".jsonl"
        is_whole = not is_log or len(json_files.read_lines(path)) == content.count(b"\n")
        if is_whole and len(content) == size:
            return


def path(name: str, which: str = "", *, texts_only: bool = False) -> str:
    """Fetches a run, a checkpoint or a file of weights; see `ctl.loop.store.fetch`."""
    url = name.rstrip("/").removesuffix(".index")
    parent, _, last = url.rpartition("/")
    step = last.removeprefix("ckpt-")
    in_folder = is_weight_file(name) or (step != last and step.isdecimal())
    url = parent if in_folder else url
    local = LocalCopy(url, folder_of(url, "read"))
    if is_weight_file(name):  # web servers, such as those of Hugging Face, do not list folders
        if not local.store.retry(local.store.download, last, local.folder / last):
            raise UsageError(f"{name} does not exist: name another file of weights.")
    elif in_folder:
        fault = checkpoint(local, "", int(step))
        if fault:
            raise UsageError(f"{name} cannot be used, since {fault}: name another checkpoint.")
    else:
        run(local, which, texts_only=texts_only)
        if not any(local.folder.iterdir()):
            raise UsageError(f"{name} has no run and no complete checkpoint: name another URL.")
    return str(local.folder / last) if in_folder else str(local.folder)
