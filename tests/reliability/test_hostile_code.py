"""Checkpoints and options that run code: refused at every door, with one line that names them."""

import argparse
import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import published
from pipeline.recipes import average

pytest.importorskip("fairseq")

from fairseq import utils
from hostile import FORMATS, OPTIONS, WORDS, Call, good, refusal, report, save_zip

from talk_fairseq import checkpoint_files

pytest_plugins = ["hostile_doors"]


def test_a_whole_checkpoint_is_refused_nowhere(doors, folder, tmp_path):
    path = tmp_path / "good.pt"
    torch.save(good(), path)
    for name in ("read_checkpoint", "load_checkpoint_to_cpu", "fairseq-generate"):
        doors[name](path)
    doors["from_pretrained"](path)
    average.main(["--inputs", str(path), "--output", str(tmp_path / "average.pt")])
    meters = checkpoint_files.read_checkpoint(path)["extra_state"]["train_meters"]
    assert type(meters["counts"]) is np.ndarray and type(meters["loss"]) is np.float64


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
    many = " + ".join(["[(64, 3)] * 20"] * 6)
    assert checkpoint_files.evaluate(many) == [(64, 3)] * 120
    assert checkpoint_files.evaluate(" (0.9, -1e-8) ") == (0.9, -1e-8)
    assert utils.eval_str_list("5e-4,1/2") == [5e-4, 0.5] and utils.eval_bool("True") is True
    assert utils.eval_str_dict("{'a': None}") == {"a": None} and utils.eval_bool(None, 3) == 3
    bad = ["().__class__", "f()", "[x for x in (1,)]", "9 ** 9 ** 9", "[0] * 9999999 * 9999"]
    bad += ["(lambda: 0)()", "__import__('os')", "f'{1}'", "[0] * (9999999 + 9999999)", "1 +", ""]
    bad += ["[0] * 0 + [0] * 99999999", "[[0] * 0.1, [0] * 99999999]"]
    bad += ["[0] * 3200 * 3200", "([0] * 9999 + [1]) * 9999", f"'{'a' * 999}' * 99999"]
    bad += ["(" * 5000, "-" * 100_000 + "1", "1 if 1 else 2", "x", "(y := 3)", "[1][0]", "'%s' % 1"]
    refused = 0
    for text in bad:
        try:
            checkpoint_files.evaluate(text)
        except ValueError as error:
            refused += "\n" not in str(error) and len(str(error)) < 250
    report(figure, "options that are more than plain values", refused, len(bad))
