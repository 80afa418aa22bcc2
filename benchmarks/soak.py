"""Trains on several processes for a long time, and repeatedly kills one of them.

    python -m benchmarks.soak --minutes=60 --kill_every=120
    python -m benchmarks.soak --minutes=5 --kill_every=60

The launcher restarts the run after each kill, and a process with --mode=continuous_eval evaluates its
checkpoints. At the end, SIGTERM stops all of them. The program fails if

- the memory of a process grows by more than `--limit` percent. The launcher and the evaluator are
  measured from the first checkpoint to the end; a worker is measured while it trains, and from its first
  to its last starts,
- a process or a temporary file is left,
- the events of the run are not complete, or a checkpoint is damaged,
- an example of an epoch was not used exactly once by the updates that are part of the result, or
- a weight, a slot or a counter differs in any bit from that of an undisturbed run of the same number of
  steps.

The memory of a process is its anonymous memory (RssAnon of Linux), without the pages of files.
"""

import argparse
from collections.abc import Sequence
import contextlib
import os
import pathlib
import random
import signal
import subprocess
import tempfile
import time
import uuid

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import chaos, counting
from benchmarks import flags as command_line
from benchmarks.chaos import check
from benchmarks.process_memory import Memory, growth_between_starts, sample
from benchmarks.windows import print_progress
from benchmarks.workdir_state import latest_checkpoint, read_events, read_weights
from tests.support.faults import signals

