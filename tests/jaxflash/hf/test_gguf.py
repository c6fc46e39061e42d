"""GGUF files of the `gguf` package's writer: weights by the formats' own formulas, tokenizers, and broken files."""

import dataclasses
import json
import struct

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflash.config import RopeScaling
from jaxflash.gguf.file import read_header
from jaxflash.gguf.model import TYPES, open_gguf
from jaxflash.gguf.tokenizer import gguf_tokenizer
from jaxflash.hf.load import load_params, open_checkpoint
from jaxflash.language_model import load
from pallas_kernels.dispatch import Unsupported
from sharding.mesh import make_mesh
from tests.jaxflash.hf.gguf_files import (
    ALPHABET,
    MERGES,
    TOKENS,
    finish,
    from_golden,
    quantised_file,
    with_tokenizer,
    writer,
)
from tests.jaxflash.hf.test_golden import PROMISED, golden, logits
from tests.jaxflash.hf.tiny import GOLDEN
from tests.jaxflash.test_tokenizer import write_bpe


@pytest.mark.parametrize(("name", "arch"), [("llama2", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_logits_are_those_of_the_checkpoint_that_it_was_made_of(name, arch, tmp_path):
    model = load(from_golden(name, tmp_path / "x.gguf", arch))
    expected = dataclasses.replace(open_checkpoint(GOLDEN / name).config, param_dtype="float32")
    assert model.config == expected
    tokens, wanted = golden(name)
    assert np.abs(logits(model, tokens) - wanted).max() <= PROMISED


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    return quantised_file(tmp_path_factory.mktemp("quantised"))


def test_every_type_by_its_own_formula(quantised):
    path, expected, config = quantised
    opened = open_gguf(path)
    assert opened.config == config
    assert {tensor.stored_as for tensor in opened.stored.values()} == set(TYPES)
    for name, tensor in opened.stored.items():
        whole = (slice(None),) * len(tensor.shape)
        np.testing.assert_allclose(tensor.read(whole), expected[name], rtol=1e-6, err_msg=name)


def test_any_rectangle_is_the_slice(quantised):
    path, _, _ = quantised
    rng = np.random.default_rng(0)
    for name, tensor in open_gguf(path).stored.items():
        whole = tensor.read((slice(None),) * len(tensor.shape))
        for _ in range(5):
            index = tuple(slice(*sorted(rng.integers(0, size + 1, 2).tolist())) for size in tensor.shape)
            np.testing.assert_array_equal(tensor.read(index), whole[index], err_msg=name)


def test_on_a_mesh_the_same_parameters(quantised):
    opened = open_gguf(quantised[0])
    one, many = (load_params(opened, make_mesh(axes))[1] for axes in ({"data": 1}, {"fsdp": 4, "tensor": 2}))
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), one, many)
    assert all(jax.tree.leaves(same)) and len(many["table"].sharding.device_set) == 8


def test_published_rotary_factors_are_recognised_and_others_refused(tmp_path):
    """The golden's scaling is for a context of 16, which no published model has."""
    with pytest.raises(Unsupported, match="is not Llama-3 scaling with the published"):
        open_gguf(from_golden("llama3", tmp_path / "x.gguf", "llama"))
    for factor in (8.0, 32.0):
        scaling = RopeScaling(factor=factor)
        change = dict(rope_scaling=scaling, rope_theta=500_000.0)
        opened = open_gguf(from_golden("llama3", tmp_path / f"{factor}.gguf", "llama", change=change))
        assert opened.config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("lama", {}, "'lama' is not a known GGUF architecture. Did you mean 'llama'"),
        ("llama", {"llama__expert_count": 8}, "llama.expert_count=8"),
        ("llama", {"split__count": 3}, "split.count=3; the parts must be merged"),
        ("llama", {"llama__rope__scaling__type": "yarn"}, "rope.scaling.type='yarn'"),
        ("llama", {"llama__rope__dimension_count": 4}, "rope.dimension_count=4"),
    ],
)
def test_what_the_model_has_not_is_refused(arch, keys, message, tmp_path):
    out = writer(tmp_path / "x.gguf", arch, open_checkpoint(GOLDEN / "llama2").config, **keys)
    finish(out)
    with pytest.raises(Unsupported, match=message):
        open_gguf(tmp_path / "x.gguf")


def test_a_type_that_is_not_read(tmp_path):
    config = open_checkpoint(GOLDEN / "llama2").config
    out = writer(tmp_path / "x.gguf", "llama", config)
    out.add_tensor("token_embd.weight", np.zeros((96, 2), np.uint8), raw_dtype=Kind.I8)
    finish(out)
    with pytest.raises(Unsupported, match="has type I8; served are F32, F16"):
        open_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("pre", "pieces", "prefix"),
    [
        ("gpt-2", ["hello", "Ġhello", "Ġ", "123"], ()),
        ("smollm", ["hello", "Ġhello", "Ġ", "1", "2", "3"], ()),
        ("qwen2", ["hello", "Ġhello", "Ġ", "1", "2", "3"], ()),
        ("llama-bpe", ["hello", "Ġhello", "Ġ", "123"], (0,)),
    ],
)
def test_the_tokenizer_inside(pre, pieces, prefix, tmp_path):
    tokenizer = load(with_tokenizer(tmp_path / "x.gguf", pre)).tokenizer
    ids = tokenizer.encode("hello hello 123")
    names = [*TOKENS, *ALPHABET, *["".join(m.split()) for m in MERGES]]
    assert [names[i] for i in ids] == pieces
    assert tokenizer.decode(ids) == "hello hello 123" and tokenizer.prefix_ids == prefix
    assert tokenizer.stop_ids == (1,) and tokenizer.special_tokens["bos_token"] == "<s>"
    assert tokenizer.encode("a</s><|u|>").tolist()[1:] == [1, 2] and tokenizer.decode([1, 2, 0]) == "<|u|>"
    assert tokenizer.chat_template is not None


