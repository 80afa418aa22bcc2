"""Resumes a tiny run in an object store again and again, and disturbs another request each time.

    python -m tests.support.faults.stores --stride=10 --json=stores.json

The store is in memory. The n-th request fails, fails after it took effect, is truncated, is answered
with damaged bytes, is delayed, or gets an earlier listing; or it and all later ones fail. Then the
fault is gone, the local folder is deleted, as on another machine, and the same command is rerun.
`io_faults.check` decides which tries are survived.

A delayed request of the thread that copies arrives when the run has ended and waits for that thread.
One of the main thread, which waits for it, moves the clock past the lease of an owner.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import pathlib
import shutil
import threading
import time
from typing import Any
from unittest import mock

from ctl.errors import Failure
from tests.support.faults import io_faults

URL = "memory://bucket/run"
COMMAND = (*io_faults.FLAGS, f"--workdir={URL}")
READS, WRITES = ("cat_file", "get_file"), ("pipe_file", "put_file")
REQUESTS = (*READS, *WRITES, "find", "rm_file")
ALL = ("fails", "fails from then on", "delayed")
FAULTS = {
    **dict.fromkeys(READS, (*ALL, "truncated", "damaged")),
    **dict.fromkeys(WRITES, (*ALL, "answer lost", "truncated")),
    "find": (*ALL, "late"),
    "rm_file": (*ALL, "answer lost"),
}
DELAY = 100.0  # seconds; longer than any lease here


class Requests:
    """Counts the requests of all clients, and disturbs the n-th.

    Attributes:
        kinds: the name of each request so far.
    """

    def __init__(self, number: int = 0, fault: str = ""):
        self.kinds: list[str] = []
        self._number, self._fault = number, fault
        self._listed: dict[str, Any] = {}
        self._arrives, self._is_over, self._delay = threading.Event(), False, 0.0
        self.time = mock.Mock(wraps=time, monotonic=lambda: time.monotonic() + self._delay)

    def wrap(self, open_url: Callable[[str], Any]) -> Callable[[str], Any]:
        """Returns the function that opens a URL with disturbed requests."""

        def open_disturbed(url: str) -> tuple[Any, str]:
            file_system, path = open_url(url)
            return _Client(file_system, self), path

        return open_disturbed

    @contextlib.contextmanager
    def disturbed(self) -> Iterator[None]:
        """Disturbs the requests of the `with` block; ends the threads that it has started."""
        from ctl.loop.bucket import ownership, store, upload

        finish = upload.Uploader.finish

        def finish_late(uploader: Any, seconds: float) -> None:
            self._arrives.set()
            finish(uploader, seconds)

        with (
            mock.patch.object(store, "open_url", self.wrap(store.open_url)),
            mock.patch.object(upload.Uploader, "finish", finish_late),
            mock.patch.object(ownership, "time", self.time),
            mock.patch.object(upload, "time", self.time),
        ):
            try:
                yield
            finally:
                self._is_over = True
                self._arrives.set()

    def call(self, name: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Sends a request."""
        self.kinds.append(name)
        if self._is_over:
            raise Failure("The process of this thread has ended.")
        later = self._fault.endswith("then on") and len(self.kinds) > self._number > 0
        fault = self._fault if later or len(self.kinds) == self._number else ""
        if fault == "delayed" and threading.current_thread() is threading.main_thread():
            self._delay += DELAY
        elif fault == "delayed":
            self._arrives.wait()
        if fault.startswith("fails"):
            raise ConnectionError("connection reset by peer")
        if fault in ("truncated", "damaged"):
            change = _halve if fault == "truncated" else _damage
            return _call_changed(name, method, change, *arguments, **options)
        if fault == "late":
            return self._listed.get(arguments[0], {})
        result = method(*arguments, **options)
        if name == "find":
            self._listed[arguments[0]] = result
        if fault == "answer lost":
            raise ConnectionError("connection reset by peer")
        return result


