"""The names of TensorFlow's ops that compute each row of a batch from that row alone."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Ops whose outputs do not depend on the values of the inputs.
SHAPES = frozenset(("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "TensorListLength"))

# Ops that compute element by element, with broadcasting.
ELEMENTWISE = _names(
    """
    Abs Acos Acosh Add AddN AddV2 AccumulateNV2 And Angle ApproximateEqual Asin Asinh Atan Atan2
    Atanh
    BesselI0 BesselI0e BesselI1 BesselI1e Betainc Bitcast BitwiseAnd BitwiseOr BitwiseXor Cast Ceil
    CheckNumerics CheckNumericsV2 ClipByValue Complex ComplexAbs Conj Cos Cosh Digamma Div DivNoNan
    Elu EluGrad EnsureShape Equal Erf Erfc Erfinv Exp Expm1 FakeQuantWithMinMaxArgs
    FakeQuantWithMinMaxVars Floor FloorDiv FloorMod Greater GreaterEqual Identity Igamma IgammaGradA
    Igammac Imag Inv InvGrad Invert IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less
    LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan
    Ndtri
    Neg NextAfter NotEqual PlaceholderWithDefault Polygamma Pow PreventGradient
    QuantizeAndDequantizeV4
    Real RealDiv Reciprocal ReciprocalGrad RegexFullMatch RegexReplace Relu Relu6 Relu6Grad ReluGrad
    RightShift Rint Round Rsqrt RsqrtGrad SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh
    Snapshot Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference
    StaticRegexReplace StaticRegexFullMatch StopGradient StringLower StringStrip StringToHashBucket
    StringToHashBucketFast StringToHashBucketStrong StringToNumber StringUpper Sub Tan Tanh TanhGrad
    TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta
    """
)

# Ops whose inputs with rows have them on axis 0, like each of their outputs.
LEADING_AXIS = _names(
    """
    AdjustContrastv2 AdjustHue AdjustSaturation AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad BiasAdd
    Conv2D Conv2DBackpropInput Conv3D Conv3DBackpropInputV2 DepthToSpace DepthwiseConv2dNative
    DepthwiseConv2dNativeBackpropInput Dilation2D ExtractImagePatches ExtractVolumePatches
    HSVToRGB ImageProjectiveTransformV2 ImageProjectiveTransformV3 InTopK InTopKV2 LRN LRNGrad
    MaxPool MaxPool3D
    MaxPool3DGrad MaxPoolGrad MaxPoolGradV2 MaxPoolGradWithArgmax MaxPoolV2 RGBToHSV ResizeArea
    ResizeBicubic ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad
    SoftmaxCrossEntropyWithLogits SpaceToDepth SparseSoftmaxCrossEntropyWithLogits
    """
)

# The input of these ops that may hold the rows; another one is a kernel, and must not depend on a batch.
DATA_INPUT = {
    **dict.fromkeys(("BiasAdd", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "Dilation2D"), 0),
    "Conv2DBackpropInput": 2,
    "Conv3DBackpropInputV2": 2,
    "DepthwiseConv2dNativeBackpropInput": 2,
}

# Ops that combine the last axes; the rows may be on the others. Op -> the number of these axes.
TRAILING_AXES = {
    **dict.fromkeys(("LogSoftmax", "Softmax", "TopK", "TopKV2", "FFT", "IFFT", "RFFT", "IRFFT"), 1),
    **dict.fromkeys(
        _names(
            """
        BatchMatrixBandPart BatchMatrixDiag Cholesky CholeskyGrad Eig FFT2D IFFT2D IRFFT2D
        MatrixBandPart
        MatrixDeterminant MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixExponential
        MatrixInverse
        LogMatrixDeterminant MatrixLogarithm MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3
        MatrixSolve
        MatrixSolveLs MatrixSquareRoot MatrixTriangularSolve Qr RFFT2D SelfAdjointEigV2 Svd
        TridiagonalSolve
        """
        ),
        2,
    ),
    **dict.fromkeys(("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3"), 1),
}

REDUCTIONS = _names("All Any ArgMax ArgMin EuclideanNorm Max Mean Min Prod Sum")
# Ops along one axis, whose output has the shape of the input.
SCANS = frozenset(("Cumsum", "Cumprod", "CumulativeLogsumexp"))
# Sums over the replicas that user code may contain.
COLLECTIVES = _names(
    """
    CollectiveAllToAllV2 CollectiveGather CollectiveGatherV2 CollectiveReduce CollectiveReduceV2
    CollectiveReduceV3 CrossReplicaSum NcclAllReduce XlaAllReduce
    """
)
