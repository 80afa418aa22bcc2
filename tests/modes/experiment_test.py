"""A config becomes a strategy, a trainer and an evaluator, with the global batch size resolved."""

import re

import pytest

import ctl
from ctl.configs import loading
from ctl.modes import experiment
from tests.support import experiments


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads the config of an experiment with keys changed: load(**{key: value})."""
    monkeypatch.chdir(tmp_path)
    experiments.write(tmp_path, {"experiment.py": experiments.DROPOUT})

    def load(**keys):
        config = loading.load_config("experiment.py")
        config.update_from_flattened_dict(keys)
        return config

    return load


def build(config, **arguments):
    return experiment.build(config, "experiment.py", **arguments)


def test_the_trainer_and_the_evaluator_have_the_settings_of_the_config(load):
    built = build(load(**{"eval.global_batch_size": 25, "runtime.precision": "float64"}))
    assert type(built.trainer).__name__ == "Trainer"
    assert built.trainer.global_batch_size == 7
    assert built.trainer.options.precision == "float64"
    assert built.trainer.options.model.dropout == 0.3
    assert built.evaluator.global_batch_size == 25
    assert built.hardware.name == "one_device"
    # Another strategy can replace that of the config, and not every mode evaluates.
    other = build(load(), evaluates=False, hardware=built.hardware)
    assert other.hardware is built.hardware and other.evaluator is None


def test_the_global_batch_size_is_computed_from_the_per_replica_batch_size(load):
    replicas = {"runtime.strategy": "mirrored", "runtime.logical_devices": 4}
    config = load(**{"data.global_batch_size": 0, "data.per_replica_batch_size": 3}, **replicas)
    built = build(config, evaluates=False)
    assert built.config.data.global_batch_size == built.trainer.global_batch_size == 12
    assert built.config.data.per_replica_batch_size == 0
    assert config.data.per_replica_batch_size == 3  # the config itself is not changed
    assert built.config.is_locked


@pytest.mark.parametrize("key", ["units=4", 'recompute="blocks"'])
def test_a_model_key_that_the_trainer_never_reads_is_rejected(load, tmp_path, key):
    # In two files: a key that the trainer's own file mentions counts as read.
    config = experiments.CONFIG.replace("))\n", f"), model=dict({key}))\n")
    # A trainer that always recomputes a layer does not read the key.
    layer = "tf_keras.layers.Dense(2, input_shape=(3,))"
    trainer = experiments.TRAINER.replace(layer, f"ctl.recompute({layer})")
    experiments.write(tmp_path, {"experiment.py": config, "tiny.py": trainer})
    name = key.partition("=")[0]
    with pytest.raises(ctl.UsageError, match=rf"model\.{name} has no effect: .* never reads"):
        build(load(), evaluates=False)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("build_dataset", "build_datset",
         "tiny.py:Tiny defines build_datset: did you mean build_dataset?"),
        ("def build_model", "def network", "tiny.py:Tiny does not define build_model: define it."),
        # A hook that need not be defined would never be called.
        ("def per_ex", "def sample_weights(self, batch): pass\n    def per_ex",
         "Tiny defines sample_weights: did you mean sample_weight? If not, name it _sample_weights."),
        ("split, input_context", "split",
         "Tiny.build_dataset cannot be called with (split, input_context): too many"),
        ("batch, outputs", "batch, outputs, weight",
         "Tiny.per_example_loss cannot be called with (batch, outputs): missing a"),
        ("def per_ex", "def forward(self, batch): pass\n    def per_ex",
         "Tiny.forward cannot be called with (batch, training): got an unexpected"),
        ("def build_m", "def __init__(self, **arguments): pass\n    def build_m",
         "__init__ of tiny.py:Tiny does not call super().__init__(**arguments)."),
    ],
)  # fmt: skip
def test_mistake_in_the_methods_of_a_trainer_is_named(load, tmp_path, old, new, line):
    text = experiments.TRAINER.replace(old, new)
    experiments.write(tmp_path, {"experiment.py": experiments.CONFIG, "tiny.py": text})
    with pytest.raises(ctl.UsageError, match=re.escape(line)):
        build(load(), evaluates=False)


def test_methods_with_arguments_of_other_names_are_accepted(load, tmp_path):
    text = experiments.TRAINER.replace("split, input_context", "*arguments")
    own = "def forward(self, b, *, training=False, extra=0): return self.model(b['x'])\n"
    own += "    @staticmethod\n    def build_metrics(): return {}\n"
    own += "    def sample_weight(self, b): return None\n    def per_ex"
    text = text.replace("def per_ex", own)
    experiments.write(tmp_path, {"experiment.py": experiments.CONFIG, "tiny.py": text})
    assert build(load(), evaluates=False).trainer.global_batch_size == 4


# The right method exists in the class of the user that Tiny is derived from.
DERIVED = experiments.TRAINER.replace("class Tiny", "class Base").replace(
    "def Function", "class Tiny(Base):\n    def NAME(self, *args): pass\n\ndef Function"
)


@pytest.mark.parametrize(
    ("method", "meant"),
    [
        ("per_exmaple_loss", "per_example_loss"),
        ("forwrad", "forward"),
        ("buildMetrics", "build_metrics"),
        ("on_epoch_end", "build_actions"),
        ("eval_step", "update_metrics or compute_metrics"),
        ("train_loop_start", "train_loop_begin"),
    ],
)
def test_misspelt_method_is_named_where_the_right_one_exists(load, tmp_path, method, meant):
    text = DERIVED.replace("NAME", method)
    experiments.write(tmp_path, {"experiment.py": experiments.CONFIG, "tiny.py": text})
    line = f"tiny.py:Tiny defines {method}: did you mean {meant}? If not, name it _{method}."
    with pytest.raises(ctl.UsageError, match=re.escape(line)):
        build(load(), evaluates=False)


@pytest.mark.parametrize(
    ("method", "more", "actions"),
    [
        ("build_model2", "", ""),
        ("predict", "", ""),
        ("_eval_step", "", ""),
        ("build_datasets", "", ""),  # a variant of a method of the same class
        ("on_epoch_end", "", "def log(trainer):\n    trainer.on_epoch_end()\n"),
        ("eval_step", "import orbit\nclass Tiny(Tiny, orbit.StandardEvaluator): pass\n", ""),
    ],
)
def test_method_of_the_users_own_is_accepted(tmp_path, method, more, actions):
    text = experiments.TRAINER.replace("\ndef F", f"    def {method}(self): pass\n\ndef F")
    experiments.write(tmp_path, {"tiny.py": text + more, "actions.py": actions})
    cls = loading.load_trainer_class("tiny.py:Tiny", f"{tmp_path}/exp.py", ctl.StandardTrainer)
    experiment._check_spelling(cls, "tiny.py:Tiny", [])


def test_a_model_key_that_only_the_step_reads_is_accepted(load, tmp_path):
    text = experiments.DROPOUT.replace("dict(dropout=0.3)", "dict(dropout=0.3, scale=4.0)")
    forward = "def forward(self, b, training): return self.options.model.scale * self.model(b['x'])"
    text = text.replace("    def build_metrics", f"    {forward}\n\n    def build_metrics")
    experiments.write(tmp_path, {"experiment.py": text})
    assert build(load(), evaluates=False).trainer.options.model.scale == 4.0
