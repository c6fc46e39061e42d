"""Reading files and the cache of tokens: once, whole, in order, and what bad input says."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxflash.corpus.documents import find_files, read_documents
from jaxflash.corpus.tokens import TokenCorpus, tokenise
from jaxflash.tokenizer import ByteTokenizer


class Counting(ByteTokenizer):
    """Bytes, and a record of what was asked for."""

    def __init__(self):
        self.groups: list[list[str]] = []

    def encode_batch(self, texts):
        self.groups.append(list(texts))
        return super().encode_batch(texts)


class Wide(ByteTokenizer):
    """Ids that need 17 bits."""

    vocab_size, eos_id, fingerprint = 70_257, 70_256, "wide"

    def encode(self, text):
        return super().encode(text) + np.int32(70_000)


def jsonl(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def open_bytes(path: Path, cache: Path) -> TokenCorpus:
    return tokenise(find_files([path]), ByteTokenizer(), cache_dir=cache)


# Reading


def test_reads_files_folders_and_globs_once_and_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("line one\r\nline two\n", newline="")
    (tmp_path / "deep" / "a.txt").write_bytes(b"\xef\xbb\xbfna\xc3\xafve")
    (tmp_path / "notes.md").write_text("not text for a model")
    jsonl(tmp_path / "c.jsonl", "one", "", "two\u2028still two")
    everything = ["line one\r\nline two\n", "one", "two\u2028still two", "na\u00efve"]
    assert list(read_documents([tmp_path])) == everything
    assert list(read_documents([str(tmp_path / "**" / "*.txt")])) == [everything[0], everything[3]]
    assert list(read_documents([tmp_path / "c.jsonl", tmp_path])) == everything[1:3] + [everything[0], everything[3]]
    assert find_files([tmp_path / "b.txt", tmp_path / "deep" / ".." / "b.txt"]) == (tmp_path / "b.txt",)


def test_jsonl_is_read_line_by_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n{"text": "also", "id": 3}\nbroken\n')
    documents = read_documents([tmp_path / "a.jsonl"])
    assert [next(documents), next(documents)] == ["fine", "also"]
    with pytest.raises(ValueError, match=r"a.jsonl:4 is not JSON"):
        next(documents)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"content": "x", "a": 1}', r"a.jsonl:2 holds an object with keys \['a', 'content'\] - each line needs"),
        (b'{"text": 3}', r"a.jsonl:2 holds an object with keys \['text'\] - each line needs a string"),
        (b'["text"]', r"a.jsonl:2 holds list"),
        (b'{"text": "\xff"}', r"a.jsonl:2 is not JSON .*can't decode byte 0xff"),
        (b'{"text": "\\ud83d"}', r"a.jsonl:2 holds half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        open_bytes(tmp_path / "a.jsonl", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half done stays behind


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("absent.txt", FileNotFoundError, r"absent.txt does not exist - name a .txt or .jsonl"),
        ("*.jsonl", FileNotFoundError, r"no file matches the glob .*\*.jsonl"),
        ("folder", FileNotFoundError, r"folder .*folder holds no .txt or .jsonl file"),
        ("empty.txt", ValueError, r"empty.txt is empty - every file must hold text"),
        ("a.parquet", ValueError, r"a.parquet is neither .txt nor .jsonl"),
        ("latin.txt", ValueError, r"latin.txt is not UTF-8 at byte 2"),
        ("marked.txt", ValueError, r"every document is empty"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, error, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "a.parquet").write_text("PAR1")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(error, match=message) as caught:
        open_bytes(tmp_path / name, tmp_path / "cache")
    assert "\n" not in str(caught.value)


# The cache


def test_tokenises_once(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", "ab", "", "c")
    tokenizer = Counting()
    corpus = tokenise([file], tokenizer, cache_dir=tmp_path / "cache")
    assert corpus.tokens.tolist() == [97, 98, 256, 99, 256] and corpus.offsets.tolist() == [0, 3, 5]
    moved = file.rename(tmp_path / "b.jsonl")
    assert tokenise([moved], tokenizer, cache_dir=tmp_path / "cache").key == corpus.key
    assert tokenizer.groups == [["ab", "c"]]
    jsonl(moved, "ab", "d")
    assert tokenise([moved], tokenizer, cache_dir=tmp_path / "cache").tokens[3] == 100
    assert tokenise([moved], Wide(), cache_dir=tmp_path / "cache").tokens[3] == 70_100


def test_the_map_is_read_only_and_stays_on_disk(tmp_path):
    corpus = tokenise([jsonl(tmp_path / "a.jsonl", "ab")], ByteTokenizer(), cache_dir=tmp_path / "cache")
    assert isinstance(corpus.tokens.base, np.memmap) and corpus.tokens.dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        corpus.tokens[0] = 1
    wide = tokenise([tmp_path / "a.jsonl"], Wide(), cache_dir=tmp_path / "cache")
    assert wide.tokens.dtype == np.uint32 and wide.tokens.tolist() == [70_097, 70_098, 70_256]


def test_a_large_corpus_is_encoded_in_pieces(tmp_path):
    tokenizer = Counting()
    texts = ["x" * 300_000] * 6 + ["y"] * 2100
    corpus = tokenise([jsonl(tmp_path / "a.jsonl", *texts)], tokenizer, cache_dir=tmp_path / "cache")
    assert [len(group) for group in tokenizer.groups] == [4, 1024, 1024, 54]
    assert len(corpus.tokens) == sum(map(len, texts)) + len(texts) == corpus.offsets[-1]


def test_a_killed_run_leaves_nothing_that_counts(tmp_path):
    class Dies(Counting):
        def encode_batch(self, texts):
            raise KeyboardInterrupt

    file, cache = jsonl(tmp_path / "a.jsonl", "ab"), tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        tokenise([file], Dies(), cache_dir=cache)
    assert list(cache.iterdir()) == []
    # What SIGKILL leaves: a folder of the same key that was never moved in place.
    key = tokenise([file], ByteTokenizer(), cache_dir=tmp_path / "other").key
    leftover = cache / f"unfinished-{key[:8]}-0"
    leftover.mkdir()
    (leftover / "tokens.bin").write_bytes(b"half")
    assert tokenise([file], ByteTokenizer(), cache_dir=cache).tokens.tolist() == [97, 98, 256]
    assert (leftover / "tokens.bin").read_bytes() == b"half"


def test_of_two_processes_the_first_to_finish_wins(tmp_path):
    file, cache = jsonl(tmp_path / "a.jsonl", "ab"), tmp_path / "cache"

    class Overtaken(ByteTokenizer):
        def encode_batch(self, texts):
            tokenise([file], ByteTokenizer(), cache_dir=cache)
            return super().encode_batch(texts)

    corpus = tokenise([file], Overtaken(), cache_dir=cache)
    assert corpus.tokens.tolist() == [97, 98, 256]
    assert [entry.name for entry in cache.iterdir()] == [corpus.key]


def damage_flip(folder: Path) -> None:
    content = bytearray((folder / "tokens.bin").read_bytes())
    content[1] ^= 4
    (folder / "tokens.bin").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (damage_flip, "tokens.bin has another checksum"),
        (lambda folder: (folder / "tokens.bin").write_bytes((folder / "tokens.bin").read_bytes()[:-2]), "checksum"),
        (lambda folder: (folder / "offsets.bin").write_bytes(b"12345678"), "offsets.bin has another checksum"),
        (lambda folder: (folder / "offsets.bin").unlink(), "offsets.bin is missing or empty"),
        (lambda folder: (folder / "facts.json").write_text(""), "facts.json is missing or empty"),
        (lambda folder: (folder / "facts.json").write_text("{"), "facts.json is not JSON"),
    ],
)
def test_a_damaged_cache_is_found(tmp_path, damage, fact):
    file = jsonl(tmp_path / "a.jsonl", "ab")
    key = tokenise([file], ByteTokenizer(), cache_dir=tmp_path).key
    damage(tmp_path / key)
    with pytest.raises(ValueError, match=rf"tokenised corpus .*{key} is damaged, .*{fact}.* Delete that folder"):
        tokenise([file], ByteTokenizer(), cache_dir=tmp_path)


def test_an_id_past_the_vocabulary_is_never_stored(tmp_path):
    class Wrong(Wide):
        vocab_size, fingerprint = 300, "wrong"

    with pytest.raises(ValueError, match=r"encoded an id outside 0..299"):
        tokenise([jsonl(tmp_path / "a.jsonl", "ab")], Wrong(), cache_dir=tmp_path / "cache")
