"""Untrusted files: refused with one line that names them, and no code of theirs is run.

Checkpoints through every door, text through the readers and fairseq-interactive, archives through
the prepare scripts. Each group shows how many of the files tried it refused.
"""

import argparse
import copy
import gzip
import hashlib
import io
import itertools
import multiprocessing
import os
import pickle
import random
import stat
import subprocess
import tarfile
import tempfile
import warnings
import zipfile
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch

import published
from conftest import ROOT, fairseq, write_dictionaries
from pipeline.data import archives as prepare_archives
from pipeline.data import corpus as corpora
from pipeline.data import prepare as prepare_benchmark
from pipeline.data import text as prepare_text
from pipeline.data.benchmarks import LISTS
from pipeline.quickstart import perplexities as compare
from pipeline.recipes import average as average

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.binarizer import FileBinarizer, VocabularyDatasetBinarizer
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

from talk_fairseq import checkpoint_files, compat
from talk_fairseq.models.talkconv import TaLKConvModel

WORDS = 97
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with dictionaries of WORDS words."""
    folder = tmp_path_factory.mktemp("dictionaries")
    write_dictionaries(folder, WORDS)
    return folder


OPTIONS = published.translation_args(
    "talkconv_iwslt_de_en",
    encoder_layers=2,
    decoder_layers=1,
    encoder_glu=False,
    decoder_glu=False,
)
WHOLE = published.checkpoint(OPTIONS, WORDS, last_optimizer_state=None)
WHOLE["extra_state"]["train_meters"] = {"loss": np.float64(3.9), "counts": np.arange(4)}


def good(**changes):
    """What a whole checkpoint holds, but for some changes."""
    return {**copy.deepcopy(WHOLE), **changes}


def report(figure, what, refused, tried):
    """Show the figure; all that were tried must have been refused."""
    figure(f"{what}: refused {refused:,} of {tried:,}")
    assert refused == tried > 0


def refusal(door, path):
    """The one line with which `door` refuses the file `path`; None if it takes it."""
    try:
        door(path)
    except (Exception, SystemExit) as error:
        line = str(error)
        assert "\n" not in line and line.isprintable() and len(line) < 1500, line
        assert str(path) in line, f"{type(error).__name__}: {line}"
        return line
    return None


def peak():
    """The most memory of this process since `forget_peak`, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


# --- The doors ---


@pytest.fixture(scope="module")
def trainer(folder):
    """A trainer of the model of `good`."""
    parser = options.get_training_parser()
    flags = (
        "--arch talkconv_iwslt_de_en --encoder-layers 2 --decoder-layers 1 --encoder-max-left "
        "1,3 --decoder-max-left 1 --encoder-embed-dim 32 --decoder-embed-dim 32 "
        "--encoder-ffn-embed-dim 48 --decoder-ffn-embed-dim 48 --criterion cross_entropy "
        "--optimizer adam --max-tokens 100 --source-lang es --target-lang en --cpu"
    )
    args = options.parse_args_and_arch(parser, [str(folder), *flags.split()])
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


@pytest.fixture(scope="module")
def doors(folder, trainer, tmp_path_factory):
    """``{name: function of a path}`` of all that reads checkpoints."""
    output = tmp_path_factory.mktemp("output") / "output.pt"

    def averages(path):
        try:
            average.main(["--inputs", str(path), "--output", str(output)])
        finally:
            assert not list(output.parent.iterdir())

    def compares(path):
        path.with_suffix(".txt").write_text(
            "num. model params: 9\nEvaluated 9 tokens\nLoss (base 2): 5.1,\n"
        )
        compare.read_model(path, 9)

    def from_pretrained(path):
        TaLKConvModel.from_pretrained(
            str(path.parent), checkpoint_file=path.name, data_name_or_path=str(folder)
        )

    return {
        "read_checkpoint": checkpoint_files.read_checkpoint,
        "load_checkpoint_to_cpu": lambda path: checkpoint_utils.load_checkpoint_to_cpu(str(path)),
        "fairseq-generate": lambda path: generates(path, folder),
        "from_pretrained": from_pretrained,
        "--restore-file": lambda path: trainer.load_checkpoint(str(path)),
        "average_checkpoints.py": averages,
        "compare_language_models.py": compares,
    }


def generates(path, folder):
    """As fairseq-generate, -interactive and -eval-lm read the checkpoints of ``--path``."""
    return checkpoint_utils.load_model_ensemble([str(path)], {"data": str(folder)})


def test_a_whole_checkpoint_is_refused_nowhere(doors, folder, tmp_path):
    path = tmp_path / "good.pt"
    torch.save(good(), path)
    for name in ("read_checkpoint", "load_checkpoint_to_cpu", "fairseq-generate"):
        doors[name](path)
    doors["from_pretrained"](path)
    average.main(["--inputs", str(path), "--output", str(tmp_path / "average.pt")])
    meters = checkpoint_files.read_checkpoint(path)["extra_state"]["train_meters"]
    assert type(meters["counts"]) is np.ndarray and type(meters["loss"]) is np.float64


# --- Checkpoints that run code ---


