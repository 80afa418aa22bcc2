"""Composing the messages of errors."""

import errno
import os
import sys
from unittest import mock

import pytest

from ctl import errors


@pytest.mark.parametrize(
    ("name", "known", "words"),
    [
        ("Adam", [["adam", "adamw"]], ": did you mean adam?"),
        ("zzz", [["steps", "seed"]], ": expected one of steps, seed."),
        ("zzz", [["steps"]], ": expected steps."),
        ("zzz", [[]], ""),
        ("zzz", [["", "best"]], ': expected one of "", best.'),
        ("stps", [{"steps": "train.steps"}], ": did you mean train.steps?"),
        ("zzz", [{"steps": "train.steps"}], ": expected train.steps."),
        # An equal name in a later collection is preferred to a similar one, which is preferred to
        # one of a later collection; that is preferred to the list.
        ("size", [["siz"], {"size": "data.size"}], ": did you mean data.size?"),
        ("stps", [["steps"], ["stops"]], ": did you mean steps?"),
        ("stps", [["seed"], ["steps"]], ": did you mean steps?"),
    ],
)
def test_did_you_mean(name, known, words):
    assert errors.did_you_mean(name, *known) == words


SECRETS = {
    "s3://key:secret@bucket/run": "s3://***@bucket/run",
    "sftp:/me:secret@host/run": "sftp:/***@host/run",  # as pathlib writes it
    "https://secret@host/w.h5": "https://***@host/w.h5",
    "https://host/w?X-Amz-Signature=secret&x=1": "https://host/w?X-Amz-Signature=***&x=1",
    "https://host/w?a=1&sig=secret": "https://host/w?a=1&sig=***",
    "https://host/w?X-Amz-Security-Token=secret": "https://host/w?X-Amz-Security-Token=***",
    "https://host/w?AWSAccessKeyId=secret": "https://host/w?AWSAccessKeyId=***",
    "https://host/w?api_key=secret": "https://host/w?api_key=***",
}


@pytest.mark.parametrize("url", SECRETS)
def test_credentials_of_a_url_are_in_no_line_and_rejected(url, capsys):
    errors.print_line(f"{url} cannot be read")
    assert capsys.readouterr().out == f"{SECRETS[url]} cannot be read\n"
    with pytest.raises(errors.UsageError, match="key has credentials in a URL"):
        errors.check_credentials("key", f"['{url}']")
    with pytest.raises(errors.UsageError) as error:
        errors.check_credentials(url, url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "gs://bucket/a@b:c/run", "sftp://me@host/run", "runs/a:b@c", "worker 0 (localhost:2222)",
        "https://host/a?page=key", "http://[::1]:80/a", "a.py:A and b@c", "https://h/x?tokenizer=bpe",
        "https://h/x?keywords=cat&design=1&sigma=2", "https://h?email=a@b", "https://github.com@v1",
    ],
)  # fmt: skip
def test_text_without_credentials_is_not_changed(text):
    assert errors.printable(text) == text
    errors.check_credentials("key", text)


def test_control_characters_do_not_reach_the_terminal(capsys):
    errors.print_line("run\x1b]0;title\x07\r\x9b1m\u202e größe\n\ttab")
    assert capsys.readouterr().out == ("run\\x1b]0;title\\x07\\r\\x9b1m\\u202e größe\n\ttab\n")


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "None"), (dict, "the class dict (call it: dict())"), ({}, "a dict"), (5, "an int")],
)
def test_type_name_has_an_article(value, words):
    assert errors.type_name(value) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [(1, "0"), (8, "0, 1, 2, 3, 4, 5, 6, 7"), (10, "0, 1, 2, 3, 4, 5, 6, 7, and 2 more")],
)
def test_list_some_counts_the_names_that_it_does_not_list(count, words):
    assert errors.list_some([str(i) for i in range(count)]) == words


@pytest.mark.parametrize("error", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_print_line_survives_a_closed_pipe_or_terminal_and_a_full_disk(monkeypatch, error):
    write = mock.Mock(side_effect=OSError(error, os.strerror(error)))
    monkeypatch.setattr(sys, "stdout", mock.Mock(write=write))
    errors.print_line("one")
    errors.print_line("two")
    write.assert_called_once()


def test_print_line_survives_a_closed_stream_and_an_encoding_without_the_character(
    monkeypatch, tmp_path
):
    with open(tmp_path / "log", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        errors.print_line("gr\u00f6\u00dfe")
    errors.print_line("dropped")
    assert (tmp_path / "log").read_text() == "gr\\xf6\\xdfe\n"


@pytest.mark.parametrize(
    ("examples", "batch"),
    [
        (None, ""),
        ([], ""),
        ([3, 1], ", on the examples 3, 1"),
        (list(range(9)), ", on the examples 0, 1, 2, 3, 4, 5, 6, 7, ..."),
    ],
)
def test_non_finite_step_names_the_step_the_tensor_and_the_examples(examples, batch):
    report = mock.MagicMock(step=33, tensor="loss")
    report.__str__.return_value = "is not finite: the loss is first"
    error = errors.NonFiniteStep(report, examples)
    assert (error.step, error.tensor) == (33, "loss")
    assert error.what == f"Step 33 is not finite: the loss is first{batch}."
    assert str(error).startswith(error.what)
    assert "train.on_non_finite=skip or rollback" in str(error)
