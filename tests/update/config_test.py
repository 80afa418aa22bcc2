"""Rules about which options may be combined. tests/update/combinations_test.py runs the rest."""

import re

import pytest

from ctl.configs import keys, overrides
from ctl.errors import UsageError
from ctl.keras import precision
from ctl.update import config
from tests.update import combinations
from tests.update.combinations import Choice

# One choice that breaks exactly one rule, by the start of that rule's message.
BROKEN = {
    "data.placement=device requires runtime.xla=loop": Choice(placement="device", xla="step"),
    "runtime.loss_scale has no effect without": Choice(loss_scale=8.0),
    "train.loss_spike has no effect with": Choice(loss_spike=3.0, on_non_finite="ignore"),
    "runtime.all_reduce.compression and": Choice(compression="float16", reduce_dtype="bfloat16"),
    "runtime.all_reduce.compression would undo": Choice(compression="float16", precision="float64"),
    "runtime.logical_shards keeps every bit of the": Choice(compression="float16", shards=4),
    "runtime.all_reduce.bucket_mib reduces gradients during the backward pass, and runtime":
        Choice(compression="float16", bucket_mib=1.0),
    "runtime.all_reduce.bucket_mib reduces gradients during the backward pass, and a program":
        Choice(bucket_mib=1.0, xla="gradients", replicas=2),
    "runtime.precision=float16 requires a": Choice(precision="float16", strategy="central_storage"),
    "runtime.precision=float64 is not supported by": Choice(precision="float64", strategy="tpu"),
    "runtime.xla=gradients compiles code that": Choice(xla="gradients", strategy="central_storage"),
    "runtime.xla=loop and step compile the update, which":
        Choice(xla="loop", strategy="parameter_server"),
    "runtime.xla=loop and step compile the complete step": Choice(xla="step", string_features=True),
    "Synchronized batch normalization and": Choice(shards=4, strategy="parameter_server"),
    "train.on_non_finite=skip and": Choice(on_non_finite="rollback", strategy="parameter_server"),
    "train.on_non_finite=skip applies the update": Choice(on_non_finite="skip", strategy="tpu"),
    "optimizer.shard_state splits the slot": Choice(shard_state=True, strategy="central_storage"),
    "optimizer.shard_state=gradients, runtime.all_reduce.compression and":
        Choice(shard_state="gradients", compression="float16"),
    "summaries.histogram_interval writes": Choice(shard_state="gradients", histogram_interval=10),
    "build_parts and transform_gradients get": Choice(own_parts=True, shard_state="gradients"),
    "build_parts and transform_gradients change":
        Choice(own_parts=True, strategy="parameter_server"),
    "runtime.all_reduce.dtype is the": Choice(reduce_dtype="bfloat16", strategy="parameter_server"),
    "runtime.all_reduce.dtype=bfloat16 is": Choice(reduce_dtype="bfloat16", cpu_collectives=True),
    "runtime.all_reduce.compression keeps errors on each replica":
        Choice(compression="float16", strategy="central_storage"),
    "runtime.all_reduce.compression=bfloat16 is not supported by TensorFlow's all-reduce between":
        Choice(compression="bfloat16", cpu_collectives=True),
    "runtime.xla=loop and step compile complete steps": Choice(xla="step", replicas=2),
    "runtime.xla=loop and step compile the update, and optimizer.shard_state":
        Choice(xla="loop", replicas=2, shard_state=True, compiles_collectives=True),
    "runtime.xla=loop and step compile the reductions":
        Choice(xla="loop", replicas=2, reduce_dtype="bfloat16", compiles_collectives=True),
    "runtime.xla=loop and step compile the selection":
        Choice(xla="loop", replicas=8, batch=7, rows_per_replica=1, compiles_collectives=True),
    "runtime.xla=gradients compiles the": Choice(xla="gradients", sync_batch_norm=True, replicas=2),
    "optimizer.micro_batches is larger than the per-replica batch "
    "(micro_batches=5, rows_per_replica=4)": Choice(micro_batches=5, rows_per_replica=4),
    "optimizer.micro_batches splits": Choice(sync_batch_norm=True, micro_batches=2),
    "runtime.logical_shards is not a multiple of the number of replicas (shards=4, replicas=3)":
        Choice(shards=4, replicas=3),
    "The global batch size is not a multiple of runtime.logical_shards (batch=6, shards=4)":
        Choice(shards=4, batch=6),
    "runtime.logical_shards requires full batches": Choice(shards=4, full_batches=False),
    "runtime.logical_shards sums gradients": Choice(shards=4, sync_batch_norm=True),
    "runtime.logical_shards already computes": Choice(shards=4, micro_batches=2),
    "runtime.logical_shards requires the same computation": Choice(shards=4, xla="autocluster"),
    "runtime.logical_shards keeps every bit":
        Choice(shards=4, reduce_dtype="bfloat16"),
    "runtime.all_reduce.dtype=bfloat16 would": Choice(reduce_dtype="bfloat16", precision="float64"),
    "optimizer.ema_decay averages complete variables": Choice(ema_decay=0.9, shard_mib=1.0),
}  # fmt: skip


