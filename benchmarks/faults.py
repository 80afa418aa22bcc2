"""Counts the faults that a run survives: failed calls on its files, signals, requests, damaged files.

    python -m benchmarks.faults                         # about twenty minutes
    python -m benchmarks.faults --before=../before      # also in a checkout of an earlier version

The tries are those of tests/support/faults. The earlier version is tried with the tests of this one:

    git worktree add ../before d97d804c
    cp -r tests/support/faults ../before/tests/support/
"""

import argparse
from collections.abc import Sequence
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import results

# The title of each loop in the table, its module and options, and the stride of the table.
LOOPS = {
    "a name that is announced before it is durable": ("io_faults --loop=names", 1),
    "a call on the run's files fails": ("io_faults --loop=calls", 3),
    "a signal at a call": ("io_faults --loop=signals", 7),
    "a request to the object store fails, is late, or is answered with damaged bytes": (
        "stores",
        2,
    ),
    "a file of the run is damaged": ("damage", 3),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all loops, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--before", type=pathlib.Path, help="the checkout of an earlier version")
    parser.add_argument("--loops", nargs="*", default=list(LOOPS.values()), help="modules")
    results.add_flag(parser)
    flags = parser.parse_args(arguments)
    rows = []
    for title, (loop, stride) in LOOPS.items():
        trees = [*([flags.before] if flags.before else []), results.ROOT]
        found = [run(loop, stride, tree=tree) for tree in trees]
        rows.append([title, found[-1]["points"]])
        rows[-1] += [each[count] for each in found for count in ("tries", "survived", "failed")]
        print(rows[-1], flush=True)
    names = [*(["before: tries"] if flags.before else []), "tries"]
    columns = [("fault", None), ("points", 0)]
    for name in names:
        columns += [(name, 0), (name.replace("tries", "survived"), 0)]
        columns += [(name.replace("tries", "failed"), 0)]
    table = results.Table(columns, rows)
    print(results.format_table(vars(table)))
    if flags.result:
        results.save(
            flags.result, {"tries": table}, packages=["tensorflow-cpu"],
            samples="each try is a run with one fault, and the same command again",
        )  # fmt: skip


def run(loop: str, stride: int, offset: int = 0, tree: pathlib.Path = results.ROOT) -> Any:
    """Runs a loop of tests/support/faults in a process; returns its counts, and each try.

    Args:
        loop: the module and its options.
        stride: every n-th point is tried.
        offset: the first one.
        tree: the checkout that is tried.
    """
    module, *options = loop.split()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "result.json")
        command = [sys.executable, "-m", f"tests.support.faults.{module}", *options]
        command += [f"--stride={stride}", f"--offset={offset}", f"--json={path}"]
        environment = {**os.environ, "PYTHONPATH": str(tree), "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, check=True)
        return json.loads(path.read_text())


if __name__ == "__main__":
    main()
