"""Bytes and tokenizer.json: there and back, the end token, and the copy in a run folder."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflash.tokenizer import ByteTokenizer, HFTokenizer, load_tokenizer

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer"


def write_bpe(folder: Path, *, specials: tuple[str, ...] = ("<pad>", "</s>"), **config: object) -> Path:
    """A small byte-level BPE with `specials`; each keyword argument is a JSON file beside it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(specials),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    # What a sentence encoder's tokenizer.json holds, and a corpus must not obey.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    if specials:
        first = specials[0]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(f"{first} $A", special_tokens=[(first, 0)])
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in config.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@settings(deadline=None)
@given(st.text())
def test_bytes_there_and_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(st.lists(st.integers(-5, 400)))
def test_bytes_decode_whatever_a_model_emits(ids):
    kept = bytes(i for i in ids if 0 <= i < 256)
    assert ByteTokenizer().decode(ids) == kept.decode(errors="replace")


def test_bytes_end_token():
    tokenizer = ByteTokenizer()
    assert tokenizer.eos_id == 256 and tokenizer.vocab_size == 257
    assert tokenizer.decode([72, 105, tokenizer.eos_id]) == "Hi"
    assert tokenizer.decode([0xC3]) == "\ufffd"


@settings(deadline=None)
@given(st.text())
def test_bpe_there_and_back(bpe, text):
    ids = bpe.encode(text)
    assert ids.dtype == np.int32 and (ids.size == 0 or ids.max() < bpe.vocab_size)
    if not any(special in text for special in ("<pad>", "</s>")):
        assert bpe.decode(ids) == text
    np.testing.assert_array_equal(bpe.encode_batch([text, "be"])[0], ids)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return load_tokenizer(write_bpe(tmp_path_factory.mktemp("bpe")))


def test_bpe_neither_cuts_nor_pads_nor_adds(bpe):
    ids = bpe.encode(TEXT * 3)
    assert len(ids) > 8 and not np.isin([0, 1], ids).any()
    assert len(bpe.encode("b")) == 1
    assert bpe.decode(np.append(ids, [bpe.eos_id, bpe.vocab_size + 7, -1])) == TEXT * 3


@pytest.mark.parametrize(
    ("specials", "config", "expected"),
    [
        (("<a>", "</s>"), {}, "</s>"),
        (("</s>", "<|endoftext|>"), {}, "<|endoftext|>"),
        (("</s>", "<a>"), {"tokenizer_config": {"eos_token": "<a>"}}, "<a>"),
        (("</s>", "<a>"), {"tokenizer_config": {"eos_token": {"content": "<a>", "lstrip": False}}}, "<a>"),
        (("</s>", "<a>"), {"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": 1}}, "<a>"),
        (("</s>", "<a>", "<b>"), {"generation_config": {"eos_token_id": [2, 1]}, "config": {"eos_token_id": 1}}, "<b>"),
        (("</s>", "<a>"), {"config": {"eos_token_id": 100_000}}, "</s>"),
        (("</s>", "<a>"), {"config": {"eos_token_id": -1}}, "</s>"),
    ],
)
def test_finds_the_end_token(tmp_path, specials, config, expected):
    tokenizer = load_tokenizer(write_bpe(tmp_path, specials=specials, **config))
    assert tokenizer.eos_id == specials.index(expected)


def test_a_named_end_token_wins(tmp_path):
    folder = write_bpe(tmp_path, specials=("<a>", "</s>"))
    assert load_tokenizer(folder, eos_token="<a>").eos_id == 0
    assert load_tokenizer(folder).fingerprint != load_tokenizer(folder, eos_token="<a>").fingerprint
    with pytest.raises(ValueError, match=r"tokenizer.json has no token eos_token='<b>'"):
        load_tokenizer(folder, eos_token="<b>")


def test_the_vocabulary_counts_added_tokens(tmp_path):
    path = write_bpe(tmp_path) / "tokenizer.json"
    before = HFTokenizer(path)
    raw = tokenizers.Tokenizer.from_file(str(path))
    raw.add_special_tokens(["<extra>"])
    raw.save(str(path))
    after = HFTokenizer(path)
    assert after.vocab_size == before.vocab_size + 1
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_a_run_folder_gives_the_same_tokenizer_back(tmp_path, kind):
    config = {"eos_token": "</s>", "chat_template": "{{ x }}"}
    source = "byte" if kind == "byte" else write_bpe(tmp_path / "hub", tokenizer_config=config)
    tokenizer = load_tokenizer(source, eos_token=None if kind == "byte" else "<pad>")
    tokenizer.save(tmp_path / "runs" / "one")
    back = load_tokenizer(tmp_path / "runs" / "one")
    assert type(back) is type(tokenizer)
    assert (back.fingerprint, back.eos_id, back.vocab_size) == (
        tokenizer.fingerprint,
        tokenizer.eos_id,
        tokenizer.vocab_size,
    )
    np.testing.assert_array_equal(back.encode(TEXT), tokenizer.encode(TEXT))
    if kind == "bpe":
        saved = json.loads((tmp_path / "runs" / "one" / "tokenizer_config.json").read_text())
        kept = {"eos_token": "<pad>", "chat_template": "{{ x }}"}
        assert saved == kept | {"tokenizer_class": "PreTrainedTokenizerFast"}


