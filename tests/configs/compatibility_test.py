"""What is allowed with what."""

import dataclasses

import pytest

import ctl
from ctl.configs import compatibility
from ctl.replica import precision
from ctl.replica import xla as replica_compile
from tests import child


def test_matrix_in_the_docs_is_the_table_of_now():
    assert (child.ROOT / "docs/matrix.md").read_text() == compatibility.matrix()


def test_every_rule_refuses_something_and_says_what_works():
    sizes = [compatibility.Choice(shards=4, batch=6), compatibility.Choice(shards=3, replicas=2)]
    names = ("central_storage", "parameter_server", "tpu")
    sizes += [
        dataclasses.replace(c, strategy=name) for c in compatibility.all_choices() for name in names
    ]
    for rule in compatibility.RULES:
        assert any(rule.broken(choice) for choice in [*compatibility.all_choices(), *sizes]), (
            rule.says
        )
        assert rule.instead.split()[0] in ("choose", "set")


def test_axes_are_the_options_there_are():
    assert set(compatibility.AXES["precision"]) == set(precision.PRECISIONS)
    assert {*compatibility.AXES["xla"], "auto"} == set(replica_compile.MODES)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("chunks", [False, True])
def test_auto_never_chooses_what_is_refused(sync, shards, gpu, replicas, chunks):
    if sync and shards:
        return  # refused, whatever is compiled
    mode, why = replica_compile.choose(
        "auto", gpu=gpu, replicas=replicas, sync_batch_norm=sync, shards=shards, chunks=chunks
    )
    assert why.startswith("auto: ")
    compatibility.check(
        compatibility.Choice(
            replicas=replicas, xla=mode, sync_batch_norm=sync, shards=4 if shards else 0
        )
    )


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, "loop"),
        ({"chunks": False}, "step"),
        ({"strings": True}, "off"),
        ({"replicas": 2}, "gradients"),
        ({"replicas": 2, "sync_batch_norm": True}, "autocluster"),
        ({"shards": True}, "off"),
        ({"gpu": False}, "off"),
        ({"replicas": 2, "strategy": "central_storage"}, "off"),
        ({"strategy": "parameter_server"}, "off"),
    ],
)
def test_auto_compiles_as_much_as_it_can(given, want):
    choice = {"gpu": True, "replicas": 1, "sync_batch_norm": False, **given}
    assert replica_compile.choose("auto", **choice)[0] == want


def test_refusal_is_one_line_with_a_way_out():
    with pytest.raises(ctl.UsageError) as refused:
        compatibility.check(compatibility.Choice(xla="step", replicas=2))
    assert "\n" not in str(refused.value)
    assert "choose runtime.xla=gradients, autocluster or off" in str(refused.value)
