"""Measures and checks on a GPU what ctl promises, in under 9 minutes.

    python -m benchmarks.gpu --out gpu.jsonl
    python -m benchmarks.gpu --parts mnist_float32 resnet50 --out gpu.jsonl
    python -m benchmarks.gpu --small                            # on a CPU: only whether it works
    python -m benchmarks.gpu.tables gpu.jsonl benchmarks/results/gpu.json    # what docs/speed.md shows

Every part runs in a process of its own with a time limit, the most important ones first. Each result is
one JSON line, which is written as soon as it is known: a run that is cut off still gives figures. A part
that fails, or exceeds its limit, writes a line with the key `error`, and the next part follows. The exit
code is 1 if there was such a line.
"""

import argparse
from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks import flags as command_line
from benchmarks.gpu.parts import PARTS

TOTAL_SECONDS = 520.0
STDERR_LINES = 5  # of a process that fails, in the line with its error


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; returns the exit code."""
    flags = command_line.parse(
        __doc__,
        arguments,
        choices={"parts": PARTS},
        parts=list(PARTS),
        out=pathlib.Path,
        seconds=TOTAL_SECONDS,
        small=False,
        jax_python=sys.executable,
        torch_python=sys.executable,
    )
    start, failures = time.monotonic(), 0
    with open(flags.out, "a") if flags.out else open(os.dup(sys.stdout.fileno()), "w") as file:
        for name in flags.parts:
            remaining = flags.seconds - (time.monotonic() - start)
            # A loaded CPU may need any time.
            seconds = remaining if flags.small else min(PARTS[name].seconds, remaining)
            for line in run_part(name, seconds, flags):
                failures += "error" in line
                line = {"part": name, "at": round(time.monotonic() - start, 1), **line}
                print(json.dumps(line), file=file, flush=True)
                if flags.out:
                    print(json.dumps(line), flush=True)
    return 1 if failures else 0


def run_part(name: str, seconds: float, flags: argparse.Namespace):
    """Runs a part in its own process; yields its results, and at the end what went wrong."""
    if seconds < 1:
        yield {"error": "skipped, because the time of the run is over"}
        return
    start = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu.parts", name]
    command += [f"--jax_python={flags.jax_python}", f"--torch_python={flags.torch_python}"]
    command += ["--small"] if flags.small else []
    with tempfile.TemporaryFile("w+") as stderr:
        # A session of its own, so that the processes that the part starts end with it.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        )
        timer = threading.Timer(seconds, kill, [process])
        timer.start()
        try:
            for line in process.stdout:
                yield json.loads(line)
            code = process.wait()
        finally:
            timer.cancel()
            kill(process)
        if code:
            stderr.seek(0)
            error = f"ended with exit code {code}"
            if code == -signal.SIGKILL:
                error = f"killed, by the time limit of {seconds:.0f} s or for its memory"
            lines = stderr.read().strip().splitlines()[-STDERR_LINES:]
            yield {"error": error, "stderr": [line[:300] for line in lines]}
    yield {"name": "part", "seconds": round(time.monotonic() - start, 1)}


def kill(process: subprocess.Popen) -> None:
    """Ends a part and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