def test_the_class_of_the_source_is_kept(tmp_path):
    folder = write_bpe(tmp_path / "hub", tokenizer_config={"tokenizer_class": "Qwen2TokenizerFast"})
    load_tokenizer(folder).save(tmp_path / "x")
    assert json.loads((tmp_path / "x" / "tokenizer_config.json").read_text())["tokenizer_class"] == "Qwen2TokenizerFast"


def test_special_ids(tmp_path):
    names = {"bos_token": "<a>", "eos_token": "</s>", "pad_token": "not there"}
    tokenizer = load_tokenizer(write_bpe(tmp_path, specials=("<a>", "</s>"), tokenizer_config=names))
    assert [tokenizer.special_id(key) for key in (*names, "unk_token")] == [0, 1, None, None]
    assert ByteTokenizer().special_id("bos_token") is None


def test_none_is_bytes():
    assert isinstance(load_tokenizer(None), ByteTokenizer) and isinstance(load_tokenizer("byte"), ByteTokenizer)


def test_refuses_what_it_cannot_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file at path='.*absent.json' - pass a tokenizer.json"):
        load_tokenizer(tmp_path / "absent.json")
    with pytest.raises(FileNotFoundError, match=f"folder {tmp_path} holds no tokenizer.json"):
        load_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"tokenizer.json is not JSON .* Git LFS pointer"):
        load_tokenizer(path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer.json holds a JSON list"):
        load_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json has no 'model'"):
        load_tokenizer(path)
    with pytest.raises(ValueError, match=r"no end-of-document token found for .*Pass eos_token"):
        load_tokenizer(write_bpe(tmp_path, specials=()))


@pytest.mark.parametrize(
    "content",
    [
        b'{"model": {}}', b'{"model": {"type": "NoSuch"}}', b'{"model": {"type": "BPE", "vocab": 3, "merges": []}}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', b'{"model": {"type": "Unigram"}}',
        b'{"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": {"type": "NoSuch"}}',
        b"[" * 100_000, b'{"model": {"a": ' + b"9" * 5000 + b"}}", b"\xff\xfe", b"",
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_with_its_name(content, tmp_path):
    """Whichever of the files it is, and whether json or the `tokenizers` library finds it."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^tokenizer: .*tokenizer\.json is no"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json", "generation_config.json"])
def test_a_damaged_file_beside_it(name, tmp_path):
    folder = write_bpe(tmp_path)
    for content in (b"{", b"\xff", b'{"a":' * 100_000, b"[]"):
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"^tokenizer: .*{name} "):
            load_tokenizer(folder)


def test_a_template_that_is_no_text(tmp_path):
    (write_bpe(tmp_path) / "chat_template.jinja").write_bytes(b"{{ x }}\xff")
    with pytest.raises(ValueError, match=r"^tokenizer: .*chat_template\.jinja is not UTF-8"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_of_absurd_size_is_not_read(name, tmp_path):
    with (write_bpe(tmp_path) / name).open("wb") as file:
        file.truncate(100_000_001)  # a hole: no bytes on the disk
    with pytest.raises(ValueError, match=f"^tokenizer: .*{name} has size=100000001 bytes - at most"):
        load_tokenizer(tmp_path)


# Parts on which the library panics, or has an error without a type.
WORSE = {
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "model": {"type": "WordLevel", "vocab": {"</s>": 1}, "unk_token": "x"},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "z", "type_id": 0}}],
                       "pair": [], "special_tokens": {}},
}  # fmt: skip
ALIEN = [
    None, True, -1, 1 << 40, "", "<s>", [], {}, ["a"], {"type": "ByteLevel"}, {"type": "BPE"}, {"Regex": "(?"},
    {"type": "Replace", "pattern": {"String": ""}, "content": "x"}, {"type": "Sequence", "normalizers": [None]},
    *WORSE.values(),
]  # fmt: skip
PLACES = ["normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "added_tokens", "truncation", "padding"]


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from(PLACES), st.sampled_from(ALIEN), max_size=2), st.text(max_size=5))
def test_any_part_of_a_file_is_used_or_told(bpe_json, parts, text):
    """The library panics on some, where it reads them or where it encodes, which no `except Exception` sees."""
    content = json.dumps(bpe_json | parts).encode()
    try:
        found = HFTokenizer.from_json(content, config={"eos_token": "</s>"}, eos_ids=[], source=Path("x")).prefixed()
        assert isinstance(found.decode(found.encode(text)), str) and len(found.encode_batch([text, ""])) == 2
    except ValueError as error:
        assert str(error).startswith("tokenizer: "), error


@pytest.mark.parametrize("place", WORSE)
def test_a_panic_of_the_library_is_an_error_with_the_file_s_name(bpe_json, place):
    content = json.dumps(bpe_json | {place: WORSE[place]}).encode()
    with pytest.raises(ValueError, match="^tokenizer: some.json is no tokenizer"):
        HFTokenizer.from_json(content, config={"eos_token": "</s>"}, eos_ids=[], source=Path("some.json")).prefixed()


@pytest.fixture(scope="module")
def bpe_json(tmp_path_factory):
    return json.loads((write_bpe(tmp_path_factory.mktemp("json")) / "tokenizer.json").read_text())
