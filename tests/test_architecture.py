"""The rules of ARCHITECTURE.md that a program can check."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHAIN = ["sharding", "pallas_kernels", "quant", "jaxflash"]  # each imports only what stands to its left
FILES = sorted(p for package in CHAIN for p in (ROOT / package).rglob("*.py"))
# The only files that may touch Pallas's Mosaic GPU dialect.
MOSAIC = re.compile(r"pallas_kernels/(mosaic\w*|\w+/hopper\w*)\.py")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_left_along_the_chain(path):
    mine = CHAIN.index(path.relative_to(ROOT).parts[0])
    for module, _ in imports(path):
        top = module.split(".")[0]
        assert top not in CHAIN or CHAIN.index(top) <= mine, f"{name(path)} imports {module}"


FAMILY_FILES = [p for p in FILES if len(p.relative_to(ROOT).parts) == 3 and p.relative_to(ROOT).parts[0] == CHAIN[1]]


@pytest.mark.parametrize("path", [p for p in FAMILY_FILES if p.name != "api.py"], ids=name)
def test_inside_a_kernel_family_only_api_imports_implementations(path):
    family = path.parent.name
    # Facts, the mathematics of a tile, the layout of packed operands; kernels share plans and configurations.
    shared = ("spec", "tile", "layout", "blocks", "fp8")
    if path.name.startswith("hopper"):
        shared += ("blocks", "hopper_config", "hopper_fp8_config", "hopper_walk", "hopper_reader", "hopper_bwd_plan")
    if path.name == "hopper_fp8.py":
        shared += ("hopper_fp8_prologue",)  # a kernel that makes its operands
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[:2] == ["pallas_kernels", family]:
            assert parts[2] in shared, f"{name(path)} imports {module}"
        elif parts[0] == "pallas_kernels" and len(parts) > 2:
            assert not (ROOT / "pallas_kernels" / parts[1]).is_dir(), f"{name(path)} imports another family: {module}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_mosaic_is_touched_by_kernels_only(path):
    for module, _ in imports(path):
        assert "mosaic_gpu" not in module or MOSAIC.fullmatch(name(path)), f"{name(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_is_guarded_or_chosen_by_catching(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"everything"}
            assert not caught & {"everything", "ImportError", "ModuleNotFoundError", "Exception", "BaseException"}, (
                f"{name(path)}:{node.lineno} catches {caught}"
            )


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_environment_variables_and_no_clashing_import(path):
    text = path.read_text()
    # mesh.py sets XLA's thread count, which has no other switch; nothing is configured through the environment.
    assert "getenv" not in text and ("os.environ" not in text or name(path) == "sharding/mesh.py")
    assert not any(module == "jax.sharding" and isinstance(node, ast.ImportFrom) for module, node in imports(path))


def test_only_device_py_probes_the_host():
    """In the kernel packages, and so in every kernel builder; a mesh is made of devices and may list them."""
    probe = re.compile(r"jax\.(local_)?devices\(|default_backend\(|device_kind")
    kernels = [p for p in FILES if p.relative_to(ROOT).parts[0] in ("pallas_kernels", "quant")]
    assert [name(p) for p in kernels if probe.search(p.read_text())] == ["pallas_kernels/device.py"]


def test_packages_are_the_four_and_sizes_stay_small():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert sorted(wheel["packages"]) == sorted(CHAIN)
    for path in FILES:
        lines = len(path.read_text().splitlines())
        limit = 700 if MOSAIC.fullmatch(name(path)) else 400
        assert lines <= limit, f"{name(path)} has {lines} lines: split it, or say in ARCHITECTURE.md why not"


def test_readme_tree_names_every_folder():
    readme = (ROOT / "README.md").read_text()
    for folder in [*CHAIN, "tests", "notebooks"]:
        assert re.search(rf"^{folder}/ ", readme, re.MULTILINE), f"README's tree lacks {folder}/"


def test_no_machine_paths_and_nothing_of_the_workplace():
    for path in [*FILES, *ROOT.glob("*.md"), *(ROOT / "tests").rglob("*.py")]:
        text = path.read_text()
        assert "/work" + "/main" not in text and "/work" + "/shared" not in text, name(path)
