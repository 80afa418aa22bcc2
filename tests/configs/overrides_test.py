"""The config: which keys there are, and how they are changed. What it refuses: mistakes_test.py."""

from ml_collections import config_dict
import pytest

import ctl
from ctl.configs import defaults, overrides, validation
from ctl.errors import UsageError

KEYS = overrides.flat(defaults.defaults())


def test_config_is_the_defaults_and_what_the_experiment_changes():
    config = ctl.config(
        trainer="net.py:Net", train=dict(steps=5), optimizer=dict(clip=dict(norm=1.0))
    )
    changed = {"trainer": "net.py:Net", "train.steps": 5, "optimizer.clip.norm": 1.0}
    assert overrides.flat(config) == KEYS | changed


def test_config_is_locked_in_every_section():
    config = ctl.config(model=dict(head=dict(units=5)))
    sections = [config, config.train, config.optimizer.clip, config.model, config.model.head]
    assert [section.is_locked for section in sections] == [True] * 5
    with pytest.raises(AttributeError, match="stps"):
        config.train.stps = 5


def test_config_values_can_be_changed():
    config = ctl.config()
    config.train.steps = 5
    assert config.train.steps == 5


def test_configs_share_nothing():
    ctl.config().train.steps = 5
    assert ctl.config().train.steps == KEYS["train.steps"]


def test_model_takes_any_keys_and_sections():
    config = ctl.config(model=dict(units=5, head=dict(rate=0.5), sizes=[1, 2]))
    assert config.model.to_dict() == {"units": 5, "head": {"rate": 0.5}, "sizes": [1, 2]}


def test_section_may_be_a_config_dict():
    config = ctl.config(train=config_dict.ConfigDict({"steps": 5}), model=None)
    assert config.train.steps == 5


@pytest.mark.parametrize("model", [[], 0, "", False])
def test_model_is_a_section_though_it_be_empty(model):
    with pytest.raises(UsageError, match=r"model is .*, want a section: model=dict\(\.\.\.\)"):
        ctl.config(model=model)


@pytest.mark.parametrize("text", ["(" * 3000, "[" * 99_999, "-" * 9999 + "1", "{[]: 1}"])
def test_text_that_python_cannot_read_is_no_tuple(text):
    with pytest.raises(UsageError, match=r"runtime\.devices is .*, want a list"):
        overrides.change(defaults.defaults(), "runtime.devices", text)


def test_whole_number_will_do_for_a_number():
    rate = ctl.config(optimizer=dict(learning_rate=1)).optimizer.learning_rate
    assert (rate, type(rate)) == (1.0, float)


def test_numpy_number_becomes_a_plain_one():
    numpy = pytest.importorskip("numpy")
    rate = ctl.config(optimizer=dict(learning_rate=numpy.float64(0.5))).optimizer.learning_rate
    assert (rate, type(rate)) == (0.5, float)


def test_section_key_that_is_no_string_is_told():
    with pytest.raises(UsageError, match=r"There is no config key train\.5"):
        ctl.config(train={5: 1})


@pytest.mark.parametrize("name", defaults.HARMLESS)
def test_harmless_key_exists(name):
    assert name in KEYS or (name.endswith(".") and any(key.startswith(name) for key in KEYS))


# Keys that any text is right for.
FREE = {"data.dir", "init.checkpoint"}
# Keys that true and false are right for.
SWITCHES = {
    "runtime.deterministic",
    "runtime.gpu.memory_growth",
    "data.tfrecord.cache",
    "optimizer.nesterov",
    "train.norms",
}
RIGHT = ctl.config(trainer="net.py:Net", data=dict(global_batch_size=4))


def refused(name, value):
    """Whether a config that is right but for one value is refused."""
    config = RIGHT.copy_and_resolve_references()
    *path, last = name.split(".")
    section = config
    for part in path:
        section = section[part]
    section[last] = value
    try:
        validation.check_config(config)
    except UsageError as error:
        return name in str(error) or name.rpartition(".")[-1] in str(error)
    return False


def test_the_config_that_these_tests_start_from_is_right():
    validation.check_config(RIGHT)


