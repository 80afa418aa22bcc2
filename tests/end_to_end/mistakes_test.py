"""Every mistake of the user is reported in one line with exit code 2, and nothing is written.

The tables spell out the complete lines, which are the specification of the messages.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
import tempfile
import time

import pytest

from ctl import main
from tests.support import child, experiments
from tests.support.experiments import CONFIG, TRAINER

PHRASES = {
    "SECTIONS": (
        "actions, data, eval, init, loss_weights, model, optimizer, runtime, seed, summaries, train, "
        "trainer"
    ),
    "MODES": (
        "train_and_eval, train, eval, continuous_eval, export, check, profile_input, find_lr, "
        "find_batch, aot_compile, explain, devices"
    ),
    "DURATION": 'but must be an integer or a duration such as "90 epochs" or "5000000 examples".',
}


@dataclasses.dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        arguments: the command line.
        line: the line that is printed, after "ctl: ".
        files: the files in the folder, in addition to a correct exp.py and tiny.py.
    """

    arguments: str
    line: str
    files: dict[str, str] = dataclasses.field(default_factory=dict)


def mistakes(table: str, make) -> dict[str, Mistake]:
    """Reads a table whose messages are indented; `make` is given a mistake and its message."""
    cases = {}
    for mistake, message in re.findall(r"^(\S.*)\n((?:    .*\n)+)", table, re.MULTILINE):
        line = " ".join(message.split())
        cases[mistake] = make(mistake, re.sub(r"<([A-Z]+)>", lambda found: PHRASES[found[1]], line))
    return cases


def command_line(arguments: str, line: str, **files: str) -> Mistake:
    """A mistake on the command line; the config file is correct."""
    return Mistake(f"--config=exp.py {arguments}", line, files)


def in_config(arguments: str, line: str) -> Mistake:
    """A mistake in the arguments of ctl.config(...), in line 4 of bad.py."""
    return in_file(CONFIG.replace("))\n", f"), {arguments})\n"), line)


def in_body(statement: str, line: str, arguments: str = "") -> Mistake:
    """A mistake in line 5 of bad.py, which changes the result of ctl.config()."""
    body = f"    config = ctl.config({arguments})\n    {statement}\n    return config\n"
    return in_file(f"import ctl\n\ndef get_config():\n{body}", line)


def in_file(text: str, line: str) -> Mistake:
    """A mistake in a config file, bad.py."""
    return Mistake("--config=bad.py", line, {"bad.py": text})


def in_trainer(text: str, line: str) -> Mistake:
    """A mistake in the trainer's file, net.py, which should define the class Net."""
    return command_line("--config.trainer=net.py:Net", line, **{"net.py": text})


NET = TRAINER.replace("class Tiny", "class Net").partition("\ndef Function")[0]
NET = NET.replace("import ctl", "import tensorflow as tf\nimport ctl")
DATA = 'ctl.data.arrays({"x": [[1.0, 2.0, 3.0]] * 8, "label": [0, 1] * 4})'
EXAMPLES = 'tf.data.Dataset.from_tensor_slices({"x": tf.ones([8, 3]), "label": [0, 1] * 4})'
UNITS = CONFIG.replace("))\n", "), model=dict(units=5))\n")