class Call:
    """Pickled, it is a call of `function`, which happens when it is read."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Trap:
    """An object that acts when its state is set."""

    def __init__(self, path):
        self.path = path

    def __setstate__(self, state):
        Path(state["path"]).touch()


def payloads(trap):
    """``{name: object}`` that leave the file `trap` behind when they are read."""
    inner = pickle.dumps(Call(os.system, f"touch {trap}"), protocol=2)
    return {
        "os.system": Call(os.system, f"touch {trap}"),
        "eval": Call(eval, f"open({str(trap)!r}, 'w')"),
        "exec": Call(exec, f"import os; os.mkdir({str(trap)!r})"),
        "open": Call(open, str(trap), "w"),
        "subprocess": Call(subprocess.call, ["touch", str(trap)]),
        "os.makedirs": Call(os.makedirs, str(trap)),
        "np.save": Call(np.save, str(trap) + ".npy", 0),
        "a pickle in it": Call(pickle.loads, inner),
        "__setstate__": Trap(str(trap)),
    }


def places(payload):
    """``{name: state}`` of checkpoints that hold it somewhere."""
    state = good()
    options = argparse.Namespace(**{**vars(state["args"]), "nested": argparse.Namespace(x=payload)})
    return {
        "args": {**state, "args": payload},
        "in args": {**state, "args": options},
        "cfg": {**state, "args": None, "cfg": {"model": {"_name": payload}}},
        "extra_state": {**state, "extra_state": {"train_meters": [payload]}},
        "model": {**state, "model": {**state["model"], "encoder.embed_tokens.weight": payload}},
        "optimizer": {**state, "last_optimizer_state": {"state": {0: (payload,)}}},
        "the whole": payload,
    }


def save_zip(state, path):
    torch.save(state, path)


def save_legacy(state, path):
    torch.save(state, path, _use_new_zipfile_serialization=False)


def save_pickle(state, path):
    path.write_bytes(pickle.dumps(state, protocol=2))


def save_pickle_4(state, path):
    path.write_bytes(pickle.dumps(state, protocol=4))


LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # opens files of torch < 1.6
FORMATS = (save_zip, save_legacy, save_pickle, save_pickle_4)


def sprung(trap):
    """Whether the trap has been touched; sets it again."""
    left = [path for path in trap.parent.iterdir() if path.name.startswith(trap.name)]
    for path in left:
        path.rmdir() if path.is_dir() else path.unlink()
    return bool(left)


def test_the_payloads_are_real(tmp_path):
    trap, path = tmp_path / "trap", tmp_path / "evil.pt"
    for name, payload in payloads(trap).items():
        save_zip({"model": {}, "args": payload}, path)
        torch.load(path, weights_only=False)
        assert sprung(trap), name


def test_code_is_not_run(tmp_path, figure):
    trap, path = tmp_path / "trap", tmp_path / "evil.pt"
    refused = tried = 0
    states = list(places(payloads(trap)["os.system"]).values())
    states += [{"model": {}, "args": payload} for payload in payloads(trap).values()]
    for state in states:
        for save in FORMATS:
            save(state, path)
            tried += 1
            refused += refusal(checkpoint_files.read_checkpoint, path) is not None
            assert not sprung(trap)
    report(figure, "checkpoints that run code, in 4 formats", refused, tried)


def test_code_is_run_at_no_door(doors, tmp_path, figure):
    trap, path = tmp_path / "trap", tmp_path / "evil.pt"
    refused = tried = 0
    for state in places(payloads(trap)["eval"]).values():
        for save in FORMATS:
            save(state, path)
            for door in doors.values():
                tried += 1
                refused += refusal(door, path) is not None
                assert not sprung(trap)
    report(figure, f"checkpoints that run code, at {len(doors)} doors", refused, tried)


def options_that_run(code):
    """``{name: state}`` of checkpoints with `code` in an option that fairseq evaluates."""
    args = vars(OPTIONS)
    language = vars(published.PUBLISHED["language model"]())
    small = {
        f"{side}_{what}_dim": 8 for side in ("encoder", "decoder") for what in ("embed", "out")
    }
    fconv = args | small | {"arch": "fconv", "decoder_out_embed_dim": 8}
    fconv |= {
        "encoder_layers": "[(8, 3)]",
        "decoder_layers": "[(8, 3)]",
        "decoder_attention": "True",
    }
    changes = {
        "encoder_layers": fconv | {"encoder_layers": code},
        "decoder_attention": fconv | {"decoder_attention": code},
        "character_filters": language
        | {"character_embeddings": True, "character_filters": code, "arch": "transformer_lm"},
        "adaptive_softmax_cutoff": args | {"adaptive_softmax_cutoff": code, "arch": "transformer"},
    }
    model = {"encoder.embed_tokens.weight": torch.zeros(WORDS, 8)}
    return {
        name: good(args=argparse.Namespace(**options), model=model)
        for name, options in changes.items()
    }


def test_options_run_no_code(doors, tmp_path, figure):
    trap, path = tmp_path / "trap", tmp_path / "evil.pt"
    refused = tried = 0
    for state in options_that_run(f"[open({str(trap)!r}, 'w')]").values():
        save_zip(state, path)
        tried += 1
        refused += refusal(doors["fairseq-generate"], path) is not None
        assert not sprung(trap)
    for text in ("!!python/object/apply:os.system ['touch {}']", "x: ${{oc.env:HOME}}"):
        save_zip(good(args=None, cfg=text.format(trap)), path)
        tried += 1
        refused += refusal(doors["fairseq-generate"], path) is not None
        assert not sprung(trap)
    report(figure, "options that run code", refused, tried)


def test_the_options_of_fairseq_are_still_evaluated(figure):
    layers = "[(512, 3)] * 9 + [(1024, 3)] * 4 + [(2048, 1)] * 2"
    assert checkpoint_files.evaluate(layers) == [(512, 3)] * 9 + [(1024, 3)] * 4 + [(2048, 1)] * 2
    assert checkpoint_files.evaluate(" (0.9, -1e-8) ") == (0.9, -1e-8)
    assert utils.eval_str_list("5e-4,1/2") == [5e-4, 0.5] and utils.eval_bool("True") is True
    assert utils.eval_str_dict("{'a': None}") == {"a": None} and utils.eval_bool(None, 3) == 3
    bad = ["().__class__", "f()", "[x for x in (1,)]", "9 ** 9 ** 9", "[0] * 9999999 * 9999"]
    bad += ["(lambda: 0)()", "__import__('os')", "f'{1}'", "[0] * (9999999 + 9999999)", "1 +", ""]
    bad += ["(" * 5000, "-" * 100_000 + "1", "1 if 1 else 2", "x", "(y := 3)", "[1][0]", "'%s' % 1"]
    refused = 0
    for text in bad:
        try:
            checkpoint_files.evaluate(text)
        except ValueError as error:
            refused += "\n" not in str(error) and len(str(error)) < 250
    report(figure, "options that are more than plain values", refused, len(bad))


# --- Checkpoints that are truncated, foreign, or of wrong shapes and types ---


def rezip(path, change):
    """Write the archive `path` anew: each record as ``change(name, content)`` says."""
    with zipfile.ZipFile(path) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records:
            archive.writestr(name, change(name, content))


def with_pickle(path, data):
    """A checkpoint whose pickle is `data`, undamaged otherwise."""
    save_zip({"model": {"w": torch.zeros(1000)}}, path)
    rezip(path, lambda name, content: data if name.endswith("data.pkl") else content)


def with_size(old, new):
    """A checkpoint of 1,000 numbers whose pickle says another size."""

    def change(name, content):
        if not name.endswith("data.pkl"):
            return content
        assert old in content, content
        return content.replace(old, new)

    def make(path):
        save_zip({"model": {"w": torch.zeros(1000)}}, path)
        rezip(path, change)

    return make


def legacy_with_size(what, count):
    """As `with_size`: `what` of a checkpoint of torch < 1.6, where `count` sizes are the same."""

    def make(path):
        save_legacy({"model": {"w": torch.zeros(1000)}}, path)
        content = path.read_bytes()
        assert content.count(what) == count
        path.write_bytes(content.replace(what, what.replace(b"M\xe8\x03", b"J\x00\xca\x9a\x3b")))

    return make


def old_tar(path):
    with tarfile.open(path, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            content = pickle.dumps(Call(os.system, "false"), protocol=2)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def holds(**changes):
    def make(path):
        save_zip(good(**changes), path)

    return make


def pickled(data):
    return lambda path: with_pickle(path, data)


def cut(share):
    def make(path):
        save_zip(good(), path)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return make


def cut_legacy(share):
    def make(path):
        save_legacy(good(), path)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return make


def text(content):
    return b"X" + len(content).to_bytes(4, "little") + content


SHAPE, STRIDE = b"M\xe8\x03\x85", b"K\x01\x85"  # in the pickle of 1,000 numbers
EXPANDED = (  # a number that is expanded to 5 million
    b"ctorch._utils\n_rebuild_tensor_v2\n((" + text(b"storage") + b"ctorch\nFloatStorage\n"
    + text(b"0") + text(b"cpu") + b"M\xe8\x03tQK\x00J\x40\x4b\x4c\x00\x85K\x00\x85\x89"
    b"ccollections\nOrderedDict\n)RtR"
)  # fmt: skip
NUMBER = b"\x80\x02cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\n"
BROKEN = {
    "empty": lambda path: path.write_bytes(b""),
    "a folder": lambda path: path.mkdir(),
    "text": lambda path: path.write_text("not a checkpoint\n" * 99),
    "a page": lambda path: path.write_text("<!DOCTYPE html><html>Not found</html>"),
    "zeros": lambda path: path.write_bytes(bytes(9999)),
    "a zip of nothing": lambda path: zipfile.ZipFile(path, "w").close(),
    "a zip of text": lambda path: zipfile.ZipFile(path, "w").writestr("a", "b") or None,
    "a tar": old_tar,
    "another magic": lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(999)),
    "gzip": lambda path: path.write_bytes(gzip.compress(pickle.dumps({"model": {}}))),
    "the magic alone": lambda path: path.write_bytes(LEGACY),
    "a list": lambda path: save_zip([1, 2], path),
    "no model": lambda path: save_zip({"args": None}, path),
    "a model that is a list": holds(model=[torch.zeros(2)]),
    "numbers for tensors": holds(model={"w": 1.0}),
    "tensors without names": holds(model={0: torch.zeros(2)}),
    "terminal codes": holds(model={"\x1b[2J\x1b[31m\n": 1}),
    "complex": holds(model={"w": torch.zeros(2, dtype=torch.complex64)}),
    "quantised": holds(model={"w": torch.quantize_per_tensor(torch.zeros(2), 1, 0, torch.qint8)}),
    "sparse": holds(
        model={"w": torch.sparse_coo_tensor([[0]], [1.0], (10**12,), check_invariants=True)}
    ),
    "meta": holds(model={"w": torch.empty(10**12, device="meta")}),
    "expanded": holds(model={"w": torch.ones(1).expand(10**12)}),
    "expanded elsewhere": holds(extra_state={"x": [(torch.ones(1).expand(10**9),)]}),
    "overlapping": holds(model={"w": torch.ones(9).as_strided((9000, 9), (0, 1))}),
    "a shape beyond the storage": with_size(SHAPE, b"J\0\xca\x9a\x3b\x85"),
    "a stride beyond it": with_size(STRIDE, b"J\0\xca\x9a\x3b\x85"),
    "a negative stride": with_size(STRIDE, b"J\xff\xff\xff\xff\x85"),
    "a negative size": with_size(SHAPE, b"J\xff\xff\xff\xff\x85"),
    "a storage beyond the record": with_size(b"M\xe8\x03", b"J\0\xca\x9a\x3b"),
    "a storage beyond a legacy file": legacy_with_size(b"M\xe8\x03", 2),
    "a shape beyond a legacy storage": legacy_with_size(b"K\x00M\xe8\x03", 1),
    "numpy: an object": pickled(NUMBER + b"X\x02\x00\x00\x00|O\x85RC\x08AAAAAAAA\x86R."),
    "numpy: object fields": holds(extra_state={"x": np.zeros(2, [("a", "O")])}),
    "numpy: objects": holds(extra_state={"x": np.array([None, "a"])}),
    "numpy: a tensor as a shape": pickled(
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R(K\x01" + EXPANDED + b"NNNtb."
    ),
    "numpy: texts": holds(extra_state={"x": np.array(["abc"])}),
    "numpy: records": holds(extra_state={"x": np.zeros(2, [("a", "f8")])[0]}),
    **{f"cut at {share}": cut(share) for share in np.linspace(0.001, 0.999, 25).round(4)},
    **{f"legacy, cut at {share}": cut_legacy(share) for share in np.linspace(0.01, 0.99, 15)},
}  # fmt: skip


def test_broken_checkpoints(doors, tmp_path, figure):
    refused, tried, taken = 0, 0, []
    others = itertools.cycle([door for door in doors if door != "read_checkpoint"])
    for name, make in BROKEN.items():
        path = tmp_path / f"{len(taken)}_{tried}.pt"
        make(path)
        for door in ("read_checkpoint", next(others)):
            if path.is_dir() and door == "--restore-file":
                continue  # fairseq takes it for no checkpoint
            tried += 1
            if refusal(doors[door], path) is None:
                taken.append((name, door))
            else:
                refused += 1
    assert not taken
    report(figure, f"broken checkpoints of {len(BROKEN)} kinds", refused, tried)


# --- Checkpoints that do not fit their options, their dictionary or the run ---


def changed(**tensors):
    """The parameters of `WHOLE`, with some replaced or, where None, left out."""
    model = {**WHOLE["model"], **tensors}
    return {name: value for name, value in model.items() if value is not None}


def option(**changes):
    return {"args": argparse.Namespace(**{**vars(WHOLE["args"]), **changes})}


EMBEDDING, BIAS = "encoder.embed_tokens.weight", "encoder.layers.1.linear1.bias"
DIFFERENT = {
    "a parameter too few": {"model": changed(**{BIAS: None})},
    "a parameter too many": {"model": changed(**{"decoder.layers.0.gate": torch.zeros(2)})},
    "no parameters": {"model": {}},
    "another shape": {"model": changed(**{EMBEDDING: torch.zeros(WORDS, 31)})},
    "another number of dimensions": {"model": changed(**{BIAS: torch.zeros(32, 1, 1)})},
    "more words": {"model": changed(**{EMBEDDING: torch.zeros(WORDS + 1, 32)})},
    "integers": {"model": changed(**{EMBEDDING: torch.zeros(WORDS, 32, dtype=torch.long)})},
    "bytes": {"model": changed(**{EMBEDDING: torch.zeros(WORDS, 32, dtype=torch.uint8)})},
    "truth values": {"model": changed(**{EMBEDDING: torch.zeros(WORDS, 32, dtype=torch.bool)})},
}
UNUSABLE = {
    "no options": {"args": None},
    "options that are a list": {"args": [1]},
    "options without an arch": {"args": argparse.Namespace(x=1)},
    "an unknown arch": option(arch="talkconv_of_nobody"),
    "an unknown task": option(task="nothing"),
    "a width of 0": option(encoder_embed_dim=0),
    "a negative width": option(encoder_embed_dim=-32),
    "a width that is text": option(encoder_embed_dim="wide"),
    "kernel sizes that are text": option(encoder_kernel_size_list="[os.system('true')]"),
    "a cfg that is a number": {"args": None, "cfg": 3},
    "a cfg that is a list": {"args": None, "cfg": [1]},
    "a cfg without a model": {"args": None, "cfg": {"task": {"_name": "translation"}}},
    "a cfg that refers to itself": {"args": None, "cfg": {"task": "${task}", "model": "${task}"}},
    "an empty history": {"optimizer_history": []},
    "a history that is text": {"optimizer_history": "Adam"},
    "no history": {"optimizer_history": None},
}


def test_checkpoints_that_do_not_fit(doors, tmp_path, figure):
    path, whole = tmp_path / "other.pt", tmp_path / "whole.pt"
    save_zip(good(), whole)

    def averages(path):
        average.average_checkpoints([str(whole), str(path)])

    refused, tried, taken = 0, 0, []
    for name, changes in {**DIFFERENT, **UNUSABLE}.items():
        save_zip(good(**changes), path)
        more = [doors["--restore-file"], averages] if name in DIFFERENT else []
        for door in (doors["fairseq-generate"], *more):
            tried += 1
            if refusal(door, path) is None:
                taken.append((name, door))
            else:
                refused += 1
    assert not taken
    report(figure, "checkpoints that do not fit", refused, tried)


def test_a_dictionary_that_does_not_fit(tmp_path):
    path = tmp_path / "whole.pt"
    save_zip(good(), path)
    write_dictionaries(tmp_path, WORDS - 9)
    line = refusal(lambda path: generates(path, tmp_path), path)
    assert "size mismatch for encoder.embed_tokens.weight" in line


def test_of_several_the_one_that_does_not_fit_is_named(folder, tmp_path):
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    save_zip(good(), paths[0])
    save_zip(good(**DIFFERENT["another shape"]), paths[1])
    with pytest.raises(RuntimeError, match=f"{paths[1]} cannot be loaded: .*size mismatch"):
        checkpoint_utils.load_model_ensemble(list(map(str, paths)), {"data": str(folder)})


# --- Checkpoints with random damage ---


def with_new_sums(content, generator):
    """The archive with a few bytes of its pickle changed, and sums that agree."""
    archive = zipfile.ZipFile(io.BytesIO(content))
    changed = io.BytesIO()
    with zipfile.ZipFile(changed, "w") as copied:
        for name in archive.namelist():
            record = archive.read(name)
            if name.endswith("data.pkl"):
                record = flip(record, generator)
            copied.writestr(name, record)
    return changed.getvalue()


def flip(content, generator):
    """`content` with one to four bytes changed."""
    content = bytearray(content)
    for _ in range(generator.randint(1, 4)):
        content[generator.randrange(len(content))] = generator.randrange(256)
    return bytes(content)


def fuzz(folder, path, trap, count, seed, results):
    """Read `count` damaged copies; sends how many were refused, and how many were read whole."""
    generator = random.Random(seed)
    state = good(extra_state={"meters": {"loss": np.float64(3.9), "counts": np.arange(4)}})
    save_zip(state, path)
    model = generates(path, folder)[0][0]
    contents = {}
    for save in (save_zip, save_legacy):
        save(state, path)
        contents[save] = path.read_bytes()
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    refused = whole = 0
    for number in range(count):
        kind = number % 3
        if kind == 0:
            path.write_bytes(flip(contents[save_zip], generator))
        elif kind == 1:
            path.write_bytes(with_new_sums(contents[save_zip], generator))
        else:
            path.write_bytes(flip(contents[save_legacy], generator))

        def load(path):
            with checkpoint_files.naming(path):
                read = checkpoint_utils.load_checkpoint_to_cpu(str(path))
                model.load_state_dict(read["model"], strict=True)

        if refusal(load, path) is not None:
            refused += 1
            continue
        whole += 1
        for name, value in model.state_dict().items():
            assert value.shape == shapes[name]
    assert not trap.exists()
    results.put((refused, whole))


def run_fuzz(figure, folder, tmp_path, count, seed):
    """Fuzz in a process of its own, whose interpreter may crash."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    arguments = (folder, tmp_path / "damaged.pt", tmp_path / "trap", count, seed, results)
    process = context.Process(target=fuzz, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0, f"ended with {process.exitcode}"
    refused, whole = results.get()
    figure(
        f"randomly damaged checkpoints: refused {refused:,} of {count:,}, "
        f"{whole:,} loaded whole, no crash"
    )
    assert refused + whole == count and refused > count / 3


def test_random_damage(folder, tmp_path, figure):
    run_fuzz(figure, folder, tmp_path, count=60, seed=1)


@pytest.mark.slow
@pytest.mark.long
def test_much_random_damage(folder, tmp_path, figure):
    run_fuzz(figure, folder, tmp_path, count=3_000, seed=2)


# --- Text ---

CONTROLS = "\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029"  # each ends a line for some reader
LINES = [
    "the word",
    "",
    "the " * 50,
    "a" + "b" * 100_000,  # one word that nobody knows
    *(f"the{control}word" for control in CONTROLS),
    "\x00 \x01 \x07 \x1b[31m the \x7f",
    "\u202eת\u202c \u200f\u200e \u2066x\u2069",  # right-to-left marks and letters
    "\ufeffthe word",
    "\U0010ffff \U0001f600 e\u0301 \ufffd \u00a0\u3000 \u200b",
    " \t ",
    "</s> <pad> <unk> <s> the",
    "H-0\t-1.0\tthe",
    "the word\r",
    "last",
]


def write_lines(path, lines=LINES, opening=b""):
    path.write_bytes(opening + "".join(line + "\n" for line in lines).encode())
    assert path.read_bytes().count(b"\n") == len(lines)
    return path


def test_one_hypothesis_a_line(corpus, trained, tmp_path):
    text = write_lines(tmp_path / "text.es", opening=b"\xef\xbb\xbf")
    out = fairseq(
        "interactive", corpus, "--path", trained, "--input", text, "--buffer-size", 8,
        "--max-tokens", 3000, "--beam", 1, "--max-len-b", 5,
    )  # fmt: skip
    for kind in "SHDP":
        rows = [line for line in out.split("\n") if line.startswith(f"{kind}-")]
        assert [int(row.split("\t")[0][2:]) for row in rows] == list(range(len(LINES))), kind
    sources = [line.split("\t")[1] for line in out.split("\n") if line.startswith("S-")]
    assert sources[0] == sources[-2] and sources[1] == "" == sources[LINES.index(" \t ")]


@pytest.mark.slow
@pytest.mark.long
def test_bytes_that_are_not_utf_8_at_the_commands(corpus, trained, tmp_path):
    bad = write_lines(tmp_path / "bad.es")
    bad.write_bytes(bad.read_bytes() + b"the \xff word\n")
    out = fairseq("interactive", corpus, "--path", trained, "--input", bad, check=False)
    last = out.rstrip("\n").split("\n")[-1]
    assert f"{bad}: line {len(LINES) + 1}: expected UTF-8, got byte 0xff at column 5" in last
    assert "H-0" not in out
    out = fairseq(
        "preprocess", "--only-source", "--source-lang", "es", "--trainpref", tmp_path / "bad",
        "--destdir", tmp_path / "bin", "--user-dir", ROOT / "talk_fairseq", check=False,
    )  # fmt: skip
    assert f"{bad}: line {len(LINES) + 1}: expected UTF-8" in out.rstrip("\n").split("\n")[-1]
    assert not list(tmp_path.glob("bin/*.bin"))


@pytest.mark.parametrize("workers", [1, 3])
def test_binarised_lines_are_those_of_the_file(workers, tmp_path):
    text = write_lines(tmp_path / "text", LINES * 5)
    words = Dictionary()
    words.add_symbol("the")
    FileBinarizer.multiprocess_dataset(
        str(text), "mmap", VocabularyDatasetBinarizer(words), str(tmp_path / "bin"), len(words),
        num_workers=workers,
    )  # fmt: skip
    found = data_utils.load_indexed_dataset(str(tmp_path / "bin"), words)
    assert [len(line) - 1 for line in found] == [len(line.split()) for line in LINES * 5]


@pytest.mark.parametrize(
    "bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"]
)
def test_bytes_that_are_not_utf_8(bad, tmp_path):
    text = write_lines(tmp_path / "train.es")
    text.write_bytes(text.read_bytes() + b"ab" + bad + b"\nmore\n")
    expected = f"{text}: line {len(LINES) + 1}: expected UTF-8, got byte 0x{bad[0]:02x} at column 3"
    with pytest.raises(ValueError) as refused:
        next(compat.text.read_lines_of_input(None, str(text), 1))  # before the first is translated
    assert str(refused.value) == expected
    args = argparse.Namespace(
        source_lang="es", target_lang=None, only_source=True, trainpref=str(tmp_path / "train"),
        dict_only=False, validpref=None, testpref=None,
    )  # fmt: skip
    with pytest.raises(ValueError) as refused:
        compat.text.check_corpora_first(lambda args: pytest.fail("it went on"), args)
    assert str(refused.value) == expected
    with pytest.raises(ValueError, match=f"train.es: not .* line {len(LINES) + 1}: 'utf-8' codec"):
        corpora.read_sentences(tmp_path, "train.es")


