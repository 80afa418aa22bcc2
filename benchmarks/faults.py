"""Counts the faults that a run survives: failed calls on its files, signals, requests, damaged files.

    python -m benchmarks.faults                         # about half an hour
    python -m benchmarks.faults --before=../before      # also in a checkout of an earlier version

The tries are those of tests/support/faults. The earlier version is tried with the tests of this one:

    git worktree add ../before d97d804c
    cp -r tests/support/faults ../before/tests/support/
"""

from collections.abc import Sequence
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import flags as command_line
from benchmarks import results

SAMPLES = "each try is a run with one fault, and the same command without it"
COUNTS = ("tries", "survived", "failed")
# The fault -> the module that tries it and its options, and the strides of the table.
LOOPS = {
    "a name is announced before it is durable": ("io_faults --loop=names", 1),
    "a call on a file fails": ("io_faults --loop=calls", 17),
    "a signal at a call": ("io_faults --loop=signals", 13),
    "a request to a store fails, is late, or is answered with damaged bytes": ("stores", 23),
    "a file is damaged": ("damage", 7),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all loops, and prints a table."""
    flags = command_line.parse(__doc__, arguments, before=pathlib.Path, result=pathlib.Path)
    trees = {"before: ": flags.before, "": results.ROOT} if flags.before else {"": results.ROOT}
    columns: list[tuple[str, int | None]] = [("fault", None)]
    columns += [(f"{which}{count}", 0) for which in trees for count in COUNTS]
    table = results.Table(columns, rows := [])
    for title, (loop, stride) in LOOPS.items():
        found = [run(loop, stride, tree=tree) for tree in trees.values()]
        rows.append([title, *(each[count] for each in found for count in COUNTS)])
        failed = [each for one in found for each in one.get("each", ()) if each["fault"]]
        print(*failed, rows[-1], sep="\n", flush=True)
        if flags.result:
            conditions = {"samples": SAMPLES, "packages": ["tensorflow-cpu"]}
            results.save(flags.result, {"tries": table}, **conditions)
    print(results.format_table(vars(table)))


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
