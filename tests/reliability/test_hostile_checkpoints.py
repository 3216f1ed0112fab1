"""Checkpoints that are truncated, foreign, damaged or do not fit: refused with one line."""

import argparse
import gzip
import io
import itertools
import multiprocessing
import os
import pickle
import random
import tarfile
import zipfile

import numpy as np
import pytest
import torch

from conftest import write_dictionaries
from pipeline.recipes import average

pytest.importorskip("fairseq")

from fairseq import checkpoint_utils
from hostile import (
    LEGACY,
    WHOLE,
    WORDS,
    Call,
    generates,
    good,
    refusal,
    report,
    save_legacy,
    save_zip,
)

from talk_fairseq import checkpoint_files

pytest_plugins = ["hostile_doors"]


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


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_part_in_many_places_is_read_once(tmp_path, kind):
    """Of 40 levels of two parts each, all the same: 2^40 places in a kilobyte."""
    part = kind([1])
    for _ in range(40):
        part = kind([part, part])
    save_zip({"model": {}, "args": None, "nested": part}, tmp_path / "nested.pt")
    nested = checkpoint_files.read_checkpoint(tmp_path / "nested.pt")["nested"]
    assert type(nested) is kind and nested[0] is nested[1]


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


@pytest.mark.long
def test_random_damage(folder, tmp_path, figure):
    run_fuzz(figure, folder, tmp_path, count=60, seed=1)


@pytest.mark.slow
@pytest.mark.long
def test_much_random_damage(folder, tmp_path, figure):
    run_fuzz(figure, folder, tmp_path, count=3_000, seed=2)
