"""The memory of a graph's tensors, in bytes that are counted by hand."""

import tensorflow as tf

from ctl.replica.graphs.tensor_lifetimes import Timeline, bytes_of

KIB = 1024  # the bytes of a [256] float32


def trace(function, *specs):
    return tf.function(function).get_concrete_function(*specs or [tf.TensorSpec([256])]).graph


def peak(function, *specs, excluded=()):
    timeline = Timeline(trace(function, *specs))
    return max(timeline.live({id(x) for x in excluded}))


def test_a_tensor_exists_until_it_is_read_for_the_last_time():
    def function(x):
        a = tf.cumsum(x)  # not in place
        b = tf.cumsum(a)
        return tf.cumsum(b)

    assert peak(function) == 2 * KIB

    def keeping(x):
        a = tf.cumsum(x)
        b = tf.cumsum(a)
        return tf.cumsum(b) + a

    assert peak(keeping) == 3 * KIB


def test_element_wise_operations_reuse_an_input_that_nobody_reads_afterwards():
    assert peak(lambda x: tf.tanh(tf.exp(tf.cumsum(x)))) == KIB
    # The argument itself is not freed.
    assert peak(lambda x: tf.exp(x) + x) == KIB

    def shared(x):
        a = tf.cumsum(x)
        return tf.exp(a) * a

    assert peak(shared) == 2 * KIB


def test_reshaped_tensors_and_rows_are_the_same_memory():
    def function(x):
        a = tf.reshape(tf.identity(tf.cumsum(x)), [16, 16])
        return tf.matmul(a, a)

    assert peak(function) == 2 * KIB
    assert peak(lambda x: tf.cumsum(x)[:128] + 0.0) == 1.5 * KIB


def test_what_nothing_depends_on_is_not_computed():
    def function(x):
        tf.cumsum(tf.cumsum(x))
        return tf.cumsum(x)

    assert peak(function) == KIB


def test_functions_and_branches_count_while_they_run():
    @tf.function
    def inner(x):
        return tf.reduce_sum(tf.cumsum(tf.cumsum(x)))

    assert peak(lambda x: inner(x) + 1.0) == 2 * KIB

    def branches(x, flag):
        return tf.cond(flag, lambda: tf.cumsum(tf.cumsum(tf.cumsum(x) + 1)), lambda: x)

    assert peak(branches, tf.TensorSpec([256]), tf.TensorSpec([], tf.bool)) == 2 * KIB


def test_the_forward_pass_keeps_what_the_backward_pass_reads():
    """Three products and tanh: the tape keeps the three outputs of tanh, [4, 64] each."""
    kernels = [tf.Variable(tf.eye(64)) for _ in range(3)]
    gradients = []

    def step(x):
        with tf.GradientTape() as tape:
            for kernel in kernels:
                x = tf.tanh(x @ kernel)
            loss = tf.reduce_sum(x)
        gradients[:] = tape.gradient(loss, kernels)
        return gradients

    timeline = Timeline(trace(step, tf.TensorSpec([4, 64])))
    # At its peak the backward pass has in addition the gradient of one output and of one input.
    assert max(timeline.live({id(x) for x in gradients})) == (3 + 1) * KIB
    assert max(timeline.live(set())) >= 3 * 16 * KIB


def test_sizes_that_are_not_known_are_reported():
    timeline = Timeline(trace(lambda x: tf.cumsum(tf.boolean_mask(x, x > 0))))
    assert timeline.unknown
    assert not Timeline(trace(tf.cumsum)).unknown


def test_bytes_of_tensors_and_variables():
    assert bytes_of(tf.zeros([3, 2], tf.float16)) == 12
    assert bytes_of(tf.Variable([1.0, 2.0])) == 8
    assert bytes_of(tf.TensorSpec([None, 2])) is None
    assert bytes_of(tf.constant("text")) == 0
