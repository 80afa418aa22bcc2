"""Makes the writers of a run, and passes all logged values to them."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from ctl.configs import loading
from ctl.configs.values import WRITERS
from ctl.errors import Failure, print_line
from ctl.loop.checkpoints.files import report_write_errors
from ctl.loop.writers.writer import Record, Writer

if TYPE_CHECKING:
    from ctl.loop.controller import Controller

TENSORBOARD = "ctl.loop.writers.tensorboard:TensorBoardWriter"


@dataclasses.dataclass(eq=False)
class MetricLog:
    """Passes each record to all writers, on one axis: the global step.

        log = MetricLog([JsonLinesWriter(workdir)])
        log.write("train", 100, {"loss": 0.3})

    Args:
        writers: the writers of the records.
        summary_folder: the folder of the summaries for TensorBoard, with one for each split; None to
            write none.
        checkpoint_folder: where the run saves, for the message if a record cannot be written.
        print_line: prints the line about a server that cannot be reached.
    """

    writers: list[Writer] = dataclasses.field(default_factory=list)
    _: dataclasses.KW_ONLY
    summary_folder: pathlib.Path | None = None
    checkpoint_folder: pathlib.Path | None = None
    print_line: Callable[[str], None] = print_line

    def write_summaries(self, controller: "Controller") -> None:
        """Adds the writer for TensorBoard, if there is a folder of summaries.

        Args:
            controller: the `Controller`, with Orbit's managers of the summaries in that folder.
        """
        if self.summary_folder:
            self.writers.append(loading.load(TENSORBOARD)(controller, self.summary_folder))

    def begin(self, config: Mapping[str, Any], *, step: int, is_new: bool) -> None:
        """Prepares the writers of a run that continues at a step."""
        self.restore(step)
        self._call(lambda writer: writer.begin(config, is_new=is_new))

    def write(self, split: str, step: int, values: Mapping[str, Any]) -> None:
        """Writes a record.

        Args:
            split: "train", "eval" or the name of another dataset.
            step: the global step.
            values: numbers by name; mappings and lists may be nested.

        Raises:
            Failure: a file cannot be written.
        """
        record = Record(split, step, values)
        self._call(lambda writer: writer.write(record))

    def restore(self, step: int) -> None:
        """Drops the records after a step, which the run is going to compute again."""
        self._call(lambda writer: writer.restore(step))

    def has_evaluation(self, step: int) -> bool:
        """Returns whether every file has a record of an evaluation at a step."""
        return all(writer.has_evaluation(step) for writer in self.writers)

    def close(self, status: str) -> None:
        """Ends the run, with the status "FINISHED" or "KILLED"."""
        self._call(lambda writer: writer.close(status))

    def _call(self, call: Callable[[Writer], None]) -> None:
        for writer in list(self.writers):
            name = writer.title or str(getattr(writer, "path", type(writer).__name__))
            try:
                with report_write_errors(name, self.checkpoint_folder):
                    call(writer)
            except Exception as error:
                if writer.required:
                    raise
                # A server that cannot be reached must not end a run that can train without it.
                self.writers.remove(writer)
                reason = error.__cause__ if isinstance(error, Failure) else error
                text = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
                failed = f"{type(writer).__name__} has failed and is not used any more"
                self.print_line(f"{failed}: {text}")


def make_writers(names: Sequence[str], workdir: pathlib.Path, config_path: str) -> list[Writer]:
    """Makes the writers of `summaries.writers`, except the TensorBoard writer.

    Args:
        names: names in `WRITERS`, or path/to/file.py:Class or package.module:Class of a `Writer` that
            is constructed with the workdir.
        workdir: the folder of the run.
        config_path: the config file; the paths of writers are relative to its folder.

    Raises:
        UsageError: the class of a writer cannot be loaded.
    """
    writers: list[Writer] = []
    for index, name in enumerate(names):
        if WRITERS.get(name):
            make = loading.load(f"ctl.loop.writers.{WRITERS[name]}")
        elif name not in WRITERS:
            key = f"summaries.writers[{index}]"
            make = loading.load_action_factory(name, config_path, key=key)
        else:
            continue
        writers.append(make(workdir))
    return writers
