"""Each record goes to all writers; the failure of a server does not end a run."""

import pytest

from ctl.errors import Failure
from ctl.loop.metric_log import MetricLog
from ctl.loop.writers.writer import Writer


class Recording(Writer):
    def __init__(self, error=None, *, required=True):
        self.calls, self.error, self.required = [], error, required

    def begin(self, config, *, is_new):
        self.calls.append(("begin", is_new))

    def write(self, record):
        if self.error:
            raise self.error
        self.calls.append((record.split, record.step, record.numbers()))

    def restore(self, step):
        self.calls.append(("restore", step))

    def has_evaluation(self, step):
        return step == 10


def test_every_writer_gets_every_record_on_the_axis_of_the_run():
    writers = [Recording(), Recording()]
    log = MetricLog(writers)
    log.begin({}, step=10, is_new=False)
    log.write("eval", 20, {"loss": 0.5, "by_class": {"a": 1}})
    expected = [("restore", 10), ("begin", False), ("eval", 20, {"loss": 0.5, "by_class/a": 1})]
    assert writers[0].calls == writers[1].calls == expected
    assert log.has_evaluation(10) and not log.has_evaluation(20)


def test_server_that_fails_is_reported_once_and_not_used_again():
    lines, other = [], Recording()
    failing = Recording(ConnectionError("no route\nto host"), required=False)
    log = MetricLog([failing, other], print_line=lines.append)
    for step in (10, 20):
        log.write("train", step, {"loss": 0.5})
    assert lines == ["Recording has failed and is not used any more: no route"]
    assert [call[1] for call in other.calls] == [10, 20]


def test_file_that_cannot_be_written_ends_the_run():
    with pytest.raises(Failure, match="Recording"):
        MetricLog([Recording(OSError(28, "No space left on device"))]).write("train", 1, {})
    with pytest.raises(KeyError):
        MetricLog([Recording(KeyError("bug"))]).write("train", 1, {})