# The arguments after --config=exp.py, and the message.
COMMAND_LINES = r"""
--config.train.stps=5
    There is no config key train.stps: did you mean train.steps?
--config.lr=5
    There is no config key lr: did you mean optimizer.learning_rate?
--config.optimizer.global_batch_size=5
    There is no config key optimizer.global_batch_size: did you mean data.global_batch_size or
    eval.global_batch_size?
--config.seed.x=1
    There is no config key seed.x: seed is a value, not a section.
--config.model.units=5
    There is no config key model.units: this experiment sets no keys there.
--config.train.steps=many
    train.steps is 'many', <DURATION>
--config.runtime.deterministic=maybe
    runtime.deterministic is 'maybe', but must be true or false.
--config.eval=5
    eval is a section: set one of its keys, --config.eval.before_training=VALUE.
--config.train.steps
    --config.train.steps has no value: write --config.train.steps=VALUE.
--noconfig.runtime.deterministic=true
    --noconfig.runtime.deterministic=true has a value: write --config.runtime.deterministic=true.
--config.init.variables=['conv*']
    init.variables has no effect without init.checkpoint: set init.checkpoint to the run that the
    variables are from, or remove init.variables.
--config.init.averages=true
    init.averages has no effect without init.checkpoint or init.models: set one of them to the run
    that the averages are from, or set init.averages=False.
--config.optimizer.learning_rate=0
    optimizer.learning_rate is 0.0, but must be greater than 0.
--config.train.best.metric=eval/accuracy
    train.best.mode is not set: choose max if higher values of eval/accuracy are better, or min if
    lower ones are.
--config.train.best.metric=eval/loss --config.train.best.mode=min --config.train.best.patience=3
    train.best.patience has no effect with eval.interval=0, which evaluates only at the end: set
    eval.interval.
--checkpoint=best
    --checkpoint has no effect with --mode=train_and_eval: remove it.
--config.optimizer.weight_decay=1e30
    optimizer.weight_decay is 1e+30 and optimizer.learning_rate is 0.001: their product, the
    fraction of each weight that an update subtracts, must be less than 1.
--config.data.per_replica_batch_size=2
    data.global_batch_size is 4 and data.per_replica_batch_size is 2: set one of them, and the other
    to 0.
--config.runtime.strategy=tpu
    No TPU can be used: tensorflow-tpu is not installed (it is part of ctl's extra `tpu`). To run
    without a TPU: --config.runtime.strategy=auto. To check whether the experiment would run on a TPU:
    --mode=aot_compile.
--config.optimizer.name=LBFGS
    optimizer.name is 'LBFGS': expected one of adam, adamw, sgd, rmsprop, adagrad, lion, adamax,
    adafactor, adadelta, ftrl, lamb, lars, package.module:function.
--config.optimizer.momentum=0.9
    optimizer.momentum is 0.9, but has no effect with optimizer.name=adam: set it to 0, or choose
    optimizer.name=sgd.
--config.optimizer.ema_decay=0.9 --config.runtime.cluster.shard_mib=1
    optimizer.ema_decay averages complete variables, which another number of parameter servers could
    not restore from shards: set runtime.cluster.shard_mib=0, or optimizer.ema_decay=0.
--config.optimizer.shard_state=true --config.optimizer.name=lamb
    optimizer.shard_state updates slices of variables, and optimizer.name=lamb requires complete
    ones: set optimizer.shard_state=false, or choose optimizer.name=adam, adamw, sgd, rmsprop,
    adagrad, lion, adamax, adadelta or ftrl.
--config.optimizer.ema_decay=1
    optimizer.ema_decay is 1.0, but must be less than 1, such as 0.999.
--config.optimizer.weight_decay_exclude=['*/bias']
    optimizer.weight_decay_exclude has no effect without optimizer.weight_decay: set it, or remove
    optimizer.weight_decay_exclude.
--config.runtime.strategy=one_device --config.runtime.logical_devices=4
    runtime.logical_devices is 4, but runtime.strategy=one_device uses one device: set
    runtime.logical_devices=0, or choose runtime.strategy=mirrored.
--config.runtime.tpu=grpc://10.0.0.2
    runtime.tpu is 'grpc://10.0.0.2', but must be a name of lower-case letters, digits and hyphens,
    projects/PROJECT/locations/ZONE/nodes/NAME, or grpc://HOST:PORT.
--config.runtime.tpu=local
    runtime.tpu is local: remove it to use the TPU of this machine.
--config.runtime.tpu=pod --config.runtime.logical_devices=2
    runtime.logical_devices has no effect on a TPU: set it to 0.
--config.trainer=nowhere.tiny:Tiny
    trainer is 'nowhere.tiny:Tiny', but there is no module nowhere: correct the name, or install it.
--config.trainer=tiny.py:TinyNet
    trainer is 'tiny.py:TinyNet', but tiny.py has no class TinyNet: did you mean Tiny?
--config exp.py
    --config is given twice: name one file, and change its keys by --config.KEY=VALUE.
--mode
    --mode has no value: write --mode=MODE.
--mode=trian
    --mode is 'trian': did you mean train?
--mode=go
    --mode is 'go': expected one of <MODES>.
--wrkdir=x
    There is no flag --wrkdir: did you mean --workdir?
--learning_rate=5
    There is no flag --learning_rate: did you mean --config.optimizer.learning_rate?
eval --mode=check
    Two modes are given: remove 'eval'.
reprot runs/a
    'reprot' is no mode, no command and no config file, which ends in .py: did you mean report?
--fresh report
    The command report must be the first argument: ctl report ...
train.steps=5
    'train.steps=5' is not a flag: write --config.train.steps=5.
please
    'please' is no mode, no command and no config file, which ends in .py: see ctl --help.
tinny
    'tinny' is no mode, no command and no config file, which ends in .py: did you mean tiny.py?
strategy=ddp
    'strategy=ddp' is not a flag: did you mean --config.runtime.strategy=ddp?
--epochs=3
    There is no flag --epochs: did you mean --config.train.steps="3 epochs"?
--config.epochs=3
    There is no config key epochs: did you mean train.steps in epochs, such as "90 epochs"?
export
    runs/exp holds no run: train first, or name its --workdir.
--fresh=maybe
    --fresh is 'maybe', but must be true or false.
--nofresh=3
    The command line cannot be read: --nofresh=3 does not take an argument
--flagfile=none
    The command line cannot be read: Unable to open flagfile: [Errno 2] No such file or directory:
    'none'
--mode=eval --fresh
    --fresh has no effect with --mode=eval: remove it.
"""

