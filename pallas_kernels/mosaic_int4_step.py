"""What one warpgroup multiplies at a time by a packed 4-bit weight."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one warpgroup multiplies at a time: `rows` columns of W (16, 32 or 64), `k` rows of W, `tokens` rows of x.

    Its four warps take 16 columns each and, where `rows` is less than 64, different runs of `unit` rows of W in turn:
    rows p * rows ... of an accumulator (64, tokens) are the p-th warps' share of the sum, for p < `parts`.
    `group` rows of W share a scale.
    """

    rows: int
    k: int
    tokens: int
    group: int
    dtype: str
    scale_dtype: str

    @property
    def parts(self) -> int:
        return 64 // self.rows

    @property
    def unit(self) -> int:
        """Rows of W that a warp multiplies in a row: whole tiles, and whole groups but for a group of all rows."""
        return 64 * max(1, min(self.group, 128) // 64)

    @property
    def scale_rows(self) -> int:
        """Groups that a step meets."""
        return max(1, self.k // self.group)

    def scale_row(self, k: int) -> int:
        """That of row k of the step."""
        return 0 if self.scale_rows == 1 else k // self.group
