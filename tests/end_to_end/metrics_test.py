"""metrics.jsonl of a run that is killed and resumed: that of the undisturbed run."""

import json
import pathlib
import signal

import pytest

import ctl
from ctl import main
from tests import child, experiments

MEASURED = (
    "time", "examples_per_second", "milliseconds_per_step", "peak_memory_gib", "input_wait"
)  # fmt: skip
RUN = ["--config=experiment.py", "--config.eval.interval=10"]


def read_metrics(workdir):
    """The lines without what depends on the machine."""
    lines = map(json.loads, pathlib.Path(workdir, "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines]


def run(*flags):
    assert main.run(["ctl", *RUN, *flags]) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    experiments.write(folder, {"experiment.py": experiments.DROPOUT})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("--workdir=undisturbed")
    return folder


@pytest.fixture
def undisturbed(folder, monkeypatch):
    """The lines of a run that nothing kills; its folder is the current one."""
    monkeypatch.chdir(folder)
    return read_metrics("undisturbed")


@pytest.mark.slow
def test_lines_after_a_sigkill_are_those_of_the_undisturbed_run(undisturbed):
    # Killed in step 18, after the line of step 15; the last checkpoint is that of step 10.
    command = ["-m", "ctl.testing.faults", "--kill=step:18", "--", *RUN, "--workdir=killed"]
    assert child.run(command, cwd=pathlib.Path.cwd()).returncode == -signal.SIGKILL
    assert read_metrics("killed") == undisturbed[:4]
    run("--workdir=killed")
    assert read_metrics("killed") == undisturbed
    events = map(json.loads, pathlib.Path("killed/events.jsonl").read_text().splitlines())
    (resume,) = [event for event in events if event["event"] == "resume"]
    assert resume["lost_steps"] == 5 and 0 < resume["lost_seconds"] < 60
    goodput = experiments.read_result("killed")["goodput"]
    assert goodput["lost"] == pytest.approx(resume["lost_seconds"] / goodput["seconds"])
    shares = sum(share for name, share in goodput.items() if name != "seconds")
    assert shares == pytest.approx(1.0)
    assert all(goodput[name] > 0 for name in ("steps", "evaluation", "saving", "starting"))


def test_evaluation_in_which_a_run_was_killed_is_repeated(undisturbed, monkeypatch):
    expected = [("train", 5), ("train", 10), ("eval", 10), ("train", 15), ("train", 20), ("eval", 20),
                ("train", 25), ("train", 30), ("eval", 30)]  # fmt: skip
    assert [(line["split"], line["step"]) for line in undisturbed] == expected
    calls = []

    def fail_in_the_second(evaluator):
        calls.append(evaluator)
        if len(calls) == 2:
            raise RuntimeError("killed")
        return eval_end(evaluator)

    eval_end = ctl.StandardEvaluator.eval_end
    monkeypatch.setattr(ctl.StandardEvaluator, "eval_end", fail_in_the_second)
    flags = ("--workdir=evaluating", "--config.train.checkpoint_writing=blocking")
    assert main.run(["ctl", *RUN, *flags]) == 2  # an error of the user's code
    assert read_metrics("evaluating") == undisturbed[:5]
    run(*flags)
    assert read_metrics("evaluating") == undisturbed
