"""Copies what is complete in the folder of a run to an object store, in a thread."""

from collections.abc import Callable
import json
import math
import os
import pathlib
import re
import shutil
import threading
import time

from ctl.errors import Failure
from ctl.hardware.file_systems import one_line
from ctl.loop import lock
from ctl.loop.bucket import fetch
from ctl.loop.bucket.local import LocalCopy
from ctl.loop.bucket.ownership import Ownership
from ctl.loop.bucket.store import Store
from ctl.loop.checkpoints.files import CheckpointFiles

# Seconds between two copies of the files that grow. A store has no append: the whole file is copied.
LOG_SECONDS = 60.0
_POLL_SECONDS = 0.5
_MOST_DELAY = 30.0  # seconds between two tries
_LINE_SECONDS = 60.0  # between two lines about a store that fails
_EXPORT = "export"
_STEP = re.compile(r"(checkpoints|best)/ckpt-(\d+)\D.*")
_FIRST = ("config.json", "rollbacks.json")  # before the checkpoints that depend on them
_OTHERS = (*_FIRST, "result.json", lock.NAME, fetch.CHECKPOINTS, fetch.BEST, _EXPORT)


class Uploader:
    """A thread that copies a run: a checkpoint's files, then its marker, then the result and the logs.

        uploader = Uploader(store, owner, local, folder, keep=3, keep_every=0, ...)
        uploader.start()
        train()
        uploader.finish(600.0)                  # Failure, if something is missing in the store

    A checkpoint is durable when its marker, with the checksums of its files, is in the store.

    Args:
        store: the folder of the run in the object store.
        owner: the right to write there.
        local: records what was copied.
        folder: the local folder of the run.
        keep: how many of the newest checkpoints to keep in the store.
        keep_every: checkpoints at multiples of this number of steps are also kept; 0 for none.
        on_durable: called as on_durable(step, bytes, seconds) for each checkpoint.
        print_line: prints that the store fails.

    Attributes:
        has_ended: whether everything is in the store.
    """

    def __init__(
        self,
        store: Store,
        owner: Ownership,
        local: LocalCopy,
        folder: pathlib.Path,
        *,
        keep: int,
        keep_every: int,
        on_durable: Callable[[int, int, float], None],
        print_line: Callable[[str], None],
    ):
        self._store, self._owner, self._local, self._folder = store, owner, local, folder
        self._keep, self._keep_every = keep, keep_every
        self._on_durable, self._print_line = on_durable, print_line
        self._remote: dict[str, int] | None = None  # the checkpoints' files in the store
        self._parts: set[tuple[str, str]] = set()  # files of a checkpoint without a marker so far
        self._logs_copied = time.monotonic()
        self._failing = ""  # why the last try failed
        self._shown = -math.inf  # when a line about it was printed
        self._lost: Failure | None = None
        self._ending, self.has_ended = threading.Event(), False
        self._thread = threading.Thread(target=self._run, daemon=True, name="ctl-upload")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def copy(self) -> None:
        """Copies the checkpoints that are complete, before `start`."""
        self._copy(all_files=False)

    @property
    def is_ending(self) -> bool:
        """Whether `finish` was called."""
        return self._ending.is_set()

    def finish(self, seconds: float) -> None:
        """Copies what is left, and ends the thread.

        Raises:
            Failure: something is still missing after that time, or another process has taken over.
        """
        self._ending.set()
        try:
            self._thread.join(seconds)
        except KeyboardInterrupt:
            self._failing = "interrupted"
        if self._lost:
            raise self._lost
        if not self.has_ended:
            reason = self._failing or "the upload takes longer"
            raise Failure(
                f"{self._store.url} is not complete after {seconds:.0f} s ({reason}): rerun the same "
                f"command, which copies the rest of {self._folder}, or increase train.upload_grace."
            )

    def _run(self) -> None:
        delay = 1.0
        while not self.has_ended:
            ends, progress = self._ending.is_set(), (len(self._parts), len(self._local.sent))
            try:
                # The last pass finds nothing to copy: an earlier one may have recorded an event.
                self.has_ended = not self._copy(all_files=ends) and ends
                delay, self._failing = 1.0, ""
            except Failure as error:
                self._lost = error
                return
            except Exception as error:
                self._report(error)
                self._remote = None
                if progress != (len(self._parts), len(self._local.sent)):
                    delay = 1.0
                self._ending.wait(delay) if not ends else time.sleep(delay)
                delay = min(2 * delay, _MOST_DELAY)
                self._store.connect()
            else:
                self._ending.wait(_POLL_SECONDS)

    def _report(self, error: Exception) -> None:
        self._failing = one_line(error)
        if time.monotonic() - self._shown >= _LINE_SECONDS:
            self._print_line(
                f"{self._store.url} cannot be written ({self._failing}): trying again."
            )
            self._shown = time.monotonic()

    def _copy(self, *, all_files: bool) -> bool:
        """Copies what is new since the last call; returns whether there was something."""
        logs = all_files or time.monotonic() - self._logs_copied >= LOG_SECONDS
        sent, result = dict(self._local.sent), self._folder / "result.json"
        before = _signature(result)
        for name in _FIRST:
            self._copy_file(self._folder / name)
        while found := self._next_checkpoint():
            self._copy_checkpoint(*found)
        self._prune()
        for path in exported_files(self._folder):
            self._copy_file(path)
        # A result must not be in the store before its checkpoint: a newer one waits for the next call.
        if _signature(result) == before:
            self._copy_file(result)
        for path in self._logs() if logs else ():
            self._copy_file(path, grows=True)
        self._logs_copied = time.monotonic() if logs else self._logs_copied
        if self._local.sent == sent:
            return False
        self._local.write(self._owner.number)
        return True

    def _logs(self) -> list[pathlib.Path]:
        """Returns the files that grow, such as events.jsonl and the summaries."""
        paths = [p for p in sorted(self._folder.rglob("*")) if p.is_file()]
        tops = [path.relative_to(self._folder).parts[0] for path in paths]
        return [
            p for p, top in zip(paths, tops, strict=True) if top not in _OTHERS and top[0] != "."
        ]

    def _copy_file(self, path: pathlib.Path, *, grows: bool = False) -> None:
        name, seen = path.relative_to(self._folder).as_posix(), _signature(path)
        if seen is None or self._local.sent.get(name) == seen:
            return
        source = path
        if grows:  # a client reads the size first
            source = self._hold() / path.name
            shutil.copyfile(path, source)
        self._owner.check()
        self._store.upload(source, name)
        self._local.sent[name] = seen

    def _hold(self) -> pathlib.Path:
        """Returns an empty folder for files that must not change while they are copied."""
        held = self._folder / ".upload"
        shutil.rmtree(held, ignore_errors=True)
        held.mkdir()
        return held

    def _next_checkpoint(self) -> tuple[str, int] | None:
        """Returns the newest checkpoint that is complete and not in the store: its folder and step."""
        for where in (fetch.CHECKPOINTS, fetch.BEST):
            for step in reversed(CheckpointFiles(self._folder / where).steps()):
                name = f"{where}/ckpt-{step}.whole"
                if _signature(self._folder / name) not in (None, self._local.sent.get(name)):
                    return where, step
        return None

    def _copy_checkpoint(self, where: str, step: int) -> None:
        start, held = time.monotonic(), self._hold()
        marker_name = f"{where}/ckpt-{step}.whole"
        seen = _signature(self._folder / marker_name)
        try:
            marker = json.loads((self._folder / marker_name).read_bytes())
            for name in marker["files"]:
                # A second name, so that the run may delete the checkpoint while it is copied: else
                # no checkpoint would ever arrive in a slow store.
                _link(self._folder / where / name, held / name)
        except FileNotFoundError:  # deleted just now
            return
        if marker_name in self._list():
            self._owner.check()
            self._store.remove([marker_name])
        marker["crc32c"] = {name: fetch.checksum(held / name) for name in marker["files"]}
        for name in marker["files"]:
            part = f"{where}/{name}", str(seen)
            if part not in self._parts:  # by an earlier try
                self._store.upload(held / name, part[0])
                self._parts.add(part)
        self._remote = None
        present = self._list()
        for name, size in marker["files"].items():
            if present.get(f"{where}/{name}") != size:
                self._parts.clear()
                raise OSError(
                    f"{where}/{name} has {present.get(f'{where}/{name}')} of {size} bytes"
                )
        self._owner.check()
        content = json.dumps(marker).encode()
        self._store.write(marker_name, content)
        present[marker_name] = len(content)
        self._local.sent[marker_name] = seen
        self._parts.clear()
        self._hold()
        if where == fetch.CHECKPOINTS:
            total = sum(marker["files"].values())
            self._on_durable(step, total, time.monotonic() - start)

    def _list(self) -> dict[str, int]:
        """Returns the files of the checkpoints in the store, with their sizes."""
        if self._remote is None:
            lists = [self._store.list(where) for where in (fetch.CHECKPOINTS, fetch.BEST)]
            self._remote = lists[0] | lists[1]
        return self._remote

    def _prune(self) -> None:
        """Deletes old checkpoints in the store, by the rule for the local ones."""
        remote = self._list()
        files: dict[tuple[str, int], list[str]] = {}
        for name in remote:
            if match := _STEP.fullmatch(name):
                files.setdefault((match[1], int(match[2])), []).append(name)
        complete = {key for key, names in files.items() if any(_is_marker(n) for n in names)}
        steps = sorted(step for where, step in complete if where == fetch.CHECKPOINTS)
        every = self._keep_every
        rest = [step for step in steps[: -self._keep] if every and step % every == 0]
        kept = {(fetch.CHECKPOINTS, step) for step in (*rest, *steps[-self._keep :])}
        # The best ones were all fetched at the start, so the local folder decides.
        best = CheckpointFiles(self._folder / fetch.BEST).steps()
        kept |= {(fetch.BEST, step) for step in best}
        newest = steps[-1] if steps else 0
        doomed = [key for key in files if key not in kept]
        doomed = [k for k in doomed if k in complete or k[1] < newest]
        if doomed:
            self._owner.check()
        for key in doomed:
            names = sorted(files[key], key=lambda name: not _is_marker(name))  # the marker first
            self._store.remove(names)
            for name in names:
                remote.pop(name)
                self._local.sent.pop(name, None)


def exported_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of the exported models of a run; those that complete a model come last."""
    versions = (folder / _EXPORT).glob("[0-9]*")
    files = [path for version in versions for path in version.rglob("*") if path.is_file()]
    return sorted(files, key=lambda p: (p.suffix in (".pb", ".json"), p.name == "saved_model.pb"))


def _link(path: pathlib.Path, other: pathlib.Path) -> None:
    try:
        os.link(path, other)
    except FileNotFoundError:
        raise
    except OSError:  # the file system has no links
        shutil.copyfile(path, other)


def _is_marker(name: str) -> bool:
    return name.endswith(".whole")


def _signature(path: pathlib.Path) -> list[int] | None:
    """Returns what changes with a file's content; None if the file does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns]
