"""What is saved is restored; damaged checkpoints are skipped."""

import atexit
import errno
import gc
import shutil
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import ctl
from ctl.loop.checkpoints import checkpointer
from ctl.loop.checkpoints.checkpointer import Checkpointer
from tests.loop.shared import arrays, make_reference, same, same_copies, share
from tests.support import reference_model


def adam():
    return tf_keras.optimizers.Adam(1e-2)


def build_trainer(replicas=1, **options):
    tf_keras.backend.reset_uids()  # names as in a process of its own
    return make_reference(replicas, optimizer=adam, **options)


make_trainer = share(build_trainer)


def state(trainer):
    return arrays([*trainer.model.variables, *trainer.optimizer.variables])


def test_state_is_restored_on_another_number_of_replicas(tmp_path):
    trainer = make_trainer(2)
    checkpoints = Checkpointer(tmp_path, trainer, background=True)
    trainer.train(tf.constant(3))
    path, want = checkpoints.save(), state(trainer)
    trainer.train(tf.constant(2))  # while it may still be written
    checkpoints.wait()
    assert checkpoints.latest_step() == 3
    assert tf.train.latest_checkpoint(str(tmp_path)) == path
    for replicas in (1, 2):
        other = make_trainer(replicas)
        assert Checkpointer(tmp_path, other).all_restore_latest() == path
        assert other.global_step.numpy() == 3
        assert same(state(other), want)
        assert all(same_copies(v, v.numpy(), replicas) for v in other.model.variables)


