"""GGUF files of the `gguf` package's writer: weights by the formats' own formulas, tokenizers, and broken files."""

import dataclasses
import json
import math
import struct
import tracemalloc

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflash.config import RopeScaling
from jaxflash.gguf import model
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
    ggml_name,
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


@pytest.mark.parametrize("module, at", [("self_attn.q_proj", 0), ("mlp.gate_proj", 2), ("self_attn.v_proj", 208)])
@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_scales_are_finite(quantised, tmp_path, module, at, scale):
    """The number of a block's 16 bits that scale it, or are its least value: told with the weight's name."""
    name = f"model.layers.0.{module}.weight"
    tensor = open_gguf(quantised[0]).stored[name]
    content = bytearray(quantised[0].read_bytes())
    info = read_header(quantised[0]).tensors[ggml_name(name)]
    content[info.offset + at : info.offset + at + 2] = np.float16(scale).tobytes()
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^load: '{name}' has \d+ weights that are NaN or infinite, by the scales"):
        open_gguf(tmp_path / "x.gguf").stored[name].read((slice(None),) * 2)
    assert np.isfinite(tensor.read((slice(None),) * 2)).all()


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
        ("llama", {"llama__rope__scaling__type": "yarn"}, "scaling of type 'yarn'"),
        ("llama", {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}, "factor=4.0"),
        ("llama", {"llama__rope__scaling__factor": 4.0}, "type 'linear' and factor=4.0"),
        ("qwen2", {"qwen2__rope__scale_linear": 4.0}, "type 'linear' and factor=4.0"),
        ("llama", {"llama__rope__scaling__attn_factor": 2.0}, "attn_factor=2.0"),
        ("qwen2", {"qwen2__attention__sliding_window": 4096}, "attention.sliding_window=4096; 0 is served"),
        ("llama", {"llama__rope__dimension_count": 4}, "rope.dimension_count=4"),
    ],
)
def test_what_the_model_has_not_is_refused(arch, keys, message, tmp_path):
    out = writer(tmp_path / "x.gguf", arch, open_checkpoint(GOLDEN / "llama2").config, **keys)
    finish(out)
    with pytest.raises(Unsupported, match=message):
        open_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "keys",
    [
        {"rope__scaling__type": "none", "rope__scaling__factor": 4.0},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 1.0},
        {"rope__scaling__factor": 0.0, "rope__scale_linear": 4.0},  # the newer key holds
        {"rope__scale_linear": 1.0, "rope__scaling__attn_factor": 1.0, "attention__sliding_window": 0},
    ],
)
def test_keys_that_say_no_scaling(keys, tmp_path):
    path = from_golden(
        "llama2", tmp_path / "x.gguf", "llama", **{f"llama__{key}": value for key, value in keys.items()}
    )
    assert open_gguf(path).config.rope_scaling is None


def with_tensors(path, **tensors):
    """A golden file with tensors added; __ stands for a dot."""
    config = open_checkpoint(GOLDEN / "qwen2").config
    out = writer(path, "qwen2", config)
    for tensor in open_checkpoint(GOLDEN / "qwen2").stored.values():
        out.add_tensor(ggml_name(tensor.name), tensor.read((slice(None),) * len(tensor.shape)).astype(np.float32))
    for name, value in tensors.items():
        out.add_tensor(name.replace("__", "."), value)
    finish(out)
    return path


@pytest.mark.parametrize(
    "name",
    ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight", "nonsense",
     "blk.00.attn_q.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"],
)  # fmt: skip
def test_a_name_that_is_not_ggmls_is_never_taken_for_the_hubs(name, tmp_path):
    path = with_tensors(tmp_path / "x.gguf", **{name.replace(".", "__"): np.zeros((4, 4), np.float32)})
    with pytest.raises(ValueError, match="1 tensors are not expected: "):
        open_gguf(path)


@pytest.mark.parametrize("shape", [(8, 4, 32), (32,), (33, 32)])
def test_a_query_weight_of_another_shape(shape, tmp_path):
    config = open_checkpoint(GOLDEN / "llama2").config
    out = writer(tmp_path / "x.gguf", "llama", config)
    for tensor in open_checkpoint(GOLDEN / "llama2").stored.values():
        values = np.zeros(shape if tensor.name.endswith("0.self_attn.q_proj.weight") else tensor.shape, np.float32)
        out.add_tensor(ggml_name(tensor.name), values)
    finish(out)
    with pytest.raises(ValueError, match=r"^load: .*q_proj.weight' has shape=.* makes it \(32, 32\)"):
        open_gguf(tmp_path / "x.gguf")


def hole(path, config, changes):
    """A Llama file whose tensors are a hole: no bytes on the disk. changes: other shapes by ggml's name."""
    out = writer(path, "llama", config)
    stored = open_checkpoint(GOLDEN / "llama2").stored.values()
    for name, shape in ({ggml_name(tensor.name): tensor.shape for tensor in stored} | changes).items():
        out.add_tensor_info(name, shape, np.dtype(np.float32), 4 * math.prod(shape))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    out.close()
    with path.open("r+b") as file:
        file.truncate(1 << 31)


@pytest.mark.parametrize(
    ("head_dim", "changes", "message"),
    [
        (8, {"blk.0.attn_q.weight": (1 << 23, 32), "blk.1.attn_k.weight": (1 << 23, 8)}, "makes it"),
        (1 << 30, {"rope_freqs.weight": (4,)}, "is not Llama-3 scaling"),
        (1 << 30, {}, "makes it"),
    ],
)
def test_headers_alone_take_no_memory_by_the_sizes_that_they_name(head_dim, changes, message, tmp_path, monkeypatch):
    monkeypatch.delattr(model, "rotary_frequencies")  # as many as the head is wide, in memory that is not traced here
    config = dataclasses.replace(open_checkpoint(GOLDEN / "llama2").config, head_dim=head_dim)
    hole(tmp_path / "x.gguf", config, changes)
    tracemalloc.start()
    with pytest.raises((ValueError, Unsupported), match=message):
        open_gguf(tmp_path / "x.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_header_is_no_longer_than_one_may_be(tmp_path):
    with (tmp_path / "x.gguf").open("wb") as file:
        file.write(array(0, 200_000_000))
        file.truncate(300_000_000)  # a hole: no bytes on the disk
    with pytest.raises(ValueError, match="200000000 items announced, more than it holds or a header may have"):
        read_header(tmp_path / "x.gguf")


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
        ({"tokenizer__ggml__token_type": 3}, "token_type=3 - must be a list", ValueError),
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
