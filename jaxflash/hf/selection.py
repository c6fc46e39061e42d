"""Which linears of a model a quantisation is of: names, parts of names, and patterns, as configurations give them."""

import re
from dataclasses import dataclass

from pallas_kernels.dispatch import Unsupported

# A pattern is downloaded text, and Python's matcher tries all ways to match one: each operator multiplies their number
# by a name's length at most. These bounds keep that below seconds, and real patterns below them.
_MAX_PATTERNS = 64
_MAX_LENGTH = 200
_MAX_OPERATORS = 4
_OPERATOR = re.compile(r"[*+?{(]")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Linears by their whole name, by a part of it, or by a regular expression that its beginning matches.

    Raises Unsupported for patterns that could run for long, ValueError for what is no pattern.
    """

    names: frozenset[str] = frozenset()
    parts: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    def __post_init__(self):
        if len(self.parts) + len(self.patterns) > _MAX_PATTERNS:
            _refuse(f"{len(self.parts) + len(self.patterns)} patterns of names, more than {_MAX_PATTERNS}")
        for pattern in self.patterns:
            plain = re.sub(r"\\.|\[[^]]*\]", "x", pattern)
            operators = len(_OPERATOR.findall(plain))
            # A repeated group would multiply by itself.
            if len(pattern) > _MAX_LENGTH or operators > _MAX_OPERATORS or re.search(r"\)[*+?{]|\\[1-9]", pattern):
                _refuse(f"the pattern {pattern[:80]!r}, which could run for long")
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(
                    f"load: quantization_config has {pattern!r} - no regular expression ({error}). Fetch it again."
                ) from error

    def __contains__(self, name: str) -> bool:
        return (
            name in self.names
            or any(part in name for part in self.parts)
            or any(re.match(pattern, name) for pattern in self.patterns)
        )


def _refuse(reason: str) -> None:
    raise Unsupported(f"load: quantization_config has {reason}. Name the linears instead.", [("patterns", reason)])