def test_published_text_keeps_its_lines(tmp_path, capsys):
    text = write_lines(tmp_path / "text", opening=b"\xef\xbb\xbf")
    text.write_bytes(text.read_bytes() + b"ab\xff\n")
    read = list(prepare_text.lines_of(text))
    assert len(read) == len(LINES) + 1 and read[0] == LINES[0] and read[-1] == "ab\ufffd"
    assert all(len(line.splitlines()) <= 1 for line in read)
    assert "1 lines held bytes that are not UTF-8" in capsys.readouterr().err


def test_a_corpus_keeps_its_lines(tmp_path):
    lines = [line for line in LINES if line.strip() and len(line) < 9999] * 9
    for split in ("train", "valid", "test"):
        for language in ("es", "en"):
            write_lines(tmp_path / f"{split}.{language}", lines)
    corpus = corpora.read_corpus(tmp_path, ["es", "en"])
    corpora.prepare(corpus, ["es", "en"], 200, tmp_path / "out")
    written = [path for path in (tmp_path / "out").rglob("*.e[sn]")]
    assert len(written) == 12
    for path in written:
        text = path.read_bytes().decode()
        assert text.count("\n") == len(lines) == len(text.splitlines()), path


def test_a_line_too_long_to_translate_is_named(tmp_path):
    sentences = {"train.es": ["a b"] * 50, "valid.es": ["a"], "test.es": ["ab " * 33_000]}
    corpus = {**sentences, **{name[:-2] + "en": text for name, text in sentences.items()}}
    with pytest.raises(ValueError, match="test.es: expected at most 1000 pieces a sentence, got"):
        corpora.prepare(corpus, ["es", "en"], 50, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [bytes(MIB), (b"a" * 1023 + b"\n") * 1024])
