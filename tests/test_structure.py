"""The shape of the project: which part may import which, and how large a file may be."""

import ast
import subprocess

import pytest

from conftest import ROOT

# Each part may import those before it, and itself.
PIPELINE = ["common", "data", "recipes", "plots", "benchmarks", "compare", "quickstart"]
PACKAGE = [
    *("ops", "modules", "rouge", "checkpoint_files", "models", "compat", "criterions", "optim"),
    "tasks",
    "__init__",
]
LARGEST = 600  # lines of a file
BOUNDS = {"README.md": 170, "scripts": 7_120, "talk_fairseq": 5_503}


def tracked(*patterns):
    """The files that git knows, as paths from the project's root."""
    done = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return [path for path in done.stdout.splitlines() if (ROOT / path).is_file()]


def lines(path):
    return len((ROOT / path).read_bytes().split(b"\n")) - 1


def imports(path):
    """The dotted names of the modules that a Python file imports, wherever in it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: expected full names in imports, got a relative one"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upwards(folder, package, parts):
    """``["a.py imports b", …]`` of the imports that go from a part to one after it."""
    found = []
    for path in tracked(f"{folder}/*.py"):
        part = path.removeprefix(f"{folder}/").partition("/")[0].removesuffix(".py")
        if part not in parts:
            assert path == f"{folder}/__init__.py" or part in ("__init__",), path
            continue
        for name in imports(path):
            root, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if root == package and other in parts and parts.index(other) > parts.index(part):
                found.append(f"{path} imports {other}")
    return found


def test_nothing_in_the_pipeline_imports_what_stands_above_it():
    assert upwards("scripts/pipeline", "pipeline", PIPELINE) == []


def test_nothing_in_the_package_imports_what_stands_above_it():
    assert upwards("talk_fairseq", "talk_fairseq", PACKAGE) == []


def test_the_package_knows_nothing_of_the_pipeline():
    assert [
        p for p in tracked("talk_fairseq/*.py") if any("pipeline" in n for n in imports(p))
    ] == []


def test_no_path_is_extended():
    files = tracked("scripts/*.py", "talk_fairseq/*.py", "hubconf.py", "tests/conftest.py")
    assert [path for path in files if "sys.path" in text(path)] == []


def text(path):
    return (ROOT / path).read_text(encoding="utf-8")


def test_commands_are_short():
    """What is in ``scripts/`` itself starts a program of the pipeline, and does nothing else."""
    commands = [p for p in tracked("scripts/*.sh", "scripts/*.py") if p.count("/") == 1]
    long = {path: lines(path) for path in commands if lines(path) > 20}
    assert long.keys() <= {"scripts/setup.sh", "scripts/test.sh"}, long


def test_no_file_is_long():
    files = tracked("*.py", "*.sh", "*.md", "*.cu", "*.cuh", "*.h", "*.cpp", "*.cfg", "*.yaml")
    long = {path: lines(path) for path in files if lines(path) > LARGEST}
    assert long.keys() <= {"CHANGELOG.md", "kernels/backward.cuh"}, long


@pytest.mark.parametrize("folder, most", BOUNDS.items())
def test_sizes(folder, most, figure):
    files = tracked(folder)
    if folder == "talk_fairseq":
        files = [path for path in files if path.endswith(".py")]
    count = sum(map(lines, files))
    figure(f"{folder}: {count:,} lines")
    assert count <= most
