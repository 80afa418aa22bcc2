"""Copies what is complete in the folder of a run to an object store, in a thread."""

from collections.abc import Callable, Iterable
from concurrent import futures
import json
import math
import os
import pathlib
import shutil
import threading
import time

from ctl.errors import Failure
from ctl.hardware.file_systems import one_line
from ctl.loop import lock
from ctl.loop.bucket.fetch import BEST, CHECKPOINTS, checksum
from ctl.loop.bucket.local import LocalCopy, signature
from ctl.loop.bucket.ownership import Ownership
from ctl.loop.bucket.store import Store
from ctl.loop.checkpoints.files import MARKER, CheckpointFiles, group_by_step, old_steps

# Seconds between two copies of the files that grow. A store has no append: the whole file is copied.
LOG_SECONDS = 60.0
_POLL_SECONDS = 0.5
_MOST_DELAY = 30.0  # seconds between two tries
_LINE_SECONDS = 60.0  # between two lines about a store that fails
_EXPORT = "export"
_FIRST = ("config.json", "rollbacks.json")  # before the checkpoints that depend on them
_NO_LOGS = ("result.json", lock.NAME, CHECKPOINTS, BEST, _EXPORT)


class Uploader:
    """A thread that copies a run: a checkpoint's files, then its marker, then the result and the logs.

        uploader = Uploader(store, owner, local, keep=3, keep_every=0, ...)
        uploader.start()
        train()
        uploader.finish(600.0)                  # Failure, if something is missing in the store

    A checkpoint is durable when its marker, with the checksums of its files, is in the store.

    Args:
        store: the folder of the run in the object store.
        owner: the right to write there.
        local: the local folder of the run.
        keep: how many of the newest checkpoints to keep in the store.
        keep_every: checkpoints at multiples of this number of steps are also kept; 0 for none.
        on_durable: called as on_durable(step, bytes, seconds) for each checkpoint.
        print_line: prints that the store fails.
    """

    def __init__(
        self,
        store: Store,
        owner: Ownership,
        local: LocalCopy,
        *,
        keep: int,
        keep_every: int,
        on_durable: Callable[[int, int, float], None],
        print_line: Callable[[str], None],
    ):
        self._store, self._owner, self._local, self._folder = store, owner, local, local.folder
        self._keep, self._keep_every = keep, keep_every
        self._on_durable, self._print_line = on_durable, print_line
        self._logs_copied = -math.inf
        self._failing = ""  # why the last try failed
        self._shown = -math.inf  # when a line about it was printed
        self._ending, self._end = threading.Event(), futures.Future[None]()
        self._thread = threading.Thread(target=self._run, daemon=True, name="ctl-upload")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread has started, and not ended."""
        return self._thread.ident is not None and not self._end.done()

    def finish(self, seconds: float) -> None:
        """Copies what is left, and ends the thread, if it has started.

        Raises:
            Failure: something is still missing after that time, or another process has taken over.
        """
        self._ending.set()
        try:
            if self._thread.ident:
                self._end.result(seconds)
        except (futures.TimeoutError, KeyboardInterrupt) as error:
            interrupted = isinstance(error, KeyboardInterrupt) and "interrupted"
            reason = interrupted or self._failing or "the upload takes longer"
            raise Failure(
                f"{self._store.url} is not complete after {seconds:.0f} s ({reason}): rerun the same "
                f"command, which copies the rest of {self._folder}, or increase train.upload_grace."
            ) from None

    def _run(self) -> None:
        delay = 1.0
        while not self._end.done():
            ends, sent = self._ending.is_set(), dict(self._local.sent)
            try:
                # The last pass finds nothing to copy: an earlier one may have recorded an event.
                if not self.copy(logs=ends) and ends:
                    self._end.set_result(None)
                delay, self._failing = 1.0, ""
                self._ending.wait(_POLL_SECONDS)
            except Failure as error:
                self._end.set_exception(error)
            except Exception as error:
                self._report(error)
                delay = 1.0 if sent != self._local.sent else delay
                time.sleep(delay) if ends else self._ending.wait(delay)
                delay = min(2 * delay, _MOST_DELAY)
                self._store.connect()

    def _report(self, error: Exception) -> None:
        self._failing = one_line(error)
        if time.monotonic() - self._shown >= _LINE_SECONDS:
            self._print_line(
                f"{self._store.url} cannot be written ({self._failing}): trying again."
            )
            self._shown = time.monotonic()

    def copy(self, *, logs: bool = False) -> bool:
        """Copies what is new since the last call; returns whether there was something.

        Args:
            logs: copy the files that grow, too, which is done once in `LOG_SECONDS` otherwise.
        """
        sent, result = dict(self._local.sent), self._folder / "result.json"
        logs = logs or time.monotonic() - self._logs_copied >= LOG_SECONDS
        before = signature(result)
        self._copy_files(self._folder / name for name in _FIRST)
        while found := self._next_checkpoint():
            self._copy_checkpoint(*found)
        if logs or sent != self._local.sent:
            self._prune()
        self._copy_files(exported_files(self._folder))
        # A result must not be in the store before its checkpoint: a newer one waits for the next call.
        self._copy_files([result] if signature(result) == before else [])
        if logs:
            tops = (p for p in self._folder.iterdir() if p.name not in _NO_LOGS)
            for top in (top for top in tops if not top.name.startswith(".")):
                self._copy_files([top] if top.is_file() else sorted(top.rglob("*")))
            self._logs_copied = time.monotonic()
        if self._local.sent == sent:
            return False
        self._local.write(self._owner.number)
        return True

    def _copy_files(self, paths: Iterable[pathlib.Path]) -> None:
        for path in self._local.changed(paths):
            self._owner.check()
            self._local.copy(path)

    def _next_checkpoint(self) -> tuple[str, int] | None:
        """Returns the newest checkpoint that is complete and not in the store: its folder and step."""
        for where in (CHECKPOINTS, BEST):
            for step in reversed(CheckpointFiles(self._folder / where).steps()):
                if self._local.changed([self._folder / where / f"ckpt-{step}{MARKER}"]):
                    return where, step
        return None

    def _copy_checkpoint(self, where: str, step: int) -> None:
        start, name = time.monotonic(), f"{where}/ckpt-{step}{MARKER}"
        seen = signature(self._folder / name)
        try:
            marker = json.loads((self._folder / name).read_bytes())
            # A second name, so that the run may delete the checkpoint while it is copied: else
            # no checkpoint would ever arrive in a slow store.
            held = self._local.hold([self._folder / where / f for f in marker["files"]], _link)
        except FileNotFoundError:  # deleted just now
            return
        self._owner.check()
        self._store.remove([name])
        marker["crc32c"] = {file: checksum(held / file) for file in marker["files"]}
        sent = self._local.sent
        for file in marker["files"]:
            if sent.get(f"{where}/{file}") != signature(held / file):  # else by an earlier try
                self._store.upload(held / file, f"{where}/{file}")
                sent[f"{where}/{file}"] = signature(held / file)
        present = self._store.list(where)
        for file, size in marker["files"].items():
            if present.get(file) != size:
                del sent[f"{where}/{file}"]
                raise OSError(f"{where}/{file} has {present.get(file)} of {size} bytes")
        self._owner.check()
        self._store.write(name, json.dumps(marker).encode())
        sent[name] = seen
        if where == CHECKPOINTS:
            self._on_durable(step, sum(marker["files"].values()), time.monotonic() - start)

    def _prune(self) -> None:
        """Deletes old checkpoints in the store, by the rule for the local ones."""
        for where in (CHECKPOINTS, BEST):
            files = group_by_step(self._store.list(where))
            complete = {step for step, names in files.items() if names[0].endswith(MARKER)}
            old = old_steps(complete, files.keys() - complete, self._keep, self._keep_every)
            if (
                where == BEST
            ):  # the best ones were all fetched at the start: the local folder decides
                old = list(files.keys() - set(CheckpointFiles(self._folder / where).steps()))
            if old:
                self._owner.check()
            for name in (f"{where}/{name}" for step in old for name in files[step]):
                self._store.remove([name])
                self._local.sent.pop(name, None)


def exported_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of the exported models of a run; those that complete a model come last."""
    files = [path for path in (folder / _EXPORT).glob("[0-9]*/**/*") if path.is_file()]
    return sorted(files, key=lambda p: (p.suffix in (".pb", ".json"), p.name == "saved_model.pb"))


def _link(path: pathlib.Path, other: pathlib.Path) -> None:
    try:
        os.link(path, other)
    except FileNotFoundError:
        raise
    except OSError:  # the file system has no links
        shutil.copy2(path, other)
