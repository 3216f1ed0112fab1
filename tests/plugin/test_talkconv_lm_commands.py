"""The language model in fairseq's commands: scores and text."""

import math
import re
import textwrap

import pytest
import torch

from conftest import PLUGIN, SMALL_LM, fairseq

pytest.importorskip("fairseq")

import fairseq_cli.eval_lm
import fairseq_cli.generate
import fairseq_cli.interactive
import fairseq_cli.train
from building import configured
from building_lm import windows
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import Dictionary
from omegaconf import OmegaConf

# --- Through the commands, in this process where they allow it ---


def command(parser, *flags):
    return configured(parser, *flags, "--user-dir", PLUGIN)


def evaluate(data, path, *flags, caplog):
    """(tokens, loss in bits) that fairseq-eval-lm reports."""
    cfg = command(
        options.get_eval_lm_parser(), data, "--path", path,
        "--num-workers", 0, *flags,
    )  # fmt: skip
    caplog.clear()
    with caplog.at_level("INFO"):
        results = fairseq_cli.eval_lm.main(cfg)
    tokens = re.search(r"Evaluated ([\d,]+) tokens", caplog.text)[1]
    return int(tokens.replace(",", "")), float(results["loss"])


@pytest.fixture(scope="module")
def model(trained_lm):
    models, _, _ = checkpoint_utils.load_model_ensemble_and_task([str(trained_lm)])
    return models[0].eval()


@pytest.fixture(scope="module")
def test_tokens(lm_corpus):
    """The test set as one sequence."""
    cfg = OmegaConf.create({"_name": "language_modeling", "data": str(lm_corpus)})
    cfg.update(tokens_per_sample=100000, dataset_impl=None, seed=1, use_plasma_view=False)
    cfg.update(plasma_path="", data_buffer_size=0, batch_size=None, batch_size_valid=None)
    lm = tasks.setup_task(cfg)
    lm.load_dataset("test")
    return lm.dataset("test")[0]["target"]


def bits(model, tokens, block, context):
    """The mean surprise of `tokens` in blocks, each after at most `context` tokens before it."""
    inputs, total = torch.cat([tokens.new_tensor([2]), tokens[:-1]]), 0.0
    for start in range(0, len(tokens), block):
        first, end = max(start - context, 0), start + block
        with torch.no_grad():
            out = model(inputs[None, first:end])
            log_probs = model.get_normalized_probs(out, log_probs=True)[0, start - first :]
        total -= log_probs.gather(1, tokens[start:end, None]).sum().item()
    return total / len(tokens) / math.log(2)


def test_evaluation_scores_every_token(lm_corpus, trained_lm, model, test_tokens, caplog):
    """With and without --context-window; --max-tokens 200 makes many batches."""
    flags = ["--tokens-per-sample", 64, "--max-tokens", 200]
    tokens, loss = evaluate(lm_corpus, trained_lm, *flags, caplog=caplog)
    assert tokens == len(test_tokens)
    assert loss == pytest.approx(bits(model, test_tokens, 64, 0), abs=1e-4)

    flags += ["--context-window", 16]
    tokens, with_context = evaluate(lm_corpus, trained_lm, *flags, caplog=caplog)
    assert tokens == len(test_tokens)
    assert with_context == pytest.approx(bits(model, test_tokens, 48, 16), abs=1e-4)
    assert with_context != pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("mode", ["none", "eos", "complete"])
def test_sample_break_modes(lm_corpus, trained_lm, test_tokens, tmp_path, mode, caplog):
    flags = [*SMALL_LM, "--tokens-per-sample", 128, "--sample-break-mode", mode]
    cfg = command(
        options.get_training_parser(), lm_corpus, *flags, "--optimizer", "adam",
        "--lr", 0.01, "--max-tokens", 1000, "--max-update", 2, "--save-dir", tmp_path,
        "--num-workers", 0,
    )  # fmt: skip
    fairseq_cli.train.main(cfg)
    path = tmp_path / "checkpoint_last.pt"
    flags = ["--tokens-per-sample", 128, "--sample-break-mode", mode]
    tokens, loss = evaluate(lm_corpus, path, *flags, caplog=caplog)
    assert tokens == len(test_tokens) and 4 < loss < 12


def test_evaluation_without_the_length_of_training_is_refused(lm_corpus, trained_lm):
    """No perplexity of a part of the text, which could be quoted."""
    printed = fairseq("eval-lm", lm_corpus, "--path", trained_lm, check=False)
    assert "expected blocks of at most 64 tokens to score" in printed.strip().splitlines()[-1]
    assert "Perplexity" not in printed


def hypotheses(printed):
    return dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", printed, re.M))


@pytest.mark.parametrize("flags", ["--beam 3", "--sampling --sampling-topk 5 --beam 1"])
def test_generation_keeps_the_prefix(lm_corpus, trained_lm, tmp_path, flags):
    cfg = command(
        options.get_generation_parser(), lm_corpus, "--path", trained_lm,
        "--task", "language_modeling", "--tokens-per-sample", 128, "--sample-break-mode", "eos",
        "--max-target-positions", 128, "--prefix-size", 3, "--max-len-b", 12, "--min-len", 6,
        "--num-workers", 0, "--batch-size", 16, *flags.split(),
        "--model-overrides", "{'max_target_positions': 128}",
    )  # fmt: skip
    with open(tmp_path / "printed", "w+") as file:
        fairseq_cli.generate._main(cfg, file)
        file.seek(0)
        printed = file.read()
    targets = dict(re.findall(r"^T-(\d+)\t(.*)$", printed, re.M))
    found = hypotheses(printed)
    assert len(found) == 43
    for sentence, text in found.items():
        assert text.split()[:3] == targets[sentence].replace("<<unk>>", "<unk>").split()[:3]
        assert len(text.split()) >= 6


