"""ctl.data.records of URLs: blocks of neighbors, read ahead in an order of (seed, step)."""

import collections

import fsspec
import numpy as np
import pytest
import tensorflow as tf

import ctl
from ctl.data import sampler
from ctl.data.files import block_reader, record_reader
from ctl.data.kinds import kind_of
from ctl.errors import Failure
from tests.data.reading import one_line, pipeline_layouts, read_all, read_steps, real_ids
from tests.data.record_files import FEATURES, flip_bit, write, write_files

FILES, PER_FILE = 5, 41
COUNT = FILES * PER_FILE
MEMORY = fsspec.filesystem("memory")


@pytest.fixture
def requests(monkeypatch):
    """The requests for content, as (path, start, end)."""
    made = []
    original = type(MEMORY).cat_file

    def cat_file(self, path, start=None, end=None, **options):
        made.append((path, start, end))
        return original(self, path, start=start, end=end, **options)

    monkeypatch.setattr(type(MEMORY), "cat_file", cat_file)
    return made


@pytest.fixture
def url(tmp_path, monkeypatch):
    """Five files of 41 records in memory; blocks of about 8 records, windows of 4 blocks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(block_reader, "BLOCK_BYTES", 8 * 65)
    monkeypatch.setattr(block_reader, "WINDOW_BLOCKS", 4)
    monkeypatch.setattr(block_reader, "_KEPT_BLOCKS", 12)
    MEMORY.store.clear()
    local = write_files(tmp_path, FILES, PER_FILE)
    for path in tmp_path.glob("*.tfrecord"):
        MEMORY.put_file(str(path), f"/data/{path.name}")
    return local.replace(str(tmp_path), "memory://data")


def stream(source, batch, start, steps, replicas=1, pipelines=1):
    layouts = pipeline_layouts(batch, replicas, pipelines)
    streams = [kind_of(source).training(x, seed=3, start=start) for x in layouts]
    return [real_ids(step) for step in read_steps(streams, layouts[0], steps)]


@pytest.fixture
def source(url):
    return ctl.data.records(url, FEATURES)


def test_records_are_those_of_the_files_in_any_order(source):
    assert source.reader.rows > 4 and len(source) == COUNT
    indexes = np.random.default_rng(0).permutation(COUNT)
    batch = source.gather(tf.constant(indexes, tf.int64))
    assert batch["id"].numpy().tolist() == indexes.tolist()
    assert batch["x"].numpy().tolist() == [[2 * i + 0.5, 2 * i + 1.5] for i in indexes]


def test_order_is_a_function_of_seed_and_step_on_any_replicas_and_each_epoch_has_all(source):
    steps = -(-2 * COUNT // 7)
    ids = stream(source, 7, 0, steps)
    flat = [i for step in ids for i in step]
    assert sorted(flat[:COUNT]) == sorted(flat[COUNT : 2 * COUNT]) == list(range(COUNT))
    assert flat[:COUNT] != flat[COUNT : 2 * COUNT]
    assert stream(source, 7, 30, 8) == ids[30:38]  # resumed, without reading the steps before it
    assert stream(source, 7, 40, 8, replicas=4, pipelines=2) == ids[40:48]


def test_each_block_is_requested_once_per_epoch(source, requests):
    requests.clear()
    for start in range(0, COUNT, 7):
        positions = tf.range(start, start + 7, dtype=tf.int64)
        source.gather(source.order(positions, seed=3, span=7))
    counts = collections.Counter(requests)
    blocks = -(-COUNT // source.reader.rows)
    # A block that ends in another file takes two; the next epoch's first blocks are read ahead.
    assert blocks <= len(counts) <= blocks + FILES
    assert sum(counts.values()) <= blocks + FILES + 2 * block_reader.WINDOW_BLOCKS


def test_blocks_are_requested_before_they_are_needed(source, requests):
    requests.clear()
    source.order(tf.constant([0], tf.int64), seed=3, span=1)
    source.reader._pool.shutdown()  # waits for the requests
    ((_, start, end), _) = requests  # of position 0, and of the position half a window later
    assert end - start > 400


def test_index_is_built_once_and_not_written_into_the_bucket_unless_asked(url, requests, tmp_path):
    before = set(MEMORY.store)
    ctl.data.records(url, FEATURES)
    assert set(MEMORY.store) == before
    assert len(list((tmp_path / "cache/ctl/records").iterdir())) == FILES
    requests.clear()
    ctl.data.records(url, FEATURES)
    assert not requests  # of the record files
    ctl.data.records(url, FEATURES, index_dir="memory://index")
    assert len([name for name in MEMORY.store if name.startswith("/index/")]) == FILES
    MEMORY.pipe_file("/data/train-00.tfrecord", b"")  # another content
    message = one_line(ctl.data.records, url, FEATURES, index_dir="memory://index")
    assert "train-00.tfrecord is empty" in message


def test_index_folder_that_cannot_be_written_is_no_obstacle(url, monkeypatch):
    def refuse(self, path, value, **options):
        raise PermissionError(path)

    monkeypatch.setattr(type(MEMORY), "pipe_file", refuse)
    assert len(ctl.data.records(url, FEATURES, index_dir="memory://index")) > 0


def test_request_that_fails_is_tried_again(source, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    original, failures = type(MEMORY).cat_file, [503, 429]

    def cat_file(self, path, **options):
        if failures:
            raise OSError(failures.pop())
        return original(self, path, **options)

    monkeypatch.setattr(type(MEMORY), "cat_file", cat_file)
    assert source.gather(tf.constant([5], tf.int64))["id"].numpy().tolist() == [5]
    failures += [503] * 9
    with pytest.raises(Failure, match=r"train-00.tfrecord .*503"):
        source.gather(tf.constant([20], tf.int64))


def test_damaged_record_is_reported_or_skipped(url, tmp_path):
    path = str(tmp_path / "train-00.tfrecord")
    flip_bit(path, 40)
    MEMORY.put_file(path, "/data/train-00.tfrecord")
    with pytest.raises(record_reader.DamagedRecord, match="has a damaged record at offset 0"):
        ctl.data.records(url, FEATURES).gather(tf.constant([0], tf.int64))
    source = ctl.data.records(url, FEATURES, skip_damaged=True)
    assert source.gather(tf.constant([0], tf.int64))["id"].numpy().tolist() == [1]


def test_cache_in_a_folder_is_valid_for_the_content_of_the_files(url, tmp_path):
    def cached_ids():
        cached = ctl.data.cached(ctl.data.records(url, FEATURES), str(tmp_path / "cache"))
        return read_all(cached)["id"].numpy().tolist()

    assert cached_ids() == list(range(COUNT))
    path = write(tmp_path / "changed", [7])
    MEMORY.put_file(path, "/data/train-00.tfrecord")
    assert cached_ids() == [7, *range(PER_FILE, COUNT)]


def test_a_cache_has_the_order_of_its_source_and_reads_no_files(source, tmp_path, requests):
    expected = stream(source, 7, 0, 5)
    copy = ctl.data.cached(source, str(tmp_path / "cache"))
    requests.clear()
    assert stream(copy, 7, 0, 5) == expected
    assert not requests


def test_what_is_not_supported_is_one_line(url, tmp_path):
    local = f"{tmp_path}/train-00.tfrecord"
    assert "local files and memory://" in one_line(ctl.data.records, [url, local], FEATURES)
    message = one_line(ctl.data.records, "memory://none/*", FEATURES)
    assert "ctl.data.records finds no file that matches" in message
    for function, *options in ((ctl.data.image_folder,), (ctl.data.idx, "train")):
        message = one_line(function, "s3://bucket/data", *options)
        assert f"{function.__name__} is s3://bucket/data, but ctl does not support URLs" in message


@pytest.mark.parametrize(("count", "rows", "window"), [(100, 4, 12), (103, 5, 25), (24, 3, 12)])
def test_order_of_blocks_is_a_permutation_whose_windows_have_few_blocks(count, rows, window):
    positions = tf.range(2 * count, dtype=tf.int64)
    options = dict(count=count, seed=1, rows=rows, window=window)
    order = sampler.block_indexes(positions, span=2 * count, **options).numpy()
    for epoch in (order[:count], order[count:]):
        assert sorted(epoch) == list(range(count))
        first = epoch[:window].tolist()
        assert len({index // rows for index in first}) == window // rows  # each block completely
        assert first != sorted(first)
    part = sampler.block_indexes(positions[count - 5 : count + 9], span=14, **options).numpy()
    assert part.tolist() == order[count - 5 : count + 9].tolist()


def test_tables_and_text_are_read_from_urls():
    MEMORY.pipe_file("/tables/a.csv", b"x,label\n1,0\n2,1\n")
    assert ctl.data.csv("memory://tables/*.csv").gather([1])["x"].numpy().tolist() == [2]
    text = ctl.data.text("memory://tables/a.csv").gather([0])["text"]
    assert text.numpy().tolist() == [b"x,label"]
