"""The cases: where each is from, what becomes of its original form, and its rewritten form."""

from collections.abc import Sequence
import dataclasses
import types

from tests.users_code import (
    examples,
    gathered,
    generative,
    keyed,
    losses,
    mixing,
    models,
    noise,
    normalization,
    pairs,
    sequences,
    state,
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A case.

    Attributes:
        name: of the case.
        source: the tutorial, example or paper whose code it follows.
        original: the trainer as its author writes it.
        message: None if the original is right on every split; otherwise parts of the line that
            rejects it, among them what to write.
        rewritten: the trainer with what the message says.
        plain: the trainer whose losses a plain loop over the global batch computes; None if the
            case draws random numbers or has its own step, which is then compared with one replica.
        tolerance: of float64; larger where TensorFlow itself computes in float32.
    """

    name: str
    source: str
    original: type
    message: Sequence[str] | None = None
    rewritten: type | None = None
    plain: type | None = None
    tolerance: float = 1e-10


def right(name: str, source: str, original: type, *, plain: bool = True) -> Row:
    return Row(name, source, original, plain=original if plain else None)


def draws(name: str, source: str, module: types.ModuleType, case: str, *message: str) -> Row:
    """A case with random numbers; keyed.py has its rewritten form, under the same name."""
    rewritten = getattr(keyed, case, None)
    return Row(name, source, getattr(module, case), message or ("ctl.random",), rewritten)


def gathers(name: str, source: str, module: types.ModuleType, case: str, *message: str) -> Row:
    """A case whose numbers depend on several rows; gathered.py has its rewritten form.

    On one replica the original is right, so it is what the rewritten form is compared with.
    """
    original = getattr(module, case)
    plain = None if original.replica_step is not examples.Case.replica_step else original
    return Row(name, source, original, message, getattr(gathered, case), plain)


UNIFORM, NORMAL, DROPOUT = "ctl.random.uniform", "ctl.random.normal", "ctl.random.dropout"
INTEGERS, BY_ROW = "ctl.random.integers", "[rows]"
GATHER = "ctl.replica.all_gather"

ROWS = (
    right("noise layers of Keras", "TF: overfit and underfit", noise.KerasNoise, plain=False),
    right("spatial dropout", "Keras: SpatialDropout2D", noise.SpatialDropout, plain=False),
    right("Fourier features, fixed projection", "Keras: NeRF", noise.FourierFeatures),
    right("adapted Normalization layer", "TF: regression", noise.AdaptedNormalization),
    draws("stochastic depth", "Keras: cct", noise, "StochasticDepthCase", UNIFORM),
    draws("Lambda with backend.dropout", "Keras FAQ", noise, "LambdaDropout", DROPOUT),
    right("RandomTranslation", "Keras: gan_ada", noise.RandomTranslationCase, plain=False),
    right("RandomFlip", "TF: images", noise.RandomFlipCase, plain=False),
    draws("mixup", "Keras: mixup", mixing, "MixUp"),
    right("label smoothing", "Keras: losses", mixing.SmoothedLabels),
    draws("variational autoencoder", "Keras: vae", generative, "VariationalAutoencoder", NORMAL),
    draws("diffusion, continuous time", "Keras: ddim", generative, "Diffusion"),
    Row(
        "divergence by add_loss",
        "Keras guide",
        generative.AddLossAutoencoder,
        ("per_example_loss",),
        gathered.DivergenceByRow,
        generative.AddLossAutoencoder,
    ),
    right("recurrent dropout of Keras", "Keras: LSTM", sequences.RecurrentDropout, plain=False),
    right("Dropout layer in a cell", "Keras guide: RNN", sequences.LayerInCellCase, plain=False),
    right(
        "folded axes and dropout", "Keras: video transformers", sequences.FoldedDropout, plain=False
    ),
    draws("cell with tf.nn.dropout", "Keras guide: RNN cells", sequences, "NoisyCellCase", DROPOUT),
    draws("masked language model", "Keras: BERT", sequences, "MaskedLanguageModel"),
    Row(
        "language model, mean over tokens",
        "TF text: transformer",
        sequences.LanguageModel,
        (BY_ROW,),
        sequences.WeightedLanguageModel,
        sequences.LanguageModel,
    ),
    gathers("Dice of the batch", "segmentation notebooks", pairs, "BatchDice", BY_ROW),
    gathers(
        "hardest examples, top k",
        "Shrivastava et al.",
        pairs,
        "HardestExamples",
        "one loss per example",
    ),
    right("Dice of the image", "Keras: segmentation", pairs.Dice),
    right("focal loss", "Keras: BinaryFocalCrossentropy", losses.FocalLoss),
    right("segmentation, weights of pixels", "TF: segmentation", losses.SegmentationByPixel),
    Row(
        "sampled softmax",
        "TF: word2vec",
        losses.SampledSoftmax,
        (INTEGERS, "shared=True"),
        keyed.SampledSoftmax,
        tolerance=1e-6,
    ),
    right("uncertainty weights of two tasks", "Kendall et al.", losses.UncertaintyWeights),
    draws("actor critic", "Keras: cartpole", losses, "ActorCritic", "ctl.random.categorical"),
    right("BYOL", "Grill et al.", state.Bootstrap, plain=False),
    right("spectral normalization", "TF addons", normalization.SpectralNormalization),
    right("weight normalization", "TF addons", normalization.WeightNormalizationCase),
    right("SyncBatchNormalization", "Keras", normalization.SyncBatchNormalization, plain=False),
    right("curriculum by global_step", "Keras: AdaMatch", state.StepCounter, plain=False),
    right("curriculum by a variable", "Keras: AdaMatch", state.CountingVariable),
    draws("Bayes by backprop", "Keras", normalization, "BayesianCase", NORMAL),
    gathers("MoCo queue", "He et al.", state, "MomentumQueue", GATHER),
    gathers("center loss", "Wen et al.", state, "CenterLoss", GATHER),
    gathers("VQ-VAE, moving codebook", "Sonnet", state, "MovingCodebookCase", GATHER),
    gathers(
        "initialization by data", "TF addons", normalization, "DataDependentInitialization", GATHER
    ),
    gathers("adaptive augmentation", "Keras: gan_ada", state, "AdaptiveProbability", GATHER),
    right("attention over instances", "Keras: attention_mil", models.AttentionPooling),
    right("Fourier transforms of tokens", "Keras: fnet", models.FourierMixing, plain=False),
    right("cross network", "TFRS: dcn", models.Crossing),
    right("gradient reversal", "Ganin et al.", models.GradientReversal),
    right("products of embeddings", "Keras: memory-efficient embeddings", models.QuotientRemainder),
    right("mixture of experts", "Keras: mmoe", models.MixtureOfExperts),
    right("rendering of volumes", "Keras: nerf", models.VolumeRendering),
    Row("CTC", "Keras: captcha_ocr", models.ConnectionistTemporal, tolerance=1e-5),
    right("triplets", "Keras: siamese_network", models.Triplets),
    right("attention of latents", "Keras: perceiver", models.Perceiver),
    right("Gram matrices", "Keras: neural_style_transfer", models.Gram),
    right("mixture density", "Bishop", models.MixtureDensity),
)
