"""Text to token ids and back: raw bytes, or a Hugging Face `tokenizer.json`."""

import copy
import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int32, Integer

from jaxflash.atomic import write_atomically

_BYTE_CLASS = "jaxflash.ByteTokenizer"
_PREFIXED = "jaxflash_prompt_prefix"  # in a tokenizer_config.json of ours
_MAX_BYTES = 100_000_000  # of a file; the largest published tokenizer.json has a third of it
# Tried in this order when no file beside tokenizer.json names the end of a text. `<|endoftext|>` stands first because
# a chat model has an end-of-turn token as well, and the separator of documents is the former.
_EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<end_of_text>", "</s>", "<eos>", "<EOS>", "[EOS]", "<|eos|>")


class Tokenizer(ABC):
    """Text to token ids and back.

    `vocab_size` is one more than the largest id that `encode` can return; `eos_id` ends every document; two tokenizers
    with the same `fingerprint` give the same ids for the same text. `prefix_ids` start every prompt; `stop_ids`, of
    which `eos_id` is the first, end what a model says. `chat_template` is the Jinja text that makes one prompt of a
    conversation, and may name the `special_tokens` ("bos_token", "eos_token", ...).
    """

    vocab_size: int
    eos_id: int
    fingerprint: str
    prefix_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = MappingProxyType({})

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self.eos_id,)

    def special_id(self, key: str) -> int | None:
        """The id of `special_tokens[key]`; None where there is none."""
        return None

    def encode_prompt(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """The ids that a model reads before it continues `text`: `prefix_ids`, then those of the text."""
        return np.concatenate([np.asarray(self.prefix_ids, np.int32), self.encode(text)])

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


class NoTokenizer(Tokenizer):
    """Of a checkpoint that came without one: it serves token ids, and refuses text with the reason."""

    vocab_size = 0
    eos_id = -1
    fingerprint = "none"

    def __init__(self, folder: str | Path):
        self._folder = str(folder)

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        raise ValueError(self._refusal)

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " tokens"]) -> str:
        raise ValueError(self._refusal)

    def save(self, folder: str | Path) -> None:
        """There is nothing to write."""

    @property
    def _refusal(self) -> str:
        return (
            f"tokenizer: the checkpoint folder={self._folder!r} holds no tokenizer.json - text needs one. Put it "
            "there, or give token ids to `jaxflash.generate.generate_tokens`."
        )


class HFTokenizer(Tokenizer):
    """A `tokenizer.json` of the Hugging Face `tokenizers` library.

    Special tokens written out in a text (`<|endoftext|>`) become their id, as everywhere in that library; `encode` adds
    none. Truncation and padding stored in the file are switched off: a corpus must not lose text.
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
        beside = {name: _read_config(path.parent / f"{name}.json") for name in ("generation_config", "config")}
        config = _read_config(path.parent / "tokenizer_config.json")
        jinja = path.with_name("chat_template.jinja")
        if jinja.is_file():  # where transformers keeps it since v4.50; it wins over the configuration's
            config["chat_template"] = _text(jinja)
        self._set(_read(path), config, [values.get("eos_token_id") for values in beside.values()], path, eos_token)

    @classmethod
    def from_json(
        cls, content: bytes, *, config: Mapping[str, Any], eos_ids: Sequence[object], source: Path
    ) -> "HFTokenizer":
        """The tokenizer whose tokenizer.json, tokenizer_config.json and generation_config.json would hold these.

        source: the file they come from, for errors.
        """
        tokenizer = cls.__new__(cls)
        tokenizer._set(content, dict(config), list(eos_ids), source, None)
        return tokenizer

    def _set(self, content: bytes, config: dict, eos_ids: list, path: Path, eos_token: str | None) -> None:
        self._json, self._config, self._path = content, config, path
        if not isinstance(_parse(path, content).get("model"), dict):
            raise ValueError(
                f"tokenizer: {path} has no 'model' - a tokenizer.json of the Hugging Face `tokenizers` library is "
                "needed. Save one with `PreTrainedTokenizerFast.save_pretrained(folder)`."
            )
        with _Library(path):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        ids = [i for listed in eos_ids for i in (listed if isinstance(listed, list) else [listed])]
        ids = [i for i in ids if type(i) is int and 0 <= i < self.vocab_size]
        self.eos_id = self._find_eos(path, eos_token, ids)
        self._stop_ids = tuple(dict.fromkeys([self.eos_id, *ids]))
        self.fingerprint = hashlib.sha256(self._json + f"\neos {self.eos_id}".encode()).hexdigest()
        self.chat_template = _chat_template(config.get("chat_template"))
        named = {key: _content(config.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        named["eos_token"] = self._tokenizer.id_to_token(self.eos_id)
        self.special_tokens = {key: token for key, token in named.items() if isinstance(token, str)}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    def special_id(self, key: str) -> int | None:
        token = self.special_tokens.get(key)
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def saved_prefixed(self) -> bool:
        """Whether it was `prefixed` when it was saved. Training reads texts without a prefix, and says so here."""
        return self._config.get(_PREFIXED) is True

    def prefixed(self) -> "HFTokenizer":
        """The same, but prompts start with what the file's post-processor puts before a text (`<s>`)."""
        with _Library(self._path):
            plain = self._tokenizer.encode("a", add_special_tokens=False).ids
            framed = self._tokenizer.encode("a", add_special_tokens=True).ids
        starts = (at for at in range(len(framed)) if framed[at : at + len(plain)] == plain)
        out = copy.copy(self)
        out.prefix_ids = tuple(framed[: next(starts, 0)])
        return out

    def _find_eos(self, path: Path, name: str | None, ids: list[int]) -> int:
        if name is not None:
            found = self._tokenizer.token_to_id(name)
            if found is None:
                raise ValueError(
                    f"tokenizer: {path} has no token eos_token={name!r} - the token that ends a document must be in "
                    "its vocabulary. Name another one."
                )
            return found
        for candidate in (_content(self._config.get("eos_token")), *ids, *_EOS_NAMES):
            found = self._tokenizer.token_to_id(candidate) if isinstance(candidate, str) else candidate
            if isinstance(found, int):
                return found
        raise ValueError(
            f"tokenizer: no end-of-document token found for {path} - tokenizer_config.json, generation_config.json and "
            f"config.json beside it name none, and the vocabulary holds none of {', '.join(_EOS_NAMES)}. "
            "Pass eos_token='...'."
        )

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        with _Library(self._path):
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        with _Library(self._path):
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | Integer[np.ndarray, " tokens"]) -> str:
        values = np.asarray(ids, np.int64)
        known = values[(values >= 0) & (values < self.vocab_size)]
        with _Library(self._path):
            return self._tokenizer.decode(known.tolist(), skip_special_tokens=True)

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        config = {key: value for key, value in self._config.items() if key != _PREFIXED}
        config["eos_token"] = self._tokenizer.id_to_token(self.eos_id)
        # Without a class transformers takes the model's usual one, which may cut text in its own way.
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        if self.prefix_ids:
            config[_PREFIXED] = True
        _write_config(folder, config)
        write_atomically(folder / "tokenizer.json", self._json)


