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
    """

    name: str
    source: str
    original: type
    message: Sequence[str] | None = None
    rewritten: type | None = None
    plain: type | None = None


def right(name: str, source: str, original: type, *, plain: bool = True) -> Row:
    return Row(name, source, original, plain=original if plain else None)


def rewritten(name: str, source: str, original: type, message: str, other: type) -> Row:
    """A case whose losses over the global batch are right, and its rewritten form."""
    return Row(name, source, original, (message,), other, original)


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


NORMAL, GATHER, BY_ROW = "ctl.random.normal", "ctl.replica.all_gather", "[rows]"

ROWS = (
    right("noise layers of Keras", "TF: overfit and underfit", noise.KerasNoise, plain=False),
    right("adapted Normalization layer", "TF: regression", noise.AdaptedNormalization),
    draws("Lambda with backend.dropout", "Keras FAQ", noise, "LambdaDropout", "ctl.random.dropout"),
    right("RandomFlip", "TF: images", noise.RandomFlipCase, plain=False),
    draws("mixup", "Keras: mixup", mixing, "MixUp"),
    draws("variational autoencoder", "Keras: vae", generative, "VariationalAutoencoder", NORMAL),
    rewritten(
        "divergence by add_loss", "Keras guide",
        generative.AddLossAutoencoder, "per_example_loss", gathered.DivergenceByRow,
    ),
    right("folded axes and dropout", "Keras: video transformers", sequences.FoldedDropout,
          plain=False),
    rewritten(
        "language model, mean over tokens", "TF text: transformer",
        sequences.LanguageModel, BY_ROW, sequences.WeightedLanguageModel,
    ),
    gathers("Dice of the batch", "segmentation notebooks", pairs, "BatchDice", BY_ROW),
    gathers("hardest examples, top k", "Shrivastava et al.", pairs, "HardestExamples",
            "one loss per example"),
    right("Dice of the image", "Keras: segmentation", pairs.Dice),
    right("uncertainty weights of two tasks", "Kendall et al.", losses.UncertaintyWeights),
    right("BYOL", "Grill et al.", state.Bootstrap, plain=False),
    right("spectral normalization", "TF addons", normalization.SpectralNormalization),
    right("weight normalization", "TF addons", normalization.WeightNormalizationCase),
    right("SyncBatchNormalization", "Keras", normalization.SyncBatchNormalization, plain=False),
    right("curriculum by a variable", "Keras: AdaMatch", state.CountingVariable),
    draws("Bayes by backprop", "Keras", normalization, "BayesianCase", NORMAL),
    gathers("MoCo queue", "He et al.", state, "MomentumQueue", GATHER),
    gathers("center loss", "Wen et al.", state, "CenterLoss", GATHER),
    gathers(
        "initialization by data", "TF addons", normalization, "DataDependentInitialization", GATHER
    ),
    right("Fourier transforms of tokens", "Keras: fnet", models.FourierMixing, plain=False),
    right("rendering of volumes", "Keras: nerf", models.VolumeRendering),
    right("attention of latents", "Keras: perceiver", models.Perceiver),
    gathers("SimCLR", "Keras: semisupervised_simclr", pairs, "ContrastiveLoss", GATHER),
    rewritten(
        "candidates of all replicas for local queries", "TensorFlow Recommenders: Retrieval",
        gathered.LocalPlaces, "ctl.replica.positions", gathered.RolledCandidates,
    ),
    right("last output of a sequence", "TF 1: dynamic_rnn", models.LastOutput),
    right("molecules as one graph", "Keras: mpnn", models.Molecules),
    right("three samples of a row", "Burda et al.", generative.ImportanceWeighted, plain=False),
)  # fmt: skip