# Complete command lines.
WITHOUT_CONFIG = r"""
--mode=eval
    No experiment is named: add its file, such as experiments/mnist.py; see --help.
--config --mode=eval
    --config has no value: write --config=FILE.
--config=exp
    There is no config file exp: did you mean exp.py?
--config=exp.py:big
    get_config() of exp.py takes no argument: remove :big.
"""

# Arguments of ctl.config(...) in bad.py.
CALLS = r"""
train=dict(steps=True)
    bad.py:4: train.steps is True, but must be an integer.
optimizer=dict(learning_rate='1e-3')
    bad.py:4: optimizer.learning_rate is '1e-3', but must be a number.
runtime=dict(deterministic=1)
    bad.py:4: runtime.deterministic is 1, but must be true or false.
train=5
    bad.py:4: train is 5, but must be a section: train=dict(...).
train=dict(steps=dict(a=1))
    bad.py:4: train.steps is a section, but must be an integer.
model=dict(layers=[dict(activation=print)])
    model.layers[0].activation is the function print, but the workdir can store only numbers, strings,
    booleans, None, and lists and sections of these.
actions=['early_stoping']
    actions[0] is 'early_stoping', but must be path/to/file.py:Class or package.module:Class.
"""

# Statements after config = ctl.config() in bad.py.
STATEMENTS = r"""
config.train.stps = 5
    bad.py:5: There is no config key train.stps: did you mean train.steps?
config.unlock().foo = 5
    There is no config key foo: expected one of <SECTIONS>.
config.train = dict(steps=5)
    The config has no train.best.keep: let get_config start from ctl.config(...), which sets every
    key, and change its keys one by one.
config.train = 5
    bad.py:5: train is 5, but must be a section.
from ml_collections import config_dict as d; config.unlock().model.x = d.required_placeholder(int)
    get_config() of bad.py returned a required_placeholder: replace it by a value.
"""

OTHERS = {
    "model key that is misspelled": command_line(
        "--config.model.unit=5",
        "There is no config key model.unit: did you mean model.units?",
        **{"exp.py": UNITS},
    ),
    "unknown key in a module of the folder": Mistake(
        "--config=sub/bad.py",
        "sub/base.py:2: There is no config key stps: did you mean train.steps?",
        {
            "sub/base.py": "import ctl\nconfig = ctl.config(stps=5)\n",
            "sub/bad.py": "def get_config():\n    import base\n    return base.config\n",
        },
    ),
    "new key of a model section set": in_body(
        "config.model.head.size = 5",
        "bad.py:5: There is no config key model.head.size: the config is locked, so add the key in "
        "ctl.config(model=dict(head=dict(size=...))).",
        "model=dict(head=dict(units=3))",
    ),
    "early stopping by time": command_line(
        "--config.eval.interval=5minutes --config.train.best.metric=eval/loss "
        "--config.train.best.mode=min --config.train.best.patience=3",
        "train.best.patience counts evaluations, whose number must not depend on the speed of the "
        "machine: set eval.interval in steps, epochs or examples.",
    ),
    "config file that is a folder": Mistake(
        "--config=sub", "--config=sub is a folder: name a file in it.", {"sub/exp.py": CONFIG}
    ),
    "folder of a run in place of the config file": Mistake(
        "export runs/a",
        "'runs/a' is a folder: name the config file, and --workdir=runs/a.",
        {"runs/a/config.json": "{}"},
    ),
    "config file that is not Python": Mistake(
        "--config=exp.yaml",
        "--config=exp.yaml is not a Python file: a config is a .py file with a get_config().",
        {"exp.yaml": "train:\n  steps: 5\n"},
    ),
    "trainer's file missing": Mistake(
        "--config=sub/exp.py --config.trainer=tyni.py:Tiny",
        "trainer is 'tyni.py:Tiny', but there is no sub/tyni.py nor tyni.py: correct the path.",
        {"sub/exp.py": CONFIG},
    ),
    "trainer's file as a module": Mistake(
        "--config=sub/exp.py --config.trainer=net:Net",
        "trainer is 'net:Net', but there is no module net: did you mean net.py:Net?",
        {"sub/exp.py": CONFIG, "sub/net.py": ""},
    ),
    "no class in the trainer's file": in_trainer(
        "x = 1\n", "trainer is 'net.py:Net', but net.py has no class Net: it defines no classes."
    ),
    "syntax error in the trainer's file": in_trainer(
        "x = 1\ndef f(:\n", "The trainer cannot be imported: net.py:2: SyntaxError: invalid syntax"
    ),
    "workdir below a file": command_line(
        "--workdir=old/run", "--workdir=old/run: old is a file: name a folder.", old=""
    ),
    "workdir not writable, not even for root": command_line(
        "--workdir=/proc/run",
        "--workdir=/proc/run cannot be written (No such file or directory): name another folder.",
    ),
    "foreign files in the workdir, with --fresh": command_line(
        "--workdir=old --fresh",
        "old has files in it and no config.json of ctl, so it is not a run's folder: name another "
        "--workdir.",
        **{"old/photo": ""},
    ),
    "workdir of another experiment": command_line(
        "--workdir=old",
        "old holds a run of another experiment, trainer other.py:Net: name another --workdir, or "
        "move it aside with --fresh.",
        **{"old/config.json": '{"trainer": "other.py:Net"}'},
    ),
}

