"""The store of a run: a place outside of this machine, of which the folder of the run is a copy."""

from collections.abc import Callable
import contextlib
import pathlib
from typing import TYPE_CHECKING, Any

from ctl.configs.loading import load
from ctl.errors import is_url

if TYPE_CHECKING:  # it imports TensorFlow
    from ctl.hardware.collectives import ProcessGroup

RECORD = ".bucket.json"  # the file in the local folder that names the store

# The scheme of a URL -> the class of its stores, a `ctl.Store`, or its name as "module:Class"; "" for
# every other scheme.
STORES: dict[str, Any] = {"": "ctl.loop.bucket.store:FileSystem"}


class RunStore:
    """What a run needs of the store that its --workdir names; by default nothing is copied.

    Attributes:
        url: the folder of the run in the store.
        folder: its local copy.
    """

    url: str
    folder: pathlib.Path

    def all_open(
        self,
        processes: "ProcessGroup",
        *,
        on_lost: Callable[[], None],
        on_durable: Callable[[int, int, float], None],
        print_line: Callable[[str], None],
    ) -> contextlib.AbstractContextManager[None]:
        """Owns and copies the run in a `with` block; every process of the run must call it.

        The local folders are up to date in the block, whose end waits until everything is copied.

        Args:
            processes: the processes of the run, whose chief owns it in the store.
            on_lost: called in a thread when another process has taken over.
            on_durable: called as on_durable(step, bytes, seconds) when a checkpoint is in the store.
            print_line: prints a line.
        """
        return contextlib.nullcontext()

    def sync(self) -> None:
        """Sends and fetches what is new, for a process that does not train."""

    def close(self) -> None:
        """Sends what this process has written, unless `all_open` has sent it."""


def open_store(
    url: str, train: Any, *, reads: bool, checkpoint: str = "", task: str = ""
) -> RunStore:
    """Opens the store of a run.

    Args:
        url: the folder of the run in the store.
        train: the section `train` of the config.
        reads: whether this process only reads the run, such as to evaluate it.
        checkpoint: the checkpoint that it reads, by default the newest.
        task: the name of this process, such as "worker-1"; "" for the chief.

    Raises:
        UsageError: the store cannot be opened.
    """
    open_bucket = load("ctl.loop.bucket.bucket:open_store")
    return open_bucket(url, train, reads=reads, checkpoint=checkpoint, task=task)


def fetch(name: str, which: str = "", *, texts_only: bool = False) -> str:
    """Returns the local path of a run, a checkpoint or a file of weights; fetches it from a URL.

    Args:
        name: a path, which is returned as it is, or a URL.
        which: the checkpoint of a run: "best", a step, or "" for the newest one and the best ones.
        texts_only: fetch no checkpoint of a run.

    Raises:
        UsageError: there is nothing of this name.
    """
    if not is_url(name):
        return name
    return load("ctl.loop.bucket.fetch:path")(name, which, texts_only=texts_only)