def test_four_digits_are_cut_as_each_model_cuts_them(tmp_path):
    """Llama 3 takes three digits at a time, Qwen one."""
    cut = {}
    for pre in ("llama-bpe", "qwen2", "gpt-2"):
        tokenizer = load(with_tokenizer(tmp_path / f"{pre}.gguf", pre)).tokenizer
        cut[pre] = len(tokenizer.encode("1231"))
    assert cut == {"llama-bpe": 2, "qwen2": 4, "gpt-2": 2}


def test_a_start_token_that_the_file_asks_for(tmp_path):
    model = load(with_tokenizer(tmp_path / "x.gguf", tokenizer__ggml__add_bos_token=1))
    assert model.tokenizer.prefix_ids == (0,)


def test_the_end_of_a_turn_is_a_stop_too(tmp_path):
    found = gguf_tokenizer(with_tokenizer(tmp_path / "x.gguf", tokenizer__ggml__eot_token_id=2))
    assert found is not None and found.eos_id == 1 and found.stop_ids == (1, 2)


def test_a_tokenizer_json_beside_the_file_wins(tmp_path):
    write_bpe(tmp_path, specials=("<x>", "</s>"))
    assert load(with_tokenizer(tmp_path / "x.gguf", "unheard-of")).tokenizer.encode("<x>").tolist() == [0]


@pytest.mark.parametrize(
    ("keys", "message", "error"),
    [
        ({"pre": "llama-bp"}, "Did you mean 'llama-bpe'", Unsupported),
        ({"tokenizer__ggml__model": "llama"}, "only byte-level BPE", Unsupported),
        ({"tokenizer__ggml__tokens": ...}, "lacks tokenizer.ggml.tokens", ValueError),
        ({"tokenizer__ggml__tokens": ["a", "a", "b"]}, "has a token twice", ValueError),
        ({"tokenizer__ggml__merges": ["h e", "x y z"]}, "merges \\('x', 'y', 'z'\\)", ValueError),
        ({"tokenizer__ggml__merges": ["h zz"]}, "merges \\('h', 'zz'\\)", ValueError),
        ({"tokenizer__ggml__eos_token_id": 70_000}, "", None),  # found by its common name
    ],
)
def test_a_tokenizer_that_is_broken(keys, message, error, tmp_path):
    path = with_tokenizer(tmp_path / "x.gguf", **keys)
    if error is None:
        found = gguf_tokenizer(path)
        assert found is not None and found.eos_id == 1
        return
    with pytest.raises(error, match=message):
        gguf_tokenizer(path)


def test_a_truncated_file(tmp_path):
    path = from_golden("qwen2", tmp_path / "x.gguf", "qwen2")
    content = path.read_bytes()
    for size in (len(content) - 4096, 5000, 500, 30, 24, 10, 0):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="^load: "):
            open_gguf(path)
    with pytest.raises(FileNotFoundError, match="no file"):
        open_gguf(tmp_path / "y.gguf")


def begin(version=3, tensors=0, pairs=0, order="<"):
    return b"GGUF" + struct.pack(f"{order}IQQ", version, tensors, pairs)


def array(kind, count):
    """A file whose one value is an array."""
    return begin(pairs=1) + struct.pack("<Q1sIIQ", 1, b"k", 9, kind, count)


@pytest.mark.parametrize(
    "content",
    [
        begin(tensors=1 << 60), begin(pairs=1 << 60), begin(version=9), begin(order=">"), begin()[::-1],
        array(8, 1 << 60), array(4, 1 << 61), array(9, 1), array(77, 1),
    ],
)  # fmt: skip
def test_absurd_counts_are_refused_at_once(content, tmp_path):
    (tmp_path / "x.gguf").write_bytes(content + bytes(64))
    with pytest.raises(ValueError, match="^load: 'x.gguf'"):
        read_header(tmp_path / "x.gguf")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "x.gguf"
    return from_golden("qwen2", path, "qwen2", tokenizer__ggml__tokens=["a", "b"]).read_bytes()


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 2400), st.integers(0, 255)), max_size=3), st.binary(max_size=40))
def test_any_file(small, tmp_path_factory, changes, tail):
    """A good file's header with bytes changed, and bytes that are none."""
    broken = bytearray(small)
    for at, byte in changes:
        broken[at] = byte
    path = tmp_path_factory.mktemp("x") / "x.gguf"
    for content in (bytes(broken), b"GGUF\3\0\0\0" + tail):
        path.write_bytes(content)
        try:
            open_gguf(path)
        except (ValueError, Unsupported) as error:
            assert str(error).split(":")[0] in ("load", "ModelConfig"), error


def test_metadata_is_read_whole(tmp_path):
    out = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2")
    facts = {"u8": 200, "i8": -100, "u16": 60_000, "i16": -30_000, "i32": -5, "u64": 1 << 60, "i64": -(1 << 60)}
    for kind, value in facts.items():
        long = kind.replace("u", "uint") if kind[0] == "u" else kind.replace("i", "int")
        getattr(out, f"add_{long}")(kind, value)
    out.add_float64("f64", 0.1)
    out.add_bool("flag", True)
    out.add_string("text", "Ω")
    out.add_array("floats", [0.5, 2.0])
    out.add_array("texts", ["a", "", "Ω"])
    finish(out)
    found = dict(read_header(tmp_path / "x.gguf").metadata)
    assert found == facts | {"general.architecture": "qwen2", "f64": 0.1, "flag": True, "text": "Ω",
                             "floats": [0.5, 2.0], "texts": ["a", "", "Ω"]}  # fmt: skip
    assert json.dumps(found)
