"""The ops of TensorFlow that draw random numbers, and what to write in place of each."""

from collections.abc import Collection, Iterator
from typing import Any

_UNIFORM = "ctl.random.uniform([rows, ...])"
_NORMAL = "ctl.random.normal([rows, ...])"
_TRUNCATED = "ctl.random.truncated_normal([rows, ...])"
_INTEGERS = "ctl.random.integers([rows, ...], minval, maxval)"
_SHUFFLE = "ctl.random.permutation_of_batch() with ctl.replica.all_gather(x)"
_CATEGORICAL = "ctl.random.categorical(logits)"
_GENERATOR = "ctl.random.uniform, normal or integers instead of tf.random.Generator"
_BOX = "integers of ctl.random for the corners"
_SAMPLER = "ctl.random.integers([samples], 0, classes, shared=True) as sampled_values"
_OTHER = "the functions of ctl.random, or do it in the input pipeline (ctl.data.augmented)"

# These have a state, or draw for the complete local batch.
STATEFUL = {
    "RandomUniform": _UNIFORM,
    "RandomUniformInt": _INTEGERS,
    "RandomStandardNormal": _NORMAL,
    "TruncatedNormal": _TRUNCATED,
    "ParameterizedTruncatedNormal": _TRUNCATED,
    "RandomShuffle": _SHUFFLE,
    "StatelessShuffle": _SHUFFLE,
    "Multinomial": _CATEGORICAL,
    "StatelessMultinomial": _CATEGORICAL,
    "RandomGamma": _OTHER,
    "RandomPoisson": _OTHER,
    "RandomPoissonV2": _OTHER,
    "RandomCrop": _OTHER,
    "NonDeterministicInts": _GENERATOR,
    "RngReadAndSkip": _GENERATOR,
    "RngSkip": _GENERATOR,
    "StatefulRandomBinomial": _GENERATOR,
    "StatefulStandardNormal": _GENERATOR,
    "StatefulStandardNormalV2": _GENERATOR,
    "StatefulTruncatedNormal": _GENERATOR,
    "StatefulUniform": _GENERATOR,
    "StatefulUniformFullInt": _GENERATOR,
    "StatefulUniformInt": _GENERATOR,
    "SampleDistortedBoundingBox": _BOX,
    "SampleDistortedBoundingBoxV2": _BOX,
    "FractionalAvgPool": _OTHER,
    "FractionalMaxPool": _OTHER,
    "ExtractGlimpse": _OTHER,
    "ExtractGlimpseV2": _OTHER,
    "FixedUnigramCandidateSampler": _SAMPLER,
    "LearnedUnigramCandidateSampler": _SAMPLER,
    "LogUniformCandidateSampler": _SAMPLER,
    "ThreadUnsafeUnigramCandidateSampler": _SAMPLER,
    "UniformCandidateSampler": _SAMPLER,
    "KMC2ChainInitialization": _OTHER,
    "KmeansPlusPlusInitialization": _OTHER,
    "StochasticCastToInt": _OTHER,
    "XlaRngBitGenerator": _OTHER,
}
# These draw a fixed number of values of a seed, which can be the same on every replica.
STATELESS = {
    "StatelessParameterizedTruncatedNormal": _TRUNCATED,
    "StatelessRandomBinomial": _OTHER,
    "StatelessRandomGammaV2": _OTHER,
    "StatelessRandomGammaV3": _OTHER,
    "StatelessRandomNormal": _NORMAL,
    "StatelessRandomNormalV2": _NORMAL,
    "StatelessRandomPoisson": _OTHER,
    "StatelessRandomUniform": _UNIFORM,
    "StatelessRandomUniformFullInt": _INTEGERS,
    "StatelessRandomUniformFullIntV2": _INTEGERS,
    "StatelessRandomUniformInt": _INTEGERS,
    "StatelessRandomUniformIntV2": _INTEGERS,
    "StatelessRandomUniformV2": _UNIFORM,
    "StatelessSampleDistortedBoundingBox": _BOX,
    "StatelessTruncatedNormal": _TRUNCATED,
    "StatelessTruncatedNormalV2": _TRUNCATED,
}
RANDOM = frozenset((*STATEFUL, *STATELESS))
# These run Python code when the step runs.
PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
ASSIGNMENTS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
# Plain calls, which run the function's ops once per call.
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# Op -> the attributes with the functions that it calls.
FUNCTIONS = {
    **dict.fromkeys(CALLS, ("f",)),
    **dict.fromkeys(("While", "StatelessWhile"), ("cond", "body")),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), ("branches",)),
}


def suggestion(op: Any, counts: Collection[int]) -> str:
    """Returns what to write in place of a random op.

    Args:
        op: the op.
        counts: the numbers of rows of the batch and of its micro-batches, if they are static.
    """
    if "dropout" in op.name.lower():
        return "ctl.random.dropout(x, rate)"
    text = {**STATEFUL, **STATELESS}[op.type]
    shape = op.outputs[0].shape
    if "[rows, ...]" not in text or not shape.is_fully_defined():
        return text
    if shape.rank and shape[0] in counts:
        return text
    # One set of numbers for the batch, such as the weights of a Bayesian layer.
    shared = text.replace("[rows, ...]", str(shape.as_list())).removesuffix(")") + ", shared=True)"
    may_be_rows = shape.rank and any(shape[0] % count == 0 for count in counts)
    return f"{text}, {shared} for numbers that all rows share" if may_be_rows else shared


def called_graphs(op: Any) -> Iterator[tuple[str, Any]]:
    """Yields the name and the graph of each function that an op calls."""
    for attribute in FUNCTIONS.get(op.type, ()):
        value = op.get_attr(attribute)
        for function in value if isinstance(value, list) else [value]:
            definition = op.graph._get_function(function.name)
            # A function that was loaded from a SavedModel has no graph.
            graph = getattr(definition, "graph", None)
            if graph is not None:
                yield function.name, graph
