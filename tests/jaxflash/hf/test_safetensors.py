"""The parsers of headers and indexes: what the format says, what is refused, and bytes that mean nothing."""

import json
import struct
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxflash.hf import safetensors
from jaxflash.hf.documents import parse_object, read_object
from jaxflash.hf.safetensors import encode_header, header_length, open_file, parse_header, read_index

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [0, 7], "data_offsets": [24, 24]},
    "c": {"dtype": "I8", "shape": [], "data_offsets": [24, 25]},
}


def parse(header, size=25):
    return parse_header(json.dumps(header).encode(), size, "x")


def test_a_header_is_read():
    assert parse({"__metadata__": {"format": "pt"}, **GOOD}) == GOOD
    assert parse({}, 0) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": {**GOOD["a"], "dtype": "F33"}}, "unknown dtype='F33'"),
        ({"a": {**GOOD["a"], "dtype": ["F32"]}}, "unknown dtype="),
        ({"a": {**GOOD["a"], "shape": [2, 4]}}, "32 bytes, but data_offsets"),
        ({"a": {**GOOD["a"], "shape": [-2, -3]}}, "must be lists of sizes"),
        ({"a": {**GOOD["a"], "shape": [2.0, 3]}}, "must be lists of sizes"),
        ({"a": {**GOOD["a"], "shape": [True, 6]}}, "must be lists of sizes"),
        ({"a": {**GOOD["a"], "shape": [1 << 62] * 64}}, "bytes, but data_offsets"),
        ({"a": {**GOOD["a"], "shape": [1] * 65}}, "must be lists of sizes"),
        ({"a": {**GOOD["a"], "data_offsets": [0, 24, 25]}}, "must be lists of sizes"),
        ({"a": {**GOOD["a"], "data_offsets": [24, 0]}}, "bytes, but data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "must be lists of sizes"),
        ({"a": 7}, "is no object"),
        ({"c": {**GOOD["c"], "data_offsets": [23, 24]}}, "must lie end to end"),  # overlaps a
        ({"c": {**GOOD["c"], "data_offsets": [25, 26]}}, "must lie end to end"),  # leaves a gap
    ],
)
def test_a_broken_entry_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        parse(GOOD | change)


def test_the_file_must_end_where_its_tensors_do():
    with pytest.raises(ValueError, match="is truncated: its tensors take 25 bytes, after the header come 24"):
        parse(GOOD, 24)
    with pytest.raises(ValueError, match="is longer than its header says"):
        parse(GOOD, 26)


def test_a_name_given_twice_is_refused():
    entry = json.dumps(GOOD["a"])
    with pytest.raises(ValueError, match="gives 'a' twice"):
        parse_header(f'{{"a": {entry}, "a": {entry}}}'.encode(), 24, "x")


