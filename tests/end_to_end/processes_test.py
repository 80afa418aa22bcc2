"""The same weights under every strategy, real processes among them; and what a lost process does."""

import json
import os
import signal
import time

import numpy as np
import pytest

from tests import child, experiments
from tests.experiments import read_result, read_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    experiments.write(folder, {"small.py": experiments.MNIST})
    return folder


def program(folder, name, *arguments, workers=0, servers=0):
    """The command of a run in a workdir of its own."""
    main = [f"--config={folder / 'small.py'}", f"--workdir={folder / name}", *arguments]
    if not workers:
        return ["-m", "ctl.main", *main]
    return ["-m", "ctl.launch", f"--workers={workers}", f"--ps={servers}", "--", *main]


@pytest.fixture(scope="module")
def one_replica(folder):
    """batch -> the weights and the result of one replica."""
    found = {}

    def train(batch):
        if batch not in found:
            done = child.run(
                program(folder, f"one-{batch}", f"--config.data.global_batch_size={batch}")
            )
            assert done.returncode == 0, done.stderr
            workdir = folder / f"one-{batch}"
            found[batch] = read_weights(workdir), read_result(workdir)
        return found[batch]

    return train


def check_same(folder, name, one_replica, batch, *, same_loops=True):
    want, told = one_replica(batch)
    got = read_weights(folder / name)
    assert got.keys() == want.keys()
    for key, value in want.items():
        np.testing.assert_allclose(got[key], value, rtol=0, atol=1e-10, err_msg=key)
    found = read_result(folder / name)
    assert found["eval"]["examples"] == told["eval"]["examples"] == 203
    assert found["eval"]["loss"] == pytest.approx(told["eval"]["loss"], abs=1e-9)
    if same_loops:  # it is the mean of the last loop
        assert found["train"]["loss"] == pytest.approx(told["train"]["loss"], abs=1e-9)


SLOW = pytest.mark.slow
CASES = [("multi_worker", 25, [], 2)]
SLOW_CASES = [
    ("central_storage", 25, ["--config.runtime.strategy=central_storage"], 0),
    ("default", 24, ["--config.runtime.strategy=default"], 0),
    ("mirrored", 25, ["--config.runtime.strategy=mirrored"], 0),
    ("mirrored", 24, ["--config.runtime.strategy=mirrored"], 0),
    *(
        (
            "mirrored", batch,
            ["--config.runtime.strategy=mirrored", "--config.runtime.logical_devices=4"], 0,
        )
        for batch in (24, 25)
    ),
    ("central_storage", 24, ["--config.runtime.strategy=central_storage"], 0),
    ("multi_worker", 25, ["--config.optimizer.gradient_accumulation_steps=2"], 3),
]  # fmt: skip
LONG_CASES = [
    ("multi_worker", 24, ["--config.runtime.all_reduce.algorithm=ring"], 2),
    ("multi_worker", 24, [], 3),
]


@pytest.mark.parametrize(
    ("name", "batch", "arguments", "workers"),
    [
        *CASES,
        *(pytest.param(*case, marks=SLOW) for case in SLOW_CASES),
        *(pytest.param(*case, marks=[SLOW, pytest.mark.long]) for case in LONG_CASES),
    ],
)
def test_fifty_steps_of_mnist_are_those_of_one_replica(
    folder, one_replica, name, batch, arguments, workers, request
):
    run = f"{name}-{abs(hash(request.node.name))}"
    size = f"--config.data.global_batch_size={batch}"
    done = child.run(program(folder, run, size, *arguments, workers=workers))
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(folder, run, one_replica, batch)
    if workers:  # the chief alone writes
        assert done.stdout.count("Done:") == 1
        assert {p.name for p in (folder / run).iterdir()} == {
            "checkpoints", "config.json", "events.jsonl", "result.json", "summaries",
        }  # fmt: skip
        assert not [p for p in (folder / run / "checkpoints").iterdir() if p.is_dir()]
        assert len(list((folder / run / "summaries/train").iterdir())) == 1


