"""What a signal, a killed process and a user error cause in a run of several processes."""

import signal

import pytest

from tests.end_to_end.launching import launch
from tests.support import child
from tests.support.experiments import read_events, read_result


def count(workdir, event):
    """How many events of a kind the run has recorded until now."""
    path = workdir / "events.jsonl"
    return path.read_text().count(f'"event": "{event}"') if path.exists() else 0


@pytest.mark.slow
def test_signal_to_one_worker_saves_due_by_time_and_evaluations_interleave(folder, run_launcher):
    """The clock that decides is the chief's, the signal is only the other worker's."""
    workdir = folder / "interleaved"
    arguments = [
        "--config.train.steps=1000000", "--config.train.steps_per_loop=2",
        "--config.train.checkpoint_interval=0.05 seconds", "--config.eval.interval=6",
        "--config.eval.global_batch_size=4",  # 51 batches, so that evaluations check for a stop, too
    ]  # fmt: skip
    code, out, err = run_launcher(
        launch(folder, "interleaved", *arguments),
        when=lambda: min(count(workdir, "eval"), count(workdir, "checkpoint")) > 1,
        send=(1, signal.SIGTERM),
    )
    assert code == 75, out + err
    events = read_events(workdir)
    evaluated = [step for name, step in events if name == "eval"]
    assert evaluated == list(range(6, evaluated[-1] + 1, 6))
    step = read_result(workdir)["step"]
    assert events[-1] == ("stop", step)
    assert (workdir / f"checkpoints/ckpt-{step}.whole").exists()


@pytest.mark.slow
@pytest.mark.long
def test_parameter_servers_continue_without_a_killed_worker(folder, run_launcher):
    arguments = [
        "--config.runtime.precision=float32", "--config.train.steps=300",
        "--config.train.checkpoint_interval=50", "--config.train.steps_per_loop=50",
    ]  # fmt: skip
    code, out, err = run_launcher(
        launch(folder, "ps-killed", *arguments, servers=1),
        when=(folder / "ps-killed/checkpoints/ckpt-50.index").exists,
        send=(1, signal.SIGKILL),
    )
    assert code == 0, out + err
    assert "Updates are asynchronous" in out
    result = read_result(folder / "ps-killed")
    assert 300 <= result["step"] <= 310
    assert result["eval"]["examples"] == 203 and result["eval"]["accuracy"] > 0.9


def test_a_user_error_is_reported_and_ends_all_processes(folder):
    done = child.run(launch(folder, "wrong", "--config.train.stpes=5"))
    assert done.returncode == 2
    assert "did you mean train.steps" in done.stdout
    assert done.stderr.count("failed first (exit code 2)") == 1
    assert not (folder / "wrong").exists()
