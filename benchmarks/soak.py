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
import dataclasses
import os
import pathlib
import random
import signal
import statistics
import subprocess
import tempfile
import time
import uuid

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks import chaos, counting
from benchmarks import flags as command_line
from benchmarks.chaos import check
from benchmarks.windows import memory_mib, print_progress
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
SETTLING = 10.0  # seconds after the first new checkpoint during which a process may still grow
MARK = "CTL_SOAK"  # an environment variable by which the processes are recognized


@dataclasses.dataclass
class Memory:
    """The memory of one process.

    Attributes:
        name: the process, such as "worker 1".
        checkpoint: the step of the latest checkpoint when the process was first seen.
        samples: (time, MiB) since `SETTLING` seconds after the next checkpoint.
        settling: the monotonic time in seconds at which the samples begin; None before that checkpoint.
    """

    name: str
    checkpoint: int
    samples: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    settling: float | None = None

    def add(self, now: float, size: float, checkpoint: int) -> None:
        """Adds a sample, unless the process may still be tracing its first steps."""
        if self.settling is None and checkpoint > self.checkpoint:
            self.settling = now + SETTLING
        if self.settling is not None and now >= self.settling:
            self.samples.append((now, size))

    def median(self) -> float:
        """Returns the median of the samples in MiB."""
        return statistics.median(size for _, size in self.samples)

    def growth(self) -> float | None:
        """Returns the relative growth from the first to the last fifth of the samples.

        The medians of both are compared; 0.01 is a growth of 1 %. None with fewer than ten samples.
        """
        sizes = [size for _, size in self.samples]
        part = len(sizes) // 5
        return None if part < 2 else _growth(sizes, part)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and kills processes, checks the results and prints a table."""
    flags = command_line.parse(
        __doc__, arguments, minutes=60.0, kill_every=120.0, workers=2, seed=0, limit=2.0
    )
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
        check_memory(flags.limit / 100, memories)
        difference = compare_undisturbed(flags, folder, steps, weights)
        print(f"| largest difference of all weights, slots and counters | {difference:g} |")
        check(difference == 0.0, "the disturbed run has another result")


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


def growth_between_starts(memories: list[Memory]) -> dict[str, float]:
    """Returns the relative growth of each task from its first to its last starts.

    The medians of the first and of the last third of the starts are compared. Tasks that were started
    only once are not in the result.
    """
    growth = {}
    for name in dict.fromkeys(memory.name for memory in memories):
        medians = [m.median() for m in memories if m.name == name and m.samples]
        if len(medians) > 1:
            growth[name] = _growth(medians, max(1, len(medians) // 3))
    return growth


def _growth(sizes: list[float], part: int) -> float:
    """The relative growth from the median of the first part of some sizes to that of the last one."""
    return statistics.median(sizes[-part:]) / statistics.median(sizes[:part]) - 1


def sample(pids: dict[str, int], memories: dict[int, Memory], checkpoint: int) -> None:
    """Adds one sample of each process.

    Args:
        pids: name -> pid of each process.
        memories: pid -> memory; new processes are added.
        checkpoint: the step of the latest checkpoint.
    """
    for name, pid in pids.items():
        with contextlib.suppress(OSError, TypeError):  # it has ended, or is ending
            size = memory_mib("RssAnon", pid)
            memories.setdefault(pid, Memory(name, checkpoint))
            memories[pid].add(time.monotonic(), size, checkpoint)


def check_memory(limit: float, memories: list[Memory]) -> None:
    """Checks the growth of each process, and of each worker from its first to its last start."""
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