def places(pattern):
    """pid -> TF_CONFIG's task of the running processes whose command line has a text in it."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                command = file.read()
            with open(f"/proc/{pid}/environ") as file:
                environment = dict(e.partition("=")[::2] for e in file.read().split("\0"))
        except OSError:
            continue
        if pattern in command and "ctl.main" in command and "TF_CONFIG" in environment:
            task = json.loads(environment["TF_CONFIG"])["task"]
            found[int(pid)] = (task["type"], task["index"])
    return found


def kill_when_saved(launcher, workdir, *, step, task):
    """Waits for a checkpoint, and kills one process."""
    end = time.monotonic() + 120
    while not (workdir / f"checkpoints/ckpt-{step}.index").exists():
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    (victim,) = [pid for pid, place in places(str(workdir)).items() if place == task]
    os.kill(victim, signal.SIGKILL)


def test_signal_to_one_worker_saves_due_by_time_and_evaluations_interleave(folder):
    """The clock that decides is the chief's, the signal is only the other worker's."""
    workdir = folder / "interleaved"
    arguments = [
        "--config.train.steps=1000000", "--config.train.steps_per_loop=2",
        "--config.train.checkpoint_seconds=0.05", "--config.eval.interval=6",
        "--config.eval.global_batch_size=4",  # 51 batches, so that evaluations check for a stop, too
    ]  # fmt: skip
    with child.start(program(folder, "interleaved", *arguments, workers=2)) as launcher:
        deadline = time.monotonic() + 120
        while count_events(workdir, "eval") < 2 or count_events(workdir, "checkpoint") < 2:
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (worker,) = [pid for pid, p in places(str(workdir)).items() if p == ("worker", 1)]
        os.kill(worker, signal.SIGTERM)
        out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 75, out + err
    events = experiments.read_events(workdir)
    evaluated = [step for name, step in events if name == "eval"]
    assert evaluated == list(range(6, evaluated[-1] + 1, 6))
    step = experiments.read_result(workdir)["step"]
    assert events[-1] == ("stop", step)
    assert (workdir / f"checkpoints/ckpt-{step}.whole").exists()


def count_events(workdir, name):
    exists = (workdir / "events.jsonl").exists()
    return exists and sum(event == name for event, _ in experiments.read_events(workdir))


@pytest.mark.slow
@pytest.mark.parametrize("index", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_killed_worker_is_told_and_the_restarted_run_ends_the_same(folder, one_replica, index):
    name = f"killed-{index}"
    arguments = ["--config.train.checkpoint_interval=10", "--config.train.steps_per_loop=2"]
    command = program(folder, name, *arguments, workers=2)
    command[2:2] = ["--max_restarts=1"]
    with child.start(command) as launcher:
        kill_when_saved(launcher, folder / name, step=20, task=("worker", index))
        out, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, out + err
    assert f"worker {index} failed first (killed by SIGKILL)" in err
    assert "restarting all processes; 0 more restarts." in err
    assert "Resumed from" in out
    check_same(folder, name, one_replica, 24, same_loops=False)


@pytest.mark.slow
def test_a_killed_worker_without_restarts_ends_the_launcher_with_its_code(folder):
    command = program(folder, "ended", "--config.train.steps_per_loop=2", workers=2)
    command += ["--config.train.checkpoint_interval=10", "--config.train.steps=5000"]
    with child.start(command) as launcher:
        kill_when_saved(launcher, folder / "ended", step=10, task=("worker", 1))
        killed = time.monotonic()
        for line in launcher.stderr:
            if "worker 1 failed first (killed by SIGKILL)" in line:
                break
        assert time.monotonic() - killed < 5
        out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 128 + signal.SIGKILL, out + err
    assert not places(str(folder / "ended"))


@pytest.mark.slow
def test_ctrl_c_stops_all_workers_at_one_step_and_the_run_goes_on(folder, one_replica):
    arguments = ["--config.train.steps_per_loop=2", "--config.train.checkpoint_interval=10"]
    command = program(folder, "stopped", *arguments, workers=2)
    with child.start(command) as launcher:
        end = time.monotonic() + 120
        while not (folder / "stopped/checkpoints/ckpt-10.index").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        launcher.send_signal(signal.SIGINT)
        out, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 75, out + err
    assert "Stopped at step" in out
    assert 10 <= read_result(folder / "stopped")["step"] < 50
    again = child.run(command)
    assert again.returncode == 0 and "Resumed from" in again.stdout, again.stderr
    check_same(folder, "stopped", one_replica, 24, same_loops=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "rollback",
        pytest.param("skip", marks=pytest.mark.long),
        pytest.param("stop", marks=pytest.mark.long),
    ],
)
def test_two_workers_decide_alike_on_a_row_that_one_of_them_has(folder, policy):
    ends = {}
    for name, workers in (("alone", 0), ("both", 2)):
        arguments = [
            "--config.trainer=small.py:Poisoned", f"--config.train.on_non_finite={policy}",
            "--config.train.checkpoint_interval=10",
        ]  # fmt: skip
        name = f"poisoned-{policy}-{name}"
        done = child.run(program(folder, name, *arguments, workers=workers))
        assert done.returncode == (1 if policy == "stop" else 0), done.stdout + done.stderr
        if policy == "stop":
            assert (
                "Step 13 is not finite: the loss is first, on the examples "
                in done.stdout + done.stderr
            )
        lines = (folder / name / "events.jsonl").read_text().splitlines()
        events = [(e["event"], e["step"]) for e in map(json.loads, lines)]
        ends[workers] = read_weights(folder / name), events
    (alone, alone_events), (both, both_events) = ends.values()
    assert alone_events == both_events and ("non_finite", 13) in both_events
    for key, value in alone.items():
        np.testing.assert_allclose(both[key], value, rtol=0, atol=1e-10, err_msg=key)
    steps = {"skip": (50, 48), "rollback": (50, 48), "stop": (10, 10)}[policy]
    assert (
        both["global_step/.ATTRIBUTES/VARIABLE_VALUE"],
        both["optimizer/_iterations/.ATTRIBUTES/VARIABLE_VALUE"],
    ) == steps


@pytest.mark.slow
def test_parameter_servers_count_their_steps_and_learn(folder):
    arguments = [
        "--config.runtime.precision=float32", "--config.train.steps=600",
        "--config.data.global_batch_size=100", "--config.train.steps_per_loop=100",
    ]  # fmt: skip
    done = child.run(program(folder, "ps", *arguments, workers=2, servers=1))
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_result(folder / "ps")
    assert found["step"] == 600 and found["eval"]["examples"] == 203
    assert found["eval"]["accuracy"] > 0.97
    assert "Updates are asynchronous" in done.stdout
    assert (read_weights(folder / "ps")["global_step/.ATTRIBUTES/VARIABLE_VALUE"]) == 600


@pytest.mark.slow
def test_parameter_servers_go_on_without_a_killed_worker(folder):
    arguments = [
        "--config.runtime.precision=float32", "--config.train.steps=300",
        "--config.train.checkpoint_interval=50", "--config.train.steps_per_loop=50",
    ]  # fmt: skip
    command = program(folder, "ps-killed", *arguments, workers=2, servers=1)
    with child.start(command) as launcher:
        kill_when_saved(launcher, folder / "ps-killed", step=50, task=("worker", 1))
        out, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, out + err
    assert "worker 1 is lost (killed by SIGKILL); the chief continues with the others." in err
    assert 300 <= read_result(folder / "ps-killed")["step"] <= 310
    assert read_result(folder / "ps-killed")["eval"]["examples"] == 203


def test_a_mistake_is_told_and_ends_all(folder):
    done = child.run(program(folder, "wrong", "--config.train.stpes=5", workers=2))
    assert done.returncode == 2
    assert "did you mean train.steps" in done.stdout
    assert done.stderr.count("failed first (exit code 2)") == 1
    assert not (folder / "wrong").exists()


@pytest.mark.slow
def test_variables_in_parts_go_on_whole_in_one_process_and_in_parts_again(folder):
    constant = [
        "--config.runtime.precision=float32", "--config.optimizer.schedule=constant",
        "--config.optimizer.warmup_steps=0", "--allow_config_change",
    ]  # fmt: skip
    parts = "--config.runtime.cluster.shard_mib=0.01"
    before = None
    for steps, workers, servers, more in (
        (60, 2, 2, [parts]),
        (90, 0, 0, []),
        (120, 2, 2, [parts]),
    ):
        arguments = [*constant, *more, f"--config.train.steps={steps}"]
        command = program(folder, "parts", *arguments, workers=workers, servers=servers)
        done = child.run(command)
        assert done.returncode == 0, done.stdout + done.stderr
        found = read_result(folder / "parts")
        assert found["step"] == steps
        # The loss goes on from where it was: a model whose slots or weights were lost begins at 2.3.
        assert before is None or found["train"]["loss"] < 1.2 * before
        before = found["train"]["loss"]
