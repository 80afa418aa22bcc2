"""Chooses and manages the folder of a run, and checks whether a run may start or resume in it."""

from collections.abc import Mapping, Sequence
import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import re
import tempfile
import threading
import time
from typing import Any

from ml_collections import config_dict

from ctl.configs import overrides
from ctl.errors import UsageError, check_local, print_line
from ctl.loop import json_files, lock
from ctl.loop.checkpoints.files import CheckpointFiles, report_write_errors
from ctl.loop.config_changes import INPUTS, ConfigChanges, changes_updates
from ctl.loop.disk import make_folder
from ctl.loop.json_files import read_lines
from ctl.loop.store import RECORD, RunStore

_EVENTS = "events.jsonl"
_LOCK = threading.Lock()  # of the threads that add events
# Bytes of a name that ctl makes, with room for what it adds: file systems allow 255 bytes.
_MAX_NAME, _MAX_BYTES = 100, 220


class Workdir:
    """The folder of a run.

        config.json                the config of the run, every key, and its inputs: the data
        checkpoints/ckpt-<step>    weights, slot variables and counters
        best/ckpt-<step>           the best checkpoints, if train.best is set
        export/<step>/             exported models
        summaries/{train,eval}/    for TensorBoard
        metrics.jsonl              one line per inner loop and evaluation: every logged value
        events.jsonl               one line per event: start, checkpoint, eval, rollback, ...
        result.json                the last step, its metrics, and versions
        rollbacks.json             which batches are skipped, if any
        run.lock                   which process trains here, while it does

    Nothing is written before `create`.

    Args:
        path: the folder.
        writes: whether this process writes there; only the chief does.
        may_read: if it cannot be written, say so, and write nothing.
        store: the store of the run, of which the folder is a copy, if --workdir is a URL.

    Attributes:
        name: the path or the URL that the user knows.
        checkpoints: the folder of checkpoints.
        best: the folder of the best checkpoints.
        exports: the folder of the exported models.

    Raises:
        UsageError: the path is a URL or a file, or cannot be written.
    """

    def __init__(
        self, path: str | pathlib.Path,
        *, writes: bool = True, store: RunStore | None = None, may_read: bool = False,
    ):  # fmt: skip
        check_local("The workdir", path)
        self.path = pathlib.Path(path)
        self.checkpoints, self.best = self.path / "checkpoints", self.path / "best"
        self.exports = self.path / "export"
        self.writes = writes
        self.store = store
        self.name = store.url if store else str(self.path)
        if writes:
            try:
                self._check_writable()
            except UsageError:
                if not may_read:
                    raise
                print_line(f"{path} cannot be written, so nothing is recorded there.")
                self.writes = False

    def sync(self) -> None:
        """Makes a copy of a store up to date, for a process that only evaluates."""
        if self.store:
            self.store.sync()

    def config_file(self) -> str:
        """Returns the config file that the run was started with; "" if it is not recorded."""
        lines = read_lines(self.path / _EVENTS, event=str, config=str | None)
        starts = [line for line in lines if line["event"] == "start"]
        return starts[0].get("config") or "" if starts else ""

    def last_workers(self) -> int | None:
        """Returns the number of workers of the last process that trained, if it is recorded."""
        events = read_lines(self.path / _EVENTS, event=str, workers=int | None)
        beginnings = [event for event in events if event.get("event") in ("start", "resume")]
        return beginnings[-1].get("workers") if beginnings else None

    def summaries(self, split: str) -> str | None:
        """Returns the folder of a split's summaries; None if this process writes none."""
        return str(self.path / "summaries" / split) if self.writes else None

    def has_run(self) -> bool:
        """Returns whether a run was started here."""
        return os.path.exists(self.path / "config.json")

    def config(self) -> dict[str, Any]:
        """Returns the values of config.json, by full name."""
        return overrides.flatten(json_files.read(self.path / "config.json", trainer=str))

    def result(self) -> dict[str, Any]:
        """Returns the content of `result.json`; empty if it does not exist."""
        path, optional = self.path / "result.json", dict | None
        types = dict(best=optional, stopped=optional, goodput=optional, step=int | None)
        return json_files.read(path, **types) if path.exists() else {}

    def check_config(
        self, config: Mapping[str, Any], *, allow_change: bool = False, only_evaluates: bool = False
    ) -> list[str]:
        """Compares a config with the config of the run in the folder.

        Args:
            config: the current config.
            allow_change: whether the user allows changes of the computed updates.
            only_evaluates: whether the run is only read, so that it may evaluate other data.

        Returns:
            One line for each change that the run continues with.

        Raises:
            UsageError: the run is of another experiment, or its updates would change.
        """
        # A typo in --workdir must not mix a run with somebody's files.
        self._check_no_foreign_files()
        if not self.has_run():
            return []
        if not only_evaluates:
            self._check_checkpoints()
        saved = self.config()
        changes = ConfigChanges(saved, config)
        # Checked first, since most other keys differ, too.
        if "trainer" in changes.lines and not allow_change:
            raise UsageError(
                f"{self.path} holds a run of another experiment, trainer {saved['trainer']}: name "
                "another --workdir, or move it aside with --fresh."
            )
        harmful = changes.harmful_to_evaluation if only_evaluates else changes.harmful
        if harmful and not allow_change:
            lines = "; ".join(changes.lines[key] for key in harmful)
            fix = (
                "resume with the change by --allow_config_change, or start from scratch with --fresh "
                "or another --workdir"
            )
            if only_evaluates:
                fix = (
                    "use the config of the run, in which only data.* and eval.* may change, or accept "
                    "the change by --allow_config_change"
                )
            only_inputs = all(key.startswith(INPUTS) for key in harmful)
            what = "other data" if only_inputs else "another config"
            raise UsageError(f"{self.path} holds a run with {what} ({lines}): {fix}.")
        return list(changes.lines.values())

    def evaluation_changes(self, config: Mapping[str, Any]) -> list[str]:
        """Returns one line for each change of the config that may change an evaluation."""
        changes = ConfigChanges(self.config(), config)
        return [changes.lines[key] for key in changes.evaluation]

    def check_run(self) -> None:
        """Raises UsageError if there is no run in the folder."""
        if not self.has_run():
            raise UsageError(f"{self.path} holds no run: train first, or name its --workdir.")

    def check_movable(self) -> None:
        """Raises UsageError if `move_aside` must not move the folder."""
        self._check_no_foreign_files(moves=True)
        # The user's shell and the relative paths of the run would then be in the moved folder.
        if self.has_run() and pathlib.Path.cwd().is_relative_to(self.path.resolve()):
            raise UsageError(
                f"--fresh would move {self.path.resolve()} aside, which is the current folder: change "
                "to another one, or name another --workdir."
            )

    def create(self, config: Mapping[str, Any]) -> None:
        """Creates the folder, and writes the current config.

        Raises:
            UsageError: the folder cannot be created.
            Failure: the config cannot be written.
        """
        if not self.writes:
            return
        try:
            make_folder(self.path)
        except OSError as error:
            raise UsageError(self._not_writable(error.strerror)) from None
        self._write("config.json", config)

    def move_aside(self) -> pathlib.Path | None:
        """Moves the run to a sibling folder whose name contains the time.

        Returns:
            The folder it is in now, or None if there was no run.

        Raises:
            UsageError: the folder has files that belong to no run, or cannot be moved.
        """
        self.check_movable()
        if not (self.has_run() or os.path.exists(self.path / _EVENTS)):
            return None
        # A link to the folder stays where it is, so that the new run is on the same disk.
        folder = self.path.resolve() if self.path.is_symlink() else self.path
        # A sibling: a rename within one file system is atomic and takes no time.
        name = f"{_cut(folder.name, _MAX_BYTES)}.{datetime.datetime.now():%Y-%m-%d-%H%M%S}"
        aside, number = folder.with_name(name), 1
        try:
            while aside.exists():
                number += 1
                aside = folder.with_name(f"{name}.{number}")
            folder.rename(aside)
            if folder != self.path:
                folder.mkdir()
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be moved to {aside} ({error.strerror}): name another --workdir."
            ) from None
        return aside

    def event(self, event: str, step: int, **fields: Any) -> None:
        """Appends a line to `events.jsonl`, completely or not at all.

        Raises:
            Failure: it cannot be written.
        """
        if not self.writes:
            return
        line = {"time": time.time(), "event": event, "step": step, **fields}
        path = self.path / _EVENTS
        # Threads record what they have saved or uploaded.
        with _LOCK, report_write_errors(str(path), self.checkpoints):
            json_files.append_text(path, json.dumps(line) + "\n")

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Replaces `result.json`, completely or not at all.

        Raises:
            Failure: it cannot be written.
        """
        self._write("result.json", result)

    def rollbacks(self) -> list[dict[str, Any]]:
        """Returns the decisions that `write_rollbacks` wrote; [] if there are none."""
        path = self.path / "rollbacks.json"
        decisions = json_files.read(path, rollbacks=list)["rollbacks"] if path.exists() else []
        if not all(isinstance(d, dict) and type(d.get("step")) is int for d in decisions):
            raise UsageError(f"{path} is not what ctl wrote: fix it, or use --fresh.")
        return decisions

    def write_rollbacks(self, rollbacks: Sequence[Mapping[str, Any]]) -> None:
        """Replaces `rollbacks.json`, completely or not at all.

        Raises:
            Failure: it cannot be written.
        """
        self._write("rollbacks.json", {"rollbacks": list(rollbacks)})

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        if self.writes:
            with report_write_errors(str(self.path / name), self.checkpoints):
                json_files.replace(self.path / name, content)

    def _check_checkpoints(self) -> None:
        """Raises UsageError if the checkpoints are lost, with which a run would begin again."""
        events = read_lines(self.path / _EVENTS, event=str, step=int)
        # What only the lost machine had is no checkpoint of the store; --fresh does not move objects.
        kinds = ("durable",) if self.store else ("checkpoint", "durable")
        fix = "name another --workdir" if self.store else "start from scratch with --fresh"
        saved = [event["step"] for event in events if event["event"] in kinds]
        files = CheckpointFiles(self.checkpoints)
        if saved and not files.steps() and not files.damaged():
            raise UsageError(
                f"{self.name}/{_EVENTS} records a checkpoint at step {saved[-1]}, but "
                f"{self.name}/checkpoints has no complete one: restore the folder, or {fix}."
            )

    def _check_no_foreign_files(self, *, moves: bool = False) -> None:
        """Raises UsageError if the folder has files, but holds no run; or a run that `moves` accepts."""
        names = set(os.listdir(self.path) if self.path.is_dir() else [])
        # A run that was killed while it started leaves the first three, and modes the others.
        names -= {json_files.temporary_name("config.json"), lock.NAME, RECORD}
        names -= {"aot_compile.json", "find_lr.html"}
        if names and not self._has_config_of_ctl() and not (moves and _EVENTS in names):
            fix = "so it is not a run's folder: name another --workdir"
            if _EVENTS in names:
                fix = f"but the {_EVENTS} of a run: restore config.json, or start with --fresh"
            raise UsageError(f"{self.path} has files in it and no config.json of ctl, {fix}.")

    def _has_config_of_ctl(self) -> bool:
        try:
            content = json_files.parse((self.path / "config.json").read_bytes())
        except (FileNotFoundError, json_files.NotAnObject):
            return False
        except (OSError, ValueError):
            return True  # damaged, but it may belong to a run
        return "trainer" in content

    def _check_writable(self) -> None:
        """Raises UsageError if the path cannot become a folder to write in. Leaves no files."""
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(self.path)  # raises if the name is too long, or permission is missing
            # The folder need not exist yet: its nearest existing parent decides.
            nearest = next(p for p in (self.path, *self.path.parents) if os.path.lexists(p))
            if not nearest.is_dir():
                where = "" if nearest == self.path else f": {nearest}"
                raise UsageError(f"--workdir={self.path}{where} is a file: name a folder.")
            with tempfile.TemporaryFile(dir=nearest):  # os.access is always True for root
                pass
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise UsageError(self._not_writable(error.reason)) from None
        except OSError as error:
            raise UsageError(self._not_writable(error.strerror)) from None

    def _not_writable(self, reason: str | None) -> str:
        return f"--workdir={self.path} cannot be written ({reason}): name another folder."


def name_folder(
    config_path: str, config: config_dict.ConfigDict, changes: Sequence[tuple[str, str | None]]
) -> pathlib.Path:
    """Returns the folder of a run that is started without --workdir.

    It is named after the experiment and the changes of the command line that change the updates, such
    as runs/mnist.learning_rate=0.003. It does not depend on what the disk holds: the same command
    resumes the same run. The place of the data is no part of the name, since an evaluation may read
    other data.

    Args:
        config_path: the flag --config.
        config: the config with the changes.
        changes: the changes of the command line, as keys and texts.
    """
    keys = sorted({key for key, _ in changes if changes_updates(key, config)} - {"data.dir"})
    current = overrides.flatten(config)  # parsed values: 5e-1 is 0.5
    name = name_values({key: str(current[key]) for key in keys})
    return pathlib.Path("runs", name_experiment(config_path) + (f".{name}" if name else ""))


def name_values(values: Mapping[str, str]) -> str:
    """Returns a name such as "learning_rate=0.1,dropout=0.5", for a folder."""
    last = [key.rpartition(".")[-1] for key in values]
    keys = last if len(set(last)) == len(last) else list(values)
    return _as_name(",".join(f"{k}={v}" for k, v in zip(keys, values.values(), strict=True)))


def name_experiment(config: str) -> str:
    """Returns the name of an experiment, for a folder: "mnist" of mnist.py, "mnist.a" of mnist.py:a."""
    file, _, text = config.partition(":")
    stem = pathlib.Path(file).stem
    return f"{stem}.{_as_name(text)}" if text else stem


def _as_name(text: str) -> str:
    """Returns a part of a file's name; it is unique for each text."""
    name = re.sub(r"[^\w.,=+-]", "_", text)
    if name == text and len(name) <= _MAX_NAME and len(os.fsencode(name)) <= _MAX_BYTES:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{_cut(name, _MAX_NAME)}-{digest}"


def _cut(name: str, size: int) -> str:
    """Returns the beginning of a name, of at most so many bytes."""
    return os.fsencode(name)[:size].decode(errors="ignore")