def test_gzip_that_never_ends(content, tmp_path, figure):
    path = tmp_path / "train.es.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(200):
            file.write(content)
    forget_peak()
    before = peak()
    for read in (
        lambda path: deque(prepare_text.lines_of(path), maxlen=1),
        lambda path: corpora.read_sentences(tmp_path, "train.es"),
    ):
        assert refusal(read, path)
    assert peak() - before < 250 * MIB
    report(figure, "gzipped text that unpacks a thousandfold", 2, 2)


# --- Archives ---


def tar(*members, mode="w:gz"):
    """Writes an archive of ``(name, content, changes of its TarInfo)``, and one that is wanted."""

    def make(path):
        with tarfile.open(path, mode) as archive:
            for name, content, changes in (("a/wanted", b"the word\n", {}), *members):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                for attribute, value in changes.items():
                    setattr(member, attribute, value)
                archive.addfile(member, io.BytesIO(content))

    return make


def zipped(*members):
    def make(path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of duplicate names
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content, mode in (("a/wanted", b"the word\n", 0), *members):
                    info = zipfile.ZipInfo(name)
                    info.external_attr = mode << 16
                    archive.writestr(info, content, zipfile.ZIP_DEFLATED)

    return make


def cut_off(make, share):
    def harm(path):
        make(path)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return harm


def flipped(make, seed):
    def harm(path):
        make(path)
        content = bytearray(path.read_bytes())
        content[random.Random(seed).randrange(40, len(content) - 40)] ^= 0xFF
        path.write_bytes(content)

    return harm


def sparse(path):
    """A file of a terabyte without a byte, as GNU tar keeps it."""
    member = tarfile.TarInfo("a/holes")
    member.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[483:495] = tarfile.itn(1 << 40, 12, tarfile.GNU_FORMAT)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    path.write_bytes(bytes(block) + bytes(1024))


def long_name(path):
    """A name of 100 MB."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        member = tarfile.TarInfo("././@LongLink")
        member.type, member.size = tarfile.GNUTYPE_LONGNAME, 100 * MIB
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        for _ in range(100):
            file.write(bytes(MIB))


def headers(*headers):
    """An archive with these headers, as ``(type, content)``, before its file."""

    def make(path):
        with gzip.open(path, "wb", compresslevel=1) as file:
            for kind, content in headers:
                member = tarfile.TarInfo("header")
                member.type, member.size = kind, len(content)
                file.write(member.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512))
            member = tarfile.TarInfo("a/wanted")
            member.size = 9
            file.write(member.tobuf() + b"the word\n".ljust(512, b"\0") + bytes(1024))

    return make


def pax(name, value):
    """A line of a pax header; its length counts itself."""
    rest = f" {name}={value}\n".encode()
    length = next(n for n in itertools.count(len(rest)) if len(str(n)) + len(rest) == n)
    return str(length).encode() + rest


def zip_declares(path):
    zipped()(path)
    content = bytearray(path.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = b"\xf0\xff\xff\xff"
    path.write_bytes(content)


MANY = tar(*((f"a/{number}", os.urandom(999), {}) for number in range(9)))
MANY_ZIPPED = zipped(*((f"a/{number}", os.urandom(999), 0) for number in range(9)))
ZEROS = bytes(60 * MIB)
ARCHIVES = {
    "..": tar(("../wanted", b"x", {})),
    ".. inside": tar(("a/../../../wanted", b"x", {})),
    "..\\": tar(("a\\..\\..\\wanted", b"x", {})),
    "absolute": tar(("/tmp/wanted", b"x", {})),
    "an absolute folder": tar(("/tmp/wanted", b"", {"type": tarfile.DIRTYPE})),
    "a link": tar(("a/link", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc"})),
    "a link, and a file below it": tar(
        ("a/link", b"", {"type": tarfile.SYMTYPE, "linkname": "/tmp"}), ("a/link/wanted", b"x", {})
    ),
    "a link inside": tar(("a/other", b"", {"type": tarfile.SYMTYPE, "linkname": "wanted"})),
    "a hard link": tar(("wanted", b"", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"})),
    "a hard link inside": tar(("b/wanted", b"", {"type": tarfile.LNKTYPE, "linkname": "a/wanted"})),
    "a device": tar(("a/zero", b"", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5})),
    "a disk": tar(("a/disk", b"", {"type": tarfile.BLKTYPE, "devmajor": 8})),
    "a pipe": tar(("a/pipe", b"", {"type": tarfile.FIFOTYPE})),
    "twice": tar(("b/wanted", b"another\n", {})),
    "holes": sparse,
    "a bomb": tar(("a/zeros", ZEROS, {})),
    "a wanted bomb": tar(("b/zeros/wanted.gz", ZEROS, {})),
    "a long name": long_name,
    "a name of 8 MB": headers((tarfile.GNUTYPE_LONGNAME, b"a/" * (4 * MIB))),
    "a header of 8 MB": headers((tarfile.XHDTYPE, pax("comment", "a" * 8 * MIB))),
    "headers of headers": headers(*[(tarfile.XHDTYPE, pax("comment", "a"))] * 2000),
    "headers for all files": headers(
        (tarfile.XGLTYPE, b"".join(pax(f"a{number}", "a") for number in range(500)))
    ),
    "a map of holes": headers((tarfile.XHDTYPE, pax("GNU.sparse.map", "x"))),
    "terminal codes": tar(("../\x1b[2J\n", b"x", {})),
    "zip: ..": zipped(("../wanted", b"x", 0)),
    "zip: ..\\": zipped(("a\\..\\wanted", b"x", 0)),
    "zip: absolute": zipped(("/tmp/wanted", b"x", 0)),
    "zip: a link": zipped(("a/link", b"/etc/passwd", stat.S_IFLNK | 0o777)),
    "zip: a device": zipped(("a/zero", b"", stat.S_IFCHR | 0o666)),
    "zip: a pipe": zipped(("a/pipe", b"", stat.S_IFIFO | 0o666)),
    "zip: twice": zipped(("b/wanted", b"another\n", 0)),
    "zip: the same name twice": zipped(("a/wanted", b"another\n", 0)),
    "zip: a bomb": zipped(("a/zeros", ZEROS, 0)),
    "zip: 4 GB declared": zip_declares,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("<html>Not found</html>\n" * 99),
    "gzipped text": lambda path: path.write_bytes(gzip.compress(b"the word\n" * 99)),
    **{f"cut at {share}": cut_off(MANY, share) for share in (0.01, 0.2, 0.5, 0.9, 0.999)},
    **{f"zip cut at {share}": cut_off(MANY_ZIPPED, share) for share in (0.01, 0.5, 0.9, 0.999)},
    **{f"damaged {seed}": flipped(MANY, seed) for seed in range(20)},
}  # fmt: skip


def test_archives(tmp_path, figure):
    refused, taken = 0, []
    forget_peak()
    before = peak()
    for name, make in ARCHIVES.items():
        archive = tmp_path / "data" / "some.tgz"
        archive.parent.mkdir(exist_ok=True)
        make(archive)

        def gather(path):
            prepare_archives.gather({"wanted"}, [path], {}, tmp_path / "work" / "extracted")

        line = refusal(gather, archive)
        extracted = list((tmp_path / "work/extracted").iterdir())
        assert all(path.suffix == ".partial" for path in extracted), name
        assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "work"], name
        if line is None:
            taken.append(name)
        else:
            refused += 1
    assert not taken
    assert not Path("/tmp/wanted").exists() and peak() - before < 250 * MIB
    report(figure, "archives", refused, len(ARCHIVES))


def test_a_story_that_never_ends(tmp_path, capsys):
    for number, name in enumerate(LISTS.values()):
        (tmp_path / name).write_text(f"address {number}\n")
    archive = tmp_path / "cnn_stories.tgz"
    story = hashlib.sha1(b"address 0").hexdigest() + ".story"
    tar((f"a/{story}", bytes(12 * MIB), {}))(archive)
    arguments = ["--data", str(tmp_path), "--other-counts", "--output", str(tmp_path / "out")]
    assert prepare_benchmark.main(["cnn_dm", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{archive}: refused: {story}: expected at most 10,000,000 bytes" in error


def test_damage_to_a_zip_is_refused_or_does_no_harm(tmp_path):
    path = tmp_path / "some.zip"
    for seed in range(40):
        flipped(MANY_ZIPPED, seed)(path)
        held = {}

        def read(path):
            prepare_archives.read_members(
                path,
                lambda name, stream: held.update({name: stream.read()}),  # noqa: B023
            )

        if refusal(read, path) is None:  # a date or a mode
            assert held["a/wanted"] == b"the word\n" and len(held) == 10


def test_a_model_in_an_archive_stays_in_its_folder(tmp_path):
    tar(("../outside", b"x", {}), mode="w:bz2")(tmp_path / "model.tar.bz2")
    line = refusal(
        lambda path: TaLKConvModel.from_pretrained(str(path)), tmp_path / "model.tar.bz2"
    )
    assert line and "outside" in line
    assert not (Path(tempfile.gettempdir()) / "outside").exists()
