"""Every public name and signature, as text under tests/golden: changing one is a decision, never an accident."""

import dataclasses
import inspect
from pathlib import Path

import jaxflash

GOLDEN = Path(__file__).parent / "golden" / "public_api.txt"


def describe() -> str:
    lines = []
    for name in sorted(n for n in vars(jaxflash) if not n.startswith("_")):
        value = getattr(jaxflash, name)
        if inspect.ismodule(value):  # submodules appear as attributes once imported
            continue
        if dataclasses.is_dataclass(value):
            lines.append(f"{name}: dataclass")
            for field in dataclasses.fields(value):
                default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
                lines.append(f"    {field.name}{default}")
        elif inspect.isclass(value):
            lines.append(f"{name}: class")
            lines += [f"    {m}" for m, f in sorted(vars(value).items()) if not m.startswith("_") and callable(f)]
        else:
            parameters = inspect.signature(value).parameters.values()
            lines.append(f"{name}({', '.join(str(p.replace(annotation=p.empty)) for p in parameters)})")
    return "\n".join(lines) + "\n"


def test_public_api_is_the_snapshot():
    assert describe() == GOLDEN.read_text(), "run `python -m tests.test_public_api` if the change is meant"


if __name__ == "__main__":
    GOLDEN.write_text(describe())
