"""The lines that a run prints when it starts and ends."""

import re
import types

import numpy as np
import pytest
import tf_keras

import ctl
from ctl.modes import messages


def make_config(schedule="constant", decay_steps=0):
    optimizer = types.SimpleNamespace(schedule=schedule, decay_steps=decay_steps)
    return types.SimpleNamespace(optimizer=optimizer)


LOSS = {"eval": {"loss": 0.5}}
STOPPED = LOSS | {"stopped": {"step": 30, "reason": "eval/loss is bad"}}


@pytest.mark.parametrize(
    ("result", "changes", "words"),
    [
        (LOSS, (), "30 steps, loss 0.5000. .*--config.train.steps=60.*--fresh"),
        ({}, ["seed: 0 -> 2"], "30 steps. .*with seed: 0 -> 2, name another --workdir. .*longer"),
        (STOPPED, (), "at step 30, because eval/loss is bad. .*train.best.patience .*--fresh"),
    ],
)
def test_complete_run_names_what_trains_longer(result, changes, words):
    assert re.search(words, messages.complete(30, result, make_config(), changes))


@pytest.mark.parametrize(("decay_steps", "stretches"), [(0, True), (100, False)])
def test_complete_run_says_if_more_steps_stretch_its_schedule(decay_steps, stretches):
    line = messages.complete(30, {}, make_config("cosine", decay_steps))
    assert ("--allow_config_change" in line) == stretches


def test_the_command_of_tensorboard_is_named_only_if_it_has_something_to_show():
    assert messages.done("runs/a", ["jsonl", "wandb"]) == "Done: runs/a/result.json"
    assert "--logdir runs/a/summaries" in messages.done("runs/a", ["tensorboard"])


class OwnUpdate(ctl.StandardTrainer):
    def train_step(self, iterator):
        self.compute(iterator)

    def compute(self, batch):
        self.optimizer.apply_gradients([])


class Discriminated(OwnUpdate):
    def compute(self, batch):
        return self.minimize(batch, lambda b: b)


class Pretrained(ctl.StandardTrainer):
    def pretrain(self):
        self.optimizer.apply_gradients([])


class Extending(ctl.StandardTrainer):
    def train_step(self, iterator):
        self.optimizer.apply_gradients([])
        return super().train_step(iterator)


@pytest.mark.parametrize(
    ("cls", "own"),
    [(OwnUpdate, True), (Discriminated, False), (Extending, False), (Pretrained, False)],
)
def test_update_of_the_users_own_is_named_in_the_first_line(cls, own):
    hardware = types.SimpleNamespace(name="mirrored", reason="auto")
    fake = dict.fromkeys(["__init__", "build_model", "build_dataset"], lambda self: None)
    trainer = type("Fake", (cls,), fake)()
    is_overridden = cls.train_step is not ctl.StandardTrainer.train_step
    trainer.__dict__.update(vars(make_trainer(2, [4, 4], is_overridden)))
    assert ("and only `ctl check` tests that update" in messages.start(hardware, trainer)) == own


def make_trainer(replicas, row_counts, own=False, examples=None):
    layout = types.SimpleNamespace(
        replicas=replicas, global_batch_size=sum(row_counts), row_counts=lambda: row_counts
    )
    plan = types.SimpleNamespace(layout=layout, own_train_step=own)
    return types.SimpleNamespace(
        _ctl_loop=types.SimpleNamespace(
            plan=plan,
            pipeline=types.SimpleNamespace(examples_per_epoch=lambda: examples),
            step=types.SimpleNamespace(
                attributes=types.SimpleNamespace(parameter_count=lambda: 1234)
            ),
        ),
        options=types.SimpleNamespace(precision="float32"),
    )


@pytest.mark.parametrize(
    ("row_counts", "words"),
    [
        ([7], "1 replica; global batch 7 = 7 rows"),
        ([1] * 9, "9 replicas; global batch 9 = 1+1+1+1+1+1+1+1+... rows"),
    ],
)
def test_start_says_on_what_and_how_the_batch_is_split(row_counts, words):
    hardware = types.SimpleNamespace(name="mirrored", reason="2 GPUs")
    trainer = make_trainer(len(row_counts), row_counts)
    assert messages.start(hardware, trainer) == (
        f"mirrored (2 GPUs): {words}; float32; 1,234 parameters"
    )


class Scaled(ctl.StandardTrainer):
    def build_model(self):
        layers = tf_keras.layers
        return tf_keras.Sequential([layers.Rescaling(1 / 255), layers.Flatten(), layers.Dense(2)])

    def build_dataset(self, split, input_context):
        images = np.zeros((8, 4, 4, 3), np.uint8)
        return ctl.data.arrays({"image": images, "map": images[..., 0], "x": images[:, 0, 0]})

    def forward(self, batch, training):
        return self.model(batch["image"], training=training)

    def per_example_loss(self, batch, outputs):
        return outputs[:, 0]


class Unscaled(Scaled):
    def preprocess(self, batch):
        return batch


def test_scaled_images_are_named_with_the_layer_that_scales_them_again():
    scaled, unscaled = (
        messages.images(cls(global_batch_size=4, optimizer=lambda: tf_keras.optimizers.SGD(0.1)))
        for cls in (Scaled, Unscaled)
    )
    assert scaled[0] == "image, map: uint8, scaled to [0, 1]" and unscaled == []
    assert re.match(r"The layer 'rescaling\w*' seems to expect images of 0 to 255, but", scaled[1])


def test_start_names_a_batch_that_is_larger_than_the_data():
    hardware = types.SimpleNamespace(name="one_device", reason="no GPU")
    lines = [messages.start(hardware, make_trainer(1, [8], examples=n)) for n in (7, 8)]
    assert ["the data has 7 examples, so a batch has" in line for line in lines] == [True, False]


def test_start_with_parameter_servers_warns_of_asynchronous_updates():
    cluster = types.SimpleNamespace(addresses={"worker": ["a", "b"], "ps": ["c"]})
    hardware = types.SimpleNamespace(name="parameter_server", reason="TF_CONFIG", cluster=cluster)
    line = messages.start(hardware, make_trainer(2, [4, 4]))
    assert "2 workers, 1 parameter server; batch 8" in line
    assert "Updates are asynchronous" in line


def test_partial_restore_lists_both_sides():
    comparison = types.SimpleNamespace(left=lambda: ["a", "b"], dropped=lambda: ["c"])
    assert messages.restored_in_part(comparison) == (
        "Restored in part: left at their initial values: a, b; not used of the checkpoint: c."
    )
