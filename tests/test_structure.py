"""The house rules that a machine can check."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each room may import the rooms named here, and itself.
ALLOWED = {
    "kernels": set(),
    "model": {"kernels"},
    "train/step": {"kernels", "model", "train/data"},
    "train/data": set(),
    "train/run": {"kernels", "model", "train/step", "train/data", "train"},
    "train": {"kernels", "model", "train/step", "train/data", "train/run"},
    "configs": set(),
}


def room(parts: tuple[str, ...]) -> str:
    """The floor (or room of train/) that a module belongs to."""
    nested = "/".join(parts[:2])
    return nested if nested in ALLOWED else parts[0]


def imports(path: Path) -> set[str]:
    """Rooms of this project that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
        for name in names:
            parts = tuple(name.split("."))
            if parts[0] in ALLOWED:
                found.add(room(parts))
    return found


@pytest.mark.parametrize("top", ["kernels", "model", "train", "configs"])
def test_imports_never_point_upwards(top):
    files = sorted((ROOT / top).rglob("*.py"))
    assert files
    for path in files:
        here = room(path.relative_to(ROOT).with_suffix("").parts)
        assert imports(path) <= ALLOWED[here] | {here}, path


def test_no_other_top_level_folder():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    folders = {name.split("/")[0] for name in listed if "/" in name}
    assert folders <= {"kernels", "model", "train", "configs", "notebooks", "tests", ".ci"}
