"""How a weight is to be quantised: the facts that every method shares."""

from dataclasses import dataclass

from pallas_kernels.w4a16.spec import GROUPS, SCALE_DTYPES


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Weights of 4 bits with a scale for every `group` rows of a column.

    group: 32, 64 or 128 rows, or None for the whole column. symmetric: zero is code 8; otherwise every group has a zero
    point of its own. scale_dtype: bfloat16 has the range of any weight, float16 three more bits of precision.

    Raises ValueError for anything else.
    """

    bits: int = 4
    group: int | None = 128
    symmetric: bool = True
    scale_dtype: str = "bfloat16"

    def __post_init__(self):
        if self.bits != 4:
            raise ValueError(f"Recipe: bits={self.bits} - must be 4. Keep the weights dense for more.")
        if self.group is not None and self.group not in GROUPS:
            raise ValueError(f"Recipe: group={self.group} - must be one of {GROUPS}, or None for the whole column.")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"Recipe: scale_dtype={self.scale_dtype!r} - must be one of {SCALE_DTYPES}.")
