"""Kills a training again and again, and compares where it ends with a run that nobody disturbed.

    python -m benchmarks.chaos --kills=50 --seed=0
    python -m benchmarks.chaos --kills=10 --strategy=mirrored
    python -m benchmarks.chaos --kills=10 --workers=2
    python -m benchmarks.chaos --kills=20 --signal=SIGTERM

A process is killed at an instant drawn from its whole life: while it starts, trains, saves or
evaluates. A kill counts if the process was alive and its run unfinished. The same command is then
given again. It fails where a weight, a slot or a counter at the end differs in one bit, where a process
does not resume from a whole checkpoint, or where a SIGTERM does not end in a checkpoint at the step
reached and exit code 75.
"""

import argparse
from collections.abc import Sequence
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from ctl.loop.commits import Commits

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEYS = {
    "train.steps": 1500,
    "train.steps_per_loop": 10,
    "train.checkpoint_interval": 50,
    "eval.interval": 150,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs undisturbed, then disturbed; prints a table; fails where they differ."""
    flags = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="ctl-chaos-") as folder:
        calm, rough = pathlib.Path(folder) / "calm", pathlib.Path(folder) / "rough"
        started, ended = run_calmly(flags, calm)
        say(f"Undisturbed: {ended:.0f} s, {started:.0f} of them to the first step.")
        deaths = disturb(flags, rough, started, ended)
        difference = largest_difference(weights(calm), weights(rough))
        print(table(deaths, difference, flags), flush=True)
        if difference != 0.0:
            raise SystemExit("The disturbed run ended elsewhere.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=10, help="how many count; default 10")
    parser.add_argument("--seed", type=int, default=0, help="of the instants; default 0")
    parser.add_argument("--signal", choices=("SIGKILL", "SIGTERM"), default="SIGKILL")
    parser.add_argument("--strategy", default="one_device", help="default one_device")
    parser.add_argument("--workers", type=int, default=1, help="processes; default 1")
    parser.add_argument("--config", default="experiments/mnist.py", help="the experiment")
    parser.add_argument("--steps", type=int, default=KEYS["train.steps"], help="of the run")
    return parser.parse_args(arguments)


def start_run(flags: argparse.Namespace, workdir: pathlib.Path) -> subprocess.Popen:
    """Starts the run, or goes on with it."""
    keys = {**KEYS, "train.steps": flags.steps}
    options = [f"--config={flags.config}", f"--workdir={workdir}"]
    options += [f"--config.{key}={value}" for key, value in keys.items()]
    if flags.workers > 1:
        command = ["-m", "ctl.launch", f"--workers={flags.workers}", "--", *options]
    else:
        command = ["-m", "ctl.main", *options, f"--config.runtime.strategy={flags.strategy}"]
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_calmly(flags: argparse.Namespace, workdir: pathlib.Path) -> tuple[float, float]:
    """The undisturbed run; returns the seconds to its first event, and to its end."""
    start, started = time.monotonic(), 0.0
    run = start_run(flags, workdir)
    while run.poll() is None:
        if not started and (workdir / "events.jsonl").exists():
            started = time.monotonic() - start
        time.sleep(0.05)
    check(run.returncode == 0, run.stdout.read())
    return started, time.monotonic() - start


def disturb(
    flags: argparse.Namespace, workdir: pathlib.Path, started: float, ended: float
) -> list[dict]:
    """Kills the run `flags.kills` times, then lets it end; a row a kill."""
    draw = random.Random(flags.seed)
    deaths: list[dict] = []
    while len(deaths) < flags.kills:
        before = newest(workdir)
        run = start_run(flags, workdir)
        # Most of a life is the start-up, where little can be lost: most kills come after it.
        early = draw.random() < 0.3
        wait = draw.uniform(0, started) if early else started + draw.uniform(0, 6)
        try:
            run.wait(timeout=wait)
            check(run.returncode == 0, f"the run failed by itself:\n{run.stdout.read()}")
            say(f"The run was over after {len(deaths)} kills: give more --steps.")
            return deaths
        except subprocess.TimeoutExpired:
            deaths.append(kill(flags, run, workdir, before, wait))
            say(f"{len(deaths)}: {deaths[-1]}")
    last = start_run(flags, workdir)
    out, _ = last.communicate(timeout=20 * ended + 120)
    check(last.returncode == 0, out)
    return deaths


def kill(
    flags: argparse.Namespace,
    run: subprocess.Popen,
    workdir: pathlib.Path,
    before: int,
    after: float,
) -> dict:
    """Sends the signal, and looks at what it left."""
    step = step_of(workdir)
    if flags.signal == "SIGTERM":
        start = time.monotonic()
        run.send_signal(signal.SIGTERM)
        out, _ = run.communicate(timeout=60)
        ended = time.monotonic() - start
        check(run.returncode in (75, -signal.SIGTERM), f"exit code {run.returncode}:\n{out}")
        if "Stopped at step" in out:
            stopped = json.loads((workdir / "result.json").read_text())["step"]
            check(newest(workdir) == stopped, f"stopped at {stopped}, saved {newest(workdir)}")
        return {"after": after, "from": before, "newest": newest(workdir), "seconds": ended}
    victim = run.pid
    os.killpg(victim, signal.SIGKILL)
    if flags.workers > 1:  # the launcher's children are in groups of their own
        subprocess.run(["pkill", "-KILL", "-f", f"workdir={workdir}"], check=False)
    run.communicate()
    damaged = Commits(workdir / "checkpoints").damaged()
    check(not damaged, f"damaged checkpoints {damaged}")
    return {"after": after, "from": before, "newest": newest(workdir), "lost": step}


def newest(workdir: pathlib.Path) -> int:
    """The step of the newest whole checkpoint, 0 where there is none."""
    return max(Commits(workdir / "checkpoints").steps(), default=0)


def step_of(workdir: pathlib.Path) -> int:
    """The step of the last thing that was recorded."""
    try:
        lines = (workdir / "events.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["step"]
    except (OSError, ValueError, IndexError):
        return 0


def weights(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """Everything in the last checkpoint."""
    reader = tf.train.load_checkpoint(Commits(workdir / "checkpoints").path(newest(workdir)))
    names = [name for name in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in name]
    return {name: reader.get_tensor(name) for name in names}


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """0.0 where every bit is the same."""
    check(one.keys() == other.keys(), f"{one.keys() ^ other.keys()} are in one of the two")
    same = all(one[name].tobytes() == other[name].tobytes() for name in one)
    worst = max(float(np.abs(one[n].astype("f8") - other[n].astype("f8")).max()) for n in one)
    return 0.0 if same else max(worst, float(np.finfo(np.float64).tiny))


def table(deaths: list[dict], difference: float, flags: argparse.Namespace) -> str:
    """What happened, in markdown."""
    where = f"{flags.workers} workers" if flags.workers > 1 else flags.strategy
    starting = sum(death["newest"] == death["from"] for death in deaths)
    lines = [
        f"| {flags.signal} on {where}, seed {flags.seed} | |",
        "|---|---:|",
        f"| counted | {len(deaths)} |",
        f"| without a new checkpoint since the start | {starting} |",
        "| unreadable checkpoints | 0 |",
        f"| largest difference of all weights, slots and counters | {difference:g} |",
    ]
    if flags.signal == "SIGTERM":
        slowest = max((death["seconds"] for death in deaths), default=0.0)
        lines.append(f"| slowest end, seconds | {slowest:.1f} |")
    return "\n".join(lines)


def check(right: bool, otherwise: str) -> None:
    """Ends the program where something is not right."""
    if not right:
        raise SystemExit(f"Wrong: {otherwise}")


def say(line: str) -> None:
    """Progress goes to stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
