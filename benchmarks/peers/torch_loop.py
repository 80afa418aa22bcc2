"""The models in PyTorch.

python -m benchmarks.peers.torch_loop eager|compiled TASK
"""

import itertools

import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.task import run


class Mnist(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dense1, self.dense2 = nn.Linear(1600, 128), nn.Linear(128, 10)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = x.permute(0, 2, 3, 1).flatten(1)  # the order of the weights of Keras
        return self.dense2(self.dropout(functional.relu(self.dense1(x))))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.norm2(x))))


class CharLm(nn.Module):
    def __init__(self, dropout, *, layers=4, heads=4, width=128, context=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


class Convolution(nn.Module):
    def __init__(self, channels, features, size, stride):
        super().__init__()
        self.conv = nn.Conv2d(channels, features, size, stride, padding=size // 2, bias=False)
        self.norm = nn.BatchNorm2d(features)

    def forward(self, x):
        return self.norm(self.conv(x))


class ResidualBlock(nn.Module):
    def __init__(self, channels, features, stride):
        super().__init__()
        self.first = Convolution(channels, features, 3, stride)
        self.second = Convolution(features, features, 3, 1)
        self.shortcut = Convolution(channels, features, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return functional.relu(self.shortcut(x) + self.second(functional.relu(self.first(x))))


class ResNet18(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.stem = Convolution(3, 64, 3, 1)
        sizes = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        self.blocks = nn.ModuleList(
            ResidualBlock(channels, features, 1 if channels == features else 2)
            for channels, features in itertools.pairwise(sizes)
        )
        self.output = nn.Linear(512, 10)

    def forward(self, x):
        x = functional.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.output(x.mean((2, 3)))


class TwoTower(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.users = nn.Embedding(1_000_000, 16, sparse=True)
        self.items = nn.Embedding(1_000_000, 16, sparse=True)

    def forward(self, user, item):
        return self.users(user), self.items(item)


MODELS = {"mnist": Mnist, "char_lm": CharLm, "resnet18": ResNet18, "two_tower": TwoTower}


def optimizer(name, model):
    parameters = dict(model.named_parameters())
    if name == "mnist":
        return torch.optim.Adam(parameters.values(), lr=1e-3, eps=1e-7, fused=True)
    if name == "resnet18":
        return torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9, fused=True)
    if name == "two_tower":
        return torch.optim.Adagrad(
            parameters.values(), lr=0.2, initial_accumulator_value=1e-6, eps=1e-10
        )
    groups = [
        {"params": [p for p in parameters.values() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), eps=1e-7, fused=True)


def load_weights(task):
    """Returns the initial weights by the names of PyTorch."""
    result, weights = {}, {k: torch.from_numpy(v) for k, v in task.weights.items()}
    for name, value in weights.items():
        if "attention" in name:
            continue  # below
        layer, *_, leaf = name.split("/")
        layer = layer.replace("block", "blocks.").replace("_", ".")
        if leaf == "kernel":
            value = value.permute(3, 2, 0, 1) if value.ndim == 4 else value.T
        leaf = "bias" if leaf in ("bias", "beta") else "weight"
        result[f"{layer}.{leaf}"] = value
    for i in range(4 if task.name == "char_lm" else 0):
        attention = f"block{i}_attention"
        for leaf, shape in (("kernel", (128, 128)), ("bias", (1, 128))):
            parts = [weights[f"{attention}/{x}/{leaf}"] for x in ("query", "key", "value")]
            torch_leaf = "weight" if leaf == "kernel" else "bias"
            result[f"blocks.{i}.qkv.{torch_leaf}"] = torch.cat(
                [p.reshape(shape).T for p in parts]
            ).squeeze(1)
            out = weights[f"{attention}/attention_output/{leaf}"]
            result[f"blocks.{i}.out.{torch_leaf}"] = out.reshape(shape).T.squeeze(1)
    return result


def pair_losses(user, item, ids):
    same = (ids[:, None] == ids[None, :]).to(user.dtype)
    positive = (user * item).sum(1, keepdim=True)
    every = torch.cat([positive, user @ item.T - 1e9 * same], 1)
    return (torch.logsumexp(every, 1) - positive[:, 0]).mean()


def make_loss_fn(task, model, *, compiled):
    """Returns a function batch -> (loss, accuracy)."""
    convert = torch.compile if compiled else lambda function: function
    if task.name == "two_tower":
        losses = convert(pair_losses)  # the compiler has no sparse gradients

        def of_pairs(batch):
            return losses(*model(batch["user"], batch["item"]), batch["item"]), torch.zeros([])

        return of_pairs

    @convert
    def of_classes(batch):
        logits = model(batch["x"]).flatten(0, -2)
        label = batch["label"].flatten()
        accuracy = (logits.detach().argmax(1) == label).float().mean()
        return functional.cross_entropy(logits, label), accuracy

    return of_classes


def load_examples(task):
    arrays = {name: torch.from_numpy(array) for name, array in task.floats().items()}
    if "label" in arrays:
        arrays["label"] = arrays["label"].long()
    if task.name == "mnist":
        arrays["x"] = arrays["x"][:, None]
    if task.name == "resnet18":
        arrays["x"] = arrays["x"].permute(0, 3, 1, 2)
    return arrays


def train(task, tick, way):
    model = MODELS[task.name](task.dropout)
    changed = model.load_state_dict(load_weights(task), strict=False)
    unknown = [k for k in changed.missing_keys if not k.endswith(("mean", "var", "tracked"))]
    if unknown or changed.unexpected_keys:
        raise ValueError(f"{unknown} and {changed.unexpected_keys} differ.")
    if task.name in ("mnist", "resnet18"):
        model = model.to(memory_format=torch.channels_last)
    optimize = optimizer(task.name, model)
    loss_fn = make_loss_fn(task, model, compiled=way == "compiled")
    examples = load_examples(task)
    count = len(next(iter(examples.values())))
    total, correct, done = torch.zeros([]), torch.zeros([]), 0

    def read_loss():
        nonlocal done
        loss = total.item() / done
        total.zero_()
        done = 0
        return loss

    tick.sync = read_loss
    while True:
        order = torch.arange(count) if task.check else torch.randperm(count)
        for rows in order.split(task.batch):
            batch = {name: array[rows] for name, array in examples.items()}
            if task.name in ("mnist", "resnet18"):
                batch["x"] = batch["x"].contiguous(memory_format=torch.channels_last)
            loss, accuracy = loss_fn(batch)
            optimize.zero_grad()
            loss.backward()
            if task.name == "char_lm":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimize.step()
            total += loss.detach()
            correct += accuracy
            done += 1
            if done % task.steps_per_loop == 0:
                tick(task.steps_per_loop)


if __name__ == "__main__":
    run(train)
