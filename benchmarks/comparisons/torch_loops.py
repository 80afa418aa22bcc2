"""Lightning and Accelerate on a model with one weight, next to the exact numbers.

    uv run --no-project --with torch --with lightning --with accelerate \
        benchmarks/comparisons/torch_loops.py

The model is y = w x with w = 1 and the loss the mean of (y - w x)^2; one step of SGD with learning rate
1. Two replicas are two processes on the CPU (gloo). It imports neither ctl nor TensorFlow, and is not
part of the tests: they would have to install PyTorch.
"""

import json
import logging
import pathlib
import sys
import tempfile
import warnings

import accelerate
from accelerate import Accelerator, debug_launcher
import lightning
from lightning import LightningModule, Trainer
from lightning.pytorch import callbacks
import torch
from torch.utils.data import DataLoader, TensorDataset

X, Y = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([4.0, 7.0, 8.0])
# 2 / 3 * (1 * 3 + 1 * 6 + 2 * 6)
EXACT = 14.0
QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "accelerator": "cpu",
}  # fmt: skip


class Line(LightningModule):
    """y = w x; a batch is (x, y, weight)."""

    def __init__(self, folder: str):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones([]))
        self.folder = folder
        self.read: list[float] = []

    def training_step(self, batch, index):
        x, y, weight = batch
        self.read += x.tolist()
        return (weight * (y - self.w * x) ** 2).sum() / weight.sum()

    def validation_step(self, batch, index):
        self.log("mean", batch[0].mean(), batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)

    def on_train_end(self):
        if self.global_rank == 0:
            path = pathlib.Path(self.folder, "w.json")
            path.write_text(json.dumps(float(self.w.detach()) - 1))


def examples(x=X, y=Y, weight=None) -> TensorDataset:
    """A dataset of weighted examples."""
    return TensorDataset(x, y, torch.ones_like(x) if weight is None else weight)


def lightning_update(data, batch: int, **options) -> float:
    """The change of w in one epoch."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(max_epochs=1, **QUIET, **options)
        trainer.fit(Line(folder), DataLoader(data, batch_size=batch, shuffle=False))
        return json.loads(pathlib.Path(folder, "w.json").read_text())


def accelerate_worker(folder: str, data, batch: int, accumulation: int) -> None:
    """Trains one epoch, as in Accelerate's guides; writes the change of w."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = Line(folder)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    loader = DataLoader(data, batch_size=batch, shuffle=False)
    wrapped, optimizer, loader = accelerator.prepare(_Module(model), optimizer, loader)
    for values in loader:
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(values))
            optimizer.step()
            optimizer.zero_grad()
    if accelerator.is_main_process:
        path = pathlib.Path(folder, "w.json")
        path.write_text(json.dumps(float(model.w.detach()) - 1))


class _Module(torch.nn.Module):
    """The loss as a plain module, which DDP can wrap."""

    def __init__(self, line: Line):
        super().__init__()
        self.w, self.line = line.w, [line]

    def forward(self, batch):
        return self.line[0].training_step(batch, 0)


