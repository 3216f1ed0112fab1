#!/usr/bin/env python3
"""Test with each supported Python, torch and NumPy; see scripts/test_matrix.sh --help."""

import argparse
import configparser
import fnmatch
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from pipeline.common.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12")
# Operators, state, modules, models, published checkpoints, the commands of fairseq, and untrusted
# files. Left out is what takes half of the time to do more of the same.
TESTS = ["-n", "2", "--dist", "loadfile", "-m", "not slow"]
TESTS += ["-k", "not (500 or ensemble or fusion or generation_modes)"]
NAMES = "operator short_conv decoding modules talkconv released compat hostile"
TESTS += [f"tests/test_{name}.py" for name in NAMES.split()]

DESCRIPTION = """\
Runs the fast tests of operators, modules, models, decoding, published checkpoints, fairseq's
commands and untrusted files with each supported Python (3.11, 3.12), torch and NumPy: the lowest
version that setup.cfg allows and that of constraints.txt, which pins the rest. Each combination has
a folder of its own with a copy of this checkout (uncommitted changes included, what git ignores
not) and the .venv that scripts/setup.sh makes in it. Prints a table, and writes it with all numbers
to matrix.json.

A combination that has passed with these files and these tests is not run again; one that fails
does not stop the others. One whose Python or packages are not to be had says so, and has not
passed. The status is 1 if any has failed, or none has passed.

Pythons are searched as python3.11 and python3.12 on the PATH, and under pyenv. pip's own settings
(PIP_INDEX_URL, PIP_FIND_LINKS …) say where packages come from; with torch for CUDA an environment
takes up to 7 GB, with torch for the CPU 2 GB.
"""
EPILOG = """\
examples:
  scripts/test_matrix.sh
  scripts/test_matrix.sh --only 'python3.12-*-numpy1.*' --remove
  scripts/test_matrix.sh -- tests/ops/test_operator.py -k oracle
"""


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="scripts/test_matrix.sh",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / ".matrix",
        metavar="DIR",
        help="where the environments are made, and matrix.json (default: .matrix)",
    )
    parser.add_argument(
        "--only", metavar="PATTERN", help="combinations whose name has it; * is anything"
    )
    parser.add_argument("--list", action="store_true", help="print the combinations, run none")
    parser.add_argument("--restart", action="store_true", help="also run those that have passed")
    parser.add_argument(
        "--remove", action="store_true", help="remove each environment after its tests"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60,
        metavar="N",
        help="for the tests of one combination, which fails if they take longer (default: 60)",
    )
    parser.add_argument(
        "tests",
        nargs="*",
        metavar="-- TESTS",
        help="arguments of pytest, in place of the selection of fast tests",
    )
    args = parser.parse_args(arguments)
    if args.minutes <= 0:
        parser.error(f"--minutes: expected more than 0, got {args.minutes:g}")
    args.chosen = [
        combination
        for combination in combinations()
        if fnmatch.fnmatchcase(combination["name"], f"*{args.only or ''}*")
    ]
    if not args.chosen:
        names = ", ".join(combination["name"] for combination in combinations())
        parser.error(f"--only: expected a part of {names}, got {args.only}")
    args.tests = args.tests or TESTS
    args.out = args.out.resolve()
    return args


# --- What is combined ---


def lowest(package):
    """The lower bound of `package` in setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return re.search(rf"^{package}>=([\d.]+)", config["options"]["install_requires"], re.M)[1]


def pinned(package):
    """The version of `package` in constraints.txt."""
    return re.search(rf"^{package}==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)[1]


def combinations():
    """``{"name", "python", "torch", "numpy"}`` of each, the lowest versions first."""
    versions = [dict.fromkeys([lowest(name), pinned(name)]) for name in ("torch", "numpy")]
    return [
        {
            "name": f"python{python}-torch{torch}-numpy{numpy}",
            "python": python,
            "torch": torch,
            "numpy": numpy,
        }
        for python, torch, numpy in itertools.product(PYTHONS, *versions)
    ]


def constraints(combination):
    """The text of constraints.txt with the versions of `combination`."""
    wanted = {package: combination[package] for package in ("torch", "numpy")}
    text = (ROOT / "constraints.txt").read_text()
    if wanted["torch"] != pinned("torch"):
        wanted["torchaudio"] = wanted["torch"]  # one was made for the other
        text = re.sub(r"^nvidia-.*\n", "", text, flags=re.M)  # torch for CUDA names its own
    for package, version in wanted.items():
        text = re.sub(rf"^{package}==.*", f"{package}=={version}", text, flags=re.M)
    return text


def find_python(version):
    """The path of a Python of this version, such as 3.12, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    under_pyenv = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)
    tell = "import sys; print(*sys.version_info[:2], sep='.')"
    for candidate in (shutil.which(f"python{version}"), *under_pyenv):
        if candidate:
            # pyenv's python3.12 on the PATH may be a script that only says which to choose.
            done = subprocess.run([candidate, "-c", tell], capture_output=True, text=True)
            if done.stdout.strip() == version:
                return str(candidate)
    return None


# --- Running one ---


def git(*arguments):
    return subprocess.check_output(["git", "-C", ROOT, *arguments], text=True)


