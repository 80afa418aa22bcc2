"""When a restart is of no use, with the files of a workdir."""

from ctl.hardware.failure_limit import FailureLimit


def test_failures_without_a_new_checkpoint_are_limited(tmp_path):
    (tmp_path / "checkpoints").mkdir()

    def save(step):
        (tmp_path / f"checkpoints/ckpt-{step}.whole").touch()

    save(10)
    limit = FailureLimit(tmp_path)
    assert not limit.is_reached(is_loss=False)
    save(20)
    assert not limit.is_reached(is_loss=False)  # the run got on since the last failure
    assert limit.is_reached(is_loss=False)


def test_run_has_saved_once_there_is_a_checkpoint_that_was_not_there_at_its_start(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/ckpt-10.whole").touch()
    limit = FailureLimit(tmp_path)
    limit.record_start()
    assert not limit.has_saved()
    (tmp_path / "checkpoints/ckpt-10.whole").unlink()  # as of a checkpoint that is too old
    assert not limit.has_saved()
    (tmp_path / "checkpoints/ckpt-20.whole").touch()
    assert limit.has_saved()
    limit.record_start()
    assert not limit.has_saved()


def test_machines_may_be_lost_one_after_the_other_while_the_run_starts(tmp_path):
    limit = FailureLimit(tmp_path)
    assert [limit.is_reached(is_loss=True) for _ in range(3)] == [False, False, True]
