"""fairseq's commands on dummy data with ``--user-dir``, as the patches leave them."""

import argparse
import os
import shutil
import subprocess
import sys

import pytest

import fairseq_commands
from conftest import PLUGIN

pytest.importorskip("fairseq")

import numpy as np
import torch
from probing import quiet_environment

from pipeline.recipes import average
from talk_fairseq import checkpoint_files
from talk_fairseq.compat import text


def fairseq(command, *arguments, fails=False, **options_of_run):
    """Run a command of fairseq with the plugin; its output, or its last line if it ``fails``."""
    flags = [*arguments, "--user-dir", PLUGIN]
    status, printed = fairseq_commands.run(command, *flags, **options_of_run)
    assert (status != 0) == fails, printed[-3000:]
    return printed.strip().splitlines()[-1] if fails else printed


SIZES = [
    f"--{side}-{what}={number}"
    for side in ("encoder", "decoder")
    for what, number in (("layers", 1), ("embed-dim", 8), ("ffn-embed-dim", 8))
] + ["--encoder-attention-heads=2", "--decoder-attention-heads=2"]


TRAIN = [*"--cpu --optimizer adam --lr 0.01 --num-workers 0 --max-tokens 300".split()]


SHORT = ["--cpu", "--num-workers=0", "--batch-size=16", "--beam=2", "--max-len-b=10"]


BLEU = ["--eval-bleu", "--eval-bleu-detok=moses", '--eval-bleu-args={"max_len_b": 10}']


MODEL = ["--arch=talkconv", "--encoder-max-left=3", "--decoder-max-left=5", *SIZES]


