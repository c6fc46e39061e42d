"""The nearest known name, for errors about unknown ones."""

import difflib
from collections.abc import Iterable

_FEW = 8


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint: the nearest of `known`, if any is near, and all of them where they are few or none is near.

    >>> did_you_mean("tinny", ["tiny", "1b"])
    "Did you mean 'tiny'? Known: tiny, 1b."
    >>> did_you_mean("zzz", ["tiny", "1b"])
    'Known: tiny, 1b.'
    """
    known = [str(k) for k in known]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hints = [f"Did you mean {near[0]!r}?"] if near else []
    if not near or len(known) <= _FEW:
        hints.append(f"Known: {', '.join(known)}.")
    return " ".join(hints)
