"""Which rows are present, asked from inside the step."""

import threading

import pytest
import tensorflow as tf

import ctl
from ctl import replica


def test_outside_of_a_step_all_rows_are_present():
    assert replica.current() is None
    assert replica.present() is None


def test_blocks_nest_and_end():
    with replica.examples(tf.constant([1.0, 0.0])):
        with replica.examples(None, first_row=3, step=7):
            assert replica.present() is None
            assert (replica.current().first_row, replica.current().step) == (3, 7)
        assert replica.present().numpy().tolist() == [1.0, 0.0]
    assert replica.current() is None


def test_a_block_ends_where_an_error_leaves_it():
    with pytest.raises(ZeroDivisionError), replica.examples(tf.ones([2])):
        raise ZeroDivisionError
    assert replica.current() is None


def test_each_replicas_thread_has_its_own():
    seen = []
    with replica.examples(tf.ones([2])):
        thread = threading.Thread(target=lambda: seen.append(replica.current()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_rows_are_seen_in_functions_traced_inside_the_step():
    @tf.function
    def step(present):
        with replica.examples(present):
            return tf.cond(tf.constant(True), lambda: replica.present() * 2, lambda: present)

    assert step(tf.constant([1.0, 0.0])).numpy().tolist() == [2.0, 0.0]


def test_rows_of_another_graph_are_an_error_in_one_line():
    held = []

    @tf.function
    def earlier(present):
        held.append(present)
        return present

    earlier(tf.ones([2]))

    @tf.function
    def later():
        with replica.examples(held[0]):
            return replica.present()

    with pytest.raises(ctl.UsageError, match=r"remove your own @tf\.function") as error:
        later()
    assert "\n" not in str(error.value)
