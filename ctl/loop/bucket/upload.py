"""Copies what is complete in the folder of a run to an object store, in a thread."""

from collections.abc import Callable, Iterable
from concurrent import futures
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
import threading
import time

from ctl.errors import Failure
from ctl.hardware.file_systems import one_line
from ctl.loop import json_files, lock
from ctl.loop.bucket.fetch import BEST, CHECKPOINTS, checksum, steps
from ctl.loop.bucket.local import LocalCopy, signature
from ctl.loop.bucket.ownership import Ownership
from ctl.loop.checkpoints.files import MARKER, CheckpointFiles, find_fault, group_by_step, old_steps

# Seconds between two copies of the files that grow. A store has no append: the whole file is copied.
LOG_SECONDS = 60.0
_POLL_SECONDS = 0.5
_MOST_DELAY = 30.0  # seconds between two tries
_LINE_SECONDS = 60.0  # between two lines about a store that fails
_EXPORT = "export"
_FIRST = ("config.json", "rollbacks.json")  # before the checkpoints that depend on them
_NO_LOGS = ("result.json", lock.NAME, CHECKPOINTS, BEST, _EXPORT)


@dataclasses.dataclass
class Uploader:
    """A thread that copies a run: a checkpoint's files, then its marker, then the result and the logs.

        uploader = Uploader(local, owner, keep=3, keep_every=0, ...)
        uploader.start()
        train()
        uploader.finish(600.0)                  # Failure, if something is missing in the store

    A checkpoint is durable when its marker, with the checksums of its files, is in the store. One is
    copied at a time, always the newest; older ones than that are passed over, except `keep_every`. So a
    slow store gets fewer checkpoints, and none of them late.

    Args:
        local: the local folder of the run.
        owner: the right to write to the store.
        keep: how many of the newest checkpoints to keep in the store.
        keep_every: checkpoints at multiples of this number of steps are also kept; 0 for none.
        on_durable: called as on_durable(step, bytes, seconds) for each checkpoint.
        print_line: prints that the store fails.
    """

    local: LocalCopy
    owner: Ownership
    _: dataclasses.KW_ONLY
    keep: int
    keep_every: int
    on_durable: Callable[[int, int, float], None]
    print_line: Callable[[str], None]

    def __post_init__(self) -> None:
        self._store, self._folder = self.local.store, self.local.folder
        self._logs_copied = -math.inf
        self._failing, self._shown = "", -math.inf  # why the last try failed; when that was printed
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
            ends, sent = self._ending.is_set(), dict(self.local.sent)
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
                delay = 1.0 if sent != self.local.sent else delay
                time.sleep(delay) if ends else self._ending.wait(delay)
                delay = min(2 * delay, _MOST_DELAY)
                with contextlib.suppress(Exception):  # the next request fails, and is reported
                    self._store.connect()

    def _report(self, error: Exception) -> None:
        self._failing = one_line(error)
        if time.monotonic() - self._shown >= _LINE_SECONDS:
            self.print_line(f"{self._store.url} cannot be written ({self._failing}): trying again.")
            self._shown = time.monotonic()

    def copy(self, *, logs: bool = False) -> bool:
        """Copies what is new since the last call; returns whether there was something.

        Args:
            logs: copy the files that grow, too, which is done once in `LOG_SECONDS` otherwise.
        """
        sent, result = dict(self.local.sent), self._folder / "result.json"
        logs = logs or time.monotonic() - self._logs_copied >= LOG_SECONDS
        before = signature(result)
        new = self._new_checkpoints()
        # A run that resumes from a checkpoint does not compute the metrics before it again.
        self._send(self._folder / name for name in (*_FIRST, *["metrics.jsonl"] * bool(new)))
        for where, step in new:
            self._copy_checkpoint(where, step)
        if logs or sent != self.local.sent:
            self._prune()
        self._send(exported_files(self._folder))
        # A result must not be in the store before its checkpoint: a newer one waits for the next call.
        self._send([result] if signature(result) == before else [])
        if logs:
            tops = [p for p in self._folder.glob("[!.]*") if p.name not in _NO_LOGS]
            self._send(path for top in tops for path in (top, *sorted(top.rglob("*"))))
            self._logs_copied = time.monotonic()
        if self.local.sent == sent:
            return False
        self.local.write(self.owner.number)
        return True

    def _send(self, paths: Iterable[pathlib.Path]) -> None:
        changed = self.local.changed(paths)
        if changed:
            self.owner.check()
            self.local.send(changed)

    def _new_checkpoints(self) -> list[tuple[str, int]]:
        """Returns the folder and the step of each checkpoint to copy, the newest first."""
        found = []
        for where in (CHECKPOINTS, BEST):
            present = CheckpointFiles(self._folder / where).steps()
            for step in reversed(present):
                kept = self.keep_every and step % self.keep_every == 0
                if where == BEST or kept or step == present[-1]:
                    found.append((where, step))
        return [each for each in found if self.local.changed([self._marker(*each)])]

    def _marker(self, where: str, step: int) -> pathlib.Path:
        return self._folder / _marker(where, step)

    def _copy_checkpoint(self, where: str, step: int) -> None:
        start, path, sent = time.monotonic(), self._marker(where, step), self.local.sent
        seen = signature(path)
        try:
            content = path.read_bytes()
            marker = json_files.parse(content, files=dict)
            # A second name, so that the run may delete the checkpoint while it is copied: else
            # no checkpoint would ever arrive in a slow store.
            held = self.local.hold([path.with_name(file) for file in marker["files"]], _link)
        except FileNotFoundError:  # deleted just now
            return
        self.owner.check()
        self._store.remove([f"{where}/{path.name}"])
        marker["crc32c"] = {file: checksum(held / file) for file in marker["files"]}
        for file in marker["files"]:
            if sent.get(f"{where}/{file}") != signature(held / file):  # else by an earlier try
                self._store.upload(held / file, f"{where}/{file}")
                sent[f"{where}/{file}"] = signature(held / file)
        fault = find_fault(content, self._store.list(where).get)
        if fault:
            for file in marker["files"]:
                del sent[f"{where}/{file}"]
            raise OSError(f"{where}/ckpt-{step}: {fault}")
        self.owner.check()
        self._store.write(f"{where}/{path.name}", json.dumps(marker).encode())
        sent[f"{where}/{path.name}"] = seen
        if where == CHECKPOINTS:
            self.on_durable(step, sum(marker["files"].values()), time.monotonic() - start)

    def _prune(self) -> None:
        """Deletes old checkpoints in the store, by the rule for the local ones."""
        for where in (CHECKPOINTS, BEST):
            files = group_by_step(self._store.list(where))
            complete = {step for step, names in files.items() if names[0].endswith(MARKER)}
            incomplete = files.keys() - complete
            copied, local = steps(self.local.sent, where), CheckpointFiles(self._folder / where)
            # A newer one could not be read, or the run would have continued from it: it goes first.
            newest = min(max(each, default=math.inf) for each in (copied, local.steps()))
            rank = functools.partial(_rank, newest=newest)
            old = old_steps(complete, incomplete, self.keep, self.keep_every, rank)
            if where == BEST:  # the local folder decides, except of those that could not be fetched
                old = list((incomplete | {*copied}) & files.keys() - local.present())
            # A listing may be late, and show no marker.
            old = [s for s in old if s in complete or self._store.read(_marker(where, s)) is None]
            names = [f"{where}/{name}" for step in old for name in files[step]]
            if names:
                self.owner.check()
            self._store.remove(names)
            for name in names:
                self.local.sent.pop(name, None)


def exported_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of the exported models of a run; those that complete a model come last."""
    files = [path for path in (folder / _EXPORT).glob("[0-9]*/**/*") if path.is_file()]
    return sorted(files, key=lambda p: (p.suffix in (".pb", ".json"), p.name == "saved_model.pb"))


def _marker(where: str, step: int) -> str:
    return f"{where}/ckpt-{step}{MARKER}"


def _rank(step: int, newest: float) -> tuple[bool, int]:
    return step <= newest, step


def _link(path: pathlib.Path, other: pathlib.Path) -> None:
    try:
        os.link(path, other)
    except OSError:  # the file system has no links, or the file is gone
        shutil.copy2(path, other)
