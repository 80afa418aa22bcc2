"""Which part of the step `runtime.xla=auto` compiles."""

import pytest

from ctl.compile import xla
from tests.update import combinations


# Batch normalization of the global batch and shards are rejected together, in every mode.
@pytest.mark.parametrize(("sync", "shards"), [(False, 0), (True, 0), (False, 4)])
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("chunks", [False, True])
def test_auto_never_chooses_a_mode_that_is_rejected(sync, shards, gpu, replicas, chunks):
    options = {"replicas": replicas, "sync_batch_norm": sync}
    mode, reason = xla.choose("auto", gpu=gpu, shards=bool(shards), chunks=chunks, **options)
    assert reason.startswith("auto: ")
    combinations.Choice(xla=mode, shards=shards, **options).check()


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "loop"),
        ({"chunks": False}, "step"),
        ({"strings": True}, "off"),
        ({"replicas": 2}, "gradients"),
        ({"replicas": 2, "sync_batch_norm": True}, "autocluster"),
        ({"shards": True}, "off"),
        ({"deterministic": True}, "off"),
        ({"strategy": "mirrored"}, "step"),
        ({"replicas": 2, "groups": True}, "off"),
        ({"gpu": False}, "off"),
        ({"replicas": 2, "strategy": "central_storage"}, "off"),
        ({"strategy": "parameter_server"}, "off"),
    ],
)
def test_auto_compiles_as_much_as_the_options_allow(options, mode):
    choice = {"gpu": True, "replicas": 1, "sync_batch_norm": False, **options}
    assert xla.choose("auto", **choice)[0] == mode
