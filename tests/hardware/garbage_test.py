"""The garbage collector is paused while modules are imported and graphs are traced."""

import gc

import pytest

from ctl.hardware import garbage
from tests.support import child


def test_collector_is_paused_and_then_as_before():
    with pytest.raises(KeyError), garbage.pause_collection():
        with garbage.pause_collection():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


@pytest.mark.slow
def test_program_does_not_collect_what_tensorflow_made_when_it_was_imported():
    code = (
        "import gc; from ctl.configs.modes import MODES; MODES['train'].load(); "
        "print(gc.get_freeze_count() > 200_000, gc.isenabled())"
    )
    result = child.run(["-c", code])
    assert result.stdout.split() == ["True", "True"], result.stderr
