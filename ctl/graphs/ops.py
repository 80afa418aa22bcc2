"""Tables of TensorFlow's ops: those that compute by element, call functions or draw random numbers."""

from collections.abc import Collection, Iterable, Iterator

import tensorflow as tf

from ctl.private.tensorflow import control_flow_util

# In the name of every op that draws bits by row: the search for other random ops recognizes it.
KEYED_BITS = "ctl_keyed_bits"
CLOCK = "ctl_clock"  # in the name of every op by which ctl reads the time
# In the name of numbers that all rows share because their shape does not begin with the rows.
SHARED_NUMBERS = "ctl_shared_numbers"
# Ops whose outputs do not depend on the values of the inputs.
SHAPES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "TensorListLength")
# Ops that compute element by element, with broadcasting.
_ELEMENTWISE = """
    Abs Acos Acosh Add AddN AddV2 AccumulateNV2 Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh
    BesselI0e BesselI1e Betainc BitwiseAnd BitwiseOr BitwiseXor Cast Ceil CheckNumerics
    CheckNumericsV2 ClipByValue Complex ComplexAbs Conj Cos Cosh Digamma Div DivNoNan Elu EluGrad
    EnsureShape Equal Erf Erfc Erfinv Exp Expm1 FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars Floor
    FloorDiv FloorMod Greater GreaterEqual Identity Igamma Igammac Imag Inv Invert IsFinite IsInf IsNan
    LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr
    Maximum Minimum Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual PlaceholderWithDefault Polygamma Pow
    PreventGradient Real RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad
    ReluGrad RightShift Rint Round Rsqrt RsqrtGrad SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin
    Sinh Snapshot Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference
    StopGradient StringToHashBucketFast Sub Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py Xlogy
    Zeta
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
# Op -> the input that may hold rows of a batch on axis 0. Its others are a kernel, a bias or a table.
DATA_INPUT = {
    **dict.fromkeys(("BiasAdd", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "Dilation2D"), 0),
    **dict.fromkeys(("Gather", "GatherV2", "ResourceGather"), 1),
    "Conv2DBackpropInput": 2,
    "Conv3DBackpropInputV2": 2,
    "DepthwiseConv2dNativeBackpropInput": 2,
}

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

# What to write instead -> the ops that draw random numbers.
_DRAWS = {
    "ctl.random.uniform([rows, ...])": (
        "RandomUniform StatelessRandomUniform StatelessRandomUniformV2"
    ),
    "ctl.random.normal([rows, ...])": (
        "RandomStandardNormal StatelessRandomNormal StatelessRandomNormalV2"
    ),
    "ctl.random.truncated_normal([rows, ...])": (
        "TruncatedNormal ParameterizedTruncatedNormal StatelessTruncatedNormal "
        "StatelessTruncatedNormalV2 StatelessParameterizedTruncatedNormal"
    ),
    "ctl.random.integers([rows, ...], minval, maxval)": (
        "RandomUniformInt StatelessRandomUniformInt StatelessRandomUniformIntV2 "
        "StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2"
    ),
    "ctl.random.permutation_of_batch() with ctl.replica.all_gather(x)": (
        "RandomShuffle StatelessShuffle"
    ),
    "ctl.random.categorical(logits)": "Multinomial StatelessMultinomial",
    "ctl.random.uniform, normal or integers instead of tf.random.Generator": (
        "NonDeterministicInts RngReadAndSkip RngSkip StatefulRandomBinomial StatefulStandardNormal "
        "StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt "
        "StatefulUniformInt"
    ),
    "integers of ctl.random for the corners": (
        "SampleDistortedBoundingBox SampleDistortedBoundingBoxV2 StatelessSampleDistortedBoundingBox"
    ),
    "ctl.random.integers([samples], 0, classes, shared=True) as sampled_values": (
        "FixedUnigramCandidateSampler LearnedUnigramCandidateSampler LogUniformCandidateSampler "
        "ThreadUnsafeUnigramCandidateSampler UniformCandidateSampler"
    ),
    "the functions of ctl.random, or self.global_step, instead of the time": "Timestamp",
    "the functions of ctl.random, or do it in the input pipeline (ctl.data.augmented)": (
        "RandomGamma RandomPoisson RandomPoissonV2 RandomCrop FractionalAvgPool FractionalMaxPool "
        "ExtractGlimpse ExtractGlimpseV2 KMC2ChainInitialization KmeansPlusPlusInitialization "
        "StochasticCastToInt XlaRngBitGenerator StatelessRandomBinomial StatelessRandomGammaV2 "
        "StatelessRandomGammaV3 StatelessRandomPoisson"
    ),
}
# Op -> what to write instead.
RANDOM = {name: text for text, names in _DRAWS.items() for name in names.split()}
# These draw a fixed number of values of a seed, which can be the same on every replica; the other
# random ops have a state, or draw for the complete local batch.
_LOCAL = ("StatelessShuffle", "StatelessMultinomial")
STATELESS = {op for op in RANDOM if op.startswith("Stateless") and op not in _LOCAL}


def suggestion(op: tf.Operation, counts: Collection[int]) -> str:
    """Returns what to write in place of a random op.

    Args:
        op: the op.
        counts: the numbers of rows of the batch and of its micro-batches, if they are static.
    """
    if "dropout" in op.name.lower():
        return "ctl.random.dropout(x, rate)"
    text, shape = RANDOM[op.type], op.outputs[0].shape
    if "[rows, ...]" not in text or not shape.is_fully_defined():
        return text
    if shape.rank and shape[0] in counts:
        return text
    # One set of numbers for the batch, such as the weights of a Bayesian layer.
    shared = text.replace("[rows, ...]", str(shape.as_list())).removesuffix(")") + ", shared=True)"
    may_be_rows = shape.rank and any(shape[0] % n == 0 or n in shape[1:] for n in counts)
    return f"{text}, {shared} for numbers that all rows share" if may_be_rows else shared


def called_graphs(op: tf.Operation) -> Iterator[tuple[str, tf.Graph]]:
    """Yields the name and the graph of each function that an op calls."""
    for attribute in FUNCTIONS.get(op.type, ()):
        value = op.get_attr(attribute)
        for function in value if isinstance(value, list) else [value]:
            definition = op.graph._get_function(function.name)
            # A function that was loaded from a SavedModel has no graph.
            graph = getattr(definition, "graph", None)
            if graph is not None:
                yield function.name, graph


def with_called(operations: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields operations, and the operations of the functions that they call."""
    for op in operations:
        yield op
        for _, graph in called_graphs(op):
            yield from with_called(graph.get_operations())


def is_compiled() -> bool:
    """Returns whether the graph that is being traced is a part of a program of XLA."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def is_compiled_for_gpu(tensor: tf.Tensor) -> bool:
    """Returns whether XLA compiles the operation of a tensor for a GPU."""
    is_gpu = "CPU" not in tensor.device and bool(tf.config.list_logical_devices("GPU"))
    return is_compiled() and is_gpu