@pytest.mark.slow
def test_loss_scale_and_both_counters_are_restored(tmp_path):
    trainer = make_trainer(precision="float16")
    trainer.optimizer._loss_scale._current_loss_scale.assign(2.0**40)
    trainer.train(tf.constant(2))
    Checkpointer(tmp_path, trainer).save()
    other = make_trainer(precision="float16")
    Checkpointer(tmp_path, other).all_restore_latest()
    assert float(other.optimizer.loss_scale) == 2.0**38
    assert (other.global_step.numpy(), other.optimizer.iterations.numpy()) == (2, 0)
    assert other.skipped_steps.numpy() == 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the checkpoints of steps 1, 2 and 3, and the state at each."""
    trainer, folder = make_trainer(), tmp_path_factory.mktemp("trained")
    checkpoints = Checkpointer(folder, trainer)
    states = {}
    for step in (1, 2, 3):
        trainer.train(tf.constant(1))
        checkpoints.save()
        states[step] = state(trainer)
    return folder, states


@pytest.fixture
def saved(trained, tmp_path):
    """A copy of it that a test may change."""
    return shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True), trained[1]


DATA = "ckpt-3.data-00000-of-00001"


def clear(path):
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES = {
    "data cut": lambda f: (f / DATA).write_bytes((f / DATA).read_bytes()[:100]),
    "index of other bytes": lambda f: clear(f / "ckpt-3.index"),
    "data of other bytes": lambda f: clear(f / DATA),
    "a leftover folder": lambda f: (f / "ckpt-9_temp").mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_newest_checkpoint_that_can_be_read_is_restored(saved, damage):
    folder, states = saved
    DAMAGES[damage](folder)
    trainer = make_trainer()
    Checkpointer(folder, trainer).all_restore_latest()
    want = 3 if damage == "a leftover folder" else 2
    assert trainer.global_step.numpy() == want
    assert same(state(trainer), states[want])


def test_checkpoint_is_not_deleted_for_a_newer_one_that_cannot_be_read(saved):
    folder, _ = saved
    DAMAGES["data of other bytes"](folder)
    checkpoints = Checkpointer(folder, make_trainer(), keep=1)
    checkpoints.all_restore_latest()
    checkpoints.save()
    assert checkpoints.files.steps() == [2]


def test_each_checkpoint_that_cannot_be_read_is_tried_once(saved):
    folder, _ = saved
    for name in (DATA, DATA.replace("3", "2")):
        clear(folder / name)
    lines, trainer = [], make_trainer()

    def print_line(line):
        assert len(lines) < 2, "tried again"
        lines.append(line)

    Checkpointer(folder, trainer).all_restore_latest(print_line=print_line)
    assert trainer.global_step.numpy() == 1
    skipped = [line.partition(":")[0] for line in lines]
    assert skipped == [f"Skipped {folder}/ckpt-{step}" for step in (3, 2)]


def test_run_does_not_start_from_scratch_if_all_checkpoints_are_damaged(saved):
    folder, _ = saved
    for path in folder.glob("*.index"):
        path.write_bytes(b"")
    with pytest.raises(ctl.UsageError, match=r"none of them can be read.*: fix the files, or name"):
        Checkpointer(folder, make_trainer()).all_restore_latest()


@pytest.mark.parametrize("name", ["a [1]", "a\\b"])
def test_folder_whose_checkpoints_could_not_be_read_is_rejected(tmp_path, name):
    with pytest.raises(ctl.UsageError, match=r"contains \[ or .*: name another folder"):
        Checkpointer(tmp_path / name, make_trainer())


def test_first_save_that_was_killed_is_no_checkpoint(tmp_path):
    (tmp_path / "ckpt-5_temp").mkdir()
    (tmp_path / "ckpt-5.index").write_bytes(b"half")
    (tmp_path / "ckpt-5.new").touch()  # written before the others
    assert Checkpointer(tmp_path, make_trainer()).all_restore_latest() is None


class Other(reference_model.ReferenceTrainer):
    """The reference model with another last layer, and one layer more."""

    def build_model(self):
        tf_keras.backend.reset_uids()  # names as in a process of its own
        model = super().build_model()
        hidden = tf_keras.layers.Dense(4, name="more")(model.layers[-2].output)
        return tf_keras.Model(model.input, tf_keras.layers.Dense(3, name="dense_1")(hidden))


@pytest.fixture
def of_reference(tmp_path):
    """The path of a reference trainer's checkpoint at step 3, and its values by name."""
    trainer = make_trainer()
    trainer.train(tf.constant(3))
    variables = (*trainer.model.variables, *trainer.optimizer.variables)
    values = {v.name.removesuffix(":0"): v.numpy() for v in variables}
    return Checkpointer(tmp_path, trainer).save(), values


@share
def make_other(replicas=1):
    return make_reference(replicas, cls=Other, optimizer=adam)


def test_mismatches_are_listed_by_name_and_nothing_is_restored(tmp_path, of_reference):
    path, _ = of_reference
    other = make_other()
    before = state(other)
    with pytest.raises(ctl.UsageError) as rejected:
        Checkpointer(tmp_path, other).restore(path)
    line, missing = (
        str(rejected.value),
        "only the trainer has more/kernel, more/bias, m/more/kernel",
    )
    assert f"{path} does not match this trainer (dense_1/kernel is [4, 3], but [5, 3] in" in line
    assert missing in line and "): restore what matches with --allow_partial_restore (" in line
    assert same(state(other), before) and other.global_step.numpy() == 0


def test_partial_restore_restores_what_matches_with_its_slots(tmp_path, of_reference):
    path, values = of_reference
    other = make_other(2)
    before = {v.name: v.numpy() for v in other.model.variables}
    checkpoints = Checkpointer(tmp_path, other, partial=True)
    checkpoints.restore(path)
    left = checkpoints.unmatched.left()
    assert left[:3] == ["dense_1/kernel", "more/kernel", "more/bias"] and len(left) == 9
    assert checkpoints.unmatched.dropped()[0] == "dense_1/kernel"
    assert (other.global_step.numpy(), other.optimizer.iterations.numpy()) == (3, 3)
    for variable in (*other.model.variables, *other.optimizer.variables):
        name = variable.name.removesuffix(":0")
        initial = before.get(variable.name, np.zeros(variable.shape))  # a slot begins at zero
        assert same_copies(variable, initial if name in left else values[name], 2), name
    other.train(tf.constant(1))
    checkpoints.save()
    complete = Checkpointer(tmp_path, make_other())
    assert complete.all_restore_latest().endswith("ckpt-4") and complete.unmatched is None


