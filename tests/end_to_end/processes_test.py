"""The weights are the same with every strategy and any number of processes."""

import itertools

import numpy as np
import pytest

from ctl import main
from tests import child, experiments
from tests.end_to_end.launching import check_same, flags, launch
from tests.experiments import read_events, read_result, read_weights

LONG = [pytest.mark.slow, pytest.mark.long]


# 24 rows are split evenly, 25 are not.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "replicas", "batch"),
    [
        ("default", 1, 24),
        ("mirrored", 2, 25),
        pytest.param("mirrored", 4, 24, marks=pytest.mark.long),
        ("central_storage", 2, 25),
        pytest.param("mirrored", 2, 24, marks=pytest.mark.long),
        pytest.param("mirrored", 4, 25, marks=pytest.mark.long),
        pytest.param("central_storage", 2, 24, marks=pytest.mark.long),
    ],
)
def test_fifty_steps_of_mnist_in_one_process_are_those_of_one_replica(
    folder, one_replica, strategy, replicas, batch
):
    name = f"{strategy}-{replicas}-{batch}"
    arguments = [
        f"--config.runtime.strategy={strategy}",
        f"--config.data.global_batch_size={batch}",
    ]
    if replicas > 1:
        arguments.append(f"--config.runtime.logical_devices={replicas}")
    assert main.run(["ctl", *flags(folder, name, *arguments)]) == 0
    assert read_result(folder / name)["replicas"] == replicas
    check_same(folder, name, one_replica, batch)


ACCUMULATION = "--config.optimizer.gradient_accumulation_steps=2"
RING = "--config.runtime.all_reduce.algorithm=ring"
GROUPS = "--config.runtime.all_reduce.bucket_mib=0.001"


@pytest.mark.parametrize(
    ("workers", "batch", "arguments"),
    [
        pytest.param(2, 25, [], marks=LONG),
        pytest.param(3, 25, [ACCUMULATION, GROUPS], marks=pytest.mark.slow),
        pytest.param(2, 24, [RING], marks=LONG),
        pytest.param(2, 25, [GROUPS], marks=LONG),
        pytest.param(3, 24, [], marks=LONG),
    ],
)
def test_fifty_steps_of_mnist_in_several_processes_are_those_of_one_replica(
    folder, one_replica, workers, batch, arguments
):
    option = "".join(argument.rpartition(".config.")[2] for argument in arguments)
    name = f"multi-worker-{workers}-{batch}-{option}"
    size = f"--config.data.global_batch_size={batch}"
    done = child.run(launch(folder, name, size, *arguments, workers=workers))
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(folder, name, one_replica, batch)
    # Only the chief writes.
    assert done.stdout.count("Done:") == 1
    assert {path.name for path in (folder / name).iterdir()} == {
        "checkpoints", "config.json", "events.jsonl", "metrics.jsonl", "result.json", "summaries",
    }  # fmt: skip
    assert not [path for path in (folder / name / "checkpoints").iterdir() if path.is_dir()]
    assert len(list((folder / name / "summaries/train").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "rollback",
        pytest.param("skip", marks=pytest.mark.long),
        pytest.param("stop", marks=pytest.mark.long),
    ],
)
def test_two_workers_take_the_same_decision_on_a_row_that_one_of_them_has(folder, capfd, policy):
    arguments = [
        "--config.trainer=small.py:Poisoned", f"--config.train.on_non_finite={policy}",
        "--config.train.checkpoint_interval=10",
    ]  # fmt: skip
    one, two = f"{policy}-one", f"{policy}-two"
    code = 1 if policy == "stop" else 0
    assert main.run(["ctl", *flags(folder, one, *arguments)]) == code
    done = child.run(launch(folder, two, *arguments))
    assert done.returncode == code, done.stdout + done.stderr
    if policy != "skip":  # these two name the step and its examples
        for printed in ("".join(capfd.readouterr()), done.stdout + done.stderr):
            assert "Step 13 is not finite: the loss is first, on the examples " in printed
    assert read_events(folder / two) == read_events(folder / one)
    assert ("non_finite", 13) in read_events(folder / two)
    both = read_weights(folder / two)
    for key, value in read_weights(folder / one).items():
        np.testing.assert_allclose(both[key], value, rtol=0, atol=1e-10, err_msg=key)
    steps = {"skip": (50, 48), "rollback": (50, 48), "stop": (10, 10)}[policy]
    assert (
        both["global_step/.ATTRIBUTES/VARIABLE_VALUE"],
        both["optimizer/_iterations/.ATTRIBUTES/VARIABLE_VALUE"],
    ) == steps