class _Client:
    def __init__(self, file_system: Any, requests: Requests):
        self._file_system, self._requests = file_system, requests

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._file_system, name)
        if name not in REQUESTS:
            return method
        return lambda *arguments, **options: self._requests.call(
            name, method, *arguments, **options
        )


def _call_changed(
    name: str, method: Callable[..., Any], change: Any, *arguments: Any, **options: Any
) -> Any:
    if name == "pipe_file":
        path, content, *others = arguments
        return method(path, change(content), *others, **options)
    if name == "put_file":
        source = pathlib.Path(f"{arguments[0]}.disturbed")
        source.write_bytes(change(pathlib.Path(arguments[0]).read_bytes()))
        return method(str(source), *arguments[1:], **options)
    result = method(*arguments, **options)
    if name == "cat_file":
        return change(result)
    target = pathlib.Path(arguments[1])
    target.write_bytes(change(target.read_bytes()))
    return result


def _halve(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _damage(content: bytes) -> bytes:
    # A bit that no text has. Another digit in a log, which has no checksum, is noticed by nobody.
    middle = len(content) // 2
    changed = bytes([content[middle] ^ 128]) if content else b"\x80"
    return content[:middle] + changed + content[middle + 1 :]


def loop(stride: int, offset: int) -> Iterator[Any]:
    """Yields first the number of requests, then each try."""
    from ctl.loop.bucket import ownership, store, upload

    os.environ["XDG_CACHE_HOME"] = os.path.abspath("cache")
    with (
        mock.patch.object(ownership, "LEASE_SECONDS", 0.5),
        mock.patch.object(ownership, "_POLL_SECONDS", 0.05),
        mock.patch.object(store, "_DELAYS", (0.01,) * 6),
        mock.patch.object(upload, "_POLL_SECONDS", 0.01),
    ):
        assert _run(Requests(), "--config.train.steps=4", "--config.train.export=")[0] == 0
        _copy("half")
        _restore("half")
        requests = Requests()
        assert _run(requests)[0] == 0
        expected = _read_state()
        points = [(n, k, fault) for n, k in enumerate(requests.kinds, 1) for fault in FAULTS[k]]
        yield len(points)
        for number, kind, fault in points[offset::stride]:
            _restore("half")
            # A store that never answers ends the run after its grace.
            grace = ["--config.train.upload_grace=0.1"] if fault.endswith("then on") else []
            first = _run(Requests(number, fault), *grace)
            shutil.rmtree("cache", ignore_errors=True)
            second = _run(Requests())
            try:
                got: Any = _read_state()
            except Exception as error:
                got = f"damaged: {error!r}"[:200]
            yield {
                "where": f"{number} {kind}", "error": fault, "code": first[0],
                "err": first[2].strip()[-300:],
                # A listing that is late at the start seems to be another run's, which is a line.
                "fault": io_faults.check(first, second, expected, got, codes=(0, 1, 2)),
            }  # fmt: skip


def _run(requests: Requests, *keys: str) -> tuple[int | None, str, str]:
    with requests.disturbed():
        return io_faults.run(*COMMAND, *keys)


def _copy(folder: str) -> None:
    """Copies the store into a folder."""
    import fsspec

    shutil.rmtree(folder, ignore_errors=True)
    pathlib.Path(folder).mkdir()
    fsspec.filesystem("memory").get("/bucket/run/", f"{folder}/", recursive=True)


def _restore(folder: str) -> None:
    """Replaces the store by a folder, and deletes what is on this machine."""
    import fsspec

    file_system = fsspec.filesystem("memory")
    file_system.store.clear()
    file_system.put(f"{folder}/", "/bucket/run/", recursive=True)
    shutil.rmtree("cache", ignore_errors=True)


def _read_state() -> dict[str, Any]:
    _copy("copy")
    return io_faults.read_state(pathlib.Path("copy"))


if __name__ == "__main__":
    io_faults.main_in_process(loop)
