"""Kills one of three workers, lets it return, and compares the run with one of a single process.

    python -m benchmarks.elastic --seeds=8
    python -m benchmarks.elastic --seeds=3 --phase=save
    python -m benchmarks.elastic --seeds=3 --phase=grow --signal=SIGINT

A run in float64 loses a worker at a random instant: while it starts, trains, saves, or restarts with a
worker that has returned. It continues with 2 workers, and with 3 once these have saved a checkpoint.
With --signal=SIGINT the launcher is interrupted at that instant instead, and the same command is rerun.
The program fails if

- a weight, a slot or a counter differs by more than 1e-10 from those of a single process,
- an example of an epoch was not used exactly once by the updates that led to the end,
- the run did not train with 2 workers and then with 3, or
- a process is left over.
"""

import argparse
from collections.abc import Callable, Sequence
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import counting
from benchmarks.chaos import COUNTING, POLL_SECONDS, ROOT, check, largest_difference, log_path
from benchmarks.workdir_state import latest_checkpoint, read_events, read_weights
from ctl.hardware.processes import STOPPED
from ctl.loop.checkpoints.files import CheckpointFiles
from tests.support.faults import signals

STEPS, TOLERANCE, TIMEOUT = 200, 1e-10, 300.0
PHASES = ("start", "step", "save", "grow")
# The pause after each loop makes the run last until the lost worker has returned.
FLAGS = [
    f"--config={COUNTING}", f"--config.train.steps={STEPS}", "--config.train.steps_per_loop=2",
    "--config.train.checkpoint_interval=10", "--config.runtime.precision=float64",
    "--config.model.epochs=2", "--config.actions=[{'name': 'counting.py:Pause', 'seconds': 0.3}]",
]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one process, then three workers once per seed; prints one row for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=1, help="number of runs; default 1")
    parser.add_argument("--first_seed", type=int, default=0, help="default 0")
    parser.add_argument("--phase", choices=PHASES, help="by default, the seed selects it")
    parser.add_argument("--signal", choices=("SIGKILL", "SIGINT"), default="SIGKILL")
    flags = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ctl-elastic-") as folder:
        single = pathlib.Path(folder) / "single"
        wait(start(single, ["ctl.main", *FLAGS[:-1]]), single, lambda: False)
        # Only a run that writes checkpoints in the background, as one process does, counts its saves.
        expected = read_weights(single)
        expected.pop("save_counter/.ATTRIBUTES/VARIABLE_VALUE", None)
        print("| seed | during | worker | workers of each start | largest difference |")
        print("|---:|---|---:|---|---:|", flush=True)
        for seed in range(flags.first_seed, flags.first_seed + flags.seeds):
            workdir = pathlib.Path(folder) / f"seed-{seed}"
            phase = flags.phase or PHASES[seed % len(PHASES)]
            victim = disturb(workdir, phase, flags.signal, random.Random(seed))
            weights = read_weights(workdir)
            difference = largest_difference(expected, weights)
            numbers = [e["workers"] for e in read_events(workdir) if "workers" in e]
            print(f"| {seed} | {phase} | {victim} | {numbers} | {difference:.1e} |", flush=True)
            check(difference <= TOLERANCE, "the weights differ")
            if flags.signal == "SIGKILL":
                check(2 in numbers and numbers[-1] == 3, "the number of workers did not change")
            (counts,) = [v for name, v in weights.items() if name.startswith("consumed/")]
            counting.check_consumed(counts, STEPS)


def disturb(workdir: pathlib.Path, phase: str, number: str, rng: random.Random) -> int:
    """Runs three workers, one of which is lost; returns its index."""
    command = [
        "ctl.launch", "--workers=3", "--min_workers=2", "--max_restarts=5", "--rejoin_seconds=5",
        "--", *FLAGS,
    ]  # fmt: skip
    launcher, victim = start(workdir, command), rng.randrange(3)
    if phase == "start":
        time.sleep(rng.uniform(0.5, 8.0))
    else:
        wait(launcher, workdir, lambda: latest_checkpoint(workdir) >= 10)
        time.sleep(rng.uniform(0.0, 2.0))
    if phase == "save":
        files = CheckpointFiles(workdir / "checkpoints")
        wait(launcher, workdir, lambda: bool(files.faults()))
    elif phase == "grow":
        drop(launcher, workdir, victim)
        wait(launcher, workdir, lambda: "can run, not 2" in log_path(workdir).read_text())
        time.sleep(rng.uniform(0.0, 10.0))
    if number == "SIGINT":
        numbers = [e["workers"] for e in read_events(workdir) if "workers" in e]
        launcher.send_signal(signal.SIGINT)
        # Without 3 workers that train, Python is starting in some process, or may be.
        check_interrupted(launcher.wait(TIMEOUT), is_starting=numbers[-1:] != [3])
        check_no_processes(workdir)
        launcher = start(workdir, command)
    else:
        drop(launcher, workdir, victim)
    wait(launcher, workdir, lambda: False)
    check_no_processes(workdir)
    return victim


def check_interrupted(code: int, *, is_starting: bool) -> None:
    """Fails unless a run that was interrupted saved, or was ended by the signal while it started."""
    code = code if code >= 0 else 128 - code
    by_signal = {128 + signal.SIGINT, 128 + signal.SIGTERM}
    check(
        code == STOPPED or (is_starting and code in by_signal),
        f"the interrupted run ended with exit code {code}",
    )


def drop(launcher: subprocess.Popen, workdir: pathlib.Path, victim: int) -> None:
    """Kills a worker as soon as it runs."""
    name = f"worker {victim}"
    wait(launcher, workdir, lambda: name in signals.workers(launcher.pid))
    signals.drop(launcher.pid, name)


def start(workdir: pathlib.Path, command: Sequence[str]) -> subprocess.Popen:
    """Starts a module with its arguments; its output goes to a file next to the workdir."""
    with open(log_path(workdir), "w") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *command, f"--workdir={workdir}"],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait(process: subprocess.Popen, workdir: pathlib.Path, condition: Callable[[], bool]) -> None:
    """Waits until a condition holds or the process ends; fails if its exit code is not 0."""
    deadline = time.monotonic() + TIMEOUT
    while process.poll() is None and not condition():
        if time.monotonic() > deadline:
            process.kill()
        time.sleep(POLL_SECONDS)
    check(not process.poll(), log_path(workdir).read_text())


def check_no_processes(workdir: pathlib.Path) -> None:
    """Fails if a process has the workdir in its command line."""
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        check(f"--workdir={workdir}".encode() not in command, f"{path} is left over: {command!r}")


if __name__ == "__main__":
    main()
