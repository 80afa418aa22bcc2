"""The variables that a step assigns are restored on every replica if the update is skipped."""

import tensorflow as tf

from ctl.update.snapshot import Snapshot


def test_only_assigned_variables_are_restored():
    variables = [tf.Variable(1.0), tf.Variable(2.0)]

    def replica_step():
        snapshot = Snapshot(variables)
        variables[1].assign_add(1.0)
        before = len(tf.compat.v1.get_default_graph().get_operations())
        snapshot.restore()
        added = tf.compat.v1.get_default_graph().get_operations()[before:]
        assert [op.inputs[0].op.name for op in added if op.type == "AssignVariableOp"] == [
            snapshot._copies[id(variables[1].handle)].value.op.inputs[0].op.name
        ]

    tf.function(replica_step)()
    assert [v.numpy() for v in variables] == [1.0, 2.0]


def test_eager_execution_restores_everything():
    variable = tf.Variable(1.0)
    snapshot = Snapshot([variable])
    variable.assign(2.0)
    snapshot.restore()
    assert variable.numpy() == 1.0
