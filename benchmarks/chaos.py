"""Kills a training again and again, and compares where it ends with a run that nobody disturbed.

    python -m benchmarks.chaos --kills=50 --seed=0
    python -m benchmarks.chaos --kills=50 --strategy=mirrored
    python -m benchmarks.chaos --kills=10 --workers=2
    python -m benchmarks.chaos --kills=20 --signal=SIGTERM

A process is killed at an instant drawn from its whole life: while it starts, trains, saves or
evaluates. A kill counts if the process was alive and its run unfinished. The same command is then
given again. It fails where a weight, a slot or a counter at the end differs in one bit, where an
example of an epoch was not consumed exactly once by the updates that led there (of the experiment
benchmarks/counting.py, the default), where a process does not resume from the newest whole checkpoint,
or where a SIGTERM does not end in a checkpoint at the step reached and exit code 75.
"""

import argparse
import collections
from collections.abc import Sequence
import dataclasses
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
import tensorflow as tf

from benchmarks import counting
from ctl.loop.checkpoints.files import CheckpointFiles
from ctl.testing import faults

ROOT = pathlib.Path(__file__).resolve().parent.parent
COUNTING = "benchmarks/counting.py"
KEYS = {"train.steps_per_loop": 10, "train.checkpoint_interval": 50, "eval.interval": 150}
EARLY = 0.3  # of the kills come before the first new step; most of a life is the start-up
WINDOW = 1.0  # seconds after the first new step, in which the others come
LOOK = 0.01  # seconds between two looks at a run; also how exactly an instant is known