PROMPTS = ["And the LORD said unto", "God", "the king of"]


def continuations(lm_corpus, path, tmp_path, capsys, prompts, *flags):
    """What fairseq-interactive makes of `prompts`, in their order."""
    (tmp_path / "prompts").write_text("".join(prompt + "\n" for prompt in prompts))
    cfg = command(
        options.get_interactive_generation_parser(), lm_corpus, "--path",
        path, "--task", "language_modeling", "--input", tmp_path / "prompts", "--max-len-b", 12,
        "--buffer-size", len(prompts), "--batch-size", len(prompts), *flags,
    )  # fmt: skip
    fairseq_cli.interactive.main(cfg)
    return [text for _, text in sorted(hypotheses(capsys.readouterr().out).items())]


@pytest.mark.parametrize("flags", [["--beam", 3], ["--sampling", "--beam", 1, "--seed", 3]])
def test_prompts_are_continued(lm_corpus, trained_lm, tmp_path, capsys, flags):
    texts = continuations(lm_corpus, trained_lm, tmp_path, capsys, PROMPTS, *flags)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        known = text.split()[: len(prompt.split())]
        assert all(word in (wanted, "<unk>") for word, wanted in zip(known, prompt.split()))
        assert len(text.split()) > len(prompt.split())
    if "--sampling" not in flags:
        for prompt, text in zip(PROMPTS, texts):  # in a batch as alone
            assert continuations(lm_corpus, trained_lm, tmp_path, capsys, [prompt], *flags) == [
                text
            ]


def test_a_prompt_may_repeat_what_may_not_be_generated(lm_corpus, trained_lm, tmp_path, capsys):
    flags = ["--no-repeat-ngram-size", 2, "--beam", 3]
    prompt = "and the and the and"
    (found,) = continuations(lm_corpus, trained_lm, tmp_path, capsys, [prompt], *flags)
    words = found.split()
    assert found.startswith(prompt) and len(words) > 5
    pairs = list(zip(words[4:], words[5:]))  # from the last word of the prompt on
    assert len(set(pairs)) == len(pairs) and ("and", "the") not in pairs


def test_beam_1_takes_the_most_likely_word(lm_corpus, trained_lm, model, tmp_path, capsys):
    words = Dictionary.load(str(lm_corpus / "dict.txt"))
    texts = continuations(lm_corpus, trained_lm, tmp_path, capsys, PROMPTS, "--beam", 1)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        tokens = torch.tensor([2] + [words.index(word) for word in prompt.split()])
        while len(tokens) <= len(text.split()):
            with torch.no_grad():
                logits = model(tokens[None])[0][0, -1]
            logits[words.pad()] = -math.inf
            tokens = torch.cat([tokens, logits.argmax()[None]])
        assert words.string(tokens[1:]) == text


@pytest.mark.slow
def test_hydra_train_from_yaml(lm_corpus, test_tokens, tmp_path, caplog):
    """An arch, some of its options overridden; the options of the task reach the model."""
    (tmp_path / "small.yaml").write_text(
        textwrap.dedent(f"""
        common: {{user_dir: {PLUGIN}, log_format: simple}}
        checkpoint: {{save_dir: {tmp_path}/checkpoints}}
        task: {{_name: language_modeling, data: {lm_corpus}, tokens_per_sample: 48}}
        criterion: {{_name: adaptive_loss}}
        dataset: {{max_tokens: 1000, num_workers: 0}}
        optimization: {{max_update: 2, lr: [0.001]}}
        optimizer: {{_name: adam}}
        lr_scheduler: {{_name: fixed}}
        model:
          _name: talkconv_lm_wiki103
          decoder_embed_dim: 32
          decoder_ffn_embed_dim: 16
          adaptive_input_cutoff: [100, 300]
          adaptive_softmax_cutoff: "100,300"
        """)
    )
    fairseq("hydra-train", "--config-dir", tmp_path, "--config-name", "small", cwd=tmp_path)
    path = tmp_path / "checkpoints/checkpoint_last.pt"
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert windows(model) == [3, 5, 7, 15, 31] + [63] * 12 and model.max_positions() == 48
    tokens, _ = evaluate(lm_corpus, path, "--tokens-per-sample", 48, caplog=caplog)
    assert tokens == len(test_tokens)


@pytest.mark.long
def test_wiki103_needs_no_flags_but_the_arch(lm_corpus, tmp_path):
    """At its own size, on a dictionary that reaches its cutoffs; one update of a few tokens."""
    words = (lm_corpus / "dict.txt").read_text()
    (tmp_path / "dict.txt").write_text(words + "".join(f"x{n} 1\n" for n in range(60001)))
    for path in lm_corpus.glob("*.*"):
        if path.name != "dict.txt":
            (tmp_path / path.name).symlink_to(path)
    fairseq(
        "train", tmp_path, "--task", "language_modeling", "--arch", "talkconv_lm_wiki103",
        "--criterion", "adaptive_loss", "--tokens-per-sample", 16, "--batch-size", 2,
        "--optimizer", "nag", "--max-update", 1, "--no-save", "--disable-validation",
    )  # fmt: skip