@pytest.mark.parametrize("length", [18, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_an_absurd_header_length_is_refused_at_once(length, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" + b" " * 15)
    start = time.monotonic()
    with pytest.raises(ValueError, match="beyond the file's end"):
        open_file(path)
    assert time.monotonic() - start < 1


def test_a_header_beyond_the_limit_of_the_format():
    with pytest.raises(ValueError, match="limit of 100000000"):
        header_length(struct.pack("<Q", 100_000_001), 1 << 40, "x")
    for short in (b"", b"1234567"):
        with pytest.raises(ValueError, match="at least 8"):
            header_length(short, len(short), "x")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[]", "1e999", "", "\x00", "{", '{"a": NaN', '"'])
def test_json_that_is_no_object(text):
    with pytest.raises(ValueError, match="^load: it "):
        parse_object(text.encode(), "it")


def test_many_keys_are_compared_in_linear_time():
    pairs = [f'"{number}": 0' for number in range(200_000)]
    start = time.process_time()
    with pytest.raises(ValueError, match="gives '199999' twice"):
        parse_object(f"{{{', '.join([*pairs, pairs[-1]])}}}".encode(), "it")
    assert time.process_time() - start < 5


def test_an_integer_of_absurd_length():
    for digits in (401, 5000):
        with pytest.raises(ValueError, match=f"^load: it has an integer of {digits} digits"):
            parse_object(b'{"a": [' + b"9" * digits + b"]}", "it")
    assert parse_object(b'{"a": -' + b"9" * 300 + b"}", "it") == {"a": 1 - 10**300}


def test_a_limit_of_bytes(tmp_path):
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert read_object(tmp_path / "x.json", limit=8) == {"a": 1}
    with pytest.raises(ValueError, match="has size=8 bytes - at most 7"):
        read_object(tmp_path / "x.json", limit=7)


def test_the_package_writes_what_we_read_and_reads_what_we_write(tmp_path):
    rng = np.random.default_rng(0)
    values = {"x": rng.standard_normal((5, 3)).astype(np.float32), "y": rng.integers(0, 99, 7), "z": np.ones(2, bool)}
    save_file(values, tmp_path / "theirs.safetensors")
    for name, tensor in open_file(tmp_path / "theirs.safetensors").items():
        np.testing.assert_array_equal(tensor.read(tuple(slice(None) for _ in tensor.shape)), values[name])
    entries = [(name, safetensors.NAMES[value.dtype], value.shape) for name, value in values.items()]
    content = encode_header(entries) + b"".join(value.tobytes() for value in values.values())
    (tmp_path / "ours.safetensors").write_bytes(content)
    for name, value in load_file(tmp_path / "ours.safetensors").items():
        np.testing.assert_array_equal(value, values[name])


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_any_rectangle_is_the_slice(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    save_file({"first": np.zeros(data.draw(st.integers(0, 3)), np.uint8), "x": values}, path)
    bounds = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    index = tuple(slice(*pair) for pair in bounds)
    np.testing.assert_array_equal(open_file(path)["x"].read(index), values[index])


def test_a_rectangle_larger_than_a_block(tmp_path):
    values = np.random.default_rng(0).standard_normal((3000, 700)).astype(np.float32)  # 8.4 MB, two blocks
    save_file({"x": values}, tmp_path / "x.safetensors")
    tensor = open_file(tmp_path / "x.safetensors")["x"]
    for index in ((slice(None), slice(None)), (slice(100, 2900), slice(5, 300))):
        np.testing.assert_array_equal(tensor.read(index), values[index])


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "..\\x.safetensors", ".x.safetensors", "x.bin",
     "x.safetensors\0", "", 7, None, ["x.safetensors"]],
)  # fmt: skip
def test_an_index_that_leads_elsewhere_is_refused(shard, tmp_path):
    path = tmp_path / safetensors.INDEX
    path.write_text(json.dumps({"weight_map": {"t": shard}}))
    with pytest.raises(ValueError, match="plain name"):
        read_index(path)


@pytest.mark.parametrize("content", [{}, {"weight_map": {}}, {"weight_map": ["x"]}, {"weight_map": None}])
def test_an_index_without_a_map_is_refused(content, tmp_path):
    path = tmp_path / safetensors.INDEX
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has no weight_map"):
        read_index(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["F32", "BF16"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "I8", "Q9"]) | JSON, "shape": st.lists(st.integers(-2, 1 << 70)) | JSON,
     "data_offsets": st.lists(st.integers(-2, 1 << 70), min_size=2, max_size=2) | JSON}
)  # fmt: skip


def accepts_or_explains(function, *args):
    """The only way to fail is a ValueError in the house's form."""
    try:
        return function(*args)
    except ValueError as error:
        assert str(error).startswith("load: "), error
        return None


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.text(max_size=5), ENTRY | JSON, max_size=4) | JSON, st.integers(0, 1 << 40))
def test_any_json_as_header(header, size):
    parsed = accepts_or_explains(parse_header, json.dumps(header).encode(), size, "x")
    if parsed is not None:
        # What is accepted tiles the data.
        sizes = [e["data_offsets"][1] - e["data_offsets"][0] for e in parsed.values()]
        assert sum(sizes) == size and min(sizes, default=0) >= 0


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_as_header(content):
    accepts_or_explains(parse_header, content, 10, "x")


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=100), st.integers(0, 100), st.integers(0, 255))
def test_any_file(tmp_path_factory, tail, at, byte):
    """A good file with a byte changed and a tail, and no good file at all."""
    path = tmp_path_factory.mktemp("x") / "x.safetensors"
    good = bytearray(encode_header([("a", "F32", (2,)), ("b", "BF16", (3,))]) + bytes(14))
    good[at % len(good)] = byte
    for content in (bytes(good), bytes(good) + tail, bytes(good)[: at % len(good)], tail):
        path.write_bytes(content)
        accepts_or_explains(open_file, path)


@settings(deadline=None, max_examples=200)
@given(JSON | st.fixed_dictionaries({"weight_map": JSON | st.dictionaries(st.text(), JSON, max_size=3)}))
def test_any_json_as_index(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("x") / safetensors.INDEX
    path.write_text(json.dumps(content))
    parsed = accepts_or_explains(read_index, path)
    assert parsed is None or all(name.endswith(".safetensors") and "/" not in name for name in parsed.values())
