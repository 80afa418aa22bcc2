"""--mode=aot_compile, from the command line to the file."""

import json

import pytest

from ctl import main
from ctl.modes.aot_compile import slices, survey
from ctl.modes.aot_compile.compiler_process import Compiled
from ctl.modes.aot_compile.problems import Problem
from ctl.modes.aot_compile.survey import SliceResult
from tests.support import child, experiments
from tests.support.experiments import CONFIG, TRAINER

GIB = 2**30
MNIST = ("-m", "ctl.main", "--config=experiments/mnist_tpu.py", "--mode=aot_compile")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, replace_compiler):
    """Runs the program in its own folder, without the compiler.

    `body` is the first line of the loss, and `peak` the GiB that every program needs.
    """
    monkeypatch.chdir(tmp_path)

    def program(*arguments, body="pass", peak=1):
        replace_compiler(f"""import json, sys
fits = {peak} < 16 or "v5p" in json.load(open(sys.argv[1]))["topology"]
error = "RESOURCE_EXHAUSTED: Ran out of memory ({peak}.0G) exceeds available HBM"
print(json.dumps({{"peak_bytes": {peak} * 2**30}} if fits else {{"error": error}}))
""")
        loss = "return tf_keras.losses"
        trainer = TRAINER.replace(loss, f"{body}\n        {loss}")
        trainer, config = f"import tensorflow as tf\n{trainer}", CONFIG.replace("size=4", "size=8")
        experiments.write(tmp_path, {"tiny.py": trainer, "exp.py": config})
        code = main.run(["ctl", "--config=exp.py", *arguments])
        return code, capsys.readouterr()

    return program


def read_entries(tmp_path):
    return json.loads((tmp_path / "runs" / "exp" / "aot_compile.json").read_text())["topologies"]


@pytest.mark.slow
def test_a_list_of_slices_gives_one_table_and_one_file(run, tmp_path):
    code, printed = run("--mode=aot_compile", "--topology=v5e:2x2,v6e:2x4")
    assert code == 0
    assert [entry["topology"] for entry in read_entries(tmp_path)] == ["v5e:2x2", "v6e:2x4"]
    assert [entry["cores"] for entry in read_entries(tmp_path)] == [4, 8]
    assert "eval step compiles" in printed.out
    assert "no figure was compared with a physical TPU" in printed.out


def test_an_experiment_that_does_not_fit_is_exit_code_1(run, tmp_path):
    code, printed = run("--mode=aot_compile", "--topology=v5e:2x2,v5p:2x2x1", peak=20)
    assert code == 1
    assert [entry["compiled"] for entry in read_entries(tmp_path)] == [False, True]
    assert "needs 20.00 GiB of HBM, but a core of v5e:2x2 has 15.75 GiB" in printed.out


def test_a_problem_in_the_step_is_exit_code_1_and_names_the_line(run, tmp_path):
    code, printed = run("--mode=aot_compile", body="tf.print(outputs)")
    assert code == 1
    assert "error: tiny.py:13: A TPU does not support " in printed.out
    assert read_entries(tmp_path)[0]["error"].startswith("tiny.py:13: ")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--topology=v5e:3x3", "There is no v5e slice of 3x3 chips"),
        ("--topology", "--topology has no value"),
        ("--fresh", "--fresh has no effect with --mode=aot_compile"),
        ("--config.runtime.precision=float16", "runtime.precision=float16"),
        ("--config.train.on_non_finite=skip", "on_non_finite=skip applies the update"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(run, tmp_path, argument, message):
    code, printed = run("--mode=aot_compile", argument)
    assert code == 2
    assert message in printed.err and len(printed.err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_run_can_start_in_the_workdir_of_the_report(run, tmp_path):
    assert run("--mode=aot_compile")[0] == 0
    assert run("--mode=train", "--config.train.steps=1")[0] == 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_mnist_compiles_for_four_generations(tmp_path):
    names = "v5e:2x2,v4:2x2x1,v5p:2x2x1,v6e:2x2"
    done = child.run([*MNIST, f"--topology={names}", f"--workdir={tmp_path}"], timeout=500)
    assert done.returncode == 0, done.stderr
    entries = json.loads((tmp_path / "aot_compile.json").read_text())["topologies"]
    assert [entry["topology"] for entry in entries] == names.split(",")
    for entry in entries:
        assert entry["compiled"] and entry["error"] is None and entry["warnings"] == []
        assert 0 < entry["peak_bytes"] < slices.find_slice(entry["topology"]).hbm_bytes / 100
        # One combines all gradients, the loss and the metrics; the learning rate is known earlier.
        assert entry["all_reduces"] == 2
        assert entry["all_reduce_bytes"] == 4 * (225_034 + 1 + 4 + 1)


@pytest.mark.slow
@pytest.mark.long
def test_two_compilers_can_run_at_the_same_time(tmp_path):
    started = [child.start([*MNIST, f"--workdir={tmp_path / str(i)}"]) for i in range(2)]
    ended = [process.communicate(timeout=240) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended


SIZES = {"peak_bytes": 3 * GIB, "flops": 4e9, "bytes": 2e9, "all_reduces": 7}
TRAIN = Compiled(**SIZES, all_reduce_bytes=2**20, argument_bytes=GIB, seconds=5.0)
FITS = SliceResult(slices.find_slice("v5e:2x2"), 256, {"train step": TRAIN, "eval step": TRAIN}, [])
FAILED = Compiled(error="no", out_of_memory=True, peak_bytes=20 * GIB)
PROBLEMS = [Problem("it does not fit"), Problem("slow", "experiment.py:3", fatal=False)]
TOO_LARGE = SliceResult(slices.find_slice("v4:2x2x1"), 512, {"train step": FAILED}, PROBLEMS)


def test_the_table_has_one_row_per_program():
    text = survey.format_table([FITS, TOO_LARGE, TOO_LARGE])
    header, first, second, third, _, *rest = text.splitlines()
    assert first.split()[:2] == ["v5e:2x2", "4"]
    for part in ("train step compiles", "3.00 GiB", "19.0%", "1.00 GiB", "2.00 GiB", "7, 1.0 MiB"):
        assert part in first
    assert header.index("peak") == first.index("3.00 GiB")
    assert "eval step compiles" in second
    assert "train step: out of HBM" in third
    # A problem of several slices is listed once.
    assert rest == ["error: it does not fit", "warning: experiment.py:3: slow"]


def test_the_file_holds_the_figures_of_every_slice(tmp_path):
    path = survey.write_json([FITS, TOO_LARGE], tmp_path / "new")
    first, second = json.loads(path.read_text())["topologies"]
    expected = SIZES | {"topology": "v5e:2x2", "cores": 4, "compiled": True, "error": None}
    expected |= {"hbm_bytes": FITS.slice.hbm_bytes, "all_reduce_bytes": 2**20}
    assert expected.items() <= first.items()
    assert second["compiled"] is False and second["error"] == "it does not fit"
    assert second["warnings"] == ["experiment.py:3: slow"]
    assert [p.name for p in path.parent.iterdir()] == ["aot_compile.json"]
