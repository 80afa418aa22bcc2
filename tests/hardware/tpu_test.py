"""A TPU is detected without TensorFlow, and its strategy is built."""

import importlib.metadata
import socket
import types
from unittest import mock

import pytest
import tensorflow as tf

import ctl
from ctl.errors import UsageError
from ctl.hardware import selection, tpu
from ctl.hardware.strategies import StrategyOptions

needs_tpu = pytest.mark.skipif(
    bool(tpu.find_obstacle()), reason="needs a TPU and TensorFlow for it"
)
V5E, NETWORK_CARD = "0x0063", "0x0042"


@pytest.fixture
def bus(tmp_path, monkeypatch):
    """Creates the files of a PCI bus with Google's devices of these ids, and an Intel one."""

    monkeypatch.setattr(tpu, "_PCI_DEVICES", tmp_path / "bus")

    def build(*devices):
        for i, (vendor, device) in enumerate([("0x8086", V5E), *(("0x1ae0", d) for d in devices)]):
            folder = tmp_path / f"bus/0000:00:0{i}.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "device").write_text(f"{device}\n")

    return build


@pytest.fixture
def install(monkeypatch):
    """Pretends that packages are installed, in these versions."""
    real = importlib.metadata.version

    def install(versions):
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: versions.get(name) or real(f"no-{name}")
        )

    return install


GOOD = {"tensorflow-tpu": "2.20.0", "libtpu": "0.0.21.1"}


@pytest.mark.parametrize(
    ("devices", "chips"),
    [([], []), ([V5E] * 4, ["v5e"] * 4), (["0x006f", NETWORK_CARD], ["v6e"]), ([NETWORK_CARD], [])],
)
def test_chips_are_googles_tpus_on_the_bus(bus, devices, chips):
    assert tpu.list_chips() == []  # a machine without a bus
    bus(*devices)
    assert tpu.list_chips() == chips


@pytest.mark.parametrize(
    ("versions", "devices", "address", "obstacle"),
    [
        (GOOD, [V5E], "", None),
        (GOOD, [], "", "this machine has no TPU chip"),
        (GOOD, [], "pod", None),
        ({}, [], "pod", "tensorflow-tpu is not installed (it is part of ctl's extra `tpu`)"),
        ({"tensorflow-tpu": "2.20.0"}, [V5E], "", "libtpu is not installed"),
        ({**GOOD, "libtpu": "0.0.30"}, [V5E], "", None),
        ({**GOOD, "libtpu": "0.0.100"}, [V5E], "pod", "libtpu is 0.0.100, but TensorFlow aborts"),
    ],
)
def test_obstacle_to_using_a_tpu(install, bus, versions, devices, address, obstacle):
    install(versions)
    bus(*devices)
    found = tpu.find_obstacle(address)
    assert found.startswith(obstacle) if obstacle else found is None


def test_message_names_the_obstacle_and_the_alternatives(install):
    install(GOOD)
    tpu.check(StrategyOptions(tpu="pod"))
    install({})
    alternatives = r"strategy=auto and no runtime\.tpu.* --mode=aot_compile"
    with pytest.raises(UsageError, match=f"tensorflow-tpu is not installed.*{alternatives}"):
        tpu.check(StrategyOptions(tpu="pod"))


@pytest.mark.parametrize(
    ("chips", "before", "after"),
    [
        ([], {}, {"TPU_SKIP_MDS_QUERY": "1"}),
        ([], {"TPU_SKIP_MDS_QUERY": "0"}, {"TPU_SKIP_MDS_QUERY": "0"}),
        ([V5E], {}, {}),
    ],
)
def test_metadata_server_is_queried_only_on_a_machine_with_a_chip(
    bus, monkeypatch, chips, before, after
):
    bus(*chips)
    tpu.skip_metadata_server(before)
    assert before == after


