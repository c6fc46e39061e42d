"""A corpus tokenised once and kept on disk as a memory map."""

import hashlib
import json
import os
import shutil
import uuid
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from jaxflash.corpus.documents import read_documents
from jaxflash.tokenizer import Tokenizer

_FORMAT = 1
# Documents encoded in one call: enough to feed the tokenizer's threads, little enough to bound memory.
_GROUP_DOCUMENTS, _GROUP_LETTERS = 1024, 1 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TokenCorpus:
    """The tokens of a corpus, each document followed by its end token.

    tokens: (n,) uint16 or uint32, read-only memory map; offsets: (documents + 1,) int64, document d is
    tokens[offsets[d]:offsets[d+1]]; key: hex digest of the text and the tokenizer.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    key: str


def default_cache_dir() -> Path:
    """Where tokenised corpora are kept unless the caller says otherwise: ~/.cache/jaxflash/tokens."""
    return Path.home() / ".cache" / "jaxflash" / "tokens"


def tokenise(files: Sequence[Path], tokenizer: Tokenizer, *, cache_dir: str | Path | None = None) -> TokenCorpus:
    """Tokenise `files` into `cache_dir`, or open what an earlier call left there for the same text and tokenizer.

    The folder's name is a digest of the files' contents and the tokenizer, so an edited file is tokenised anew and a
    renamed one is not. Files are written beside it and moved in place at the end: a killed run leaves nothing that
    could be taken for a corpus, and of several processes the first to finish wins. Memory: the largest document.

    Raises:
      ValueError: no text in the files, or a cached corpus whose checksum does not hold.
      OSError: `cache_dir` cannot be written.
    """
    key = _key(files, tokenizer)
    root = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    folder = root / key
    if not folder.is_dir():
        # Not tempfile.mkdtemp, whose folders nobody else may read: a cache can be shared between users.
        unfinished = root / f"unfinished-{key[:8]}-{uuid.uuid4().hex}"
        unfinished.mkdir(parents=True)
        try:
            _write(unfinished, read_documents(files), tokenizer)
            _publish(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return _open(folder, key)


def token_stream(texts: Iterable[str], tokenizer: Tokenizer, *, limit: int | None = None) -> Int32[np.ndarray, " n"]:
    """The tokens of `texts`, each tokenised by itself, with nothing between them; only the first `limit` of them."""
    parts, count = [np.zeros(0, np.int32)], 0
    for text in texts:
        if limit is not None and count >= limit:
            break
        parts.append(tokenizer.encode(text))
        count += len(parts[-1])
    return np.concatenate(parts)[:limit]


def _key(files: Sequence[Path], tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {tokenizer.fingerprint}\n".encode())
    for file in files:
        with file.open("rb") as content:
            digest.update(f"{file.suffix} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:32]


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        os.rename(unfinished, folder)
    except OSError:
        # A folder cannot be moved onto a full one: then another process has published the same corpus.
        if not folder.is_dir():
            raise


def _groups(documents: Iterable[str]) -> Iterator[list[str]]:
    group, letters = [], 0
    for document in documents:
        group.append(document)
        letters += len(document)
        if len(group) == _GROUP_DOCUMENTS or letters >= _GROUP_LETTERS:
            yield group
            group, letters = [], 0
    if group:
        yield group


def _write(folder: Path, documents: Iterable[str], tokenizer: Tokenizer) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    offsets, checksum = array("q", [0]), 0
    with (folder / "tokens.bin").open("wb") as out:
        for group in _groups(documents):
            for ids in tokenizer.encode_batch(group):
                if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
                    raise ValueError(
                        f"tokenizer: encoded an id outside 0..{tokenizer.vocab_size - 1} ({ids.min()=}, {ids.max()=}) "
                        "- vocab_size must cover every id."
                    )
                content = np.append(ids, tokenizer.eos_id).astype(dtype).tobytes()
                checksum = zlib.crc32(content, checksum)
                out.write(content)
                offsets.append(offsets[-1] + ids.size + 1)
        out.flush()
        os.fsync(out.fileno())
    if len(offsets) == 1:
        raise ValueError("data: every document is empty - the files must hold text.")
    content = np.frombuffer(offsets, np.int64).tobytes()
    (folder / "offsets.bin").write_bytes(content)
    facts = {"dtype": dtype.name, "documents": len(offsets) - 1, "tokens": offsets[-1]}
    facts |= {"tokens_crc32": checksum, "offsets_crc32": zlib.crc32(content), "tokenizer": tokenizer.fingerprint}
    (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")


def _open(folder: Path, key: str) -> TokenCorpus:
    try:
        facts = json.loads(_intact(folder, "facts.json").read_bytes())
    except json.JSONDecodeError as error:
        raise _damaged(folder, f"facts.json is not JSON ({error})") from error
    for name in ("tokens", "offsets"):
        # Read in pieces, not through the map: the check must not count as memory of this process.
        checksum = 0
        with _intact(folder, f"{name}.bin").open("rb") as content:
            while chunk := content.read(_CHUNK):
                checksum = zlib.crc32(chunk, checksum)
        if checksum != facts[f"{name}_crc32"]:
            raise _damaged(folder, f"{name}.bin has another checksum than when it was written")
    tokens = np.memmap(folder / "tokens.bin", facts["dtype"], "r").view(np.ndarray)
    offsets = np.fromfile(folder / "offsets.bin", np.int64)
    return TokenCorpus(tokens=tokens, offsets=offsets, key=key)


def _intact(folder: Path, name: str) -> Path:
    if not (folder / name).is_file() or (folder / name).stat().st_size == 0:
        raise _damaged(folder, f"{name} is missing or empty")
    return folder / name


def _damaged(folder: Path, fact: str) -> ValueError:
    return ValueError(f"data: the tokenised corpus {folder} is damaged, {fact}. Delete that folder and run again.")