KEYS = {
    "train.steps": 10_000_000,
    "train.steps_per_loop": 10,
    "train.checkpoint_interval": 100,
    "summaries.writers": "['jsonl']",
    "model.pause": 0.25,
}
SAMPLE_SECONDS = 2.0
MARK = "CTL_SOAK"  # an environment variable by which the processes are recognized


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and kills processes, checks the results and prints a table."""
    flags = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="ctl-soak-") as name:
        folder = pathlib.Path(name)
        workdir, temporary = folder / "soak", folder / "temporary"
        temporary.mkdir()
        environment = {**os.environ, MARK: uuid.uuid4().hex, "TMPDIR": str(temporary)}
        memories, kills = soak(flags, workdir, environment)
        steps = latest_checkpoint(workdir)
        left = sorted(path.name for path in temporary.iterdir())
        check(not left, f"temporary files are left: {left}")
        resumed = check_events(read_events(workdir))
        chaos.check_checkpoints(workdir)
        weights = read_weights(workdir)
        examples = chaos.count_examples(weights, steps)
        print(table(flags, memories, kills, resumed, steps), flush=True)
        print(f"| epochs x examples, each consumed once | {examples} |")
        check_memory(flags, memories)
        difference = compare_undisturbed(flags, folder, steps, weights)
        print(f"| largest difference of all weights, slots and counters | {difference:g} |")
        check(difference == 0.0, "the disturbed run has another result")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    return command_line.parse(
        __doc__, arguments, minutes=60.0, kill_every=120.0, workers=2, seed=0, limit=2.0
    )


def command(flags: argparse.Namespace, workdir: pathlib.Path, keys: dict) -> list[str]:
    """Returns the flags of a run with these config keys."""
    # The counts of every epoch that the run could reach, at no more than 60 steps per second.
    epochs = 2 + int(flags.minutes * 60 * 60 * counting.BATCH / counting.EXAMPLES)
    keys = {**keys, "model.epochs": epochs}
    options = [f"--config.{key}={value}" for key, value in keys.items()]
    return [f"--config={chaos.COUNTING}", f"--workdir={workdir}", *options]


def launch(flags: argparse.Namespace) -> list[str]:
    """Returns the command of the launcher of several processes."""
    return ["-m", "ctl.launch", f"--workers={flags.workers}", "--max_restarts=1000000", "--"]


def soak(
    flags: argparse.Namespace, workdir: pathlib.Path, environment: dict[str, str]
) -> tuple[list[Memory], int]:
    """Runs for `flags.minutes`; returns the memory of each process, and the number of kills."""
    rng = random.Random(flags.seed)
    log = workdir.with_suffix(".log")
    options = command(flags, workdir, KEYS)
    launcher = chaos.start([*launch(flags), *options], log, env=environment)
    evaluator: subprocess.Popen | None = None
    memories: dict[int, Memory] = {}
    kills, begin = 0, time.monotonic()
    next_kill, end = begin + flags.kill_every, begin + 60 * flags.minutes
    try:
        while time.monotonic() < end:
            time.sleep(SAMPLE_SECONDS)
            check(launcher.poll() is None, f"the launcher ended:\n{log.read_text()[-3000:]}")
            if evaluator is None and latest_checkpoint(workdir):
                mode = ["-m", "ctl.main", "--mode=continuous_eval"]
                evaluator = chaos.start([*mode, *options], log, env=environment)
            workers = signals.workers(launcher.pid)
            pids = {**workers, "launcher": launcher.pid}
            if evaluator:
                check(evaluator.poll() is None, f"the evaluator ended:\n{log.read_text()[-3000:]}")
                pids["evaluator"] = evaluator.pid
            sample(pids, memories, latest_checkpoint(workdir))
            # No kill in the last minute, so that the run trains when it gets SIGTERM.
            is_time = next_kill <= time.monotonic() < end - 60
            if is_time and len(workers) == flags.workers:
                name = rng.choice(sorted(workers))
                os.kill(workers[name], signal.SIGKILL)
                kills += 1
                next_kill += flags.kill_every * rng.uniform(0.75, 1.25)
                step = latest_checkpoint(workdir)
                seconds = time.monotonic() - begin
                print_progress(f"{seconds:.0f} s: killed {name} after step {step}.")
        for process in (launcher, evaluator):
            if process:
                process.send_signal(signal.SIGTERM)
                code = process.wait(timeout=120)
                check(code in (0, 75), f"exit code {code}:\n{log.read_text()[-3000:]}")
        left = marked_pids(environment[MARK])
        check(not left, f"processes are left: {left}")
    finally:
        for pid in marked_pids(environment[MARK]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return list(memories.values()), kills


def marked_pids(mark: str) -> list[int]:
    """Returns the running processes whose environment has the mark."""
    pids = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment.split(b"\0"):
            pids.append(int(folder.name))
    return pids


def check_events(events: list[dict]) -> int:
    """Checks that the events of training are complete; returns how often it resumed.

    Every start must resume from the last recorded checkpoint, and every interval must have been saved.
    """
    # The process that evaluates the checkpoints writes to the same file.
    events = [event for event in events if event["event"] != "eval"]
    names = [event["event"] for event in events]
    check(names[:1] == ["start"], f"the events begin with {names[:1]}")
    check(names[-1:] == ["stop"], f"the events end with {names[-1:]}")
    interval, saved = KEYS["train.checkpoint_interval"], 0
    for event in events:
        step = event["step"]
        if event["event"] == "resume":
            # A process can be killed between the marker of a checkpoint and its event.
            check(step - saved in (0, interval), f"resumed from step {step}, not {saved}")
            saved = step
        elif event["event"] == "checkpoint":
            check(0 <= step - saved <= interval, f"saved step {step} after step {saved}")
            saved = step
    return names.count("resume")


def check_memory(flags: argparse.Namespace, memories: list[Memory]) -> None:
    """Checks the growth of each process, and of each worker from its first to its last start."""
    limit = flags.limit / 100
    for memory in memories:
        growth = memory.growth() or 0.0  # None with too few samples
        check(growth <= limit, f"{memory.name} grew by {growth:.1%}")
    for name, growth in growth_between_starts(memories).items():
        check(growth <= limit, f"{name} grew by {growth:.1%} from start to start")


def table(
    flags: argparse.Namespace, memories: list[Memory], kills: int, resumed: int, steps: int
) -> str:
    """Returns the results as a table."""
    lines = [f"| {flags.minutes:g} minutes, {flags.workers} workers | |", "|---|---|"]
    lines += [f"| kills; restarts; steps | {kills}; {resumed}; {steps} |"]
    for memory in memories:
        if memory.samples:
            growth = memory.growth()  # None with too few samples
            text = "" if growth is None else f"; grew by {growth:.2%}"
            lines.append(f"| {memory.name} | {memory.median():.1f} MiB{text} |")
    return "\n".join(lines)


def compare_undisturbed(
    flags: argparse.Namespace, folder: pathlib.Path, steps: int, weights: dict
) -> float:
    """Runs the same number of steps without kills and pauses; returns the largest difference."""
    print_progress(f"Running {steps} steps undisturbed.")
    workdir = folder / "undisturbed"
    keys = {"train.steps": steps, "train.checkpoint_interval": steps, "model.pause": 0.0}
    log = workdir.with_suffix(".log")
    process = chaos.start([*launch(flags), *command(flags, workdir, KEYS | keys)], log)
    check(process.wait() == 0, f"the undisturbed run failed:\n{log.read_text()[-3000:]}")
    return chaos.largest_difference(read_weights(workdir), weights)


if __name__ == "__main__":
    main()
