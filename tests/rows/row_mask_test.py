"""The rows that a step computes, read from inside the step."""

import threading

import pytest
import tensorflow as tf

import ctl
from ctl import replica


def test_blocks_nest_and_end_and_all_rows_exist_outside_of_them():
    assert replica.present() is None
    with replica.examples(tf.constant([1.0, 0.0])):
        with replica.examples(None, first_row=3, step=7):
            assert replica.present() is None
            assert (replica.current().first_row, replica.current().step) == (3, 7)
        assert replica.present().numpy().tolist() == [1.0, 0.0]
    assert replica.current() is None


def test_block_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), replica.examples(tf.ones([2])):
        raise ZeroDivisionError
    assert replica.current() is None


def test_each_replica_thread_has_its_own_rows():
    seen = []
    with replica.examples(tf.ones([2])):
        thread = threading.Thread(target=lambda: seen.append(replica.current()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_functions_traced_inside_the_step_read_its_rows():
    @tf.function
    def step(present):
        with replica.examples(present):
            return tf.cond(tf.constant(True), lambda: replica.present() * 2, lambda: present)

    assert step(tf.constant([1.0, 0.0])).numpy().tolist() == [2.0, 0.0]


def test_rows_of_another_graph_raise_an_error_of_one_line():
    captured = []

    @tf.function
    def earlier(present):
        captured.append(present)
        return present

    earlier(tf.ones([2]))

    @tf.function
    def later():
        with replica.examples(captured[0]):
            return replica.present()

    with pytest.raises(ctl.UsageError, match=r"remove your own @tf\.function") as error:
        later()
    assert "\n" not in str(error.value)
