"""Kills a training run again and again, and compares its result with that of an undisturbed run.

    python -m benchmarks.chaos --kills=50 --seed=0
    python -m benchmarks.chaos --kills=50 --strategy=mirrored
    python -m benchmarks.chaos --kills=10 --workers=2
    python -m benchmarks.chaos --kills=20 --signal=SIGTERM
    python -m benchmarks.chaos --config=experiments/vae.py --options model.hidden=20

Each process is killed at a random time while it starts, trains, saves or evaluates, and the same
command is then rerun. A kill counts if the process was alive and its run unfinished. The program
fails if

- a weight, a slot or a counter differs in one bit at the end,
- a line of metrics.jsonl differs, is missing or is there twice,
- an example of an epoch was not used exactly once by the updates that led to the end (checked for the
  default experiment, benchmarks/counting.py),
- a process does not resume from the latest complete checkpoint, or
- a SIGTERM does not end in a checkpoint at the current step and exit code 75.
"""

import argparse
import collections
from collections.abc import Sequence
import dataclasses
import itertools
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from benchmarks import counting
from benchmarks import flags as command_line
from benchmarks.windows import print_progress
from benchmarks.workdir_state import (
    ProcessEvents,
    latest_checkpoint,
    read_metrics,
    read_weights,
)
from ctl.loop.checkpoints.files import CheckpointFiles
from tests.support.faults import signals

ROOT = pathlib.Path(__file__).resolve().parent.parent
COUNTING = "benchmarks/counting.py"
KEYS = {
    "train.steps_per_loop": 10,
    "train.checkpoint_interval": 50,
    "eval.interval": 150,
    "summaries.writers": "['jsonl']",
}
# Most of the life of a process is its start, so only this fraction of the kills comes at any time
# before its first new step. The others come within `--window` seconds after it.
EARLY = 0.3
POLL_SECONDS = 0.01  # also the precision of the measured times


