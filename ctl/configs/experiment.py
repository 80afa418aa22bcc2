"""The config of what every experiment defines: its trainer, data and model."""

from typing import Any

from ctl.configs.component import Key, Rule
from ctl.errors import UsageError, check_local


def _check_trainer(key: str, trainer: str) -> None:
    path, _, name = trainer.rpartition(":")
    is_module = all(part.isidentifier() for part in path.split("."))
    if trainer and not (name.isidentifier() and (is_module or path.endswith(".py"))):
        raise UsageError(
            f"{key} is {trainer!r}, but must be path/to/file.py:Class or package.module:Class."
        )


# fmt: off
KEYS = (
    Key("trainer", "", validate=_check_trainer,
        text="Names the class to train, a subclass of ctl.StandardTrainer, as path/to/file.py:Class "
             "(relative to the folder of the config file, or else to the current folder) or as "
             "package.module:Class."),
    Key("seed", 0, also=("shuffle",), least=0, most=2**32 - 1, option="seed",
        text="Determines the initial weights, the order of the data and the random layers."),
    Key("data", {}, option="data",
        text="Holds what build_dataset reads as self.options.data: data.dir, and in a script any other "
             "key."),
    Key("data.dir", "",
        text="Names the folder of the dataset, which build_dataset reads as self.options.data.dir. "
             "A relative path is searched in the current folder, then in that of the config file."),
    Key("data.global_batch_size", 0, also=("batch_size",), least=0,
        text="Sets the number of examples per update, over all replicas. Set either this key or "
             "data.per_replica_batch_size."),
    Key("data.per_replica_batch_size", 0, least=0,
        text="Sets the number of examples per update on each replica, so that the batch grows with "
             "the number of replicas. Set either this key or data.global_batch_size."),
    Key("data.placement", "stream", choices=("stream", "device"), option="placement", harmless=True,
        text="With stream, the host sends every batch to the device. With device, the arrays are "
             "held in device memory and only indices are sent, which requires runtime.xla=loop."),
    Key("data.prefetch", -1, also=("num_workers",), least=-1, option="prefetch", harmless=True,
        text="Sets how many batches the input pipeline prepares ahead. With -1, tf.data chooses."),
    Key("data.cache", "",
        bound=(lambda place: place.lower() not in ("none", "off", "false", "true", "disk"),
               "memory, a folder, or '' for no cache"),
        option="cache", harmless=True, validate=check_local,
        text="Keep parsed examples, before the augmentation: in memory, or in a folder, which "
             'several runs may share. With "", they are parsed again in each epoch.'),
    Key("model", {}, free=True, option="model",
        text="Holds the experiment's own keys, which build_model reads as self.options.model."),
)
# fmt: on


def _sizes(values: Any) -> tuple[int, int]:
    return values["data.global_batch_size"], values["data.per_replica_batch_size"]


# fmt: off
RULES = (
    Rule(lambda v: not v["trainer"],
         "trainer is not set",
         "name a class, as path/to/file.py:Class or package.module:Class"),
    Rule(lambda v: all(_sizes(v)),
         "data.global_batch_size is {data.global_batch_size} and data.per_replica_batch_size is "
         "{data.per_replica_batch_size}",
         "set one of them, and the other to 0"),
    Rule(lambda v: not any(_sizes(v)),
         "Neither data.global_batch_size nor data.per_replica_batch_size is set",
         "set one of them"),
)
# fmt: on
