"""Measures the memory of each process that trains a large embedding on two parameter servers.

    python -m benchmarks.embedding
    python -m benchmarks.embedding --mib 1024

The embedding has rows of 128 floats and is split over the servers (`runtime.cluster.shard_mib`). One
epoch has as many lookups as there are rows, eight per example; the updates are sparse, by Adagrad, whose
slots are as large as the embedding. The run ends with a checkpoint. The table shows the peak of the
resident set of each process; the smaller sizes show what a process needs without the embedding.

This file is also the config and the trainer of the run.
"""

from collections.abc import Iterator, Sequence
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from benchmarks import flags as command_line

WIDTH = 128
LOOKUPS = 8  # rows per example
SERVERS = 2
_INTERVAL = 0.05  # seconds between two readings of the processes


def get_config():
    """The config of the run; `model.mib` is the size of the embedding."""
    import ctl

    return ctl.config(
        trainer="benchmarks.lookups:LookupTrainer",
        runtime=dict(strategy="parameter_server"),
        data=dict(global_batch_size=4096),
        model=dict(mib=1, width=WIDTH, lookups=LOOKUPS),
        optimizer=dict(name="adagrad", learning_rate=0.1),
        train=dict(steps="1 epochs", steps_per_loop=20),
        eval=dict(splits=[]),
    )


def main(arguments: Sequence[str] | None = None) -> dict[int, dict[str, float]]:
    """Measures the sizes and prints a table; returns size -> name of a process -> MiB."""
    flags = command_line.parse(__doc__, arguments, mib=[1, 1024], workers=2, batch=4096)
    peaks, seconds = {}, {}
    for mib in flags.mib:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="ctl-embedding-") as folder:
            peaks[mib] = measure(mib, folder, workers=flags.workers, batch=flags.batch)
        seconds[mib] = time.perf_counter() - start
    print(table(peaks, seconds))
    return peaks


def measure(mib: int, folder: str, *, workers: int, batch: int) -> dict[str, float]:
    """Trains one epoch.

    Args:
        mib: the size of the embedding.
        folder: the workdir of the run.
        workers: the number of workers.
        batch: the global batch size.

    Returns:
        Name of a process -> the peak of its resident set, in MiB.
    """
    keys = {
        "model.mib": mib,
        "runtime.cluster.shard_mib": mib / SERVERS,
        "data.global_batch_size": batch,
    }
    command = [sys.executable, "-m", "ctl.launch", f"--workers={workers}", f"--ps={SERVERS}", "--"]
    command += [f"--config={__file__}", f"--workdir={folder}"]
    command += [f"--config.{key}={value}" for key, value in keys.items()]
    peaks: dict[str, float] = {}
    with subprocess.Popen(command, stdout=sys.stderr) as launcher:
        while launcher.poll() is None:
            for name, peak in _read_children(launcher.pid):
                peaks[name] = max(peak, peaks.get(name, 0.0))
            time.sleep(_INTERVAL)
    if launcher.returncode:
        raise SystemExit(f"The run ended with code {launcher.returncode}.")
    return peaks


def table(peaks: dict[int, dict[str, float]], seconds: dict[int, float]) -> str:
    """Returns a Markdown table with a row per process and a column per size."""
    sizes = list(peaks)
    lines = [
        f"| peak MiB | {' | '.join(f'embedding of {mib:,} MiB' for mib in sizes)} |",
        f"|---|{'---:|' * len(sizes)}",
    ]
    for name in sorted(peaks[sizes[0]]):
        lines.append(f"| {name} | {' | '.join(f'{peaks[mib][name]:,.0f}' for mib in sizes)} |")
    lines.append(f"| seconds | {' | '.join(f'{seconds[mib]:.0f}' for mib in sizes)} |")
    return "\n".join(lines)


def _read_children(parent: int) -> Iterator[tuple[str, float]]:
    """Yields the name and the peak, in MiB, of each process of the run."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text()
            if f"\nPPid:\t{parent}\n" not in status:
                continue
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        config = [value[10:] for value in environment if value.startswith(b"TF_CONFIG=")]
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        if config and peak:
            task = json.loads(config[0])["task"]
            yield f"{task['type']} {task['index']}", int(peak[1]) / 1024


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main()