@pytest.mark.parametrize("name", KEYS)
def test_every_key_has_values_that_are_refused(name):
    wrong = {
        bool: ["true"],
        str: [5] if name in FREE else ["?"],
        int: [-2, 2**33],
        float: [-1.0, float("nan"), float("inf")],
        list: [["CPU"], ["GPU:0", "GPU:0"], ["GPU:0", "CPU:0"], [5]],
    }[type(KEYS[name])]
    if name in SWITCHES or name in FREE:  # the config's own types do that
        with pytest.raises(TypeError):
            refused(name, wrong[0])
    else:
        assert [refused(name, value) for value in wrong] == [True] * len(wrong)


def test_free_keys_and_switches_are_what_they_are_said_to_be():
    assert {name for name in KEYS if type(KEYS[name]) is bool} == SWITCHES
    assert {name for name in KEYS if not KEYS[name] and type(KEYS[name]) is str} == FREE | {
        "trainer",
        "runtime.all_reduce.dtype",
        "runtime.tpu.name",
        "runtime.tpu.zone",
        "runtime.tpu.project",
        "runtime.tpu.address",
    }


def test_flat_names_every_value_by_its_path():
    config = {"seed": 1, "train": {"steps": 5}, "model": {"head": {"units": (2, 3)}, "no": {}}}
    flat = {"seed": 1, "train.steps": 5, "model.head.units": (2, 3)}
    assert overrides.flat(config) == flat
    assert overrides.flat(config_dict.ConfigDict(config)) == flat


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seed", "7", 7),
        ("data.prefetch", "-1", -1),
        ("train.steps", "1_000", 1000),
        ("optimizer.learning_rate", "1", 1.0),
        ("optimizer.learning_rate", "1e-4", 1e-4),
        ("optimizer.clip.norm", "0.5", 0.5),
        ("data.dir", "a=b, c", "a=b, c"),
        ("data.dir", "", ""),
        ("data.dir", "5", "5"),
        ("runtime.deterministic", None, True),
        ("runtime.deterministic", "True", True),
        ("runtime.deterministic", "1", True),
        ("runtime.deterministic", "false", False),
        ("runtime.deterministic", "0", False),
        ("model.units", "7", 7),
        ("model.head.rate", "1", 1.0),
        ("model.sizes", "[3, 4, 5]", [3, 4, 5]),
        ("model.shape", "(3,)", (3,)),
        ("model.shape", "[3]", (3,)),
        ("model.nothing", "relu", "relu"),
        ("model.nothing", "[1]", [1]),
    ],
)
def test_change_reads_a_text_by_the_type_of_the_key(name, text, value):
    head = dict(rate=0.5)
    model = dict(units=5, head=head, sizes=[1, 2], shape=(1, 2), nothing=None)
    config = ctl.config(model=model)
    before = overrides.flat(config)
    overrides.change(config, name, text)
    assert overrides.flat(config) == before | {name: value}
    assert type(overrides.flat(config)[name]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("model.sizes", "3", r"model\.sizes is '3', want a list, such as \[1, 2\]\."),
        ("model.shape", "x", r"model\.shape is 'x', want a tuple, such as \(1, 2\)\."),
        ("model.head", "5", r"model\.head is a section: change a key of it, "
                            r"--config\.model\.head\.rate=VALUE\."),
        ("model.head.rat", "5", r"There is no config key model\.head\.rat: did you mean "
                                r"model\.head\.rate\?"),
        ("model.other", "5", r"There is no config key model\.other: there are model\.head, "),
        ("model.head.rate.x", "5", r"model\.head\.rate is a value, not a section"),
    ],
)  # fmt: skip
def test_change_refuses(name, text, line):
    config = ctl.config(model=dict(head=dict(rate=0.5), sizes=[1, 2], shape=(1, 2)))
    with pytest.raises(UsageError, match=line):
        overrides.change(config, name, text)


def test_explain_leaves_other_errors_alone():
    others = [
        KeyError("x"),
        TypeError("x"),
        AttributeError("'x' has no y"),
        ValueError(),
        OSError(),
    ]
    assert [overrides.explain(error) for error in others] == [None] * 5
