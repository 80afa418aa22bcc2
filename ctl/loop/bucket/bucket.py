"""Connects a run with the object store that its --workdir names."""

from collections.abc import Callable, Iterator
import contextlib
import math
import pathlib
import time
from typing import TYPE_CHECKING, Any

from ctl.errors import Failure, UsageError
from ctl.loop.bucket import fetch, ownership
from ctl.loop.bucket.local import LocalCopy, folder_of
from ctl.loop.bucket.ownership import Ownership
from ctl.loop.bucket.upload import Uploader, exported_files
from ctl.loop.store import RunStore

if TYPE_CHECKING:  # it imports TensorFlow
    from ctl.hardware.collectives import ProcessGroup


_FOLLOW_SECONDS = 5.0
_NO_OWNER = -2


def open_store(url: str, train: Any, *, reads: bool, checkpoint: str, task: str) -> RunStore:
    """Opens the object store of a run; see `ctl.loop.store.open_store`."""
    if not reads:
        return Bucket(url, train, task=task)
    reader = BucketReader(url)
    reader.fetch(checkpoint)
    return reader


class Bucket(RunStore):
    """The object store of a run that trains in a local folder.

        bucket = Bucket("gs://bucket/run", config.train)
        with bucket.all_open(processes, ...):
            train()

    Args:
        url: the folder of the run in the store.
        train: the section `train` of the config. Its `local_dir` is the local folder, by default in the
            user's cache; its `upload_grace` are the seconds to wait at the end.
        task: the name of this process, such as "worker-1"; "" for the chief. Each process has a local
            folder of its own.

    Attributes:
        url: the same.
        folder: the local folder.

    Raises:
        UsageError: there is no package for the URL's scheme.
    """

    def __init__(self, url: str, train: Any, *, task: str = ""):
        folder = train.local_dir
        named = f"{folder}.{task}" if task else folder
        self.folder = pathlib.Path(named) if folder else folder_of(url, task or "train")
        self._train = train
        self._local = LocalCopy(url, self.folder)
        self._store, self.url = self._local.store, self._local.store.url

    @contextlib.contextmanager
    def all_open(
        self,
        processes: "ProcessGroup",
        *,
        on_lost: Callable[[], None],
        on_durable: Callable[[int, int, float], None],
        print_line: Callable[[str], None],
    ) -> Iterator[None]:
        """Owns and copies the run in the `with` block, as `ctl.loop.store.RunStore` describes.

        Raises:
            UsageError: another run is the owner, or a process does not read the same store.
            Failure: something is missing in the store at the end.
        """
        owner = Ownership(self._store, on_lost)
        uploader = Uploader(
            self._local,
            owner,
            keep=self._train.checkpoints_to_keep,
            keep_every=self._train.checkpoint_keep_every,
            on_durable=on_durable,
            print_line=print_line,
        )
        try:
            if processes.is_chief:
                self._fetch(owner.acquire())
                self._local.write(owner.number)
                if len(processes.members) > 1:
                    self._store.retry(uploader.copy)  # the others can then fetch it
                uploader.start()
            self._all_fetch(processes, owner.number)
            yield
        except BaseException:
            with contextlib.suppress(Failure):  # the error of the run is the one to report
                uploader.finish(self._train.upload_grace)
            raise
        else:
            uploader.finish(self._train.upload_grace)
        finally:
            owner.end(released=not uploader.is_running)

    def _fetch(self, owner: int) -> None:
        """Makes the local folder up to date, unless it is that of the last owner."""
        if not self._local.is_current(owner):
            self._local.clear()
            fetch.run(self._local)
            self._local.mark_sent()

    def _all_fetch(self, processes: "ProcessGroup", number: int) -> None:
        """Fetches the checkpoints of the chief in the other processes; collective."""
        token = processes.broadcast_from_chief(number)
        seen = token if processes.is_chief else self._store.retry(ownership.latest, self._store)
        if processes.any_process(seen != token):
            raise UsageError(
                f"{self.url} is not the same store in every process: check the endpoint and the "
                "credentials of each."
            )
        if not processes.is_chief:
            self._fetch(_NO_OWNER)
            self._local.write(token)
        processes.barrier()


class BucketReader(RunStore):
    """The object store of a run that this process only evaluates or exports.

    Args:
        url: the folder of the run in the store.

    Attributes:
        url: the same.
        folder: the local copy.
    """

    def __init__(self, url: str):
        self.folder = folder_of(url, "read")
        self._local = LocalCopy(url, self.folder)
        self.url = self._local.store.url
        self._fetched = -math.inf  # when, by the monotonic clock

    def fetch(self, checkpoint: str = "", *, every: bool = False) -> None:
        """Fetches the files of the run; `fetch.run` describes the arguments."""
        fetch.run(self._local, checkpoint, every=every)
        # The files of this process that are not yet sent stay so.
        self._local.mark_sent("result.json" if self._local.sent else "**/*")

    def sync(self) -> None:
        """Sends the results, and fetches what the run has written; at most every few seconds."""
        if time.monotonic() - self._fetched >= _FOLLOW_SECONDS:
            self.close()
            self.fetch(every=True)
            self._fetched = time.monotonic()

    def close(self) -> None:
        """Copies what this process has written: a changed result, exported models and summaries."""
        written = [self.folder / "result.json", *exported_files(self.folder)]
        written += self.folder.glob("summaries/**/*")
        self._local.store.retry(self._local.send, written)