def test_partial_restore_requires_a_weight_and_the_counters_to_match(tmp_path, of_reference):
    path, _ = of_reference
    with pytest.raises(ctl.UsageError, match="no variable"):
        other = make_trainer(precision="float32")
        Checkpointer(tmp_path, other, partial=True).restore(path)
    bare = tf.train.Checkpoint(model=other.model).write(str(tmp_path / "bare"))
    with pytest.raises(ctl.UsageError, match="even in part, since the counters"):
        Checkpointer(tmp_path, other, partial=True).restore(bare)


def test_only_a_reader_ignores_what_only_the_checkpoint_has(tmp_path):
    trainer = build_trainer()
    trainer.temperature = tf.Variable(2.0, name="temperature")
    path = Checkpointer(tmp_path, trainer).save()
    other = make_trainer()
    with pytest.raises(ctl.UsageError, match="only the checkpoint has temperature"):
        Checkpointer(tmp_path, other).restore(path)
    Checkpointer(tmp_path, other, reads_only=True).restore(path)
    assert same(state(other), state(trainer))


class Two(reference_model.ReferenceTrainer):
    """A second optimizer, whose slots are made in the first step."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        with self.build_scope():
            self.extra = tf.Variable(1.0, dtype=tf.float64, name="extra")
            self.momentum = tf_keras.optimizers.SGD(0.1, momentum=0.9)

    def replica_step(self, batch):
        losses = lambda rows: tf.square(self.extra * rows["x"][:, 0])  # noqa: E731
        self.minimize(batch, losses, variables=[self.extra], optimizer=self.momentum)
        return super().replica_step(batch)


@pytest.mark.slow
def test_slots_that_are_not_built_yet_are_restored_when_they_are_built_and_not_lost(tmp_path):
    one, other = make_reference(cls=Two), make_reference(cls=Two)
    one.train(tf.constant(2))
    path = Checkpointer(tmp_path, one).save()
    checkpoints = Checkpointer(tmp_path, other)
    checkpoints.restore(path)
    with pytest.raises(ctl.UsageError, match=r"SGD/m/extra"):
        checkpoints.save()
    for trainer in (one, other):
        trainer.train(tf.constant(1))
    checkpoints.save()
    assert other.extra.numpy() == one.extra.numpy() != 1.0
    assert same(other.momentum.variables, one.momentum.variables)


def test_newest_checkpoints_and_multiples_of_keep_every_are_kept(tmp_path):
    trainer = make_trainer()
    checkpoints = Checkpointer(tmp_path, trainer, keep=2, keep_every=3, background=True)
    for _ in range(8):
        trainer.train(tf.constant(1))
        checkpoints.save()
    checkpoints.wait()
    assert checkpoints.files.steps() == [3, 6, 7, 8]


def test_checkpoints_that_cannot_be_deleted_are_reported_once(tmp_path, monkeypatch, capsys):
    checkpoints = Checkpointer(tmp_path, trainer := make_trainer(), keep=1)

    def fail(step):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoints.files, "remove", fail)
    for step in (1, 2, 3):
        trainer.global_step.assign(step)
        checkpoints.save()
    assert checkpoints.files.steps() == [1, 2, 3]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"Old checkpoints in {tmp_path} cannot be deleted (Permission denied)")


def test_closed_checkpointer_is_not_kept_in_memory_and_can_save_again(tmp_path):
    trainer, threads = make_trainer(), threading.active_count()
    checkpoints = Checkpointer(tmp_path, trainer, background=True)
    for step in (0, 1):
        trainer.global_step.assign(step)
        checkpoints.save()
        checkpoints.wait()
        assert threading.active_count() == threads + 1
        checkpoints.close()
        assert threading.active_count() == threads and checkpoints.latest_step() == step
    kept = weakref.ref(checkpoints)
    del checkpoints
    gc.collect()
    assert kept() is None


def test_error_of_the_writing_thread_prints_nothing_at_exit(tmp_path, monkeypatch, capfd):
    handlers = []
    monkeypatch.setattr(atexit, "register", handlers.append)
    monkeypatch.setattr(atexit, "unregister", lambda handler: None)
    checkpoints = Checkpointer(tmp_path, make_trainer(), background=True)

    def fail(step, notes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "_commit", fail)
    checkpoints.save()  # another error ends the run before `wait`
    for handler in reversed(handlers):
        handler()
    assert len(handlers) == 2 and capfd.readouterr().err == ""


def test_checkpoints_are_read_and_written_by_this_process_for_a_remote_tpu(
    tmp_path, monkeypatch, pretend_strategy
):
    devices, trainer = [], make_trainer()
    make = tf.train.CheckpointOptions

    def record(experimental_io_device=None, **options):
        devices.append(experimental_io_device)
        return make(**options)

    monkeypatch.setattr(tf.train, "CheckpointOptions", record)
    for name, device in (("tpu", "/job:localhost"), ("one_device", None)):
        pretend_strategy(name)
        for is_chief in (True, False):
            checkpoints = Checkpointer(tmp_path, trainer, is_chief=is_chief)
            checkpoints.restore(checkpoints.save())
        assert devices == [device] * 4
        devices.clear()


def test_errors_of_the_variables_are_no_damage():
    missing = tf.errors.NotFoundError(None, None, "Key model/kernel not found in checkpoint")
    for error in (missing, AssertionError("No checkpointed value found")):
        assert not checkpointer._is_damage(error)


def test_checkpoints_of_tensorflows_manager_are_refused_and_kept(tmp_path):
    trainer = make_trainer()
    root = tf.train.Checkpoint(**trainer.checkpoint_items())
    theirs = tf.train.CheckpointManager(root, str(tmp_path), max_to_keep=5)
    for _ in range(2):
        theirs.save()
    names = sorted(path.name for path in tmp_path.iterdir())
    checkpoints = Checkpointer(tmp_path, trainer, keep=1)
    for call in (checkpoints.all_restore_latest, checkpoints.save):
        with pytest.raises(ctl.UsageError, match=r"ckpt-2 has no marker of ctl.*restore it once"):
            call()
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_failed_read_is_neither_damage_nor_a_mismatch(tmp_path, monkeypatch):
    trainer = make_trainer()
    checkpoints = Checkpointer(tmp_path, trainer)
    checkpoints.save()

    def fail(path):
        raise tf.errors.AbortedError(None, None, "a/ckpt-3.index; Stale file handle")

    monkeypatch.setattr(tf.train, "load_checkpoint", fail)
    with pytest.raises(ctl.errors.Failure, match="ckpt-0 cannot be read: Stale file"):
        checkpoints.all_restore_latest()


def test_newer_checkpoint_takes_the_place_of_one_that_a_run_deletes_meanwhile(
    tmp_path, monkeypatch
):
    trainer = make_trainer()
    checkpoints = Checkpointer(tmp_path, trainer, keep=1)
    checkpoints.save()
    original = Checkpointer.restore

    def restore(self, path):
        if path.endswith("ckpt-0"):  # the other process saves, and prunes
            trainer.global_step.assign(5)
            checkpoints.save()
        original(self, path)

    monkeypatch.setattr(Checkpointer, "restore", restore)
    reader = Checkpointer(tmp_path, trainer, reads_only=True)
    assert reader.all_restore_latest() == reader.path(5)
