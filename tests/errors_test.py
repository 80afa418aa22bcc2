"""What a person may have meant."""

import pytest

from ctl import errors


@pytest.mark.parametrize(
    ("name", "known", "words"),
    [
        ("stps", [["steps", "seed"]], ": did you mean steps?"),
        ("Adam", [["adam", "adamw"]], ": did you mean adam?"),
        ("zzz", [["steps", "seed"]], ": there are steps, seed."),
        ("zzz", [["steps"]], ": there is steps."),
        ("zzz", [[]], ""),
        ("zzz", [], ""),
        ("stps", [{"steps": "train.steps"}], ": did you mean train.steps?"),
        ("zzz", [{"steps": "train.steps"}], ": there is train.steps."),
    ],
)
def test_words(name, known, words):
    assert errors.did_you_mean(name, *known) == words


def test_the_same_name_elsewhere_comes_before_a_close_one_here():
    here, elsewhere = ["global_batch"], {"global_batch_size": "data.global_batch_size"}
    words = errors.did_you_mean("global_batch_size", here, elsewhere)
    assert words == ": did you mean data.global_batch_size?"


def test_a_close_name_here_comes_before_a_close_one_elsewhere():
    assert errors.did_you_mean("stps", ["steps"], ["stops"]) == ": did you mean steps?"


def test_a_close_name_elsewhere_comes_before_the_list_of_those_here():
    assert errors.did_you_mean("stps", ["seed"], ["steps"]) == ": did you mean steps?"


@pytest.mark.parametrize(("value", "words"), [(None, "None"), ({}, "a dict"), (5, "an int")])
def test_kind(value, words):
    assert errors.type_name(value) == words
