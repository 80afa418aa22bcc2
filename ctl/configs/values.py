"""Names that the config and the code that reads them share."""

SERVERS = ("mlflow", "wandb")  # servers of logged values; their packages have the same names
# Name of a writer -> module:class in ctl.loop.writers, where a new writer is a row and a class. The
# controller makes the writer for TensorBoard.
WRITERS = {
    "tensorboard": "",
    "jsonl": "json_lines:JsonLinesWriter",
    "mlflow": "servers:MlflowWriter",
    "wandb": "servers:WandbWriter",
}
# The suffixes of files of weights that `init.checkpoint` may name.
WEIGHT_FILES = (".safetensors", ".h5", ".keras", ".npz")


def is_weight_file(path: str) -> bool:
    """Returns whether `init.checkpoint` names a file of weights, by its suffix."""
    return path.endswith(WEIGHT_FILES)