UNREADABLE = "The config file cannot be read: bad.py:"
# The text of bad.py -> the message.
FILES = {
    "import ctl\n\ndef get_config(:\n": f"{UNREADABLE}3: SyntaxError: invalid syntax",
    "raise SystemExit(0)\n": f"{UNREADABLE}1: SystemExit: 0",
    "get_config = 3\n": "bad.py has no get_config(): define one that returns ctl.config(...).",
    "import ctl\n\ndef get_config():\n    return ctl.config(data=dict(global_batch_size=4))\n": (
        "trainer is not set: name a class, as path/to/file.py:Class or package.module:Class."
    ),
    "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({})\n": (
        "The config has no actions: let get_config start from ctl.config(...), which sets every key, "
        "and change its keys one by one."
    ),
    "def get_config(size):\n    return size\n": (
        "get_config() of bad.py requires an argument: write --config=bad.py:VALUE."
    ),
    "def get_config():\n    raise RuntimeError('one\\ntwo')\n": (
        "get_config() fails: bad.py:2: RuntimeError: one"
    ),
    "def get_config():\n    return dict(train=dict(steps=5))\n": (
        "get_config() of bad.py returned a dict: return the result of ctl.config(...)."
    ),
}
WITHOUT_TENSORFLOW = {
    **mistakes(COMMAND_LINES, command_line),
    **mistakes(WITHOUT_CONFIG, Mistake),
    **mistakes(CALLS, in_config),
    **mistakes(STATEMENTS, in_body),
    **OTHERS,
    **{repr(text): in_file(text, line) for text, line in FILES.items()},
}


def with_data(data: str, line: str) -> Mistake:
    """A mistake in what the `build_dataset` of net.py returns, in line 10."""
    return in_trainer(NET.replace(DATA, data), line)


# Detected only after TensorFlow is imported, so they run in a separate process. Here the start of the
# line is compared: the tests of the module that reports it spell out the rest.
WITH_TENSORFLOW = {
    "trainer does not import": in_trainer(
        "import tf_keras\nimport nowhere\nclass Net: pass\n",
        "The trainer cannot be imported: net.py:2: ModuleNotFoundError: No module named 'nowhere'",
    ),
    "trainer's module has no such class": Mistake(
        "--config=exp.py --config.trainer=other.net:Ned",
        "trainer is 'other.net:Ned', but other.net has no class Ned: did you mean Net?",
        {"other/net.py": "class Net: pass\n"},
    ),
    "trainer is another class": in_trainer(
        "class Net: pass\n",
        "trainer is 'net.py:Net', which is not a subclass of ctl.StandardTrainer: derive it from "
        "ctl.StandardTrainer, or name another class.",
    ),
    "batch size changed by the number of replicas": Mistake(
        "--config=exp.py --workdir=old --config.data.global_batch_size=0 "
        "--config.data.per_replica_batch_size=5",
        "old holds a run with another config (data.global_batch_size: 4 -> 5): resume with "
        "the change by --allow_config_change, or start from scratch with --fresh or another "
        "--workdir.",
        {"old/config.json": '{"trainer": "tiny.py:Tiny", "data": {"global_batch_size": 4}}'},
    ),
    "feature called weight": with_data(
        'ctl.data.arrays({"x": [[1.0, 2.0, 3.0]] * 8, "weight": [1.0] * 8})',
        'The batch has "weight" and no "label", so "weight" may be a feature or the weight of the '
        "losses: rename it if it is a feature, or let sample_weight return ",
    ),
    "evaluation examples without a label": with_data(
        f'{EXAMPLES} if split == "train" else {EXAMPLES}.map(lambda e: {{"x": e["x"]}})',
        "The evaluation examples are not like the training examples (label is missing instead of int32 "
        "()) and cannot be evaluated: net.py:14: The batch has no 'label': expected x.",
    ),
    "constructor with an argument of its own": in_trainer(
        f"{NET}    def __init__(self, size, **arguments):\n        super().__init__(**arguments)\n",
        "net.py:Net cannot be constructed with strategy, global_batch_size, optimizer, options (missing "
        "a required argument: 'size'): let its __init__ accept **arguments only",
    ),
    "too late to split devices": command_line(
        "--config.runtime.strategy=mirrored --config.runtime.logical_devices=8",
        "runtime.logical_devices is 8, but TensorFlow has already initialized its devices with 1 "
        "CPU: create no tensor before the strategy is built, for example while the "
        "trainer's file is imported.",
    ),
}


