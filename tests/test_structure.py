"""The floor plan holds: imports go downwards only, and the project speaks of itself alone."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ["plugins", "runtime", "exporter", "calibrate", "tools"]  # bottom up
HEAVY = {"torch", "onnx", "onnx_ir", "onnxruntime", "skimage", "matplotlib", "jinja2", "triton", "tensorrt", "cuda"}
HEAVY |= {"av"}


def sources():
    return [(floor, path) for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_go_downwards_only(floor):
    allowed = set(FLOORS[: FLOORS.index(floor) + 1])
    checked = 0
    for mine, path in sources():
        if mine != floor:
            continue
        for module in imports(ast.parse(path.read_text())):
            checked += 1
            if module.startswith("toprovar."):
                assert module.split(".")[1] in allowed, f"{path} imports {module}"
    assert checked


def test_the_command_line_and_the_runtime_import_nothing_heavy_at_the_top():
    for path in [ROOT / "tools" / "cli.py", ROOT / "tools" / "console.py", *(ROOT / "runtime").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for node in top:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            assert not {name.split(".")[0] for name in names} & HEAVY, f"{path}: {names}"


def test_every_package_folder_is_listed_for_the_build():
    listed = set(re.findall(r'"toprovar\.([\w.]+)"[,\n\] ]', (ROOT / "pyproject.toml").read_text()))
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for floor in FLOORS
        for path in (ROOT / floor).rglob("__init__.py")
    }
    assert found <= listed, f"missing in pyproject.toml: {sorted(found - listed)}"


def test_every_data_file_is_packed_into_the_wheel():
    text = (ROOT / "pyproject.toml").read_text()
    patterns = {
        package.replace(".", "/"): re.findall(r'"([^"]+)"', globs)
        for package, globs in re.findall(r'^"toprovar\.([\w.]+)" = \[(.*)\]$', text, re.MULTILINE)
    }
    checked = 0
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*"):
            if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts:
                folder = str(path.parent.relative_to(ROOT))
                assert any(path.match(glob) for glob in patterns.get(folder, [])), f"{path} is not packed"
                checked += 1
    assert checked >= 8


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.md")), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_in_markdown_resolve(path):
    if ".venv" in path.parts or "out" in path.parts:
        return
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), f"{path}: {target}"