def accelerate_update(data, batch: int, *, processes: int = 1, accumulation: int = 1) -> float:
    """The change of w in one epoch."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, data, batch, accumulation)
        if processes == 1:
            accelerate_worker(*arguments)
        else:
            debug_launcher(accelerate_worker, args=arguments, num_processes=processes)
        return json.loads(pathlib.Path(folder, "w.json").read_text())


def resumed_order(folder: str) -> tuple[list[float], list[float]]:
    """The examples of an epoch of 8 that is resumed after 3 steps, and of an undisturbed one."""
    data = examples(torch.arange(8.0), torch.zeros(8))

    def train(model, steps, checkpoint=None):
        generator = torch.Generator().manual_seed(5)
        options = QUIET | {"enable_checkpointing": True, "default_root_dir": folder}
        trainer = Trainer(max_steps=steps, **options)
        loader = DataLoader(data, batch_size=1, shuffle=True, generator=generator)
        trainer.fit(model, loader, ckpt_path=checkpoint, weights_only=False)
        return trainer

    undisturbed = Line(folder)
    train(undisturbed, 8)
    first, second = Line(folder), Line(folder)
    path = str(pathlib.Path(folder, "stopped.ckpt"))
    train(first, 3).save_checkpoint(path)
    train(second, 8, path)
    return first.read + second.read, undisturbed.read


def evaluated_mean() -> float:
    """The mean of 1, 2, 3, 4, 100, validated by two processes; 22 by hand."""
    data = examples(torch.tensor([1.0, 2, 3, 4, 100]), torch.zeros(5))
    trainer = Trainer(devices=2, strategy="ddp_fork", **QUIET)
    return trainer.validate(Line(""), DataLoader(data, batch_size=1), verbose=False)[0]["mean"]


def best_after_nan() -> tuple[float, int]:
    """The best value that ModelCheckpoint keeps of NaN, 3, 2, and the step EarlyStopping ends at."""

    class Values(Line):
        def validation_step(self, batch, index):
            self.log("value", torch.tensor([float("nan"), 3.0, 2.0][self.current_epoch]))

    with tempfile.TemporaryDirectory() as folder:
        best = callbacks.ModelCheckpoint(folder, monitor="value", mode="min")
        stopping = callbacks.EarlyStopping("value", patience=3)
        loader = DataLoader(examples(), batch_size=3)
        options = QUIET | {"enable_checkpointing": True, "num_sanity_val_steps": 0}
        Trainer(max_epochs=3, callbacks=[best], **options).fit(Values(folder), loader, loader)
        ended = Trainer(max_epochs=3, callbacks=[stopping], **QUIET, num_sanity_val_steps=0)
        ended.fit(Values(folder), loader, loader)
        return float(best.best_model_score), ended.current_epoch


def main() -> None:
    """Prints one row per case."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}"
    print(f"{versions}, accelerate {accelerate.__version__}, Python {sys.version.split()[0]}")
    ddp = {"devices": 2, "strategy": "ddp_fork"}
    # The fourth example has weight 0. Which examples a rank reads is up to the loop.
    padded = examples(
        torch.tensor([1.0, 2.0, 1.0, 2.0]), torch.tensor([4.0, 8.0, 7.0, 8.0]),
        torch.tensor([1.0, 1.0, 1.0, 0.0]),
    )  # fmt: skip
    one, accumulated = examples(X[:1], Y[:1]), {"accumulate_grad_batches": 2}
    cases = [
        ("3 examples on 2 replicas", EXACT, examples(), 2, ddp, {"processes": 2}),
        ("weights 1, 1 and 1, 0 on 2 replicas", EXACT, padded, 2, ddp, {"processes": 2}),
        ("3 examples, accumulated 2 + 1", EXACT, examples(), 2, accumulated, {"accumulation": 2}),
        # 2 * (4 - 1): one batch is left for a window of 2.
        ("1 batch in a window of 2", 6.0, one, 1, accumulated, {"accumulation": 2}),
    ]
    for name, exact, data, batch, of_lightning, of_accelerate in cases:
        values = f"lightning {lightning_update(data, batch, **of_lightning):8.4f}   "
        values += f"accelerate {accelerate_update(data, batch, **of_accelerate):8.4f}"
        print(f"update, {name:38}exact {exact:8.4f}   {values}")
    print(
        f"mean of 1, 2, 3, 4, 100 evaluated on 2 replicas: exact 22, lightning {evaluated_mean():g}"
    )
    with tempfile.TemporaryDirectory() as folder:
        resumed, undisturbed = resumed_order(folder)
    print(f"order of an epoch, undisturbed:     lightning {[int(x) for x in undisturbed]}")
    print(f"order, resumed after 3 of 8 steps:  lightning {[int(x) for x in resumed]}")
    best, epochs = best_after_nan()
    print(
        f"values NaN, 3, 2: lightning's best {best:g}; early stopping ends after epoch {epochs} of 3"
    )


if __name__ == "__main__":
    main()