@pytest.fixture
def calls(monkeypatch):
    """The calls of TensorFlow's TPU functions, which are replaced; the TPU has four cores."""
    calls = []

    def resolve(**arguments):
        calls.append(arguments)
        return types.SimpleNamespace(master=lambda: "" if arguments["tpu"] == "local" else "grpc")

    resolver = types.SimpleNamespace(TPUClusterResolver=resolve)
    monkeypatch.setattr(tf.distribute, "cluster_resolver", resolver)
    connect, initialize = (lambda _: calls.append("connect"), lambda _: calls.append("initialize"))
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", connect)
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", initialize)
    monkeypatch.setattr(tf.distribute, "TPUStrategy", Strategy)
    monkeypatch.setattr(tpu, "find_obstacle", lambda address="": None)
    return calls


class Strategy:
    """A TPUStrategy of four cores."""

    num_replicas_in_sync = 4
    extended = types.SimpleNamespace(num_hosts=1)

    def __init__(self, resolver):
        self.cluster_resolver = resolver


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("", ("local", None, None)),
        ("pod", ("pod", None, None)),
        ("projects/mine/locations/eu-a/nodes/pod", ("pod", "eu-a", "mine")),
    ],
)
def test_build_connects_to_the_tpu_and_then_initializes_it(calls, bus, name, place):
    bus(*[V5E] * 4)
    strategy = tpu.build([], StrategyOptions(tpu=name))
    assert isinstance(strategy, Strategy)
    arguments = dict(zip(("tpu", "zone", "project"), place, strict=True))
    assert calls == [arguments, "connect", "initialize"]
    topology = "4 cores, 1 host" if name else "v5e, 4 cores, 1 host"
    assert tpu.describe_topology(strategy) == topology


def test_address_must_be_reachable_before_tensorflow_waits_for_it(calls):
    for port in ("1", "99999"):
        line = rf"The TPU grpc://127\.0\.0\.1:{port} is not reachable \("
        with pytest.raises(UsageError, match=line):
            tpu.build([], StrategyOptions(tpu=f"grpc://127.0.0.1:{port}"))
    assert calls == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"grpc://127.0.0.1:{server.getsockname()[1]}"
        tpu.build([], StrategyOptions(tpu=address))
    assert calls[0]["tpu"] == address


@pytest.mark.usefixtures("calls")
def test_tensorflows_error_is_reported_in_one_line(monkeypatch):
    error = tf.errors.NotFoundError(None, None, "No TPU devices\nfound. Registered: x")
    monkeypatch.setattr(tf.distribute, "TPUStrategy", mock.Mock(side_effect=error))
    with pytest.raises(UsageError, match=r"\(NotFoundError: No TPU devices found\)\. .*=auto\.$"):
        tpu.build([], StrategyOptions())


@pytest.mark.skipif(not tpu.find_obstacle(), reason="is about a machine without a TPU")
def test_tensorflow_itself_rejects_a_tpu_that_does_not_exist():
    with pytest.raises(UsageError, match=r"initialized .*NotFoundError"):
        tpu.build([], StrategyOptions())


@pytest.mark.parametrize(
    ("runtime", "uses_tpu"),
    [(dict(tpu="pod"), True), (dict(strategy="tpu"), True), ({}, False)],
)
@pytest.mark.usefixtures("calls")
def test_a_config_uses_a_tpu_by_its_strategy_or_by_any_tpu_key(monkeypatch, runtime, uses_tpu):
    if not uses_tpu:
        monkeypatch.setattr(tpu, "find_obstacle", lambda address="": "there is none")
    config = ctl.config(runtime=runtime)
    options = StrategyOptions.from_config(config.runtime, {})
    hardware = selection.build(config.runtime.strategy, options)
    assert (hardware.name == "tpu", isinstance(hardware.strategy, Strategy)) == (uses_tpu, uses_tpu)


@needs_tpu
@pytest.mark.tpu
def test_a_real_tpu_adds_on_every_core():
    strategy = tpu.build([], StrategyOptions())
    total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)
    assert float(total) == strategy.num_replicas_in_sync
    assert tpu.describe_topology(strategy).endswith("host")