@dataclasses.dataclass
class Kill:
    """One kill that counted.

    Attributes:
        phase: what the process was doing: start, step, save or eval.
        after: seconds since the process was started.
        checkpoint: the step of the latest complete checkpoint afterwards.
        time: when the process was killed, by the monotonic clock.
        code: the exit code.
        ending: seconds from the signal to the end of the process.
        recovery: seconds until the next process reported a new step; None if it was killed before.
    """

    phase: str
    after: float
    checkpoint: int
    time: float
    code: int
    ending: float
    recovery: float | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs undisturbed, then with kills; prints a table; fails if the results differ."""
    flags = command_line.parse(
        __doc__,
        arguments,
        choices={"signal": ("SIGKILL", "SIGTERM")},
        kills=10,
        seed=0,
        signal="SIGKILL",
        strategy="one_device",
        workers=1,
        config=COUNTING,
        steps=0,
        window=1.0,
        options=[""],
    )
    flags.options = [f"--config.{option}" for option in flags.options if option]
    flags.steps = flags.steps or 3000 + 400 * flags.kills
    with tempfile.TemporaryDirectory(prefix="ctl-chaos-") as folder:
        undisturbed, disturbed = pathlib.Path(folder) / "calm", pathlib.Path(folder) / "rough"
        start_seconds, seconds = run_undisturbed(flags, undisturbed)
        first = f"{start_seconds:.1f} of them to the first checkpoint"
        print_progress(f"Undisturbed: {seconds:.0f} s, {first}.")
        kills = run_with_kills(flags, disturbed, start_seconds, seconds)
        weights = read_weights(disturbed)
        difference = largest_difference(read_weights(undisturbed), weights)
        lines = check_metrics(read_metrics(undisturbed), read_metrics(disturbed))
        examples = "not counted by this experiment"
        if flags.config == COUNTING:
            examples = count_examples(weights, flags.steps)
        print(table(kills, difference, examples, lines, flags), flush=True)
        if difference != 0.0:
            raise SystemExit("The disturbed run has another result.")


def start_run(flags: argparse.Namespace, workdir: pathlib.Path) -> subprocess.Popen:
    """Starts or resumes the run; its output goes to a file next to the workdir."""
    keys = {**KEYS, "train.steps": flags.steps}
    if flags.config == COUNTING:
        keys["model.epochs"] = 1 + flags.steps * counting.BATCH // counting.EXAMPLES
    options = [f"--config={flags.config}", f"--workdir={workdir}"]
    options += [*(f"--config.{key}={value}" for key, value in keys.items()), *flags.options]
    if flags.workers > 1:
        command = ["-m", "ctl.launch", f"--workers={flags.workers}", "--", *options]
    else:
        command = ["-m", "ctl.main", *options, f"--config.runtime.strategy={flags.strategy}"]
    log_path(workdir).unlink(missing_ok=True)
    return start(command, log_path(workdir), start_new_session=True)


def start(command: Sequence[str], log: pathlib.Path, **options) -> subprocess.Popen:
    """Starts a command of Python; its output is appended to a file."""
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, **options
        )


def run_undisturbed(flags: argparse.Namespace, workdir: pathlib.Path) -> tuple[float, float]:
    """Runs without kills; returns the seconds to the first new step, and to the end."""
    begin = time.monotonic()
    process = start_run(flags, workdir)
    events = ProcessEvents(workdir, eval_interval=KEYS["eval.interval"])
    while process.poll() is None and not events.made_progress():
        time.sleep(POLL_SECONDS)
    start_seconds = time.monotonic() - begin
    check(process.wait() == 0, log_path(workdir).read_text())
    return start_seconds, time.monotonic() - begin


def run_with_kills(
    flags: argparse.Namespace, workdir: pathlib.Path, start_seconds: float, seconds: float
) -> list[Kill]:
    """Kills the run `flags.kills` times, then lets it finish.

    Args:
        flags: the command line.
        workdir: the workdir of the run.
        start_seconds: seconds that an undisturbed process takes to its first new step.
        seconds: seconds that it takes to the end.
    """
    rng = random.Random(flags.seed)
    kills: list[Kill] = []
    while len(kills) <= flags.kills:
        is_last = len(kills) == flags.kills
        early = rng.random() < EARLY
        delay = rng.uniform(0, start_seconds if early else flags.window)
        events = ProcessEvents(workdir, eval_interval=KEYS["eval.interval"])
        begin, checkpoint = time.monotonic(), latest_checkpoint(workdir)
        process = start_run(flags, workdir)
        progress_time = wait_for_kill(process, events, delay, early=early and not is_last)
        if progress_time and kills:
            kills[-1].recovery = progress_time - kills[-1].time
        if is_last:
            process.wait(timeout=20 * seconds + 120)
        if process.poll() is not None:
            output = log_path(workdir).read_text()
            check(process.returncode == 0, f"the run failed without a kill:\n{output}")
            if not is_last:
                print_progress(f"The run finished after {len(kills)} kills: increase --steps.")
            return kills
        kills.append(kill(flags, process, workdir, events, begin))
        first_step = events.first_step
        check(first_step in (None, checkpoint), f"resumed from step {first_step}, not {checkpoint}")
        print_progress(f"{len(kills)}: {kills[-1]}")
    return kills


def wait_for_kill(
    process: subprocess.Popen, events: ProcessEvents, delay: float, *, early: bool
) -> float | None:
    """Waits until it is time to kill; returns when the first new step was reported, or None.

    Args:
        process: the process.
        events: the events that it records.
        delay: seconds since the start if `early`, else since the first new step.
        early: whether the kill may come before a new step.
    """
    since, progress_time = time.monotonic(), None
    while process.poll() is None:
        if progress_time is None and events.made_progress():
            progress_time = time.monotonic()
            since = since if early else progress_time
        if (early or progress_time) and time.monotonic() - since >= delay:
            break
        time.sleep(POLL_SECONDS)
    return progress_time


def kill(
    flags: argparse.Namespace,
    process: subprocess.Popen,
    workdir: pathlib.Path,
    events: ProcessEvents,
    begin: float,
) -> Kill:
    """Sends the signal, waits for the end of the process, and checks the workdir."""
    kill_time = time.monotonic()
    if flags.signal == "SIGTERM":
        phase = events.phase()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        ending = time.monotonic() - kill_time
        check_stop(process.returncode, log_path(workdir).read_text(), workdir, phase)
    else:
        process.send_signal(signal.SIGSTOP)  # keeps a launcher from starting further processes
        for pid in (*signals.workers(process.pid).values(), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        ending = time.monotonic() - kill_time
        phase = events.phase()
    check_checkpoints(workdir)
    return Kill(
        phase, kill_time - begin, latest_checkpoint(workdir), kill_time, process.returncode, ending
    )


def check_checkpoints(workdir: pathlib.Path) -> None:
    """Checks that every checkpoint can be read."""
    damaged = CheckpointFiles(workdir / "checkpoints").damaged()
    check(not damaged, f"damaged checkpoints {damaged}")


def check_stop(code: int, output: str, workdir: pathlib.Path, phase: str) -> None:
    """Checks that a SIGTERM ended in a checkpoint and exit code 75."""
    before_program = code == -signal.SIGTERM and not output  # Python was still starting
    check(code == 75 or before_program, f"exit code {code}:\n{output}")
    saved = "Stopped at step" in output
    check(saved or phase == "start", f"stopped in {phase} without a checkpoint:\n{output}")
    if saved:
        stopped = json.loads((workdir / "result.json").read_text())["step"]
        checkpoint = latest_checkpoint(workdir)
        check(checkpoint == stopped, f"stopped at {stopped}, saved {checkpoint}")


def log_path(workdir: pathlib.Path) -> pathlib.Path:
    """Returns the path of the output of the run's last process."""
    return workdir.with_suffix(".log")