def take_snapshot(folder, out):
    """Copy what git does not ignore, but nothing under `out`, to `folder`; returns its digest."""
    digest = hashlib.sha256()
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in sorted(set(listed)):
        path = ROOT / name
        if not path.is_file() or out in path.parents:
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, folder / name)
        digest.update(f"{name}\0{path.stat().st_mode & 0o111}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def place(snapshot, folder, combination):
    """Copy the checkout to `folder`, which may have an older one; its .venv stays."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name != ".venv":
            shutil.rmtree(path)
        elif path.name != ".venv":
            path.unlink()
    shutil.copytree(snapshot, folder, dirs_exist_ok=True)
    (folder / "constraints.txt").write_text(constraints(combination))


def why_not_set_up(log):
    """From what scripts/setup.sh printed: whether packages are not to be had, and the reason."""
    missing = re.findall(r"No matching distribution found for ([^\s;(]+)", log)
    if missing:
        return "not made", f"{missing[-1].replace('==', ' ')}: not to be had"
    lines = [line for line in log.splitlines() if re.match(r"ERROR|setup\.sh: (?!install)", line)]
    return "failed", f"scripts/setup.sh: {' '.join((lines or log.splitlines() or ['?'])[:1])}"


def count(report):
    """Numbers of tests and names of those that failed, from pytest's JUnit report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [case for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    # A test that fails, and then its fixture too, is reported twice.
    names = sorted({f"{case.get('classname')}::{case.get('name')}" for case in bad})
    return {
        "passed": len(cases) - len(bad) - skipped,
        "failed": len(bad),
        "skipped": skipped,
        "failures": names,
    }


def run(combination, snapshot, args):
    """Set up and test one combination; returns its outcome."""
    python = find_python(combination["python"])
    if python is None:
        return {"result": "not made", "reason": f"no Python {combination['python']} here"}
    folder = args.out / combination["name"]
    log = args.out / f"{combination['name']}.log"
    place(snapshot, folder, combination)
    environment = {key: os.environ[key] for key in os.environ.keys() - {"PYTHONPATH"}}
    began = time.monotonic()
    print(f"{combination['name']}: setting up", flush=True)
    with open(log, "w") as output:
        done = subprocess.run(
            [folder / "scripts/setup.sh"],
            env={**environment, "PYTHON": python, "PIP_NO_COMPILE": "1"},  # most is never imported
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    set_up = round(time.monotonic() - began, 1)
    if done.returncode:
        result, reason = why_not_set_up(log.read_text(errors="replace"))
        return {"result": result, "reason": reason, "setup_seconds": set_up, "log": log.name}

    print(f"{combination['name']}: testing", flush=True)
    report = folder / "report.xml"
    began = time.monotonic()
    outcome = {"result": "failed", "setup_seconds": set_up, "log": log.name}
    with open(log, "a") as output:
        try:
            status = subprocess.run(
                [".venv/bin/python", "-m", "pytest", f"--junit-xml={report}", *args.tests],
                cwd=folder,
                env={**environment, "PATH": f"{folder}/.venv/bin:{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=args.minutes * 60,
            ).returncode
        except subprocess.TimeoutExpired:
            return {**outcome, "reason": f"tests took more than {args.minutes:g} minutes"}
    outcome["seconds"] = round(time.monotonic() - began, 1)
    if not report.exists():
        return {**outcome, "reason": f"pytest ended with status {status}"}
    outcome.update(count(report))
    if status == 0 and outcome["passed"]:
        return {**outcome, "result": "passed"}
    if outcome["failures"]:
        return {**outcome, "reason": outcome["failures"][0]}
    return {**outcome, "reason": f"no test passed; pytest ended with status {status}"}


# --- What is told ---


def table(results):
    width = max(len(name) for name in results) + 2
    lines = [f"{'':<{width}}{'':<10}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"]
    for name, result in results.items():
        numbers = [result.get(key, "") for key in ("passed", "failed", "skipped", "seconds")]
        row = f"{name:<{width}}{result['result']:<10}"
        row += "{:>8}{:>8}{:>9}{:>9}".format(*numbers)
        lines.append(row + (f"  {result['reason']}" if "reason" in result else ""))
    passed = sum(result["result"] == "passed" for result in results.values())
    tried = sum(result["result"] != "not made" for result in results.values())
    lines.append(
        f"combinations passed of tried: {passed} of {tried}; not made: {len(results) - tried}"
    )
    return "\n".join(lines)


def read_passed(path, key):
    """The outcomes in an earlier matrix.json that still hold: passed with this `key`."""
    try:
        earlier = json.loads(path.read_text())["combinations"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: expected what this script wrote, got {error!r}") from error
    return {
        name: result
        for name, result in earlier.items()
        if result["result"] == "passed" and {item: result[item] for item in key} == key
    }


def main(arguments=None):
    args = parse(arguments)
    if args.list:
        for combination in args.chosen:
            print(combination["name"], find_python(combination["python"]) or "no Python here")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "matrix.json"
    with tempfile.TemporaryDirectory() as snapshot:
        key = {"files": take_snapshot(Path(snapshot), args.out), "tests": args.tests}
        commit = git("rev-parse", "HEAD").strip()
        changed = bool(git("status", "--porcelain").strip())
        known = {} if args.restart else read_passed(path, key)
        results = {}
        for combination in args.chosen:
            name = combination["name"]
            if name in known:
                results[name] = known[name]
                print(f"{name}: has passed", flush=True)
                continue
            outcome = run(combination, Path(snapshot), args)
            results[name] = {
                **combination, **outcome, "commit": commit, "uncommitted_changes": changed, **key
            }  # fmt: skip
            # Read again: another --only may have written to it.
            everything = {"combinations": {**read_passed(path, key), **results}}
            write_whole(path, json.dumps(everything, indent=1) + "\n")
            print(f"{name}: {outcome['result']}", flush=True)
            if args.remove:
                shutil.rmtree(args.out / name, ignore_errors=True)
    print(f"\n{table(results)}\n{path}")
    ends = [result["result"] for result in results.values()]
    return 1 if "failed" in ends or "passed" not in ends else 0


if __name__ == "__main__":
    sys.exit(main())
