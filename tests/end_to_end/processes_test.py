"""The weights are the same with every strategy and any number of processes."""

import pytest

from ctl import main
from tests.end_to_end.launching import flags, launch
from tests.support import experiments
from tests.support.experiments import read_result

SIZE = "--config.data.global_batch_size=25"  # is not split evenly


@pytest.fixture(scope="module")
def one_replica(folder):
    """The weights and the result of training on one replica."""
    assert main.run(["ctl", *flags(folder, "one", SIZE)]) == 0
    return experiments.read_weights(folder / "one"), read_result(folder / "one")


def check_same(run, one_replica):
    expected, expected_result = one_replica
    result = read_result(run)
    experiments.check_same(experiments.read_weights(run), expected, tolerance=1e-10)
    assert result["eval"]["examples"] == expected_result["eval"]["examples"] == 203
    for split in ("eval", "train"):
        assert result[split]["loss"] == pytest.approx(expected_result[split]["loss"], abs=1e-9)


@pytest.mark.slow
def test_fifty_steps_of_mnist_with_central_storage_are_those_of_one_replica(folder, one_replica):
    name = "central_storage"
    arguments = [f"--config.runtime.strategy={name}", "--config.runtime.logical_devices=2"]
    assert main.run(["ctl", *flags(folder, name, SIZE, *arguments)]) == 0
    assert read_result(folder / name)["replicas"] == 2
    check_same(folder / name, one_replica)


@pytest.mark.slow
def test_fifty_steps_of_mnist_in_three_processes_are_those_of_one_replica(
    folder, one_replica, run_launcher
):
    name = "workers-3"
    arguments = [
        "--config.optimizer.micro_batches=2", "--config.runtime.all_reduce.bucket_mib=0.001",
        "--config.runtime.all_reduce.algorithm=ring",
    ]  # fmt: skip
    code, out, err = run_launcher(launch(folder, name, SIZE, *arguments, workers=3))
    assert code == 0, out + err
    check_same(folder / name, one_replica)
    # Only the chief writes.
    assert out.count("Done:") == 1
    written = "checkpoints config.json events.jsonl metrics.jsonl result.json summaries"
    assert {path.name for path in (folder / name).iterdir()} == {*written.split()}
    assert not [path for path in (folder / name / "checkpoints").iterdir() if path.is_dir()]
    assert len(list((folder / name / "summaries/train").iterdir())) == 1


@pytest.mark.slow
def test_a_run_with_sharded_variables_resumes_in_one_process(folder, run_launcher):
    constant = [
        "--config.runtime.precision=float32", "--config.optimizer.schedule=constant",
        "--config.optimizer.warmup_steps=0", "--allow_config_change",
    ]  # fmt: skip
    sharded = [*constant, "--config.train.steps=40", "--config.runtime.cluster.shard_mib=0.01"]
    code, out, err = run_launcher(launch(folder, "sharded", *sharded, workers=1, servers=2))
    assert code == 0, out + err
    before = read_result(folder / "sharded")
    assert main.run(["ctl", *flags(folder, "sharded", *constant, "--config.train.steps=60")]) == 0
    after = read_result(folder / "sharded")
    assert (before["step"], after["step"]) == (40, 60)
    # A model that lost its weights or slot variables would start again at a loss of 2.3.
    assert after["train"]["loss"] < 1.2 * before["train"]["loss"] < 2


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("servers", [0, 1])
def test_dry_run_of_several_processes_leaves_nothing(folder, run_launcher, servers):
    def files():
        return sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts)

    before = files()
    code, out, err = run_launcher(launch(folder, "dry", "--dry_run", servers=servers))
    assert code == 0, out + err
    assert out.count("Dry run: 2 steps with their evaluations, ") == 1
    assert files() == before