TRANSLATION = ["--task=translation", *MODEL, *TRAIN]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Text of 60 + 20 + 43 lines whose translation is its reverse."""
    folder = tmp_path_factory.mktemp("corpus")
    numbers = np.random.default_rng(0)
    for split, count in (("train", 60), ("valid", 20), ("test", 43)):
        lines = [numbers.integers(30, size=numbers.integers(2, 9)) for _ in range(count)]
        for language, order in (("de", 1), ("en", -1)):
            text = "".join(" ".join(f"w{i}" for i in line[::order]) + "\n" for line in lines)
            (folder / f"{split}.{language}").write_text(text)
    return folder


def preprocessing(corpus, destination):
    """The flags of fairseq-preprocess."""
    prefixes = [f"--{split}pref={corpus / split}" for split in ("train", "valid", "test")]
    flags = ["--source-lang=de", "--target-lang=en", "--joined-dictionary"]
    return [*prefixes, *flags, f"--destdir={destination}"]


@pytest.fixture(scope="session")
def data(corpus, tmp_path_factory):
    destination = tmp_path_factory.mktemp("data")
    fairseq("preprocess", *preprocessing(corpus, destination))
    return destination


@pytest.fixture(scope="session")
def trained(data, tmp_path_factory):
    """A folder with checkpoint1.pt and checkpoint2.pt, validated with BLEU."""
    folder = tmp_path_factory.mktemp("trained")
    flags = [*BLEU, "--best-checkpoint-metric=bleu", "--max-epoch=2", f"--save-dir={folder}"]
    out = fairseq("train", data, *TRANSLATION, *flags)
    assert "| bleu " in out and (folder / "checkpoint2.pt").exists()
    return folder


def hypotheses(out):
    return [line for line in out.splitlines() if line.startswith("H-")]


def test_all_43_sentences_are_generated(data, trained):
    path = f"--path={trained / 'checkpoint_best.pt'}"
    out = fairseq("generate", data, path, *SHORT, "--scoring=sacrebleu")
    assert len(hypotheses(out)) == 43
    assert "Translated 43 sentences" in out and "BLEU = " in out


def test_sacrebleu_scores_with_sacrebleu(data, trained):
    """But does not replace another scoring that is named."""
    path = f"--path={trained / 'checkpoint_best.pt'}"

    def score(*flags):
        return fairseq("generate", data, path, *SHORT, *flags).strip().splitlines()[-1]

    named = score("--scoring=sacrebleu")
    assert score("--sacrebleu") == named != score()
    assert "chrF" in score("--sacrebleu", "--scoring=chrf")


def test_diverse_beams_and_sentences_over_the_maximum(data, trained, corpus):
    flags = ["--max-source-positions=6", "--skip-invalid-size-inputs-valid-test"]
    groups = ["--diverse-beam-groups=2", "--diverse-beam-strength=0.5"]
    path = f"--path={trained / 'checkpoint_best.pt'}"
    out = fairseq("generate", data, path, *SHORT, *flags, *groups)
    lengths = [len(line.split()) + 1 for line in (corpus / "test.de").open()]
    kept = sum(length <= 6 for length in lengths)
    assert 16 < kept < 43 and len(hypotheses(out)) == kept
    assert f"{43 - kept} samples have invalid sizes and will be skipped" in out


def test_interactive_translates_every_line(data, trained, corpus):
    path, lines = f"--path={trained / 'checkpoint_best.pt'}", corpus / "test.de"
    out = fairseq("interactive", data, path, *SHORT, "--buffer-size=100", stdin=lines)
    assert len(hypotheses(out)) == 43


def test_validation_sees_every_sentence(data, trained):
    path = f"--path={trained / 'checkpoint_best.pt'}"
    flags = ["--task=translation", "--valid-subset=test", "--max-tokens=10000", "--cpu"]
    flags += ["--num-workers=0"]
    assert "| bsz 43" in fairseq("validate", data, path, *flags)


@pytest.mark.slow
def test_averaging_resuming_and_finetuning(data, trained, tmp_path):
    averaged = tmp_path / "averaged.pt"
    epochs = ["--inputs", str(trained), "--last-epochs=2", "--output", str(averaged)]
    average.main(epochs)
    first, second, mean = (
        checkpoint_files.read_checkpoint(path)["model"]["encoder.layers.0.fc1.weight"]
        for path in (trained / "checkpoint1.pt", trained / "checkpoint2.pt", averaged)
    )
    torch.testing.assert_close(mean, (first + second) / 2)

    resumed = ["--max-epoch=3", f"--save-dir={tmp_path}", "--no-epoch-checkpoints"]
    restore = f"--restore-file={trained / 'checkpoint_last.pt'}"
    out = fairseq("train", data, *TRANSLATION, *resumed, restore)
    assert "Loaded checkpoint" in out and "begin training epoch 3" in out

    tuned = ["--max-epoch=1", "--bf16", "--no-save", f"--finetune-from-model={averaged}"]
    out = fairseq("train", data, *TRANSLATION, *tuned, f"--save-dir={tmp_path / 'tuned'}")
    assert "loading pretrained model from" in out and "done training" in out


def test_fp16_on_a_cpu_is_one_clear_line(data, tmp_path):
    line = fairseq("train", data, *TRANSLATION, "--no-save", "--fp16", fails=True)
    assert line == "ValueError: expected a GPU for --fp16, got a CPU: use --bf16, --amp or neither"


def test_options_of_an_optimizer_are_refused_in_one_line(data):
    flags = ["--no-save", "--optimizer=fused_adam", "--fp16-adam-stats", "--user-dir", PLUGIN]
    status, printed = fairseq_commands.run("train", data, *TRANSLATION, *flags)
    assert status == 1 and "Traceback" not in printed
    assert printed.strip().splitlines()[-1].startswith("ValueError: fp16_adam_stats: expected")


def refusal_of_preprocess(corpus, out):
    """The line that fairseq-preprocess ends with, without a traceback; nothing is written."""
    flags = [*preprocessing(corpus, out), "--user-dir", PLUGIN]
    status, printed = fairseq_commands.run("preprocess", *flags)
    assert status == 1 and "Traceback" not in printed and not out.exists()
    return printed.strip().splitlines()[-1]


def test_preprocess_checks_the_corpora_before_it_writes(corpus, tmp_path):
    here, out = tmp_path / "corpus", tmp_path / "data"
    shutil.copytree(corpus, here)
    (here / "test.en").unlink()
    missing = f"No such file or directory: '{here / 'test.en'}'"
    assert refusal_of_preprocess(here, out) == f"FileNotFoundError: [Errno 2] {missing}"

    shutil.copy(corpus / "test.en", here)
    (here / "valid.en").write_text("w1\n")
    lines = {f"{here}/valid.de": 20, f"{here}/valid.en": 1}
    wanted = f"ValueError: expected as many lines in both languages, got {lines}"
    assert refusal_of_preprocess(here, out) == wanted

    args = argparse.Namespace(source_lang="de", target_lang="en", only_source=True, dict_only=False)
    args.trainpref, args.testpref = f"{here}/train", None
    args.validpref = f"{here}/train,{here}/valid"
    assert text.check_corpora_first(lambda given: given, args) is args
    args.dict_only, args.validpref = True, f"{here}/absent"  # which is not read then
    assert text.check_corpora_first(lambda given: given, args) is args


@pytest.mark.slow
def test_language_models_train_and_are_scored(corpus, data, tmp_path):
    shutil.copy(data / "dict.de.txt", tmp_path / "dict.txt")
    for file in data.glob("*.de-en.de.*"):
        shutil.copy(file, tmp_path / file.name.replace(".de-en.de", ""))
    flags = ["--tokens-per-sample=32", "--sample-break-mode=eos"]
    model = ["--task=language_modeling", "--arch=transformer_lm", f"--save-dir={tmp_path}"]
    sizes = [size for size in SIZES if size.startswith("--decoder")]
    fairseq("train", tmp_path, *model, *sizes, *TRAIN, *flags, "--max-update=3")

    path = f"--path={tmp_path / 'checkpoint_last.pt'}"
    out = fairseq("eval_lm", tmp_path, path, "--cpu", "--num-workers=0", *flags)
    words = (corpus / "test.de").read_text().split()
    assert f"Evaluated {len(words) + 43} tokens" in out
    # Without the flags every block is longer than the model allows.
    line = fairseq("eval_lm", tmp_path, path, "--cpu", fails=True)
    assert line.startswith("ValueError: expected blocks of at most 32 tokens to score, got")


def test_a_matmul_precision_that_there_is_not(data):
    line = fairseq("train", data, fails=True, env={"TALK_MATMUL_PRECISION": "low"})
    name = "ValueError: TALK_MATMUL_PRECISION"
    assert line == f"{name}: expected highest, high or medium, got 'low'"


LEVEL = "logging.getLogger().getEffectiveLevel()"


NUMBA = "logging.getLogger('numba.core.ssa').getEffectiveLevel()"


PRECISION = "__import__('torch').get_float32_matmul_precision()"


@pytest.mark.parametrize(
    "program, level",
    [
        (f"import fairseq_cli.interactive, talk_fairseq, logging; print({LEVEL})", "20"),
        (f"import talk_fairseq, logging; print({LEVEL}, {PRECISION})", "30 medium"),
        (
            f"import logging; logging.basicConfig(level=40); import talk_fairseq; print({LEVEL})",
            "40",
        ),
        (f"import logging, fairseq, talk_fairseq; print({NUMBA})", "30"),
    ],
    ids=["a command", "a program", "a program with a level", "fairseq first"],
)
def test_the_log_has_the_level_of_the_program(program, level):
    """A module of fairseq sets DEBUG, with which Numba fills pages when it compiles a kernel.

    Products have the precision of the environment.
    """
    env = {**os.environ, "TALK_MATMUL_PRECISION": "medium"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == level, done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_resume_one(data, trained, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    entry = tmp_path / "train.py"
    entry.write_text("from fairseq_cli.train import cli_main\n\ncli_main()\n")
    restore = f"--restore-file={trained / 'checkpoint_last.pt'}"
    flags = [*TRANSLATION, *BLEU, "--max-epoch=3", restore, f"--save-dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(entry), str(data), *flags, "--user-dir", str(PLUGIN)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=quiet_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "training on 2 devices" in done.stdout and "Loaded checkpoint" in done.stdout
    assert (tmp_path / "checkpoint3.pt").exists()


def test_generate_refuses_options_in_one_line(data):
    flags = ["--task=talk_summarization", "--max-source-positions=1", "--path=none.pt"]
    status, printed = fairseq_commands.run("generate", data, *flags, "--user-dir", PLUGIN)
    assert status == 1 and "Traceback" not in printed
    assert printed.strip().endswith("max_source_positions: expected at least 2, got 1")