def table(
    kills: list[Kill], difference: float, examples: str, lines_count: int, flags: argparse.Namespace
) -> str:
    """Formats the result as a markdown table.

    Args:
        kills: the kills that counted.
        difference: the largest difference of any variable from the undisturbed run.
        examples: how many examples the run used.
        lines_count: the number of lines of metrics.jsonl, the same in both runs.
        flags: the command line of benchmarks.chaos.
    """
    setup = f"{flags.workers} workers" if flags.workers > 1 else flags.strategy
    phases = collections.Counter(kill.phase for kill in kills)
    phase_counts = ", ".join(f"{phases[name]} {name}" for name in ("start", "step", "save", "eval"))
    recoveries = [kill.recovery for kill in kills if kill.recovery is not None]
    lines = [
        f"| {flags.signal} on {setup}, seed {flags.seed}, {flags.steps} steps | |",
        "|---|---:|",
        f"| kills | {len(kills)} |",
        f"| phases | {phase_counts} |",
        f"| seconds to the first new step, of {len(recoveries)} | {median_and_max(recoveries)} |",
        "| unreadable checkpoints | 0 |",
        f"| epochs x examples, each consumed once | {examples} |",
        f"| lines of metrics.jsonl, the same in both runs | {lines_count} |",
        f"| largest difference of all weights, slots and counters | {difference:g} |",
    ]
    if flags.signal == "SIGTERM":
        seconds = [kill.ending for kill in kills if kill.code == 75]
        lines.append(f"| seconds to exit code 75, of {len(seconds)} | {median_and_max(seconds)} |")
    return "\n".join(lines)


def median_and_max(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    return f"{statistics.median(seconds):.1f}, at most {max(seconds):.1f}"


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Returns the largest difference of all variables; 0.0 only if every bit is the same."""
    check(one.keys() == other.keys(), f"only one run has {one.keys() ^ other.keys()}")
    if all(one[name].tobytes() == other[name].tobytes() for name in one):
        return 0.0
    largest = max(float(np.abs(one[n].astype("f8") - other[n].astype("f8")).max()) for n in one)
    return max(largest, float(np.finfo(np.float64).tiny))


def check_metrics(one: list, other: list) -> int:
    """Checks that two runs have logged the same lines in the same order; returns their number."""
    for first, second in itertools.zip_longest(one, other):
        check(first == second, f"metrics.jsonl has {second}, not {first}")
    return len(one)


def count_examples(weights: dict[str, np.ndarray], steps: int) -> str:
    """Checks that a run used each example once per epoch; returns how many it used."""
    (counts,) = [value for name, value in weights.items() if name.startswith("consumed/")]
    try:
        epochs, rest = counting.check_consumed(counts, steps)
    except ValueError as error:
        raise SystemExit(f"Error: {error}") from None
    return f"{epochs} x {counting.EXAMPLES} and {rest}"


def check(condition: bool, message: str) -> None:
    """Ends the program with a message if a condition is false."""
    if not condition:
        raise SystemExit(f"Error: {message}")


if __name__ == "__main__":
    main()
