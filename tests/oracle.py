"""Attention in float64 NumPy, one query row at a time over the keys it sees, with hand-written gradients. No jax.

It shares nothing with the library: what a row does not see is never read, so that no masking trick can hide here.
With `precision` the same loop runs in float32, adds from left to right, and rounds weights, their gradients and
results to that dtype: the same-precision reference against which tests/tolerance.py measures.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Results of one call; the gradients are None without cotangents, and dbias is None without a bias."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dbias: np.ndarray | None = None
    dscale: float = 0.0


def attention(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, local_window_size=None, causal_alignment="top_left", segment_ids=None,
    dout=None, dlse=None, precision=None,
) -> Attention:  # fmt: skip
    """The library's call on (B, T, N, H) arrays; `dout` and `dlse` are the cotangents of out and lse."""
    work = np.float64 if precision is None else np.float32
    add = np.sum if precision is None else lambda x, axis: np.cumsum(x, axis=axis).take(-1, axis=axis)
    rounded = (lambda x: x) if precision is None else (lambda x: x.astype(precision).astype(work))
    q, k, v = (np.asarray(x).astype(work) for x in (query, key, value))
    (B, T, N, H), (S, K, H_v) = q.shape, v.shape[1:]
    scale = work(1 / np.sqrt(H) if scale is None else scale)
    full = None if bias is None else np.broadcast_to(np.asarray(bias).astype(work), (B, N, T, S))
    out, lse = np.zeros((B, T, N, H_v), work), np.full((B, T, N), -np.inf, work)
    with_gradients = dout is not None
    do = np.zeros_like(out) if dout is None else np.asarray(dout).astype(work)
    dl = np.zeros_like(lse) if dlse is None else np.asarray(dlse).astype(work)
    dq, dk, dv, dscale = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), 0.0
    dfull = np.zeros((B, N, T, S), work)
    for b in range(B):
        seen = visible(
            b, T, S, is_causal=is_causal, query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths, local_window_size=local_window_size,
            causal_alignment=causal_alignment, segment_ids=segment_ids,
        )  # fmt: skip
        for n in range(N):
            head = n // (N // K)
            allowed = seen if mask is None else seen & np.broadcast_to(np.asarray(mask), (B, N, T, S))[b, n]
            if full is not None:
                allowed = allowed & (full[b, n] != -np.inf)
            for i in range(T):
                (j,) = np.nonzero(allowed[i])
                if j.size == 0:
                    continue
                keys, values = k[b, j, head], v[b, j, head]
                dot = add(keys * q[b, i, n], axis=1)
                logits = scale * dot + (0 if full is None else full[b, n, i, j])
                weights = np.exp(logits - logits.max())
                total = add(weights, axis=0)
                p = weights / total
                lse[b, i, n] = logits.max() + np.log(total)
                out[b, i, n] = rounded(add(rounded(p)[:, None] * values, axis=0))
                if with_gradients:
                    dp = add(values * do[b, i, n], axis=1)
                    # Added backwards: where this should cancel dp, as for a single key, plain float32 leaves a residue.
                    delta = add((do[b, i, n] * out[b, i, n])[::-1], axis=0)
                    ds = p * (dp - delta + dl[b, i, n])
                    dfull[b, n, i, j] = ds
                    dq[b, i, n] = scale * add(rounded(ds)[:, None] * keys, axis=0)
                    dk[b, j, head] += scale * np.outer(rounded(ds), q[b, i, n])
                    dv[b, j, head] += np.outer(rounded(p), do[b, i, n])
                    dscale += float((ds * dot).sum())
    if not with_gradients:
        return Attention(out=out, lse=lse)
    dbias = None
    if bias is not None:
        broadcast = tuple(axis for axis, size in enumerate(np.shape(bias)) if size == 1)
        dbias = dfull.sum(axis=broadcast, keepdims=True)
    return Attention(
        out=out, lse=lse, dq=rounded(dq), dk=rounded(dk), dv=rounded(dv), dbias=dbias, dscale=dscale
    )  # fmt: skip


def visible(
    b, T, S, *, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size, causal_alignment, segment_ids
) -> np.ndarray:
    """(T, S) booleans for batch entry b: which keys each query sees, mask and bias aside."""
    queries = T if query_seq_lengths is None else int(np.clip(query_seq_lengths[b], 0, T))
    keys = S if key_value_seq_lengths is None else int(np.clip(key_value_seq_lengths[b], 0, S))
    shift = keys - queries if causal_alignment == "bottom_right" else 0
    left = right = None
    if local_window_size is not None:
        left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        query_ids, key_ids = (np.asarray(ids)[b] for ids in pair)
    seen = np.zeros((T, S), bool)
    for i in range(queries):
        for j in range(keys):
            distance = j - (i + shift)
            seen[i, j] = (
                not (is_causal and distance > 0)
                and (left is None or -distance <= left)
                and (right is None or distance <= right)
                and (segment_ids is None or (query_ids[i] == key_ids[j] and query_ids[i] >= 0))
            )
    return seen
