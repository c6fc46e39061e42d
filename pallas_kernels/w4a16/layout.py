"""The one order in which packed 4-bit weights lie in memory. The only file that knows it; pure, and exact both ways.

A weight W of logical shape (K, N), y = x W, is padded to K' x N', multiples of 64, and cut into tiles of 64 x 64 codes.
A tile is 512 words of eight codes, shape (8, 64), in the register order of the tensor cores' A operand for A = W^T,
whose rows are columns of W (PTX ISA, "Matrix Fragments" of wgmma.mma_async.m64nNk16 and of mma.m16n8k16). Word
`t * 4 + v` belongs to thread t = warp * 32 + l8 * 4 + q of a warpgroup and to the tile's v-th step of 16 rows:

    bits of the word   16 e + 8 jj + 4 rh ... + 3
    column of W        n = warp * 16 + rh * 8 + l8         warp 0..3, rh 0..1, l8 0..7
    row of W           k = v * 16 + jj * 8 + q * 2 + e     v 0..3, jj 0..1, q 0..3, e 0..1

So a thread's four steps are 16 bytes in a row, no code crosses lanes, and the two codes of one register (e = 0, 1) lie
16 bits apart: shifts and masks alone bring them into their halves.

All arrays lead with (columns of W, rows of W), in tiles or groups: one sharding rule serves them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped, UInt8, UInt32

TILE = 64
# A tile's rows (v, jj, q, e) and columns (warp, rh, l8), as they nest.
_ROWS = (4, 2, 4, 2)
_COLUMNS = (4, 2, 8)
# Of (row tile, v, jj, q, e, column tile, warp, rh, l8): the place in memory, then the bits of a word.
_TO_WORDS = (5, 0, 6, 8, 3, 1, 4, 2, 7)


def padded(size: int) -> int:
    """The size rounded up to whole tiles: K' of K, N' of N."""
    return -(-size // TILE) * TILE


def pack(codes: UInt8[Array, "k n"]) -> Int32[Array, "column_tiles row_tiles 8 64"]:
    """Codes 0..15 to words; a code above 15 is undefined. The padding has code 0."""
    K, N = codes.shape
    codes = jnp.pad(codes, ((0, padded(K) - K), (0, padded(N) - N)))
    codes = codes.reshape(padded(K) // TILE, *_ROWS, padded(N) // TILE, *_COLUMNS).transpose(_TO_WORDS)
    codes = codes.reshape(padded(N) // TILE, padded(K) // TILE, 8, TILE, 2, 2, 2).astype(jnp.uint32)
    words = (codes << _shifts(4)).sum(axis=(4, 5, 6), dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def unpack(words: Int32[Array, "column_tiles row_tiles 8 64"], shape: tuple[int, int]) -> UInt8[Array, "k n"]:
    """The codes of a weight of this shape (K, N); undoes `pack`."""
    columns = unpack_words(words)
    in_rows = columns.reshape(len(columns), -1, 4, 4, 2, 2).transpose(0, 1, 3, 4, 2, 5)  # q v jj e -> v jj q e
    return in_rows.reshape(columns.shape).T[: shape[0], : shape[1]]


def unpack_words(words: Int32[Array, "column_tiles row_tiles 8 64"]) -> UInt8[Array, "padded_n padded_k"]:
    """The codes of W^T with its padding, the rows of W in the order of their words: q v jj e within a tile.

    Every word becomes four codes in a row of memory and four in another, which is what makes it cheap: to the order of
    W each code would go its own way.
    """
    column_tiles, row_tiles = words.shape[:2]
    places = words.reshape(column_tiles, row_tiles, 4, 8, 16).transpose(0, 2, 3, 1, 4)  # tile warp l8 tile (q v)
    shifts = _shifts(0).transpose(2, 1, 0)[None, None, :, None, None, None].astype(jnp.int32)
    codes = jax.lax.shift_right_logical(places[:, :, None, :, :, :, None, None], shifts) & 15
    return codes.astype(jnp.uint8).reshape(column_tiles * TILE, row_tiles * TILE)


def in_word_order(x: Shaped[Array, "m padded_k"]) -> Shaped[Array, "m padded_k"]:
    """Columns of x, which are rows of W, in the order of `unpack_words`."""
    return x.reshape(len(x), -1, *_ROWS).transpose(0, 1, 4, 2, 3, 5).reshape(x.shape)


def _shifts(leading: int) -> UInt32[Array, "*leading 2 2 2"]:
    """The bit at which the code of (e, jj, rh) begins in its word."""
    e, jj, rh = (jnp.arange(2, dtype=jnp.uint32).reshape(shape) for shape in ((2, 1, 1), (1, 2, 1), (1, 1, 2)))
    return (16 * e + 8 * jj + 4 * rh).reshape((1,) * leading + (2, 2, 2))


def pack_columns(values: Shaped[Array, "groups n"]) -> Shaped[Array, "column_tiles groups 64"]:
    """Scales of every group and column, columns by tiles; the padding has value 0."""
    groups, N = values.shape
    values = jnp.pad(values, ((0, 0), (0, padded(N) - N)))
    return values.reshape(groups, padded(N) // TILE, TILE).transpose(1, 0, 2)


def unpack_columns(values: Shaped[Array, "column_tiles groups 64"], columns: int) -> Shaped[Array, "groups n"]:
    """Undoes `pack_columns` for a weight of `columns` columns."""
    column_tiles, groups, _ = values.shape
    return values.transpose(1, 0, 2).reshape(groups, column_tiles * TILE)[:, :columns]


def pack_zeros(zeros: UInt8[Array, "groups n"]) -> UInt8[Array, "column_tiles groups 64"]:
    """Zero points as `pack_columns`, but with the two columns of a thread (rh = 0, 1) side by side: the 16 bytes of a
    warp are then a row of eight pairs, which ldmatrix hands out."""
    columns = pack_columns(zeros)
    return columns.reshape(*columns.shape[:-1], *_COLUMNS).swapaxes(-2, -1).reshape(columns.shape)


def zeros_by_column(zeros: UInt8[Array, "column_tiles groups 64"]) -> UInt8[Array, "column_tiles groups 64"]:
    """Packed zero points in the order of `pack_columns`."""
    warps, rh, l8 = _COLUMNS
    return zeros.reshape(*zeros.shape[:-1], warps, l8, rh).swapaxes(-2, -1).reshape(zeros.shape)


def unpack_zeros(zeros: UInt8[Array, "column_tiles groups 64"], columns: int) -> UInt8[Array, "groups n"]:
    """Undoes `pack_zeros` for a weight of `columns` columns."""
    return unpack_columns(zeros_by_column(zeros), columns)