@pytest.mark.parametrize(("message", "choice"), BROKEN.items(), ids=BROKEN)
def test_check_rejects_in_one_line_with_a_fix(message, choice):
    with pytest.raises(UsageError, match=f"^{re.escape(message)}") as rejection:
        choice.check()
    line = str(rejection.value)
    assert "\n" not in line
    fix = line.rpartition(": ")[-1]
    assert fix.split()[0] in ("batch", "choose", "remove", "set", "turn") and fix.endswith(".")


def test_every_rule_has_a_choice_that_breaks_no_other_rule():
    only = [choice.broken() for choice in BROKEN.values()]
    assert [rules for rules in only if len(rules) != 1] == []
    assert {rules[0] for rules in only} == {*combinations.NAMED_RULES}


def test_other_choices_of_parameter_servers_are_rejected():
    for choice in (
        Choice(sync_batch_norm=True, strategy="parameter_server"),
        Choice(on_non_finite="skip", strategy="parameter_server"),
        Choice(loss_spike=3.0, strategy="parameter_server"),
    ):
        with pytest.raises(UsageError, match="parameter servers"):
            choice.check()


def check_options(changes):
    """Applies the rules to a valid config with changed keys; no fact is known."""
    valid = {"trainer": "a:B", "data.global_batch_size": 8}
    keys.check_rules(overrides.flatten(keys.defaults()) | valid | changes)


def test_logical_shards_have_a_reduction_of_their_own():
    with pytest.raises(UsageError, match=r"^optimizer\.shard_state=gradients, "):
        Choice(shard_state="gradients", shards=4).check()
    Choice(shard_state=True, shards=4).check()


def test_defaults_and_micro_batches_of_an_unknown_per_replica_batch_are_allowed():
    check_options({})
    Choice().check()
    Choice(micro_batches=100).check()


def test_check_of_options_needs_neither_model_nor_hardware():
    default = Choice().values()
    broken = [
        {name: value for name, value in choice.values().items() if value != default[name]}
        for choice in BROKEN.values()
    ]
    options = [changes for changes in broken if all("." in name for name in changes)]
    assert len(options) == 14
    for mode in ("gradients", "autocluster"):
        options.append({"runtime.all_reduce.bucket_mib": 1.0, "runtime.xla": mode})
    for changes in [{"data.placement": "device"}, *options]:
        with pytest.raises(UsageError):
            check_options(changes)


def test_axes_are_the_values_of_the_options():
    assert set(combinations.AXES["precision"]) == set(precision.PRECISIONS)
    assert {*combinations.AXES["xla"], "auto"} == set(config.XLA_MODES)
