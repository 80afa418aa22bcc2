"""The cases in which the numbers of a row depend on the other rows of its replica, or on the trace."""

from tests.users_code import gathered, mixing, normalization, pairs, state
from tests.users_code.table import GATHER, Row, gathers

COUPLED = (
    gathers("SimCLR", "Keras: semisupervised_simclr", pairs, "ContrastiveLoss", GATHER),
    Row(
        "hardest examples, mask",
        "Shrivastava et al.: OHEM",
        pairs.HardestExamplesMask,
        (GATHER,),
        gathered.HardestExamples,
        pairs.HardestExamples,
    ),
    gathers("advantages normalized over the batch", "PPO", pairs, "NormalizedAdvantage", GATHER),
    gathers("mixup with the reversed batch", "notebooks", mixing, "ReversedMixUp", GATHER),
    Row(
        "candidates of all replicas for local queries",
        "TensorFlow Recommenders: Retrieval",
        gathered.LocalPlaces,
        ("ctl.replica.positions",),
        gathered.RolledCandidates,
        gathered.LocalPlaces,
    ),
    Row(
        "ghost batch normalization",
        "Hoffer et al.",
        normalization.GhostBatchNormalizationCase,
        (GATHER,),
        gathered.FixedGroups,
        normalization.GhostBatchNormalizationCase,
    ),
    Row(
        "curriculum by a counter in Python",
        "notebooks",
        state.PythonCounter,
        ("self.global_step",),
        state.StepCounter,
    ),
)
