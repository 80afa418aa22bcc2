"""A model starts from the weights in files that other libraries have written."""

import contextlib
import functools
import http.server
import io
import threading
import zipfile

import h5py
import keras
import numpy as np
import pytest
from safetensors.numpy import save_file
import tensorflow as tf
import tf_keras

import ctl
from ctl import testing
from ctl.loop.bucket.store import FileSystem, open_folder
from ctl.loop.checkpoints import warm_start
from tests.loop.shared import init

TORCH = {
    "*/kernel": "*.weight",
    "*/depthwise_kernel": "*.weight",
    "*/bias": "*.bias",
    "norm/gamma": "bn.weight",
    "norm/beta": "bn.bias",
    "norm/moving_mean": "bn.running_mean",
    "norm/moving_variance": "bn.running_var",
}
IMAGES = np.random.default_rng(1).normal(size=(4, 5, 5, 2)).astype(np.float32)


def build(library):
    layers = library.layers
    stem = [library.Input([5, 5, 2]), layers.Conv2D(3, 3, name="stem")]
    hidden = [layers.DepthwiseConv2D(2, name="deep"), layers.BatchNormalization(name="norm")]
    head = [layers.GlobalAveragePooling2D(), layers.Dense(4, name="head")]
    return library.Sequential([*stem, *hidden, *head], name="net")


class Fine(ctl.StandardTrainer):
    def build_model(self):
        tf_keras.backend.reset_uids()
        return build(tf_keras)

    def build_dataset(self, split, input_context):
        return ctl.data.arrays({"image": IMAGES, "label": np.zeros(4, np.int64)})

    def per_example_loss(self, batch, outputs):
        return tf.reduce_sum(outputs, axis=-1)


@pytest.fixture(scope="module")
def trainer():
    options = dict(global_batch_size=4, optimizer=tf_keras.optimizers.SGD)
    return Fine(strategy=testing.make_strategy(2), **options)


def random_values(model):
    random = np.random.default_rng(0)
    return [random.uniform(0.5, 1.5, size=w.shape).astype(np.float32) for w in model.weights]


def as_torch(model):
    """The weights as the state of a module of PyTorch has them: [outputs, inputs, height, width]."""
    order = {"stem/kernel": (3, 2, 0, 1), "deep/depthwise_kernel": (2, 3, 0, 1)}
    order["head/kernel"] = (1, 0)
    norm = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean"}
    state = {}
    for variable in model.weights:
        name, value = variable.name.removesuffix(":0"), variable.numpy()
        layer, _, part = name.partition("/")
        if layer == "norm":
            layer, part = "bn", norm.get(part, "running_var")
        elif part != "bias":
            part = "weight"
        value = value.transpose(order[name]) if name in order else value
        state[f"{layer}.{part}"] = np.ascontiguousarray(value)
    return state


