"""How a weight is to be quantised: the facts that every method shares."""

from dataclasses import dataclass

from pallas_kernels.fp8.spec import check_scaling
from pallas_kernels.w4a16.spec import GROUPS, SCALE_DTYPES

BITS = (2, 3, 4, 8)
STORED_BITS = 4


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe:
    """Weights of 8-bit floats (e4m3), rounded to nearest, with scales by "block" of 128 x 128, "row" or "tensor".

    Raises ValueError for another scaling.
    """

    scaling: str = "block"

    def __post_init__(self):
        check_scaling("Fp8Recipe", self.scaling)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Weights of `bits` bits with a scale for every `group` rows of a column.

    bits: 4 is what an Int4Tensor stores; 2, 3 and 8 are simulated (`quant.grid.Codes`). group: 32, 64 or 128 rows, or
    None for the whole column. symmetric: zero is code 2^(bits-1); otherwise every group has a zero point of its own.
    scale_dtype: bfloat16 has the range of any weight, float16 three more bits of precision.

    Raises ValueError for anything else.
    """

    bits: int = 4
    group: int | None = 128
    symmetric: bool = True
    scale_dtype: str = "bfloat16"

    def __post_init__(self):
        if self.bits not in BITS:
            raise ValueError(f"Recipe: bits={self.bits} - must be one of {BITS}. Keep the weights dense for more.")
        if self.group is not None and self.group not in GROUPS:
            raise ValueError(f"Recipe: group={self.group} - must be one of {GROUPS}, or None for the whole column.")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"Recipe: scale_dtype={self.scale_dtype!r} - must be one of {SCALE_DTYPES}.")

    @property
    def last(self) -> int:
        """The largest code; the smallest is 0."""
        return 2**self.bits - 1

    @property
    def symmetric_zero(self) -> int:
        """The code of 0 where `symmetric`."""
        return 2 ** (self.bits - 1)

    def group_rows(self, rows: int) -> int:
        """Rows of a group of a weight of that many rows; the last group may have fewer."""
        return rows if self.group is None else min(self.group, rows)

    def check_stored(self, op: str) -> None:
        """Raises ValueError, in the name of `op`, for bits that no packed weight has."""
        if self.bits != STORED_BITS:
            raise ValueError(
                f"{op}: bits={self.bits} - packed weights have {STORED_BITS}. jaxflash.quantize simulates others."
            )
