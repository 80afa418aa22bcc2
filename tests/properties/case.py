"""`Case`: one random configuration of a model, its data and the options; and how to draw them."""

import dataclasses

from hypothesis import assume
from hypothesis import strategies as st
import tf_keras

from ctl.optimizers import layerwise
from tests.properties import layers

optimizers = tf_keras.optimizers
OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.5),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamax": lambda: optimizers.Adamax(0.01),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "lamb": lambda: layerwise.LAMB(0.01, weight_decay=0.1),
    "lars": lambda: layerwise.LARS(0.1, momentum=0.9),
    "adafactor": lambda: optimizers.Adafactor(0.01),
}
WHOLE = ("lamb", "lars", "adafactor")  # their updates read complete variables: no shard_state
SPARSE = ("adagrad", "rmsprop")  # no shard_state with the sparse gradients of embeddings
EXAMPLES = 11


@dataclasses.dataclass(frozen=True)
class Case:
    """A training of two steps. The printed form has the fields that are not the simplest values.

    Attributes:
        replicas: the number of replicas.
        batch: rows of a global batch.
        data: "arrays" (shuffled), "dataset" (of examples), or "global_batches" (the second is
            partial, and not padded).
        second_batch: rows of the second one of "global_batches".
        input: a name of `layers.INPUTS`.
        body: layers on the input.
        head: layers on vectors, after the positions are averaged.
        outputs: "class" (cross entropy), "value" (squares), or both; "steps": a loss per position.
        weights: sample weights: "none", "random", "some_zero" or "all_zero".
        optimizer: one of `OPTIMIZERS`.
        micro_batches: `micro_batches`.
        logical_shards: shards whose gradients are summed in order; 0 for none.
        clip: "none", "global_norm", "norm" or "value".
        shard_state: whether the slot variables are split over the replicas, and also the gradients.
        recompute: whether the backward pass computes the activations of each layer again.
        penalty: whether dense layers have an L2 penalty.
        updates: `minimize` is called this many times per step; 0: the class does not override
            `replica_step`.
        group: "none", or the optimizer's group of the body's first layer: "scaled" or "frozen".
        skip_nan: whether example 3 is NaN, and steps that are not finite are skipped.
        ema: whether the weights are averaged.
        norms: which norms are measured.
        seed: of the weights, the data's order and the random layers.
    """

    replicas: int = 1
    batch: int = 1
    data: str = "arrays"
    second_batch: int = 1
    input: str = "vector"
    body: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("class",)
    weights: str = "none"
    optimizer: str = "sgd"
    micro_batches: int = 1
    logical_shards: int = 0
    clip: str = "none"
    shard_state: bool | str = False
    recompute: bool = False
    penalty: bool = False
    updates: int = 0
    group: str = "none"
    skip_nan: bool = False
    ema: bool = False
    norms: str = ""
    seed: int = 0

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        changed = [f"{k}={v!r}" for k, v in values.items() if v != getattr(Case, k)]
        return f"Case({', '.join(changed)})"

    @property
    def layers(self) -> tuple[str, ...]:
        return self.body + self.head

    @property
    def reference(self) -> "Case":
        """The same update on one replica, computed at once."""
        return dataclasses.replace(
            self, replicas=1, micro_batches=1, logical_shards=0, shard_state=False, recompute=False
        )


def names(kind: str, size: int) -> st.SearchStrategy[tuple[str, ...]]:
    """Lists of names of layers; shrinks to none."""
    return st.lists(st.sampled_from(list(layers.LAYERS[kind])), max_size=size).map(tuple)


def mostly(common, rare) -> st.SearchStrategy:
    """Draws `common` in three of four cases."""
    return st.integers(0, 3).flatmap(lambda i: st.sampled_from(rare) if i == 3 else st.just(common))


@st.composite
def cases(draw) -> Case:
    """Draws a case; some of them are rejected by ctl."""
    source = draw(st.sampled_from(list(layers.INPUTS)))
    kind = layers.INPUTS[source][1]
    replicas = draw(st.sampled_from([2, 3, 4, 1]))
    batch = draw(st.integers(1, 9))
    steps = [("steps",)] * (2 * (kind == "sequence"))
    outputs = draw(st.sampled_from([("class",), ("value",), ("class", "value"), *steps]))
    body = draw(names(kind, 3))
    head = () if outputs == ("steps",) else draw(names("vector", 2))
    sync = set(body + head) & set(layers.SYNC)
    rows = -(-batch // replicas)
    # Sync BN forbids both; most other values would be rejected.
    split = draw(st.sampled_from(["whole"] if sync else ["whole", "micro", "micro", "shards"]))
    micro_batches = draw(st.integers(1, min(rows, 4))) if split == "micro" else 1
    shards = [s for s in range(1, batch + 1) if batch % s == 0 and s % replicas == 0]
    logical_shards = draw(st.sampled_from(shards)) if split == "shards" and shards else 0
    optimizer = draw(st.sampled_from([*OPTIMIZERS]))
    data = draw(mostly("arrays", ["dataset", "global_batches"]))
    recompute = draw(mostly(False, [True]))
    shard_state = draw(mostly(False, [True] if logical_shards else [True, "gradients"]))
    if optimizer in WHOLE or (optimizer in SPARSE and "tokens" in source):
        shard_state = False
    # The update would be compared with itself.
    assume(replicas > 1 or micro_batches > 1 or logical_shards or recompute)
    return Case(
        replicas=replicas,
        batch=batch,
        data=data,
        second_batch=draw(st.integers(1, batch)) if data == "global_batches" else 1,
        input=source,
        body=body,
        head=head,
        outputs=outputs,
        weights=draw(st.sampled_from(["none", "random", "some_zero", "all_zero"])),
        optimizer=optimizer,
        micro_batches=micro_batches,
        logical_shards=logical_shards,
        clip=draw(st.sampled_from(["none", "global_norm", "norm", "value"])),
        shard_state=shard_state,
        recompute=recompute,
        penalty=draw(st.booleans()),
        updates=draw(mostly(0, [1, 2])),
        group=draw(mostly("none", ["scaled", "frozen"])),
        skip_nan=draw(mostly(False, [True])),
        ema=draw(mostly(False, [True])),
        norms=draw(mostly("", ["global"])),
        seed=draw(st.integers(0, 3)),
    )