WRITERS = {
    "k.keras": lambda model, path: model.save(path),
    "k.weights.h5": lambda model, path: model.save_weights(path),
    "k.h5": lambda model, path: model.save(path),
    "t.h5": lambda model, path: model.save_weights(path),
    "w.npz": lambda model, path: np.savez(path, **{w.name[:-2]: w.numpy() for w in model.weights}),
    "w.safetensors": lambda model, path: save_file(as_torch(model), path),
}
SETTINGS = {
    "k.h5": dict(names={"*/depthwise_kernel": "net/*/kernel"}),  # Keras 3 has another name for it
    "w.safetensors": dict(names=TORCH, layout="torch"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_replica_starts_from_the_file_of_another_library(name, trainer, tmp_path):
    model = build(keras if name.startswith("k.") else tf_keras)
    model.set_weights(random_values(model))
    path, expected = tmp_path / name, model(IMAGES).numpy()
    WRITERS[name](model, path)
    trainer.model.set_weights([np.zeros(w.shape) for w in trainer.model.weights])
    (loaded,) = warm_start.all_load(trainer, init(path, **SETTINGS.get(name, {})))
    assert len(loaded.names) == loaded.total == 10
    np.testing.assert_allclose(trainer.model(IMAGES), expected, atol=1e-5)
    for variable in trainer.model.variables:
        copies = testing.copies(trainer.strategy, variable)
        assert all(np.array_equal(copies[0], copy) for copy in copies) and copies[0].any()


def test_other_classes_are_left_out_and_the_listing_shows_what_does_not_match(trainer, tmp_path):
    state = as_torch(trainer.model) | {"head.weight": np.ones((7, 3), np.float16)}
    del state["stem.bias"]
    save_file(state | {"other": np.ones(1)}, tmp_path / "w.safetensors")
    settings = SETTINGS["w.safetensors"]
    lines = warm_start.describe(trainer, init(tmp_path / "w.safetensors", **settings))
    assert "deep/depthwise_kernel [2, 2, 3, 1] <- deep.weight" in lines
    assert "head/kernel [3, 4] <- head.weight [3, 7], another shape" in lines
    assert "stem/bias [3] <- missing" in lines and "not used: other" in lines
    message = r"\(no stem/bias; head/kernel is .*; it also has other\): map names by init.names"
    with pytest.raises(ctl.UsageError, match=message):
        warm_start.check(trainer, init(tmp_path / "w.safetensors", **settings))
    left = init(tmp_path / "w.safetensors", "!head/*", "!stem/bias", **settings)
    kept = trainer.model.get_layer("head").kernel.numpy()
    (loaded,) = warm_start.all_load(trainer, left)
    assert len(loaded.names) == 7 and "head/kernel" not in loaded.names
    assert np.array_equal(trainer.model.get_layer("head").kernel.numpy(), kept)
    assert "not loaded (init.variables)" in " ".join(warm_start.describe(trainer, left))


@contextlib.contextmanager
def serve(folder):
    """A web server that does not list folders; yields its URL."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def list_directory(self, path):
            self.send_error(404)

        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://localhost:{server.server_port}"
        finally:
            server.shutdown()


@contextlib.contextmanager
def upload(folder):
    """An object store with the files of the folder; yields its URL."""
    for path in folder.iterdir():
        open_folder("memory://weights").upload(path, path.name)
    yield "memory://weights"


@pytest.mark.parametrize(
    "place",
    [upload, pytest.param(serve, marks=pytest.mark.slow)],  # aiohttp is in the group `stores`
)
def test_a_file_may_be_a_url(trainer, tmp_path, monkeypatch, place):
    if place is serve:
        pytest.importorskip("aiohttp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "www").mkdir()
    np.savez(tmp_path / "www/w.npz", **{"head/bias": np.full(4, 7.0)})
    with place(tmp_path / "www") as url:
        monkeypatch.setattr(FileSystem, "list", None)  # a web server does not list folders
        lines = warm_start.describe(trainer, init(f"{url}/w.npz", "head/bias"))
        assert "head/bias [4] <- head/bias, cast from float64" in lines
        (loaded,) = warm_start.all_load(trainer, init(f"{url}/w.npz", "head/bias"))
        assert loaded.names == ["head/bias"] and trainer.model.layers[-1].bias.numpy()[0] == 7
        for read in (warm_start.check, warm_start.describe):
            with pytest.raises(ctl.UsageError, match=r"b\.npz does not exist: name another file"):
                read(trainer, init(f"{url}/b.npz"))


def test_mistakes_are_one_line(trainer, tmp_path):
    np.savez(tmp_path / "w.npz", a=np.ones(1))
    for names, message in (
        ({"hed/*": "x"}, "'hed/\\*', which no variable"),
        ({"head/kernel": "*"}, "more \\*"),
    ):
        with pytest.raises(ctl.UsageError, match=message):
            warm_start.check(trainer, init(tmp_path / "w.npz", names=names))
    (tmp_path / "w.safetensors").write_bytes(b"no")
    for read in (warm_start.check, warm_start.describe):
        with pytest.raises(ctl.UsageError, match=r"w.safetensors, which cannot be read \(.*header"):
            read(trainer, init(tmp_path / "w.safetensors"))
    config = dict(trainer="a.py:A", data=dict(global_batch_size=1), init=dict(layout="torch"))
    with pytest.raises(ctl.UsageError, match="have no effect without a file of weights"):
        ctl.configs.validation.check_config(ctl.config(**config))


KERNEL = "head/head/kernel:0"  # the place in a file of Keras


def hdf5(write):
    """The content of an HDF5 file."""
    with h5py.File("memory", "w", driver="core", backing_store=False) as file:
        write(file)
        file.flush()
        return file.id.get_file_image()


HUGE = (2**46,)  # 256 TiB, more than a process can have
TOO_LARGE = rf"head/kernel is \[3, 4\], but \[{2**46}\] in the checkpoint"


def huge(file):
    file.create_dataset(KERNEL, HUGE, "f4", chunks=(2**20,))


def large_chunks(file):
    options = dict(maxshape=(None,), chunks=(2**29,), compression="gzip")
    file.create_dataset(KERNEL, (4,), "f4", **options)


def external(file):
    file.create_dataset(KERNEL, (4,), "f4", external=[("secret", 0, 16)])


def virtual(file):
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "secret", (4,))
    file.create_virtual_dataset(KERNEL, layout)


def compound(file):
    file[KERNEL] = np.zeros(4, [("a", "i4")])


def references(file):
    file.create_dataset(KERNEL, (4,), dtype=h5py.ref_dtype)[0] = file.ref


def outside(link):
    def write(file):
        file[KERNEL] = link

    return write


def archive(name, content, compression=zipfile.ZIP_STORED):
    """The content of a zip file."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", compression) as file:
        file.writestr(name, content)
    return whole.getvalue()


def header(shape):
    """The beginning of a file of NumPy, without values."""
    content = io.BytesIO()
    description = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(content, description)
    return content.getvalue()


def write_objects():
    content = io.BytesIO()
    np.savez(content, **{"head/kernel": np.array([{}], object)})
    return content.getvalue()


HOSTILE = {
    "external.h5": (hdf5(external), "head/head/kernel:0 is in another file"),
    "virtual.h5": (hdf5(virtual), "head/head/kernel:0 is in another file"),
    "external_link.h5": (hdf5(outside(h5py.ExternalLink("other.h5", "secret"))), "is a link"),
    "soft_link.h5": (hdf5(outside(h5py.SoftLink("/"))), "is a link"),
    "references.h5": (hdf5(references), "head/kernel is no array of numbers"),
    "compound.h5": (hdf5(compound), "to a TensorFlow DType"),
    "huge.h5": (hdf5(huge), TOO_LARGE),
    "chunk.h5": (hdf5(large_chunks), "head/head/kernel:0 has larger chunks than values"),
    "bomb.keras": (
        archive("model.weights.h5", bytes(2**20), zipfile.ZIP_DEFLATED),
        "are 1048576 b",
    ),
    "other.keras": (archive("other", b""), "no item named 'model.weights.h5'"),
    "huge.npz": (archive("head/kernel.npy", header(HUGE)), TOO_LARGE),
    "short.npz": (archive("head/kernel.npy", header((3, 4))), "cannot be read"),
    "objects.npz": (write_objects(), "head/kernel is no array of numbers"),
    "no_archive.npz": (header((3, 4)), "not a zip file"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_file_that_is_not_trusted_is_one_line_and_takes_no_memory(
    name, trainer, tmp_path, monkeypatch
):
    content, message = HOSTILE[name]
    monkeypatch.chdir(tmp_path)  # the other files exist
    (tmp_path / "secret").write_bytes(np.ones(4, np.float32).tobytes())
    (tmp_path / "other.h5").write_bytes(hdf5(lambda file: file.update(secret=np.ones(4))))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ctl.UsageError, match=message) as error:
        warm_start.all_load(trainer, init(tmp_path / name, "head/kernel"))
    assert "\n" not in str(error.value)


def test_weights_that_no_variable_has_are_not_read(trainer, tmp_path):
    def write(file):
        file["head/head/bias:0"] = np.full(4, 7.0)
        file.create_dataset("huge", HUGE, "f4", chunks=(2**20,))
        file["again"] = file["head"]  # visited once
        file["head/loop"] = file["/"]

    (tmp_path / "w.h5").write_bytes(hdf5(write))
    (loaded,) = warm_start.all_load(trainer, init(tmp_path / "w.h5", "head/bias"))
    assert loaded.names == ["head/bias"] and trainer.model.layers[-1].bias.numpy()[0] == 7
