"""What README.md and docs/ tell people to type works: Python, commands, links and tables."""

import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
TEXT = PAGES["README.md"]
RESULTS = ("results", "summaries", "scaling", "benchmarks")  # pages with the details of its tables


def blocks(page, *languages):
    """The code blocks of a page in these languages, in order."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", PAGES[page], re.M | re.S)
    return [text for language, text in found if language in languages]


def prose(page):
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", PAGES[page], flags=re.M | re.S)


def write_files(page, folder):
    """Write the blocks that begin with a file's name as a comment; return the other blocks.

    Those of a file of the project quote it.
    """
    others = []
    for text in blocks(page, "python", "yaml"):
        if named := re.match(r"# ([\w/]+\.(?:py|yaml))\n", text):
            if named[1].startswith("configs/"):
                assert text[named.end() :] in (ROOT / named[1]).read_text()
                continue
            path = folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        else:
            others.append(text)
    return others


# --- Text ---


def test_the_readme_is_short():
    assert len(TEXT.splitlines()) <= 170


@pytest.mark.parametrize("page", PAGES)
def test_no_number_is_left_to_fill_in(page):
    assert not re.search(r"^[A-Z]+-[A-Z]+$", PAGES[page], re.M)


def anchors(text):
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_files_and_scripts_exist(page):
    folder = (ROOT / page).parent
    for link in re.findall(r"\]\((?!http)([^)]+)\)", prose(page)):
        name, _, anchor = link.partition("#")
        target = (folder / name).resolve() if name else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
    for name in re.findall(r"(?:scripts|tests|configs|docs)/\w+\.\w+", PAGES[page]):
        assert (ROOT / name).exists(), name


def test_every_page_is_linked():
    """From README.md, or from a page that it links."""
    linked, queue = set(), ["README.md"]
    while queue:
        page = queue.pop()
        linked.add(page)
        for name in re.findall(r"\]\(([\w./]+\.md)", PAGES[page]):
            name = os.path.normpath(os.path.join(os.path.dirname(page), name))
            if name in PAGES and name not in linked:
                queue.append(name)
    assert linked == set(PAGES)


def script_text(name):
    """The source of a script and of what it runs or shares, where its options are."""
    own = (ROOT / name).read_text()
    others = [ROOT / "scripts" / other for other in re.findall(r"\b\w+\.(?:py|sh)\b", own)]
    modules = re.findall(r"run\.(?:sh|py)\"? ([\w.]+)|run\(\"([\w.]+)\"\)", own)
    others += [pipeline_file("".join(names)) for names in modules]
    text = own + "".join(path.read_text() for path in others if path.exists())
    shared = set()
    for module, names in re.findall(r"^from pipeline\.([\w.]+) import (.+)", text, re.M):
        shared |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
    paths = (pipeline_file(module) for module in sorted(shared))
    return text + "".join(path.read_text() for path in paths if path.exists())


def pipeline_file(module):
    """The file of a module of the pipeline."""
    return ROOT / "scripts/pipeline" / f"{module.replace('.', '/')}.py"


@pytest.mark.parametrize("page", PAGES)
def test_options_of_scripts_exist(page):
    """Also in the text: each `--option` in the code that names a script is one of that script."""
    commands = [text.replace("\n", " ") for text in re.findall(r"`([^`]*)`", prose(page))]
    for text in blocks(page, "bash"):
        commands += text.replace("\\\n", " ").splitlines()
    for command in commands:
        if not (script := re.search(r"\bscripts/(?!test\.sh)\w+\.(?:py|sh)\b", command)):
            continue  # scripts/test.sh hands its arguments to pytest
        source = script_text(script[0])
        after = command[script.end() :].split(" #")[0]
        for option in re.findall(r"(?<![\w'\"-])--([a-z][\w-]*)", after):
            made, last = option.replace("-", "[-_]"), option.rpartition("-")[2]
            # The others are made from tables, of sizes or of names, or for each side.
            known = rf"--{option}\b(?!-)|\b{made}=\d|\"{option}\"|--{{side}}-{last}\b"
            assert re.search(known, source), f"{command}: --{option}"


# --- Code ---

WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python(page, tmp_path, monkeypatch):
    """The blocks of a page one after the other, as a reader would paste them."""
    if page == "docs/own_variant.md":
        pytest.importorskip("fairseq")
        # Its copy would register the same models anew.
        monkeypatch.setitem(sys.modules, "my_variant", importlib.import_module("windows"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = {}
    for text in write_files(page, tmp_path):
        exec(compile(text, page, "exec"), names)


SMALL_SIZES = {  # what the models are made to be
    f"{side}_{name}": 32
    for side in ("encoder", "decoder")
    for name in ("embed_dim", "ffn_embed_dim")
}

COMMANDS = {  # how many each page has
    "README.md": 4,
    "docs/quickstart.md": 1,
    "docs/checkpoints.md": 1,
    "docs/own_data.md": 17,
    "docs/own_variant.md": 2,
}


def make_texts(verses, folder):
    """The texts that the pages speak of, out of a few verses."""
    for name in ("my_text", "my_articles"):
        (folder / name).mkdir()
    for path in verses.glob("*.e[sn]"):
        language = {".es": ".source", ".en": ".target"}[path.suffix]
        shutil.copy(path, folder / "my_text")
        shutil.copy(path, folder / "my_articles" / (path.stem + language))


def learn_pieces(text, path):
    """A SentencePiece model of a file."""
    import sentencepiece

    with contextlib.closing(io.BytesIO()) as model:
        sentencepiece.SentencePieceTrainer.train(
            input=str(text), model_writer=model, vocab_size=300, model_type="bpe", minloglevel=2
        )
        path.write_bytes(model.getvalue())


# These commands take minutes.
LONG_PAGES = ("docs/own_data.md",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.long] * (page in LONG_PAGES)) for page in COMMANDS],
)
def test_commands(page, corpus, trained, tmp_path):
    """Each command, on a small corpus and for one epoch; the quick starts have their own tests."""
    quickstart = tmp_path / "quickstart"
    (quickstart / "corpus").mkdir(parents=True)
    (quickstart / "binarised").symlink_to(corpus)
    (quickstart / "averaged.pt").symlink_to(trained)
    learn_pieces(corpus.parent / "train.es", quickstart / "corpus/sentencepiece.model")
    for name in ("talk_fairseq", "scripts", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    make_texts(corpus.parent, tmp_path)
    if page == "docs/checkpoints.md":
        (tmp_path / "checkpoints").mkdir()
        shutil.copy(trained, tmp_path / "checkpoints/checkpoint1.pt")
    write_files(page, tmp_path)

    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    commands = [line for line in lines if re.match(r"(echo .*)?fairseq-|python |cp |export ", line)]
    script = ["set -euo pipefail"]
    for command in commands:
        name = re.search(r"fairseq-[\w-]+|\w+\.py|export|cp", command)[0]
        command = re.sub(r"(--last-epochs) \d+", r"\1 1", command)
        command = re.sub(r"--(vocabulary) \d+", r"--\1 300", command)
        if name == "fairseq-train":
            command += " --max-epoch 1 --log-format none"
        if name == "fairseq-hydra-train":
            command += " optimization.max_epoch=1 common.log_format=none"
        if "-train" in name:
            for size, value in SMALL_SIZES.items():
                if name == "fairseq-hydra-train":
                    command += f" +model.{size}={value}"
                elif "decoder" in size or "language_modeling" not in command:
                    command += f" --{size.replace('_', '-')} {value}"
        if name in ("fairseq-generate", "fairseq-interactive"):
            command += " --max-len-b 5"
        if page != "README.md" and name in ("fairseq-train", "fairseq-generate"):
            command += " --num-workers 0"  # for which PyTorch would wait 5 seconds to end
        script.append(command)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PWD": str(tmp_path)}
    subprocess.run(["bash", "-c", "\n".join(script)], check=True, cwd=tmp_path, env=environment)
    for text in blocks(page, "py"):
        subprocess.run([sys.executable, "-c", text], check=True, cwd=tmp_path, env=environment)
    assert len([line for line in commands if not re.match("export |cp ", line)]) == COMMANDS[page]
    if page == "docs/quickstart.md":
        assert (tmp_path / "windows.encoder.png").exists()


def test_commands_of_all_pages_are_tested():
    """Here, or in the tests of the benchmarks."""
    for page in PAGES:
        if re.search(r"^(fairseq-|python )", "".join(blocks(page, "bash")), re.M):
            assert page in (*COMMANDS, "docs/benchmarks.md"), page


# --- Tables ---

ARCHS = [
    row for row in re.findall(r"^\| `(talkconv\w*)` \| (\d.*) \|$", PAGES["docs/models.md"], re.M)
]


@pytest.mark.parametrize("arch, columns", ARCHS, ids=[arch for arch, _ in ARCHS])
def test_archs(arch, columns):
    """The sizes and windows in the tables of docs/models.md are those of the archs."""
    pytest.importorskip("fairseq")
    import test_talkconv
    import test_talkconv_lm

    sizes, layers, windows, million = (column.strip() for column in columns.split("|"))
    words = {"iwslt": (8848, 6632), "fr": (40000,), "cnndm": (30000,), "wiki103": (267744,)}
    words = next((words[name] for name in words if name in arch), (32768,))
    if "_lm" in arch:
        model = test_talkconv_lm.build(test_talkconv_lm.from_flags("--arch", arch), *words)
        sides = [model.decoder.layers]
    else:
        shared = ["--share-all-embeddings"] if len(words) == 1 else []
        model = test_talkconv.build(test_talkconv.from_flags("--arch", arch, *shared), *words)
        sides = [model.encoder.layers, model.decoder.layers]
    assert layers == " + ".join(str(len(side)) for side in sides)
    for side, text in zip(sides, windows.split(";")):
        stated = test_talkconv.window_list(arch, text.strip(), len(side))
        assert [layer.self_attn.conv.max_left for layer in side] == stated
        for layer in side:
            heads = layer.self_attn.conv.heads
            assert sizes.split(", ")[:3] == [
                str(size) for size in (layer.embed_dim, layer.fc1.out_features, heads)
            ]
            assert layer.self_attn.glu == ("no GLU" not in sizes)
    if million:
        count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        assert f"{count:.1f}M" == million.split(" ")[0]


def test_all_archs_are_listed():
    pytest.importorskip("fairseq")
    from fairseq.models import ARCH_MODEL_REGISTRY

    import talk_fairseq  # noqa: F401

    archs = {name for name in ARCH_MODEL_REGISTRY if name.startswith("talkconv")}
    assert archs <= set(re.findall(r"`(talkconv\w*)`", PAGES["docs/models.md"]))
    of_the_papers = {name for name in archs if not re.search("plus|recall", name)}
    assert of_the_papers == {arch for arch, _ in ARCHS}  # whose rows test_archs checks


def test_the_readme_agrees_with_the_results():
    """Each number of the README's tables of results is on the pages with the details."""
    details = "".join(PAGES[f"docs/{page}.md"] for page in RESULTS)
    tables = re.search(r"^## \[Results\]\S+$(.*?)^## ", TEXT, re.M | re.S)[1]
    rows = re.findall(r"^\|(.*)\|$", tables, re.M)
    assert len(rows) > 10
    for row in rows:
        for number in re.findall(r"[\d,]*\d\.?\d*", row.split("|", 1)[1]):
            alone = rf"(?<![\d.,]){re.escape(number)}(?![.,]?\d)"
            assert re.search(alone, details), f"{number} in {row}"


# --- Other files ---


def test_hooks_run_the_linters_of_the_tests():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    lines = (ROOT / "scripts/test.sh").read_text().splitlines()
    linters = [line for line in lines if line.startswith(("ruff ", "shellcheck "))]
    assert len(linters) == 3
    for line in linters:
        words = [word for word in shlex.split(line) if word.isalpha() or word.startswith("--")]
        assert " ".join(words) in hooks, line
