"""Eight 4-bit codes in a 32-bit word: what all formats of 4 bits share, up to an order."""

import numpy as np
from jaxtyping import Int32, UInt8

from quant.formats.grid import LinearSpec

NATURAL = (0, 1, 2, 3, 4, 5, 6, 7)


def pack(codes: UInt8[np.ndarray, "rows n"], order: tuple[int, ...] = NATURAL) -> Int32[np.ndarray, "rows words"]:
    """Words along the last dim: bits 4 i ... 4 i + 3 of word c hold code 8 c + order[i]; codes past the end are 0.

    Raises ValueError for a code above 15, which would spill into its neighbours.
    """
    rows, n = codes.shape
    if codes.size and codes.max() > 15:
        raise ValueError(f"pack: a code is {codes.max()} - 4 bits hold 0..15. Clip it.")
    whole = codes if n % 8 == 0 else np.pad(codes, ((0, 0), (0, -n % 8)))
    eights = whole.reshape(rows, whole.shape[1] // 8, 8)[..., list(order)]
    pairs = np.ascontiguousarray(eights[..., 0::2] | eights[..., 1::2] << 4)  # bytes, the lowest first
    return pairs.view("<i4")[..., 0].astype(np.int32, copy=False)


def unpack(
    words: Int32[np.ndarray, "rows words"], n: int, order: tuple[int, ...] = NATURAL
) -> UInt8[np.ndarray, "rows n"]:
    """The first `n` codes of every row; undoes `pack`."""
    pairs = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    nibbles = np.empty((len(words), 2 * pairs.shape[1]), np.uint8)
    nibbles[:, 0::2], nibbles[:, 1::2] = pairs & 15, pairs >> 4
    if order != NATURAL:
        nibbles = nibbles.reshape(len(words), -1, 8)[..., np.argsort(order)].reshape(nibbles.shape)
    return nibbles[:, :n]


def unpack_columns(words: Int32[np.ndarray, "n words"], spec: LinearSpec) -> UInt8[np.ndarray, "k n"]:
    """The codes of W (K, N) from words that run along K, a row of them for each column of W."""
    return unpack(words, spec.K).T