@dataclasses.dataclass(frozen=True)
class _Library:
    """Around calls of the `tokenizers` library: what it says of a broken file as a ValueError, its panics too.

    A panic of Rust's is no Exception, and its type cannot be imported; its other errors are bare Exceptions, or
    ValueErrors.
    """

    path: Path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if kind in (Exception, ValueError) or (kind is not None and kind.__name__ == "PanicException"):
            raise ValueError(
                f"tokenizer: {self.path} is no tokenizer ({str(error)[:200]}) - a tokenizer.json of the Hugging Face "
                "`tokenizers` library is needed. Fetch it again, or save it anew with `transformers`."
            ) from error


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
        found = find_tokenizer(path, eos_token=eos_token)
        if found is not None:
            return found
        raise FileNotFoundError(
            f"tokenizer: folder {path} holds no tokenizer.json - only that format is read. "
            "Convert a sentencepiece tokenizer.model with `transformers`, or pass 'byte'."
        )
    return HFTokenizer(path, eos_token=eos_token)


def find_tokenizer(folder: Path, *, eos_token: str | None = None) -> Tokenizer | None:
    """The tokenizer that lies in `folder` (Hub or run), or None. Raises what `load_tokenizer` does of a broken one."""
    if (folder / "tokenizer.json").is_file():
        return HFTokenizer(folder / "tokenizer.json", eos_token=eos_token)
    if _read_config(folder / "tokenizer_config.json").get("tokenizer_class") == _BYTE_CLASS:
        return ByteTokenizer()
    return None


def _content(token: object) -> object:
    """A special token's text: a plain string, or the `content` of an object."""
    return token.get("content") if isinstance(token, dict) else token


def _chat_template(value: object) -> str | None:
    """The template of a conversation: the value itself, or the one called "default" in a list of named ones."""
    if isinstance(value, list):
        value = next((t.get("template") for t in value if isinstance(t, dict) and t.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _parse(path: Path, content: bytes) -> dict:
    try:
        parsed = json.loads(content)
    except (
        ValueError,
        RecursionError,
    ) as error:  # no JSON, no UTF-8, an integer of absurd length, or nested too deeply
        raise ValueError(
            f"tokenizer: {path} is not JSON ({error}) - the file is damaged, or a Git LFS pointer. Fetch it again."
        ) from error
    if not isinstance(parsed, dict):
        raise ValueError(
            f"tokenizer: {path} holds a JSON {type(parsed).__name__} - an object is needed. Fetch it again."
        )
    return parsed


def _read_config(path: Path) -> dict:
    return _parse(path, _read(path)) if path.is_file() else {}


def _read(path: Path) -> bytes:
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ValueError(f"tokenizer: {path} has {size=} bytes - at most {_MAX_BYTES}. Is it the right file?")
    return path.read_bytes()


def _text(path: Path) -> str:
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"tokenizer: {path} is not UTF-8 text ({error}). Fetch it again.") from error


def _write_config(folder: Path, config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
