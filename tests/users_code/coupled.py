"""The cases in which the numbers of a row depend on the other rows of its replica.

Training does not detect this: the test kit and --mode=check do.
"""

from tests.users_code import gathered, mixing, normalization, pairs, state
from tests.users_code.table import Row, gathers

COUPLED = (
    gathers("SimCLR", "Keras: semisupervised_simclr", pairs, "ContrastiveLoss"),
    gathers(
        "supervised contrastive loss",
        "Keras: supervised_contrastive",
        pairs,
        "SupervisedContrastiveLoss",
    ),
    gathers("batch-hard triplets", "TF addons: triplet_hard_loss", pairs, "HardTriplets"),
    Row(
        "hardest examples, mask",
        "Shrivastava et al.: OHEM",
        pairs.HardestExamplesMask,
        (),
        gathered.HardestExamples,
        pairs.HardestExamples,
    ),
    gathers("advantages normalized over the batch", "PPO", pairs, "NormalizedAdvantage"),
    gathers("normalization over axis 0", "a mistake", pairs, "CrossBatchNormalizer"),
    gathers("mixup with the reversed batch", "notebooks", mixing, "ReversedMixUp"),
    Row(
        "ghost batch normalization",
        "Hoffer et al.",
        normalization.GhostBatchNormalizationCase,
        (),
        gathered.FixedGroups,
        normalization.GhostBatchNormalizationCase,
    ),
    Row(
        "curriculum by a counter in Python", "notebooks", state.PythonCounter, (), state.StepCounter
    ),
)