@dataclasses.dataclass
class Death:
    """One kill that counted.

    Attributes:
        phase: what the process was doing: start, step, save or eval.
        after: seconds since it was started.
        newest: the step of the newest whole checkpoint afterwards.
        at: the instant, of the monotonic clock.
        code: the exit code.
        ending: seconds that it took to end.
        recovery: seconds until a later process told of a new step; None if it was killed before.
    """

    phase: str
    after: float
    newest: int
    at: float
    code: int
    ending: float
    recovery: float | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs undisturbed, then disturbed; prints a table; fails where they differ."""
    flags = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="ctl-chaos-") as folder:
        calm, rough = pathlib.Path(folder) / "calm", pathlib.Path(folder) / "rough"
        started, ended = run_calmly(flags, calm)
        print_line(f"Undisturbed: {ended:.0f} s, {started:.1f} of them to the first checkpoint.")
        deaths = disturb(flags, rough, started, ended)
        found = weights(rough)
        difference = largest_difference(weights(calm), found)
        print(table(deaths, difference, consumed(found, flags), flags), flush=True)
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
    parser.add_argument("--config", default=COUNTING, help=f"the experiment; default {COUNTING}")
    parser.add_argument("--steps", type=int, help="of the run; default enough for the kills")
    flags = parser.parse_args(arguments)
    flags.steps = flags.steps or 3000 + 400 * flags.kills
    return flags


def start_run(flags: argparse.Namespace, workdir: pathlib.Path) -> subprocess.Popen:
    """Starts the run, or goes on with it; what it prints goes to a file beside its folder."""
    keys = {**KEYS, "train.steps": flags.steps}
    if flags.config == COUNTING:
        keys["model.epochs"] = 1 + flags.steps * counting.BATCH // counting.EXAMPLES
    options = [f"--config={flags.config}", f"--workdir={workdir}"]
    options += [f"--config.{key}={value}" for key, value in keys.items()]
    if flags.workers > 1:
        command = ["-m", "ctl.launch", f"--workers={flags.workers}", "--", *options]
    else:
        command = ["-m", "ctl.main", *options, f"--config.runtime.strategy={flags.strategy}"]
    with open(log(workdir), "w") as file:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_calmly(flags: argparse.Namespace, workdir: pathlib.Path) -> tuple[float, float]:
    """The undisturbed run; returns the seconds to its first new step, and to its end."""
    start = time.monotonic()
    run = start_run(flags, workdir)
    look = Look(workdir)
    while run.poll() is None and not look.moved():
        time.sleep(LOOK)
    started = time.monotonic() - start
    run.wait()
    check(run.returncode == 0, log(workdir).read_text())
    return started, time.monotonic() - start


def disturb(
    flags: argparse.Namespace, workdir: pathlib.Path, started: float, ended: float
) -> list[Death]:
    """Kills the run `flags.kills` times, then lets it end."""
    draw = random.Random(flags.seed)
    deaths: list[Death] = []
    while len(deaths) <= flags.kills:
        last = len(deaths) == flags.kills
        early = draw.random() < EARLY
        wait = draw.uniform(0, started if early else WINDOW)
        look = Look(workdir)
        start, whole = time.monotonic(), newest(workdir)
        run = start_run(flags, workdir)
        moved = watch(run, look, wait, early=early and not last)
        if moved and deaths:
            deaths[-1].recovery = moved - deaths[-1].at
        if last:
            run.wait(timeout=20 * ended + 120)
        if run.poll() is not None:
            check(run.returncode == 0, f"the run failed by itself:\n{log(workdir).read_text()}")
            if not last:
                print_line(f"The run was over after {len(deaths)} kills: give more --steps.")
            return deaths
        deaths.append(kill(flags, run, workdir, look, start))
        check(look.origin in (None, whole), f"resumed from {look.origin}, not from {whole}")
        print_line(f"{len(deaths)}: {deaths[-1]}")
    return deaths


def watch(run: subprocess.Popen, look: "Look", wait: float, *, early: bool) -> float | None:
    """Waits for the instant of a kill; returns that of the first new step, if there was one.

    Args:
        run: the process.
        look: sees what it records.
        wait: seconds, since the start if `early`, else since the first new step.
        early: whether the kill may come before a new step.
    """
    since, moved = time.monotonic(), None
    while run.poll() is None:
        if moved is None and look.moved():
            moved = time.monotonic()
            since = since if early else moved
        if (early or moved) and time.monotonic() - since >= wait:
            break
        time.sleep(LOOK)
    return moved


class Look:
    """What one process of a run has recorded so far."""

    def __init__(self, workdir: pathlib.Path):
        self._workdir = workdir
        self._before = len(events(workdir))

    def events(self) -> list[dict]:
        """What the process recorded."""
        return events(self._workdir)[self._before :]

    def moved(self) -> bool:
        """Whether it told of a step that it made."""
        return any(event["event"] in ("checkpoint", "eval") for event in self.events())

    @property
    def origin(self) -> int | None:
        """The step that it started from, if it came so far."""
        steps = [e["step"] for e in self.events() if e["event"] in ("start", "resume")]
        return steps[0] if steps else None

    def phase(self) -> str:
        """What it is doing, or did when it was killed; a save in the background goes first."""
        if not self.moved():
            return "start"
        # A save removes what an earlier life left of the same step before it is recorded.
        if CheckpointFiles(self._workdir / "checkpoints").faults():
            return "save"
        last = self.events()[-1]
        due = last["step"] % KEYS["eval.interval"] == 0
        return "eval" if last["event"] == "checkpoint" and due else "step"


def kill(
    flags: argparse.Namespace,
    run: subprocess.Popen,
    workdir: pathlib.Path,
    look: Look,
    start: float,
) -> Death:
    """Sends the signal, and looks at what it left."""
    at = time.monotonic()
    if flags.signal == "SIGTERM":
        phase = look.phase()
        run.send_signal(signal.SIGTERM)
        run.wait(timeout=60)
        ending = time.monotonic() - at
        check_stop(run.returncode, log(workdir).read_text(), workdir, phase)
    else:
        run.send_signal(signal.SIGSTOP)  # a launcher starts no more
        for pid in (*faults.workers(run.pid).values(), run.pid):
            os.kill(pid, signal.SIGKILL)
        run.wait()
        ending = time.monotonic() - at
        phase = look.phase()
    damaged = CheckpointFiles(workdir / "checkpoints").damaged()
    check(not damaged, f"damaged checkpoints {damaged}")
    return Death(phase, at - start, newest(workdir), at, run.returncode, ending)


def check_stop(code: int, out: str, workdir: pathlib.Path, phase: str) -> None:
    """Whether a SIGTERM ended as promised."""
    asleep = code == -signal.SIGTERM and not out  # Python had not begun with the program
    check(code == 75 or asleep, f"exit code {code}:\n{out}")
    saves = "Stopped at step" in out
    check(saves or phase == "start", f"stopped in {phase} without a checkpoint:\n{out}")
    if saves:
        stopped = json.loads((workdir / "result.json").read_text())["step"]
        check(newest(workdir) == stopped, f"stopped at {stopped}, saved {newest(workdir)}")


def log(workdir: pathlib.Path) -> pathlib.Path:
    """What the last process printed."""
    return workdir.with_suffix(".log")


def events(workdir: pathlib.Path) -> list[dict]:
    """What was recorded in whole lines."""
    try:
        text = (workdir / "events.jsonl").read_text()
    except OSError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def newest(workdir: pathlib.Path) -> int:
    """The step of the newest whole checkpoint, 0 where there is none."""
    return max(CheckpointFiles(workdir / "checkpoints").steps(), default=0)


def weights(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """Everything in the last checkpoint."""
    reader = tf.train.load_checkpoint(
        CheckpointFiles(workdir / "checkpoints").path(newest(workdir))
    )
    names = [name for name in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in name]
    return {name: reader.get_tensor(name) for name in names}


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """0.0 where every bit is the same."""
    check(one.keys() == other.keys(), f"{one.keys() ^ other.keys()} are in one of the two")
    same = all(one[name].tobytes() == other[name].tobytes() for name in one)
    worst = max(float(np.abs(one[n].astype("f8") - other[n].astype("f8")).max()) for n in one)
    return 0.0 if same else max(worst, float(np.finfo(np.float64).tiny))


def consumed(found: dict[str, np.ndarray], flags: argparse.Namespace) -> str:
    """How many examples the history that survived consumed, each once an epoch."""
    if flags.config != COUNTING:
        return "not counted by this experiment"
    (counts,) = [value for name, value in found.items() if name.startswith("consumed/")]
    try:
        epochs, begun = counting.check_consumed(counts, flags.steps)
    except ValueError as error:
        raise SystemExit(f"Wrong: {error}") from None
    return f"{epochs} x {counting.EXAMPLES} and {begun}"


def table(deaths: list[Death], difference: float, examples: str, flags: argparse.Namespace) -> str:
    """What happened, in markdown."""
    where = f"{flags.workers} workers" if flags.workers > 1 else flags.strategy
    phases = collections.Counter(death.phase for death in deaths)
    hit = ", ".join(f"{phases[phase]} {phase}" for phase in ("start", "step", "save", "eval"))
    recoveries = [death.recovery for death in deaths if death.recovery is not None]
    lines = [
        f"| {flags.signal} on {where}, seed {flags.seed}, {flags.steps} steps | |",
        "|---|---:|",
        f"| counted | {len(deaths)} |",
        f"| hit | {hit} |",
        f"| seconds to the first new step, of {len(recoveries)} | {middle(recoveries)} |",
        "| unreadable checkpoints | 0 |",
        f"| epochs x examples, each consumed once | {examples} |",
        f"| largest difference of all weights, slots and counters | {difference:g} |",
    ]
    if flags.signal == "SIGTERM":
        stopped = [death.ending for death in deaths if death.code == 75]
        lines.append(f"| ended with 75, seconds, of {len(stopped)} | {middle(stopped)} |")
    return "\n".join(lines)


def middle(seconds: list[float]) -> str:
    """Their median and the most."""
    if not seconds:
        return "none"
    return f"{statistics.median(seconds):.1f}, at most {max(seconds):.1f}"


def check(right: bool, otherwise: str) -> None:
    """Ends the program where something is not right."""
    if not right:
        raise SystemExit(f"Wrong: {otherwise}")


def print_line(line: str) -> None:
    """Progress goes to stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
