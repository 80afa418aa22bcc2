"""What the tests of runs in object stores share: flags, faults and counts."""

import json
import types

import fsspec

ENDINGS = ("data-00000-of-00001", "index", "whole")
BEST = ("--config.train.best.metric=eval/loss", "--config.train.best.mode=min")
_MEMORY = type(fsspec.filesystem("memory"))


def fail_writes(monkeypatch, fails):
    """Makes writes to memory:// fail for the names that `fails` accepts; counts them."""
    calls = types.SimpleNamespace(calls=0)
    for name in ("pipe_file", "put_file"):
        original = getattr(_MEMORY, name)

        def write(self, first, second, *arguments, name=name, original=original, **keywords):
            path = str(first if name == "pipe_file" else second)
            if fails(path):
                calls.calls += 1
                raise OSError("503 Slow Down")
            return original(self, first, second, *arguments, **keywords)

        monkeypatch.setattr(_MEMORY, name, write)
    return calls


def take_over(store):
    """Does what another process does that becomes the owner."""
    number = max(int(name) for name in store.list("owner")) + 1
    store.write(f"owner/{number:08d}", json.dumps({"pid": 1, "host": "other"}).encode())
