"""The formats of 4-bit weights by name."""

from quant.formats import awq, gptq, pack_quantized
from quant.formats.grid import Format

FORMATS: dict[str, Format] = {
    known.name: known for known in (gptq.V1, gptq.V2, awq.GEMM, awq.GEMV, pack_quantized.FORMAT)
}
WRITTEN: tuple[str, ...] = tuple(name for name, known in FORMATS.items() if known.write is not None)
