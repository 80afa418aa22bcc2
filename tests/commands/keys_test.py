"""ctl keys."""

import subprocess

import pytest

from ctl import main
from ctl.configs.keys import KEYS


def test_search_prints_the_keys_that_contain_a_text(capsys):
    assert main.run(["ctl", "keys", "optimizer.CLIP"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "optimizer.clip.global_norm = 0.0  (number)",
        "    Scale all gradients of the global batch to at most this joint norm. With 0,",
    ]
    assert main.run(["ctl", "keys", "goyal"]) == 0  # in the description
    assert capsys.readouterr().out.startswith("optimizer.learning_rate_batch_size = 0  (integer)")
    # The section may change when a run is resumed.
    assert main.run(["ctl", "keys", "train.norms"]) == 0
    assert capsys.readouterr().out.startswith("train.norms = ''  (string, resume)")


def test_search_prints_the_sections_whose_keys_the_experiment_chooses(capsys):
    assert main.run(["ctl", "keys", "optimizer.arg"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "optimizer.arguments  (free section: its keys are the experiment's)",
        "    Holds further arguments of the optimizer's class, such as beta_2 or epsilon.",
    ]
    assert main.run(["ctl", "keys"]) == 0
    printed = capsys.readouterr().out.splitlines()
    sections = [line.split()[0] for line in printed if "  (free section" in line]
    assert sections == [
        "model", "optimizer.arguments", "optimizer.schedule_arguments", "init.names", "init.models",
        "loss_weights",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("Sync-Batch_Norm", "model.sync_batch_norm"),
        ("accumulation", "optimizer.micro_batches"),
        ("learning rate", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("ddp", "runtime.strategy"),
        ("callbacks", "actions"),
        ("recompute blocks", "model.recompute"),
        ("early stopping", "train.best.patience"),
        ("shuffle", "seed"),
        ("workers", "runtime.strategy"),
        ("gradient clipping", "optimizer.clip.global_norm"),
    ],
)
def test_search_finds_the_words_of_other_libraries(words, key, capsys):
    assert main.run(["ctl", "keys", *words.split()]) == 0
    printed = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in printed if line[0] != " "]
    assert names[0] == key and len({*names}) == len(names)


def test_search_prints_the_best_five_keys(capsys):
    assert main.run(["ctl", "keys", "gradients"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len([line for line in printed if line[0] not in " ."]) == 5
    assert printed[-1].startswith("... and ")


def test_key_that_does_not_exist_gets_a_suggestion(capsys):
    assert main.run(["ctl", "keys", "lerning_rate"]) == 2
    assert capsys.readouterr().err == (
        "ctl: No config key contains 'lerning_rate': did you mean optimizer.learning_rate?\n"
    )


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--config.optimizer.clip.g", ["--config.optimizer.clip.global_norm="]),
        ("--config.train.best.m", [f"--config.train.best.{k}=" for k in ("metric", "mode")]),
    ],
)
def test_names_complete_words_in_bash(word, expected, capsys):
    assert main.run(["ctl", "keys", "--names"]) == 0
    names = capsys.readouterr().out
    assert len(names.splitlines()) == len([key for key in KEYS if key.default != {}])
    command = ["bash", "-c", 'compgen -W "$1" -- "$2"', "bash", names, word]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(result.stdout.splitlines()) == expected
