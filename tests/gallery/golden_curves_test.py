"""The experiments compute what tests/golden/ has recorded, on any CPU.

pytest --update_golden -n 0 -m "" tests/gallery/golden_curves_test.py records the files again.
"""

import pytest

from ctl import testing
from ctl.configs.flags import load_config
from ctl.testing import golden
from tests.support import child

STEPS = 6
# A small model, and the MNIST of the repository. The data of the last two is generated.
CHANGES = {
    "mnist": {"data.global_batch_size": 16, "optimizer.warmup_steps": 3},
    "vae": {"data.global_batch_size": 16, "model.hidden": 16, "model.latent": 4},
    "simclr": {"data.global_batch_size": 8, "model.width": 16, "model.projection": 8},
    # With fewer than 8 input channels, oneDNN computes wrong gradients of the strided 1x1 convolutions
    # on CPUs without AVX-512 (TF 2.20).
    "fashion_resnet": {
        "data.dir": "experiments/data/mnist", "data.global_batch_size": 8, "model.stem": 8,
        "model.widths": "(8, 16)",
    },
    "two_tower": {
        "data.global_batch_size": 16, "model.user_count": 50, "model.item_count": 40,
        "model.interactions": 400, "model.eval_interactions": 40,
    },
    "char_lm": {
        "data.global_batch_size": 7, "model.layers": 1, "model.heads": 2, "model.width": 16,
        "model.context": 16, "optimizer.warmup_steps": 3,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def root(monkeypatch):
    monkeypatch.chdir(child.ROOT)


# The others differ in what they train, and not in how a curve is compared.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "mnist")) for name in CHANGES],
)
def test_the_first_steps_are_those_of_the_golden_curve(name, tmp_path):
    values = {"runtime.xla": "off", "runtime.devices": "['CPU:0']", **CHANGES[name]}
    if name == "char_lm":
        (tmp_path / "a.txt").write_text("To be, or not to be, that is the question: " * 40)
        values["data.dir"] = str(tmp_path)
    config = load_config(f"experiments/{name}.py", [(k, str(v)) for k, v in values.items()])
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.trainer = f"experiments/{config.trainer}"
    testing.assert_curve(f"tests/golden/{name}.json", config, steps=STEPS)


@pytest.mark.skipif(golden.is_updating(), reason="golden files are recorded")
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "variables", [{"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"TF_ENABLE_ONEDNN_OPTS": "0"}]
)
def test_other_instructions_are_within_the_tolerance(variables):
    command = ["-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "", "-k", "first_steps"]
    done = child.run([*command, "tests/gallery/golden_curves_test.py"], **variables)
    assert done.returncode == 0, done.stdout
