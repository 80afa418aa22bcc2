"""The folder of a run: what is in it, and whether this run may go on in it. Loads no TensorFlow."""

from collections.abc import Mapping, Sequence
import contextlib
import datetime
import errno
import io
import json
import os
import pathlib
import tempfile
import time
from typing import Any

from ctl.configs import defaults, overrides
from ctl.errors import UsageError
from ctl.loop import lock, write_errors


class Workdir:
    """The folder of a run.

        config.json                what the run was started with, every key
        checkpoints/ckpt-<step>    weights, slots and counters
        summaries/{train,eval}/    for TensorBoard
        events.jsonl               one line a notable thing, and why
        result.json                where the run stands
        rollbacks.json             which batches were left out, if any were
        run.lock                   who is running, while it runs

    Nothing is written before `create`.
    """

    def __init__(self, path: str | pathlib.Path, *, writes: bool = True):
        """Names the folder, and checks that it can be one.

        Args:
            path: the folder.
            writes: whether this process writes there; of several the chief alone does.

        Raises:
            UsageError: it is a file, or cannot be written.
        """
        self.path = pathlib.Path(path)
        self._writes = writes
        if writes:
            self._check_writable()

    @property
    def checkpoints(self) -> pathlib.Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    def summaries(self, split: str) -> str | None:
        """The folder of a split's summaries; None where this process writes none."""
        return str(self.path / "summaries" / split) if self._writes else None

    def has_run(self) -> bool:
        """Whether a run was started here."""
        return os.path.exists(self.path / "config.json")

    def config(self) -> dict[str, Any]:
        """The values that the run here was started with, by their full names."""
        return overrides.flat(self._read("config.json"))

    def result(self) -> dict[str, Any]:
        """What `result.json` says, or nothing where there is none."""
        return self._read("result.json") if (self.path / "result.json").exists() else {}

    def check_config(self, config: Mapping[str, Any], *, allow_change: bool = False) -> list[str]:
        """Compares a config with the one that the run here was started with.

        Args:
            config: the config of now. As long as it has a `per_replica_batch_size`, which the run's
                own became a global one by, the batch sizes are not compared.
            allow_change: whether a change of the arithmetic is meant.

        Returns:
            A line for each difference that the run goes on with.

        Raises:
            UsageError: the run is another experiment's, or its arithmetic would change.
        """
        self._check_no_foreign()
        if not self.has_run():
            return []
        old = {
            **overrides.flat(defaults.defaults()),
            **self.config(),
        }  # an older ctl had fewer keys
        new = overrides.flat(json.loads(json.dumps(dict(config))))  # a tuple comes back as a list
        changed = [k for k in sorted({*old, *new}) if _differ(k, old, new)]
        lines = {k: f"{k}: {_shown(old, k)} -> {_shown(new, k)}" for k in changed}
        if "trainer" in changed and not allow_change:
            raise UsageError(
                f"{self.path} holds a run of another experiment, trainer {old['trainer']}: name "
                "another --workdir, or move it aside with --fresh."
            )
        serious = [k for k in changed if not _harmless(k, old, new)]
        if serious and not allow_change:
            named = "; ".join(lines[k] for k in serious)
            raise UsageError(
                f"{self.path} holds a run with another config ({named}): go on with the change by "
                "--allow_config_change, or start anew by --fresh or another --workdir."
            )
        return list(lines.values())

    def check_run(self) -> None:
        """Refuses a folder with no run in it."""
        if not self.has_run():
            raise UsageError(
                f"{self.path} has no run to evaluate: train first, or name its --workdir."
            )

    def check_movable(self) -> None:
        """Refuses a folder that `move_aside` must not touch: one that is no run's, or in use."""
        self._check_no_foreign()
        if self.has_run() and pathlib.Path.cwd().is_relative_to(self.path.resolve()):
            raise UsageError(
                f"--fresh would move {self.path.resolve()} aside, and you are in it: go elsewhere, "
                "or name another --workdir."
            )

    def create(self, config: Mapping[str, Any]) -> None:
        """Makes the folder, and writes the config of now.

        Raises:
            UsageError: the folder cannot be made.
            Failure: the config cannot be written.
        """
        if not self._writes:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(self._not_writable(error)) from None
        self._write("config.json", config)

    def move_aside(self) -> pathlib.Path | None:
        """Moves the run here out of the way, to a name with the time.

        Returns:
            Where it went, or None where there is none.

        Raises:
            UsageError: the folder is not a run's, or cannot be moved.
        """
        self.check_movable()
        if not self.has_run():
            return None
        stamp = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
        aside = self.path.with_name(f"{self.path.name}.{stamp}")
        number = 1
        while aside.exists():
            number += 1
            aside = self.path.with_name(f"{self.path.name}.{stamp}.{number}")
        try:
            self.path.rename(aside)
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be moved to {aside} ({error.strerror}): name another "
                "--workdir."
            ) from None
        return aside

    def event(self, event: str, step: int, **fields: Any) -> None:
        """Adds a line to `events.jsonl`, whole or not at all.

        Raises:
            Failure: it cannot be written.
        """
        if not self._writes:
            return
        line = {"time": time.time(), "event": event, "step": step, **fields}
        path = self.path / "events.jsonl"
        with (
            write_errors.report_write_errors(str(path), self.checkpoints),
            open(path, "ab", buffering=0) as file,
        ):
            _append(file, json.dumps(line).encode() + b"\n")

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Replaces `result.json`, whole or not at all.

        Raises:
            Failure: it cannot be written.
        """
        if self._writes:
            self._write("result.json", result)

    def rollbacks(self) -> list[dict[str, Any]]:
        """What `write_rollbacks` wrote, or nothing."""
        if not (self.path / "rollbacks.json").exists():
            return []
        found: Any = self._read("rollbacks.json").get("rollbacks")
        if isinstance(found, list) and all(map(_has_step, found)):
            return found
        raise UsageError(
            f"{self.path / 'rollbacks.json'} is not what ctl wrote: mend it, or use --fresh."
        )

    def write_rollbacks(self, rollbacks: Sequence[Mapping[str, Any]]) -> None:
        """Replaces `rollbacks.json`, whole or not at all.

        Raises:
            Failure: it cannot be written.
        """
        if self._writes:
            self._write("rollbacks.json", {"rollbacks": list(rollbacks)})

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        temporary = self.path / _temporary(name)
        with write_errors.report_write_errors(str(self.path / name), self.checkpoints):
            try:
                temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
                os.replace(temporary, self.path / name)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()  # it takes room that a full disk does not have
                raise

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} cannot be read ({error}): mend it, or use --fresh.") from None
        if not isinstance(content, dict):
            raise UsageError(f"{path} is not a JSON object: mend it, or use --fresh.")
        return content

    def _check_no_foreign(self) -> None:
        """Refuses a folder with files in it that are not a run's."""
        names = os.listdir(self.path) if self.path.is_dir() else []
        if (
            set(names) - {_temporary("config.json"), lock.NAME, "aot_compile.json"}
            and not self._has_own_config()
        ):
            raise UsageError(
                f"{self.path} has files in it and no config.json of ctl, so it is not a run's "
                "folder: name another --workdir."
            )

    def _has_own_config(self) -> bool:
        try:
            content = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return False
        except (OSError, ValueError, RecursionError):
            return True  # a broken one, which may have been a run's
        return isinstance(content, dict) and "trainer" in content

    def _check_writable(self) -> None:
        """Refuses a path that cannot become a folder to write in, and leaves nothing there."""
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(self.path)  # a name may be too long, or not for us to see
            nearest = self.path
            while not os.path.lexists(nearest):
                nearest = nearest.parent
            if not nearest.is_dir():
                where = "" if nearest == self.path else f": {nearest}"
                raise UsageError(f"--workdir={self.path}{where} is a file: name a folder.")
            with tempfile.TemporaryFile(dir=nearest):  # os.access always says yes to root
                pass
        except OSError as error:
            raise UsageError(self._not_writable(error)) from None

    def _not_writable(self, error: OSError) -> str:
        return f"--workdir={self.path} cannot be written ({error.strerror}): name another folder."


def _append(file: io.FileIO, line: bytes) -> None:
    """Adds a line whole or not at all: a full disk takes the beginning of one."""
    end = file.seek(0, os.SEEK_END)
    try:
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


def _has_step(decision: Any) -> bool:
    return isinstance(decision, dict) and type(decision.get("step")) is int


def _temporary(name: str) -> str:
    return f".{name}.new"


def _differ(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    batch = ("data.global_batch_size", "data.per_replica_batch_size")
    if key in batch and new.get("data.per_replica_batch_size"):  # global once replicas are known
        return False
    return (key in old) != (key in new) or old.get(key) != new.get(key)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "absent"


def _harmless(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if key == "train.steps":  # a cosine without a length of its own is spread over train.steps
        constant = new.get("optimizer.schedule") == "constant"
        return constant or bool(new.get("optimizer.decay_steps"))
    if key == "runtime.strategy":  # the updates of parameter servers are asynchronous
        return "parameter_server" not in (old.get(key), new.get(key))
    return any(
        key == name or (name.endswith(".") and key.startswith(name)) for name in defaults.HARMLESS
    )
