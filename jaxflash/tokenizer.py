"""Text to token ids and back: raw bytes, or a Hugging Face `tokenizer.json`."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Int32, Integer

from jaxflash.atomic import write_atomically

_BYTE_CLASS = "jaxflash.ByteTokenizer"
# Tried in this order when no file beside tokenizer.json names the end of a text. `<|endoftext|>` stands first because
# a chat model has an end-of-turn token as well, and the separator of documents is the former.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<end_of_text>", "</s>", "<eos>", "<EOS>", "[EOS]", "<|eos|>")


class Tokenizer(ABC):
    """Text to token ids and back.

    `vocab_size` is one more than the largest id that `encode` can return; `eos_id` ends every document; two tokenizers
    with the same `fingerprint` give the same ids for the same text.
    """

    vocab_size: int
    eos_id: int
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """The ids of `text`, int32, with neither a start nor an end token added."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " tokens"]) -> str:
        """The text of `ids`; special ids and ids past the vocabulary are skipped, broken UTF-8 becomes U+FFFD."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write into `folder` (made when missing) what `load_tokenizer(folder)` needs to give this tokenizer back."""

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        """`[encode(text) for text in texts]`, on several threads where the tokenizer has them."""
        return [self.encode(text) for text in texts]


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0..255, and 256 for the end of a document.

    >>> ByteTokenizer().encode("Oh!").tolist()
    [79, 104, 33]
    >>> ByteTokenizer().decode([79, 104, 33, 256])
    'Oh!'
    """

    vocab_size = 257
    eos_id = 256
    fingerprint = "bytes-257"

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " tokens"]) -> str:
        values = np.asarray(ids, np.int64)
        return values[(values >= 0) & (values < 256)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def save(self, folder: str | Path) -> None:
        _write_config(Path(folder), {"tokenizer_class": _BYTE_CLASS})


class HFTokenizer(Tokenizer):
    """A `tokenizer.json` of the Hugging Face `tokenizers` library.

    Special tokens written out in a text (`<|endoftext|>`) become their id, as everywhere in that library; none is
    added. Truncation and padding stored in the file are switched off: a corpus must not lose text.
    """

    def __init__(self, path: str | Path, *, eos_token: str | None = None):
        """Read `path`, a tokenizer.json. The end-of-document token is `eos_token`, or found (see `load_tokenizer`).

        Raises:
          FileNotFoundError: no such file.
          ValueError: not a tokenizer, an `eos_token` outside its vocabulary, or no end-of-document token found.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer: no file at path={str(path)!r} - pass a tokenizer.json or its folder.")
        self._json = path.read_bytes()
        if not isinstance(_parse(path, self._json).get("model"), dict):
            raise ValueError(
                f"tokenizer: {path} has no 'model' - a tokenizer.json of the Hugging Face `tokenizers` library is "
                "needed. Save one with `PreTrainedTokenizerFast.save_pretrained(folder)`."
            )
        self._tokenizer = tokenizers.Tokenizer.from_str(self._json.decode("utf-8"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = _read_config(path.parent / "tokenizer_config.json")
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_id = self._find_eos(path, eos_token)
        self.fingerprint = hashlib.sha256(self._json + f"\neos {self.eos_id}".encode()).hexdigest()

    def _find_eos(self, path: Path, name: str | None) -> int:
        if name is not None:
            found = self._tokenizer.token_to_id(name)
            if found is None:
                raise ValueError(
                    f"tokenizer: {path} has no token eos_token={name!r} - the token that ends a document must be in "
                    "its vocabulary. Name another one."
                )
            return found
        for candidate in self._eos_candidates(path.parent):
            found = self._tokenizer.token_to_id(candidate) if isinstance(candidate, str) else candidate
            if isinstance(found, int) and 0 <= found < self.vocab_size:
                return found
        raise ValueError(
            f"tokenizer: no end-of-document token found for {path} - tokenizer_config.json, generation_config.json and "
            f"config.json beside it name none, and the vocabulary holds none of {', '.join(_EOS_NAMES)}. "
            "Pass eos_token='...'."
        )

    def _eos_candidates(self, folder: Path) -> Iterable[object]:
        token = self._config.get("eos_token")
        yield token.get("content") if isinstance(token, dict) else token
        for name in ("generation_config.json", "config.json"):
            ids = _read_config(folder / name).get("eos_token_id")
            yield from ids if isinstance(ids, list) else [ids]
        yield from _EOS_NAMES

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " tokens"]) -> str:
        values = np.asarray(ids, np.int64)
        known = values[(values >= 0) & (values < self.vocab_size)]
        return self._tokenizer.decode(known.tolist(), skip_special_tokens=True)

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        _write_config(folder, {**self._config, "eos_token": self._tokenizer.id_to_token(self.eos_id)})
        write_atomically(folder / "tokenizer.json", self._json)


def load_tokenizer(path: str | Path | None = None, *, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer at `path`: None or "byte" for bytes, a tokenizer.json, or a folder (Hub or run) that holds one.

    The end-of-document token of a tokenizer.json is `eos_token`; else the `eos_token` of tokenizer_config.json beside
    it; else the `eos_token_id` of generation_config.json or config.json; else the first common name in the vocabulary.

    Raises:
      FileNotFoundError: nothing at `path`, or a folder without a tokenizer.
      ValueError: a broken file, or no end-of-document token.

    >>> load_tokenizer("byte").vocab_size
    257
    """
    if path is None or path == "byte":
        return ByteTokenizer()
    path = Path(path).expanduser()
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return HFTokenizer(path / "tokenizer.json", eos_token=eos_token)
        if _read_config(path / "tokenizer_config.json").get("tokenizer_class") == _BYTE_CLASS:
            return ByteTokenizer()
        raise FileNotFoundError(
            f"tokenizer: folder {path} holds no tokenizer.json - only that format is read. "
            "Convert a sentencepiece tokenizer.model with `transformers`, or pass 'byte'."
        )
    return HFTokenizer(path, eos_token=eos_token)


def _parse(path: Path, content: bytes) -> dict:
    try:
        parsed = json.loads(content)
    except ValueError as error:  # json.JSONDecodeError and UnicodeDecodeError
        raise ValueError(
            f"tokenizer: {path} is not JSON ({error}) - the file is damaged, or a Git LFS pointer. Fetch it again."
        ) from error
    if not isinstance(parsed, dict):
        raise ValueError(
            f"tokenizer: {path} holds a JSON {type(parsed).__name__} - an object is needed. Fetch it again."
        )
    return parsed


def _read_config(path: Path) -> dict:
    return _parse(path, path.read_bytes()) if path.is_file() else {}


def _write_config(folder: Path, config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
