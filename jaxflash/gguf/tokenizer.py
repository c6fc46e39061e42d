"""The tokenizer inside a GGUF file, as the tokenizer.json that it was made from. Byte-level BPE only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxflash.gguf.file import read_header
from jaxflash.tokenizer import HFTokenizer
from pallas_kernels.dispatch import Unsupported
from sharding.names import did_you_mean

_CONTROL, _USER_DEFINED = 3, 4
# The patterns that Llama 3's and Qwen 2's published tokenizer.json split text by; they differ in runs of digits.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(digits: str) -> Any:
    pattern = pre_tokenizers.Split(Regex(_SPLIT % digits), "isolated")
    return pre_tokenizers.Sequence([pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# By tokenizer.ggml.pre: how text is cut before merging, whether it is normalised (NFC) first, whether a word that is in
# the vocabulary whole skips its merges, and whether a start token is added where the file does not say.
_PRE: dict[str, tuple[Any, bool, bool, bool]] = {
    "gpt-2": (_gpt2, False, False, False),
    "smollm": (_smollm, False, False, False),
    "llama-bpe": (lambda: _split("{1,3}"), False, True, True),
    "qwen2": (lambda: _split(""), True, False, False),
}


def gguf_tokenizer(path: Path) -> HFTokenizer | None:
    """The tokenizer of a GGUF file, with its chat template; None where the file has none at all.

    Raises:
      ValueError: keys that are missing, or merges of tokens that it does not have.
      Unsupported: no byte-level BPE, or one that cuts text in a way not known here.
    """
    values = read_header(path).metadata
    model, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if model is None:
        return None
    if model != "gpt2" or not isinstance(pre, str) or pre not in _PRE:
        hint = "only byte-level BPE ('gpt2') is read" if model != "gpt2" else did_you_mean(str(pre), _PRE)
        reason = f"tokenizer of {model=} and {pre=}; {hint.rstrip('.')}"
        raise Unsupported(
            f"load: {path.name!r} has a {reason}. Put the model's tokenizer.json beside the file.", [("gguf", reason)]
        )
    split, nfc, whole_words, starts = _PRE[pre]
    tokens = _texts(values, "tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_bpe(tokens, _texts(values, "tokenizer.ggml.merges"), whole_words))
    tokenizer.pre_tokenizer = split()
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    kinds = values.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list):
        raise ValueError(
            f"load: {path.name!r} has tokenizer.ggml.token_type={kinds!r} - must be a list, a number for each token. "
            "Put the model's tokenizer.json beside the file."
        )
    for text, kind in zip(tokens, kinds, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(text, special=kind == _CONTROL, normalized=False)])
    named = {
        f"{name}_token": _token(tokens, values.get(f"tokenizer.ggml.{key}_token_id"))
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    bos = named["bos_token"]
    if bos is not None and values.get("tokenizer.ggml.add_bos_token", starts):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, tokens.index(bos))]
        )
    config: dict[str, Any] = {key: token for key, token in named.items() if token is not None}
    if isinstance(values.get("tokenizer.chat_template"), str):
        config["chat_template"] = values["tokenizer.chat_template"]
    # The end of a turn, which a chat model says and a document does not have, is a key of its own.
    eos_ids = [values.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    return HFTokenizer.from_json(tokenizer.to_str().encode(), config=config, eos_ids=eos_ids, source=path)


def _bpe(tokens: list[str], merges: list[str], whole_words: bool) -> Any:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise ValueError("load: the GGUF file's tokenizer has a token twice - the file is broken. Fetch it again.")
    pairs: Any = [tuple(merge.split(" ")) for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise ValueError(
                f"load: the GGUF file's tokenizer merges {pair}, which are no two of its tokens that make a third - "
                "the file is broken. Fetch it again."
            )
    return models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=whole_words)


def _texts(values: Mapping[str, Any], key: str) -> list[str]:
    texts = values.get(key)
    if not isinstance(texts, list) or not texts or not isinstance(texts[0], str):
        raise ValueError(f"load: the GGUF file lacks {key} - its tokenizer needs them. Put a tokenizer.json beside it.")
    return texts


def _token(tokens: list[str], index: Any) -> str | None:
    return tokens[index] if type(index) is int and 0 <= index < len(tokens) else None
