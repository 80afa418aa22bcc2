"""The graph that TensorFlow runs, after all passes of Grappler."""

import tensorflow as tf
from tensorflow.python.eager import context


def optimized_nodes(step, *arguments):
    """The nodes of the graph that runs, after all passes of Grappler, by name."""
    options = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    context.context().enable_graph_collection()
    try:
        step(*arguments)
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
        tf.config.optimizer.set_experimental_options(options)
    graphs = [graph.post_optimization_graph for graph in metadata.function_graphs]
    return {node.name: node for graph in graphs for node in graph.node}


def ancestors(nodes, *names):
    """The names of all nodes that run before some nodes, in the same iteration of a loop."""
    seen, queue = set(), list(names)
    while queue:
        node = nodes[queue.pop()]
        for value in () if node.op == "NextIteration" else node.input:
            value = value.removeprefix("^").split(":")[0]
            if value in nodes and value not in seen:
                seen.add(value)
                queue.append(value)
    return seen