def read_files(folder: pathlib.Path) -> dict[str, bytes | None]:
    """The content of each file in a folder, except the bytecode that Python caches."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def run_all(mistakes: dict[str, Mistake]) -> None:
    """Runs the program with one mistake after the other; `run_in_process` calls it.

    Prints the name of each mistake before the lines that it causes, and the results at the end.
    """
    results = {}
    sys.path.insert(0, "")  # the current folder, as it changes
    for number, (name, mistake) in enumerate(mistakes.items()):
        folder = pathlib.Path.cwd().parent / str(number)
        folder.mkdir()
        experiments.write(folder, {"exp.py": CONFIG, "tiny.py": TRAINER, **mistake.files})
        os.chdir(folder)
        before = read_files(folder)
        for stream in (sys.stdout, sys.stderr):
            print(f"== {name}", file=stream, flush=True)
        start = time.process_time()
        code = main.run(["ctl", *mistake.arguments.split()])
        seconds = time.process_time() - start
        unchanged = read_files(folder) == before
        results[name] = {"code": code, "unchanged": unchanged, "seconds": seconds}
    print("== results")
    print(json.dumps({"results": results, "tensorflow": "tensorflow" in sys.modules}))


@functools.cache
def run_in_process(table: str) -> tuple[dict[str, dict], bool]:
    """Runs a table of mistakes: the result of each, and whether TensorFlow was imported."""
    command, is_fresh = ["-m", "tests.end_to_end.mistakes_test", table], "WITHOUT" in table
    with tempfile.TemporaryDirectory() as folder:
        start = pathlib.Path(folder, "start")
        start.mkdir()
        process = child.run(command, cwd=start, fresh=is_fresh)
    assert process.returncode == 0, process.stderr
    out, err = (
        dict(part.split("\n", 1) for part in text.split("== ")[1:])
        for text in (process.stdout, process.stderr)
    )
    output = json.loads(out["results"])
    results = {n: {**r, "out": out[n], "err": err[n]} for n, r in output["results"].items()}
    return results, output["tensorflow"]


@pytest.mark.parametrize("name", WITHOUT_TENSORFLOW)
def test_mistake_is_reported_in_one_line(name: str) -> None:
    result = dict(run_in_process("WITHOUT_TENSORFLOW")[0][name])
    assert result.pop("seconds") < 1  # of processor time
    line = f"ctl: {WITHOUT_TENSORFLOW[name].line}\n"
    assert result == {"code": 2, "unchanged": True, "out": "", "err": line}


def test_mistake_is_reported_without_tensorflow() -> None:
    _, is_imported = run_in_process("WITHOUT_TENSORFLOW")
    assert not is_imported


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_TENSORFLOW)
def test_mistake_that_is_detected_with_tensorflow_is_reported_in_one_line(name: str) -> None:
    result = run_in_process("WITH_TENSORFLOW")[0][name]
    assert (result["code"], result["unchanged"]) == (2, True)
    assert result["err"].startswith(f"ctl: {WITH_TENSORFLOW[name].line}"), result
    assert result["err"].count("\n") == 1, result


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    tempfile.tempdir = str(pathlib.Path.cwd().parent)  # for the files of tracebacks
    run_all(globals()[sys.argv[1]])
