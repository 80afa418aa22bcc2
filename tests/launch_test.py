"""The command line of the launcher. tests/end_to_end/processes_test.py runs it."""

import pathlib
import re
import sys

import pytest

from ctl import launch, main
from ctl.hardware import gpu


@pytest.fixture
def launchers(monkeypatch):
    """Records the launchers that are made, in place of running them."""
    created = []

    class Recorder:
        def __init__(self, command, **options):
            created.append((command(None), options))

        def run(self):
            return 7

    monkeypatch.setattr(launch, "Launcher", Recorder)
    monkeypatch.setattr(gpu, "list_gpus", lambda: [])
    return created


def test_arguments_after_the_dashes_go_to_the_program(launchers):
    flags = ["--workers=3", "--ps=2", "--max_restarts=1"]
    assert launch.main(["launch", *flags, "--", "--config=a.py", "--mode=train"]) == 7
    command = [sys.executable, "-m", "ctl.main", "--config=a.py", "--mode=train"]
    assert launchers == [(command, {"workers": 3, "servers": 2, "max_restarts": 1})]


def test_default_is_one_worker_without_servers_and_restarts(launchers):
    assert main.run(["ctl", "launch", "--", "--config=a.py"]) == 7
    assert launchers[0][1] == {"workers": 1, "servers": 0, "max_restarts": 0}


ELASTIC = ["--workers=4", "--min_workers=2"]


def test_elastic_run_has_a_pool_and_a_limit_of_failures(launchers):
    waits = ["--rejoin-seconds=5", "--wait_seconds=7"]
    assert launch.main(["launch", *ELASTIC, *waits, "--", "a.py", "--workdir", "runs/a"]) == 7
    ((command, options),) = launchers
    assert command[-2:] == ["--workdir", "runs/a"]
    pool = options["pool"]
    assert (pool.size, pool.minimum, pool._rejoin_seconds) == (4, 2, 5.0)
    assert options["wait_seconds"] == 7.0 and pool.gpus == []
    assert options["failure_limit"]._folder == pathlib.Path("runs/a/checkpoints")


# The arguments, and the message.
MISTAKES = """
--workers=2 --
    There is nothing to run: add `-- --config=FILE`, the arguments of ctl.main after two dashes.
--workers=0 -- --config=a.py
    --workers is 0, but must be at least 1.
--ps=-1 -- --config=a.py
    --ps is -1, but must be at least 0.
--worker=2 -- --config=a.py
    The command line cannot be read: unrecognized arguments: --worker=2; see --help.
--workers=4 --min_workers=2 -- --config=a.py
    --min_workers requires --workdir=FOLDER among the arguments of ctl.main.
--workers=4 --min_workers=2 -- --workdir=a --fresh
    --fresh would start the run from scratch at each restart of --min_workers: remove it, and name a
    new --workdir.
--workers=4 --min_workers=2 -- --workdir=gs://bucket/run
    The --workdir of --min_workers is gs://bucket/run, but ctl does not support URLs here: name a path of
    a file system, which may be a mounted bucket.
--min_workers=2 -- --workdir=a
    --min_workers is 2, but must be at most --workers, 1.
--workers=4 --min_workers=2 --ps=1 -- --workdir=a
    --min_workers has no effect with --ps: the chief continues without a lost worker.
--wait_seconds=5 -- --workdir=a
    --wait_seconds has no effect without --min_workers: set it, too.
--workers=4 --min_workers=2 --rejoin_seconds=nan -- --workdir=a
    --rejoin_seconds is nan, but must be at least 0.
"""


@pytest.mark.parametrize(
    ("arguments", "line"), re.findall(r"^(\S.*)\n((?:    .*\n)+)", MISTAKES, re.MULTILINE)
)
def test_user_error_is_one_line_and_exit_code_2(launchers, capfd, arguments, line):
    assert launch.main(["launch", *arguments.split()]) == 2
    assert capfd.readouterr() == ("", f"ctl.launch: {' '.join(line.split())}\n")
    assert not launchers


def test_workers_are_at_most_the_gpus(launchers, capfd, monkeypatch):
    monkeypatch.setattr(gpu, "list_gpus", lambda: ["0", "1"])
    assert launch.main(["launch", "--workers=3", "--", "--config=a.py"]) == 2
    assert capfd.readouterr().err == (
        "ctl.launch: --workers is 3, but this machine has 2 GPUs: start at most 2 workers, or set "
        "CUDA_VISIBLE_DEVICES=-1 to train on the CPU.\n"
    )
    assert launch.main(["launch", "--workers=2", "--", "--config=a.py"]) == 7


def test_elastic_run_needs_a_gpu_only_for_each_of_the_fewest_workers(launchers, monkeypatch):
    monkeypatch.setattr(gpu, "is_reported", lambda name: True)
    monkeypatch.setattr(gpu, "list_gpus", lambda: ["0", "1", "2"])
    assert launch.main(["launch", *ELASTIC, "--", "--workdir=a"]) == 7
    assert launchers[0][1]["pool"].slots() == [0, 1, 2]
    monkeypatch.setattr(gpu, "list_gpus", lambda: ["0"])
    assert launch.main(["launch", *ELASTIC, "--", "--workdir=a"]) == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *[(fresh, 2) for fresh in ("-fresh", "--fresh=true", "-fresh=1", "--nofresh --fresh")],
        *[(f, 7) for f in ("--fresh=False", "--fresh=0", "--fresh --nofresh", "--config.fresh=1")],
    ],
)
def test_fresh_is_recognized_in_all_forms(launchers, arguments, code):
    assert launch.main(["launch", *ELASTIC, "--", "--workdir=a", *arguments.split()]) == code
