"""Saves and restores a trainer, in checkpoints numbered by global step."""

import atexit
from collections.abc import Callable, Mapping, Sequence
import errno
import pathlib
import re
import tempfile
from typing import Any

import tensorflow as tf

from ctl.built.inner_loop import step_of
from ctl.built.state import as_entry
from ctl.errors import UsageError, list_some, print_line, type_name
from ctl.hardware import quiet, strategies
from ctl.hardware.collectives import ProcessGroup
from ctl.keras.models import adapt
from ctl.loop import disk
from ctl.loop.checkpoints import matching, positions
from ctl.loop.checkpoints.files import CheckpointFiles, read_notes, report_write_errors
from ctl.step import Step
from ctl.trainer import StandardTrainer

_Trackable = tf.__internal__.tracking.Trackable
_DATA = "data"  # the name of the notes in which a checkpoint holds what `ctl.Step` has trained on


class DamagedCheckpoint(Exception):
    """Raised if files of a checkpoint cannot be read; an older checkpoint may be intact."""


class Checkpointer:
    """Saves and restores everything that the next step of a trainer depends on.

        checkpoints = Checkpointer("runs/mine/checkpoints", trainer)
        checkpoints.all_restore_latest()
        trainer.train(tf.constant(100))
        checkpoints.save()                              # runs/mine/checkpoints/ckpt-100
        checkpoints.wait()

    Every process of a run must call the same methods in the same order.

    Several steps that train together, such as those of a GAN, are saved by one `Checkpointer`, so that
    a kill never leaves them at different positions:

        checkpoints = ctl.Checkpointer("runs/gan/checkpoints", [generator_step, critic_step])

    A checkpoint then has the number of the largest `global_step`, and restores each step to its own.

    A trainer's attributes with `state_dict()` and `load_state_dict(state)` are part of its checkpoints,
    and so are those of `extra`: data that training makes, such as a replay buffer. A state consists of
    dicts, lists, tuples, arrays, numbers and texts. In several processes it is the chief's.

    Args:
        directory: the folder, which need not exist.
        trainer: the trainer, or the `ctl.Step` after `build`, whose state is saved and restored; or a
            list of them, in a fixed order, which may also contain models, optimizers and variables.
        keep: how many of the newest checkpoints are kept.
        keep_every: checkpoints at multiples of this number of steps are also kept; 0 for none.
        background: copy the values and return, while a thread writes them; for a run in one
            process only.
        is_chief: whether this process writes the checkpoints of the run.
        has_own_folder: whether `directory` is a folder of this process alone, as the local folder of
            a run in an object store: every process then writes the checkpoints.
        processes: the processes of the run. By default this one only, or those of a step's strategy.
        partial: if a checkpoint does not match, restore the variables of the same name and shape, and
            continue with other data.
        reads_only: nothing will be saved, so a checkpoint may have more than the trainer.
        rank: the sort key of steps, from the first to delete to the last; by default the step.
        extra: name -> a further object to save, with `state_dict` and `load_state_dict`, or one that
            `tf.train.Checkpoint` can hold.

    Attributes:
        files: the checkpoints in the folder.
        has_own_folder: the same as the argument.
        unmatched: the variables that the last restore could not match, if it was partial; else None.
    """

    def __init__(
        self, directory: str | pathlib.Path, trainer: StandardTrainer | Step | Sequence[Any],
        *, keep: int = 3, keep_every: int = 0, background: bool = False, is_chief: bool = True,
        has_own_folder: bool = False, processes: ProcessGroup | None = None, partial: bool = False,
        reads_only: bool = False, rank: Callable[[int], Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        is_list = isinstance(trainer, list | tuple)
        parts: list[Any] = [*trainer] if isinstance(trainer, list | tuple) else [trainer]
        owners = _find_owners(parts, is_list=is_list, reads_only=reads_only)
        if any(owner.strategy is not owners[0].strategy for owner in owners):
            raise UsageError(
                "ctl.Checkpointer saves steps of one strategy: pass them the same object."
            )
        # TensorFlow looks for a checkpoint by its path as a pattern, in which [ does not match itself.
        if re.search(r"[\[\\]", str(directory)):
            raise UsageError(
                f"The folder {directory} contains [ or \\, with which TensorFlow can write checkpoints, "
                "but cannot read them: name another folder (--workdir)."
            )
        self.directory = pathlib.Path(directory)
        self.files = CheckpointFiles(directory)
        self.unmatched: matching.Comparison | None = None
        self._owners = owners
        self._steps = [p.built() if isinstance(p, Step) else step_of(p) for p in owners]
        positions.add(owners)
        items = {str(i): _as_item(part) for i, part in enumerate(parts)}
        items = items if is_list else _items(owners[0])
        self._checkpoint = tf.train.Checkpoint(**items, **_extra_items(extra or {}))
        saved = (v.source for v in matching.list_variables(self._checkpoint))
        self._states = [each for each in saved if hasattr(each, "freeze")]  # `StateDict`s
        if isinstance(owners[0], Step) and processes is None:
            hardware = strategies.of_strategy(owners[0].strategy)
            is_chief, processes = hardware.is_chief, ProcessGroup(hardware)
        self._keep = keep
        self._keep_every = keep_every
        self._background = background
        self.has_own_folder = has_own_folder
        self._writes = is_chief or has_own_folder
        self._processes = processes or ProcessGroup()
        self._partial = partial
        self._reads_only = reads_only
        self._rank = rank
        self._writing: int | None = None  # the step that a thread is writing, until `wait`
        self._committed: int | None = None  # the step that it has written
        self._prune_failed = False  # which is printed once
        # The restored checkpoint, and its variables that TensorFlow will restore when the trainer
        # builds them.
        self._restored: matching.CheckpointContent | None = None
        self._deferred: list[matching.Variable] = []

    def latest_step(self, before: int | None = None) -> int | None:
        """Returns the step of the newest complete checkpoint, or of the newest before a step."""
        steps = (step for step in self.files.steps() if before is None or step < before)
        return max(steps, default=None)

    def path(self, step: int) -> str:
        """Returns the path of the checkpoint of a step."""
        return self.files.path(step)

    def save(
        self, notes: Mapping[str, Any] | None = None, on_complete: Callable[[], None] = lambda: None
    ) -> str:
        """Saves a checkpoint of the current step; returns its path.

        A checkpoint that is written in the background is complete after `wait`.

        Args:
            notes: data that `files.notes` returns for it, in JSON types; the chief's notes are saved.
            on_complete: called once it is complete, in the thread that writes.
        """
        self._check_deferred()
        for part in self._steps:
            part.check_ready()
        step = max(int(owner.global_step.numpy()) for owner in self._owners)
        if others := positions.of_others(self._owners):
            notes = {**(notes or {}), "others": others}
        if any(data := [list(getattr(owner, "descriptions", ())) for owner in self._owners]):
            notes = {**(notes or {}), _DATA: data if len(data) > 1 else data[0]}
        if not self._writes:
            # TensorFlow requires every process to save: reading a variable that has a value per
            # replica is a collective operation. These files are not needed.
            with tempfile.TemporaryDirectory(prefix="ctl-checkpoint-") as folder:
                self._checkpoint.write(f"{folder}/ckpt", self._options())
            on_complete()
            return self.path(step)
        self.wait()
        for state in self._states if self._background else ():
            state.freeze()
        disk.make_folder(self.directory)
        # A damaged checkpoint of the same step may exist: its marker must not match the new files.
        self.files.begin(step)
        self._committed = None
        options = self._options(
            experimental_enable_async_checkpoint=self._background,
            # Called in the thread that writes, once all files are written.
            experimental_write_callbacks=[lambda _: self._commit(step, notes, on_complete)],
        )
        self._writing = step if self._background else None
        self._checkpoint.write(self.path(step), options)
        if self._background:
            # Runs before TensorFlow's own handler, which the first write has registered, and which
            # would print a traceback after the line of the error that ends the program.
            atexit.unregister(self._discard_thread_error)
            atexit.register(self._discard_thread_error)
        return self.path(step)

    def wait(self) -> None:
        """Waits until the checkpoint that a thread is writing is complete.

        Raises:
            OSError or tf.errors.OpError: it could not be written.
        """
        if self._writing is None:
            return
        step, self._writing = self._writing, None
        # In TensorFlow 2.20, this does not raise the error of the thread.
        self._checkpoint.sync()
        error = self._take_thread_error()
        if error or self._committed != step:
            raise error or OSError(errno.EIO, "it was not written to the end")

    def close(self) -> None:
        """Ends the thread that writes, which would keep the trainer in memory; a `save` starts it again.

        Call `wait` before, which raises the errors of the thread.
        """
        helper = self._checkpoint._async_checkpointer_impl
        if helper is not None:
            self._discard_thread_error()
            atexit.unregister(self._discard_thread_error)
            atexit.unregister(helper._join_async_save_thread)
            helper._join_async_save_thread()
            self._checkpoint._async_checkpointer_impl = None

    def all_restore_latest(
        self, *, before: int | None = None, print_line: Callable[[str], None] | None = None
    ) -> str | None:
        """Restores the newest checkpoint that every process can read.

        Args:
            before: restore only a checkpoint from before this step.
            print_line: prints which newer checkpoints are skipped, and why.

        Returns:
            Its path, or None if there is no checkpoint.

        Raises:
            UsageError: there are checkpoints, but none can be read.
        """
        print_line = print_line or (lambda line: None)
        self.wait()  # a thread may be writing the newest one
        failed: set[int] = set()
        step = self._broadcast_latest_step(before, failed)
        for newer, fault in self.files.faults().items():
            if newer > step and (before is None or newer < before):
                print_line(f"Skipped {self.path(newer)}: {fault}.")
        while step >= 0:
            fault = ""
            try:
                self.restore(self.path(step))
            except DamagedCheckpoint as error:
                fault = str(error)
            # A file may be unreadable in one process only: all then try the next older checkpoint.
            if not self._processes.any_process(bool(fault)):
                return self.path(step)
            print_line(f"Skipped {self.path(step)}: {fault}.")
            # A run that trains meanwhile may have deleted it, and written a newer one.
            failed.add(step)
            step = self._broadcast_latest_step(before, failed)
        # Training from scratch would overwrite what the user may still be able to repair.
        if self.files.steps() or self.files.damaged():
            raise UsageError(
                f"{self.directory} has checkpoints, but none of them can be read: fix the files, or "
                "name another --workdir."
            )
        self.files.check_foreign()
        return None

    def restore(self, path: str) -> None:
        """Restores a checkpoint; only what matches, if `partial` is set.

        Raises:
            UsageError: it does not match the trainer, or the data that a step has been built with.
            DamagedCheckpoint: its files are damaged.
            Failure or OSError: the disk fails.
        """
        self.wait()  # a thread may still copy values of the trainer
        self.unmatched, self._deferred = None, []
        self._check_data(path)
        for is_last in (False, True):
            try:
                with self._owners[0].strategy.scope():
                    content = matching.CheckpointContent(path)
                    variables = matching.list_variables(self._checkpoint)
                    if not self._restore_by_place(path, content, variables):
                        self._restore_by_name(path, content, variables)
                break
            except UsageError:
                raise
            except (AssertionError, IndexError, ValueError, tf.errors.OpError) as error:
                if reason := disk.find_reason(error):
                    raise disk.read_failure(path, reason) from None
                # TensorFlow takes some failed reads for missing keys.
                if not is_last:
                    disk.check_readable(path)
                    continue
                reason = str(error).splitlines()[0]
                if _is_damage(error):
                    raise DamagedCheckpoint(reason) from None
                raise UsageError(_format_mismatch(path, reason)) from None
        positions.check(self._owners, read_notes(path).get("others", {}), path)

    def _options(self, **options: Any) -> tf.train.CheckpointOptions:
        spec = strategies.spec_of(self._owners[0].strategy)
        # By default a parameter server writes its variables into its own file system.
        own = "/job:chief" if self.has_own_folder and spec.coordinated else ""
        device = spec.io_device or own
        return tf.train.CheckpointOptions(experimental_io_device=device or None, **options)

    def _broadcast_latest_step(self, before: int | None, failed: set[int]) -> int:
        """Returns the newest step of the chief that has not failed, or -1.

        A shared disk may show the other processes an older state.
        """
        steps = (
            s for s in self.files.steps() if s not in failed and (before is None or s < before)
        )
        return self._processes.broadcast_from_chief(max(steps, default=-1))

    def _restore_by_place(
        self, path: str, content: matching.CheckpointContent, variables: list[matching.Variable]
    ) -> bool:
        """Restores as TensorFlow does, unless that would skip variables on either side."""
        places = content.places(self._checkpoint)
        mismatch, extra = matching.find_misplaced(variables, content, places)
        deferred = [v for v in extra if content.is_deferred(v, places)]
        if mismatch or (len(deferred) < len(extra) and not self._reads_only):
            return False
        # Not `restore`, which would also number the checkpoints by a variable `save_counter`.
        # TensorFlow need not warn of what is not restored: it was compared above.
        status = self._checkpoint.read(path, self._options())
        status.assert_existing_objects_matched().expect_partial()
        self._restored, self._deferred = content, deferred
        return True

    def _restore_by_name(
        self, path: str, content: matching.CheckpointContent, variables: list[matching.Variable]
    ) -> None:
        """Restores the variables of the same name, for a trainer whose objects have moved."""
        places = content.places(self._checkpoint)
        comparison = matching.compare(variables, content.variables, places)
        mismatch = comparison.describe()
        if not self._partial and not comparison.complete:
            raise UsageError(_format_mismatch(path, mismatch))
        restored = {id(variable.source) for variable, _ in comparison.pairs}
        models = [v for owner in self._owners for v in matching.list_variables(owner.model)]
        model = {id(variable.source) for variable in models}
        reason = "" if model & restored else "no variable of the model matches"
        # Without the counters the data order and the learning rate would start at zero, with weights
        # of a later step.
        counters = [(owner.global_step, owner.optimizer.iterations) for owner in self._owners]
        if not {id(variable) for pair in counters for variable in pair} <= restored:
            reason = "the counters of steps and updates do not match"
        if reason:
            raise UsageError(
                f"{path} does not match this trainer even in part, since {reason} ({mismatch}): name "
                "another --workdir."
            )
        # All values are read before a variable changes: a damaged file must leave the trainer as it is.
        values = [(variable.source, content.value(saved)) for variable, saved in comparison.pairs]
        for variable, value in values:
            variable.assign(value)
        for step in self._steps:  # the run had no such state before, or had another model
            step.restart(keep=restored)
        self.unmatched = None if comparison.complete else comparison

    def _check_data(self, path: str) -> None:
        """Raises UsageError if a step continues on other data than that of its own checkpoint."""
        own = [step for step in self.files.steps() if self.path(step) == str(path)]
        noted = self.files.notes(own[0]).get(_DATA, []) if own else []
        every = [noted] if all(isinstance(each, str) for each in noted) else noted
        if len(every) != len(self._owners):
            return  # it is a checkpoint of other steps, which the comparison of variables reports
        for owner, saved in zip(self._owners, every, strict=True):
            seen = owner.descriptions if isinstance(owner, Step) else []
            if saved and seen and not {*saved} & {*seen}:
                if not self._partial:
                    raise UsageError(
                        f"{path} was saved with other data ({saved[-1]} -> {seen[-1]}), so the next "
                        "examples are others: use the same data, continue with the change by "
                        "partial=True of ctl.Checkpointer, or start from scratch in another folder."
                    )
                saved = []
            seen[:0] = [each for each in saved if each not in seen]

    def _check_deferred(self) -> None:
        """Raises UsageError if saving would lose values of variables that are not built yet."""
        if not self._deferred or not self._restored:
            return
        built = self._restored.places(self._checkpoint)
        lost = [variable.name for variable in self._deferred if variable.node not in built]
        if lost:
            raise UsageError(
                f"The restored checkpoint has {list_some(lost)}, which the trainer never built, so "
                "saving would lose them: build in the constructor what they belong to, or name "
                "another --workdir."
            )
        self._deferred = []

    def _take_thread_error(self) -> BaseException | None:
        """Returns the error of the writing thread, which TensorFlow only logs."""
        helper = self._checkpoint._async_checkpointer_impl
        error: BaseException | None = getattr(helper, "_async_error", None)
        if error:
            helper._async_error = None
        return error

    def _discard_thread_error(self) -> None:
        self._checkpoint.sync()
        self._take_thread_error()

    def _commit(
        self, step: int, notes: Mapping[str, Any] | None, on_complete: Callable[[], None]
    ) -> None:
        self.files.commit(step, notes)
        # A newer one could not be read, or the run would have continued from it: it is the first to go.
        rank = self._rank or (lambda other: (other <= step, other))
        complete = [self.path(step)]
        # If the disk fails meanwhile, the next save deletes what is old.
        try:
            steps = self.files.prune(keep=self._keep, keep_every=self._keep_every, rank=rank)
            complete = [self.path(step) for step in steps]
        except OSError as error:
            if not self._prune_failed:
                reason = error.strerror or error
                print_line(
                    f"Old checkpoints in {self.directory} cannot be deleted ({reason}): check its "
                    "permissions. Each save tries again."
                )
            self._prune_failed = True
        # For TensorFlow's own tools, such as `tf.train.latest_checkpoint`. The function is deprecated.
        state = report_write_errors(f"{self.directory}/checkpoint", self.directory)
        with quiet.hide_warnings(), state:
            tf.compat.v1.train.update_checkpoint_state(
                str(self.directory), complete[-1], all_model_checkpoint_paths=complete
            )
        on_complete()
        self._committed = step


def _items(owner: StandardTrainer | Step) -> dict[str, Any]:
    return owner.state() if isinstance(owner, Step) else owner.checkpoint_items()


def _find_owners(parts: Sequence[Any], *, is_list: bool, reads_only: bool) -> list[Any]:
    """Returns the trainers and steps; raises UsageError without any, or for something else."""
    allowed = (StandardTrainer, Step, *([_Trackable] if is_list else []))
    wrong = [part for part in parts if not (reads_only or isinstance(adapt(part), allowed))]
    owners = [part for part in parts if reads_only or isinstance(part, StandardTrainer | Step)]
    if wrong or not owners:
        got = type_name(wrong[0]) if wrong else "a list without one"
        raise UsageError(
            f"ctl.Checkpointer(directory, trainer) got {got}, but must get a ctl.Step or a "
            "ctl.StandardTrainer, whose model and optimizer it saves, or a list of them."
        )
    return owners


def _extra_items(extra: Mapping[str, Any]) -> dict[str, Any]:
    wrapped = {name: as_entry(name, adapt(value)) for name, value in extra.items()}
    for name, value in wrapped.items():
        if not isinstance(value, _Trackable):
            raise UsageError(
                f"extra[{name!r}] of ctl.Checkpointer is {type_name(value)}, but must have the methods "
                "state_dict and load_state_dict, or be an object that tf.train.Checkpoint can hold."
            )
    return {"_extra": tf.train.Checkpoint(**wrapped)} if wrapped else {}


def _as_item(part: Any) -> Any:
    """Returns what a checkpoint of a list holds for one part."""
    if not isinstance(part, Step | StandardTrainer):
        return adapt(part)
    models = {"models": [adapt(m) for m in part.models]} if isinstance(part, Step) else {}
    return tf.train.Checkpoint(**_items(part), **models)


def _format_mismatch(path: str, reason: str) -> str:
    return (
        f"{path} does not match this trainer ({reason}): restore what matches with "
        "--allow_partial_restore (partial=True of ctl.Checkpointer), start from scratch in another "
        "folder (--workdir), or use the trainer that wrote it."
    )


def _is_damage(error: Exception) -> bool:
    """Returns whether an error is caused by the files, not by the variables to restore."""
    # TensorFlow raises an IndexError if a file is cut short, a bare OpError if an index file is not one.
    damage = (tf.errors.DataLossError, tf.errors.OutOfRangeError, IndexError)
    missing = isinstance(error, tf.errors.NotFoundError) and "matching files" in str(error)
    return isinstance(error, damage) or type(error) is tf.errors.OpError or missing