@pytest.mark.slow
@pytest.mark.long
def test_parameter_servers_count_their_steps_and_learn(folder):
    arguments = [
        "--config.runtime.precision=float32", "--config.train.steps=600",
        "--config.data.global_batch_size=100", "--config.train.steps_per_loop=100",
    ]  # fmt: skip
    done = child.run(launch(folder, "ps", *arguments, servers=1))
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_result(folder / "ps")
    assert result["step"] == 600 and result["eval"]["examples"] == 203
    assert result["eval"]["accuracy"] > 0.97
    assert "Updates are asynchronous" in done.stdout
    assert read_weights(folder / "ps")["global_step/.ATTRIBUTES/VARIABLE_VALUE"] == 600


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_run_with_sharded_variables_resumes_in_one_process_and_with_shards_again(folder, parts):
    constant = [
        "--config.runtime.precision=float32", "--config.optimizer.schedule=constant",
        "--config.optimizer.warmup_steps=0", "--allow_config_change",
    ]  # fmt: skip
    shards = "--config.runtime.cluster.shard_mib=0.01"
    losses, name = [], f"sharded-{parts}"
    for steps, is_sharded in ((60, True), (90, False), (120, True))[:parts]:
        arguments = [*constant, f"--config.train.steps={steps}"]
        if is_sharded:
            done = child.run(launch(folder, name, *arguments, shards, workers=1, servers=2))
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            assert main.run(["ctl", *flags(folder, name, *arguments)]) == 0
        result = read_result(folder / name)
        assert result["step"] == steps
        losses.append(result["train"]["loss"])
    # A model that lost its weights or slot variables would start again at a loss of 2.3.
    assert all(after < 1.2 * before for before, after in itertools.pairwise(losses))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("servers", [0, 1])
def test_dry_run_of_several_processes_leaves_nothing(folder, servers):
    before = sorted(folder.rglob("*"))
    done = child.run(launch(folder, "dry", "--dry_run", servers=servers))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Dry run: 2 steps with their evaluations, ") == 1
    assert [path for path in sorted(folder.rglob("*")) if path.suffix != ".pyc"] == before


SHARDED = (
    experiments.MNIST
    + '''

class Sharded(Small):
    """Each process would read every second example if it got the context of its own pipeline."""

    def build_dataset(self, split, input_context):
        source = super().build_dataset(split, input_context)
        examples = source.gather(list(range(203)))
        dataset = tf.data.Dataset.from_tensor_slices(examples)
        return dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
'''
)


@pytest.mark.slow
def test_dataset_that_its_author_shards_by_the_context_loses_no_example_in_two_processes(tmp_path):
    experiments.write(tmp_path, {"small.py": SHARDED})
    trainer = "--config.trainer=small.py:Sharded"
    done = child.run(launch(tmp_path, "two", trainer, workers=2))
    assert done.returncode == 0, done.stdout + done.stderr
    assert main.run(["ctl", *flags(tmp_path, "one", trainer)]) == 0
    expected, weights = read_weights(tmp_path / "one"), read_weights(tmp_path / "two")
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-10, err_msg=name)
    result = read_result(tmp_path / "two")
    assert (result["replicas"], result["eval"]["examples"]) == (2, 203)
