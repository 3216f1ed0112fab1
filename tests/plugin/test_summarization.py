"""Summaries: the task's options, cut sources, ROUGE in validation, the step-wise length penalty,
and scripts/evaluate_rouge.sh."""

import csv
import json
import math
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from conftest import SMALL

pytest.importorskip("fairseq")

import fairseq_cli.generate
import fairseq_cli.train
from building import configured
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import Dictionary
from fairseq.logging import metrics
from fairseq.sequence_generator import EnsembleModel
from fairseq.tasks.translation import TranslationTask
from rouge_score.rouge_scorer import RougeScorer

from pipeline.recipes import rouge as score_rouge
from talk_fairseq.rouge import KINDS, rouge, rouge_sums
from talk_fairseq.tasks.talk_summarization import (
    StepwiseLengthPenaltyBeamSearch,
    StepwiseLengthPenaltyGenerator,
    TaLKSummarizationTask,
    length_penalty,
)


def flags_of(*flags, parser=options.get_training_parser):
    return configured(parser(), *flags)


def task_of(corpus, **given):
    dataset = {"train_subset": "train", "dataset_impl": None, "required_seq_len_multiple": 1}
    task = {"_name": "talk_summarization", "data": str(corpus), **given}
    return tasks.setup_task(OmegaConf.create({"dataset": dataset, "task": task}).task)


# --- Options ---


@pytest.mark.parametrize("arch", ["talkconv", "transformer", "lightconv"])
def test_from_flags(corpus, arch):
    flags = [corpus, "--task", "talk_summarization", "--arch", arch]
    cfg = flags_of(*flags)
    assert cfg.task.max_source_positions == 400 and cfg.task.max_target_positions == 1024
    assert not cfg.task.stepwise_lenpen and not cfg.task.eval_rouge
    cfg = flags_of(
        *flags, "--max-source-positions", 50, "--eval-rouge", "--eval-rouge-args", '{"beam": 2}',
        "--eval-rouge-remove-bpe", "--stepwise-lenpen",
        "--eval-rouge-sentence-separator", " . ", "--eval-rouge-print-samples",
    )  # fmt: skip
    task = tasks.setup_task(cfg.task)
    assert isinstance(task, TaLKSummarizationTask) and task.max_positions() == (50, 1024)
    assert task.cfg.eval_rouge and task.cfg.stepwise_lenpen and task.cfg.eval_rouge_print_samples
    assert task.eval_rouge_options == {"beam": 2}
    assert task.cfg.eval_rouge_remove_bpe == "@@ "
    assert task.cfg.eval_rouge_sentence_separator == " . "


def test_from_yaml(corpus):
    task = task_of(
        corpus, max_source_positions=50, eval_rouge=True, eval_rouge_args='{"max_len_b": 9}'
    )
    assert isinstance(task, TaLKSummarizationTask) and task.max_positions() == (50, 1024)
    assert task.cfg.eval_rouge and task.eval_rouge_options == {"max_len_b": 9}
    assert task_of(corpus).max_positions() == (400, 1024)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"max_source_positions": 1}, "max_source_positions: expected at least 2, got 1"),
        ({"eval_rouge_args": "{beam"}, "eval_rouge_args: expected a JSON object, got '{beam'"),
        ({"eval_rouge_args": "[4]"}, "eval_rouge_args: expected a JSON object"),
        (
            {"eval_rouge_args": '{"max_lenb": 30}'},
            "eval_rouge_args: expected options of generation, got 'max_lenb'",
        ),
        (
            {"eval_rouge_args": '{"prefix_size": 3}'},
            "eval_rouge_args: expected options of generation, got 'prefix_size'",
        ),
        ({"eval_rouge_args": '{"lenpen": "long"}'}, "eval_rouge_args: Value 'long' of type 'str'"),
        ({"eval_rouge_args": '{"beam": 0}'}, "eval_rouge_args: expected a beam of at least 1"),
        ({"eval_rogue": True}, "eval_rogue"),
    ],
)
def test_bad_options(corpus, given, message):
    with pytest.raises(Exception, match=message):
        task_of(corpus, **given)


@pytest.mark.parametrize(
    "args, message",
    [
        ({"min_len": 9, "max_len_b": 8}, "min_len: expected at most max_len_b = 8, got 9"),
        ({"unnormalized": True}, "stepwise_lenpen: expected no unnormalized beside it"),
        ({"print_alignment": "hard"}, "stepwise_lenpen: expected no print_alignment beside it"),
        ({"match_source_len": True}, "stepwise_lenpen: expected beam search, got LengthConstr"),
        ({"sampling": True}, "stepwise_lenpen: expected beam search, got Sampling"),
        ({"diverse_beam_groups": 2}, "stepwise_lenpen: expected beam search, got DiverseBeam"),
    ],
)
def test_bad_options_of_generation(corpus, args, message):
    with pytest.raises(ValueError, match=message):
        task_of(corpus, stepwise_lenpen=True).build_generator([Toy()], SimpleNamespace(**args))


# --- Sources are cut ---


def test_sources_are_cut_and_keep_their_end(corpus):
    whole, cut = (task_of(corpus, max_source_positions=n) for n in (1024, 12))
    for task in (whole, cut):
        task.load_dataset("test")
    eos, shortened = whole.source_dictionary.eos(), 0
    for full, short in zip(whole.datasets["test"], cut.datasets["test"]):
        source = full["source"].tolist()
        if len(source) > 12:
            source, shortened = source[:11] + [eos], shortened + 1
        assert short["source"].tolist() == source
        assert torch.equal(short["target"], full["target"])
    assert shortened > 20 and max(cut.datasets["test"].src_sizes) <= 12


def test_sources_typed_in_are_cut_too(corpus):
    task = task_of(corpus, max_source_positions=5)
    eos = task.source_dictionary.eos()
    tokens = [torch.tensor([*range(10, 10 + n), eos]) for n in (2, 4, 5, 9)]
    dataset = task.build_dataset_for_inference(tokens, [len(t) for t in tokens])
    sources = [dataset[i]["source"].tolist() for i in range(4)]
    assert sources[:2] == [[10, 11, eos], [10, 11, 12, 13, eos]]
    assert sources[2] == sources[3] == sources[1]
    assert list(dataset.src_sizes) == [3, 5, 5, 5]


# --- ROUGE in validation ---

GENERATION = {"beam": 2, "min_len": 4, "max_len_b": 12, "no_repeat_ngram_size": 3}


@pytest.fixture(scope="module")
def validated(corpus, tmp_path_factory):
    """A folder where a small model was trained, validated by ROUGE; and what was validated."""
    folder = tmp_path_factory.mktemp("summaries")
    logged = []
    original = fairseq_cli.train.get_valid_stats

    def get_valid_stats(cfg, trainer, stats, tracking_best):
        logged.append(dict(stats))
        return original(cfg, trainer, stats, tracking_best)

    with pytest.MonkeyPatch.context() as patch:
        # where fairseq remembers the best score, of any run of this process
        patch.setattr(checkpoint_utils.save_checkpoint, "best", 0, raising=False)
        patch.setattr(fairseq_cli.train, "get_valid_stats", get_valid_stats)
        fairseq_cli.train.main(
            flags_of(
                corpus, "--task", "talk_summarization", *SMALL, "--max-source-positions", 12,
                "--optimizer", "adam", "--lr", 0.01, "--max-tokens", 2000, "--max-update", 12,
                "--save-dir", folder, "--log-format", "none", "--no-last-checkpoints", "--cpu",
                "--eval-rouge", "--eval-rouge-args", json.dumps(GENERATION), "--num-workers", 0,
                "--best-checkpoint-metric", "rouge_l", "--maximize-best-checkpoint-metric",
            )
        )  # fmt: skip
    return folder, logged


def generate(corpus, checkpoint, folder, *flags):
    """What fairseq-generate writes of the validation set."""
    cfg = flags_of(
        corpus, "--task", "talk_summarization", "--path", checkpoint, "--gen-subset", "valid",
        "--max-source-positions", 12, "--batch-size", 50, "--cpu", "--num-workers", 0, *flags,
        parser=options.get_generation_parser,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    with open(folder / "generate-valid.txt", "w") as file:
        fairseq_cli.generate._main(cfg, file)
    return folder


def as_flags(generation):
    return [word for key, n in generation.items() for word in (f"--{key.replace('_', '-')}", n)]


def test_validation_scores_what_is_generated(corpus, validated, tmp_path):
    """The best checkpoint has the ROUGE in validation that its generated summaries have."""
    folder, logged = validated
    assert all(math.isfinite(stats[kind]) for stats in logged for kind in KINDS)
    best = max(stats["rouge_l"] for stats in logged)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(folder / "checkpoint_best.pt"))
    assert state["extra_state"]["best"] == best > 1
    generated = generate(
        corpus, folder / "checkpoint_best.pt", tmp_path / "generated", *as_flags(GENERATION)
    )
    scores = score_rouge.score(generated)
    assert scores["summaries"] == 50
    stats = next(stats for stats in logged if stats["rouge_l"] == best)
    assert {kind: round(scores[kind], 2) for kind in KINDS} == {k: stats[k] for k in KINDS}


def test_validation_splits_sentences(corpus, monkeypatch):
    task = task_of(corpus, eval_rouge=True, eval_rouge_sentence_separator=" . ")
    texts = ["a b . c d"], ["c d . a b"]
    monkeypatch.setattr(TranslationTask, "valid_step", lambda *_: (0, 1, {}))
    monkeypatch.setattr(task, "_summarize", lambda *_: texts)
    _, _, log = task.valid_step(None, None, None)
    wanted = rouge_sums(*texts, " . ")
    assert wanted != rouge_sums(*texts) and log["_rouge_count"] == 1
    assert {kind: log[f"_{kind}"] for kind in KINDS} == wanted


def test_validation_joins_words_and_prints_a_summary(corpus, monkeypatch, caplog):
    task = task_of(corpus, eval_rouge_remove_bpe="@@ ", eval_rouge_print_samples=True)
    task.tgt_dict, task.rouge_generator = Dictionary(), None
    words = [task.tgt_dict.add_symbol(word) for word in ("lo@@", "w")]
    tokens = torch.tensor([*words, task.tgt_dict.eos(), task.tgt_dict.pad()])
    monkeypatch.setattr(task, "inference_step", lambda *_: [[{"tokens": tokens[:3]}]])
    with caplog.at_level("INFO"):
        assert task._summarize({"target": tokens[None]}, None) == (["low"], ["low"])
    assert "example hypothesis: low" in caplog.text and "example reference: low" in caplog.text


class NoCriterion:
    @staticmethod
    def reduce_metrics(logging_outputs):
        pass


def reduced(task, *steps):
    """The metrics of steps, each the logging outputs of some processes."""
    counts = {"ntokens": 1, "nsentences": 1, "sample_size": 1}
    with metrics.aggregate(new_root=True) as aggregated:
        for outputs in steps:
            task.reduce_metrics([counts | output for output in outputs], NoCriterion())
        return aggregated.get_smoothed_values()


def test_sums_over_batches_and_processes(corpus):
    """However the summaries are dealt out, their mean is the same: not a mean of means."""
    task = task_of(corpus, eval_rouge=True)
    pairs = [("a b c", "a b d"), ("x", "y z"), ("e f", "e f"), ("g h i j", "g i k l")]
    hypotheses, references = zip(*pairs)

    def output(*which):
        sums = rouge_sums([hypotheses[i] for i in which], [references[i] for i in which])
        return {"_rouge_count": len(which)} | {f"_{kind}": n for kind, n in sums.items()}

    want = {kind: round(score, 2) for kind, score in rouge(hypotheses, references).items()}
    tensors = {key: torch.tensor(n).double() for key, n in output(0, 1, 2).items()}
    idle = {"_rouge_count": 0} | {f"_{kind}": 0.0 for kind in KINDS}
    for steps in (
        [[output(0, 1, 2, 3)]],
        [[output(0), output(1, 2, 3)]],
        [[output(0), output(1)], [output(2, 3), idle]],
        [[tensors], [output(3)]],
    ):
        got = reduced(task, *steps)
        assert {kind: got[kind] for kind in KINDS} == want
        assert all(type(got[kind]) is float for kind in KINDS)


def test_nothing_to_score_is_0(corpus):
    task = task_of(corpus, eval_rouge=True)
    nothing = {"_rouge_count": 0} | {f"_{kind}": 0.0 for kind in KINDS}
    assert reduced(task, [nothing])["rouge_l"] == 0
    assert set(rouge(["", ""], ["some words", "others"]).values()) == {0.0}
    assert "rouge_l" not in reduced(task, [{}])  # training


# --- Generation ---


def summaries(folder):
    text = (folder / "generate-valid.txt").read_text()
    return [line.split("\t")[2].split() for line in text.split("\n") if line.startswith("H-")]


def test_lengths_and_trigrams(corpus, validated, tmp_path):
    checkpoint = validated[0] / "checkpoint_best.pt"

    def lengths_and_repeats(*flags):
        made = summaries(generate(corpus, checkpoint, tmp_path, "--beam", 2, *flags))
        trigrams = [[tuple(words[i : i + 3]) for i in range(len(words) - 2)] for words in made]
        return {len(w) for w in made}, sum(len(set(t)) < len(t) for t in trigrams)

    lengths, repeats = lengths_and_repeats("--min-len", 14, "--max-len-b", 16)
    assert lengths <= {14, 15, 16} and repeats > 0
    flags = ["--min-len", 14, "--max-len-b", 16, "--no-repeat-ngram-size", 3]
    lengths, repeats = lengths_and_repeats(*flags)
    assert lengths <= {14, 15, 16} and repeats == 0
    lengths, repeats = lengths_and_repeats(*flags, "--stepwise-lenpen", "--lenpen", 0.7)
    assert lengths <= {14, 15, 16} and repeats == 0
    short, _ = lengths_and_repeats("--max-len-b", 3)
    assert max(short) <= 3


# --- The step-wise length penalty, beside a search that is written down as it is defined ---

WORDS = 5


class Toy(EnsembleModel):
    """A model of which each prefix has a table of log-probabilities, other for each source."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.models_size = 1
        self.dictionary = Dictionary()
        for index in range(60):  # fairseq's beam is no wider than the dictionary
            self.dictionary.add_symbol(f"w{index}")
        self.first = self.dictionary.index("w0")
        self.eos = self.dictionary.eos()

    def choices(self, source, prefix):
        """``{token: log-probability}`` after a tuple of tokens."""
        generator = torch.Generator().manual_seed(hash((source, prefix)) % 2**31)
        logits = 2 * torch.randn(WORDS + 1, generator=generator)
        tokens = [*range(self.first, self.first + WORDS), self.eos]
        return dict(zip(tokens, logits.log_softmax(0).tolist()))

    def set_decoder_beam_size(self, beam_size):
        pass

    def max_decoder_positions(self):
        return 100

    def forward_encoder(self, net_input):
        return net_input["src_tokens"][:, 0]

    def reorder_encoder_out(self, encoder_outs, new_order):
        return encoder_outs[new_order]

    def reorder_incremental_state(self, incremental_states, new_order):
        pass

    def forward_decoder(self, tokens, encoder_outs, incremental_states, temperature):
        scores = torch.full((len(tokens), len(self.dictionary)), -math.inf)
        for row, (source, prefix) in enumerate(zip(encoder_outs.tolist(), tokens.tolist())):
            for token, score in self.choices(source, tuple(prefix[1:])).items():
                scores[row, token] = score
        return scores, None


def beam_search(toy, source, beam, alpha, longest):
    """The last beam, best first, as ``[(tokens, score), …]``.

    In each step the unfinished hypotheses are replaced by all their extensions, and of these and
    the finished the best `beam` are kept, by log-probability over ((5 + length) / 6) ** alpha.
    """

    def rank(hypothesis):
        tokens, logprob = hypothesis
        return logprob / ((5 + len(tokens)) / 6) ** alpha

    kept = [((), 0.0)]
    for step in range(longest + 1):
        finished = [h for h in kept if h[0][-1:] == (toy.eos,)]
        extended = [
            (tokens + (token,), logprob + more)
            for tokens, logprob in kept
            if tokens[-1:] != (toy.eos,)
            for token, more in toy.choices(source, tokens).items()
            if step < longest or token == toy.eos
        ]
        kept = sorted(finished + extended, key=rank, reverse=True)[:beam]
    return [(list(tokens), rank((tokens, logprob))) for tokens, logprob in kept]


def searched(toy, corpus, sources, beam, alpha, longest, stepwise=True):
    task = task_of(corpus, stepwise_lenpen=stepwise)
    task.tgt_dict = toy.dictionary
    args = SimpleNamespace(beam=beam, lenpen=alpha, max_len_b=longest, min_len=0)
    sample = {"net_input": {"src_tokens": torch.tensor(sources).unsqueeze(1)}}
    return [
        [(hypothesis["tokens"].tolist(), float(hypothesis["score"])) for hypothesis in found]
        for found in task.build_generator(toy, args).generate(toy, sample)
    ]


@pytest.fixture(scope="module")
def toy():
    return Toy()


@pytest.mark.parametrize("beam", [1, 2, 4])
@pytest.mark.parametrize("alpha", [0, 0.9, 2.5])
def test_search_is_the_one_by_definition(toy, corpus, beam, alpha):
    sources = list(range(24))  # in one batch, of which they leave at different steps, and alone
    found = searched(toy, corpus, sources, beam, alpha, longest=6)
    alone = [searched(toy, corpus, [source], beam, alpha, longest=6)[0] for source in sources]
    for source, hypotheses in zip(sources + sources, found + alone):
        expected = beam_search(toy, source, beam, alpha, longest=6)
        assert [tokens for tokens, _ in hypotheses] == [tokens for tokens, _ in expected]
        for (_, got), (_, want) in zip(hypotheses, expected):
            assert got == pytest.approx(want, abs=1e-5)


def test_search_differs_from_fairseqs(toy, corpus):
    sources = list(range(16))
    ours = searched(toy, corpus, sources, 4, 1.0, longest=6)
    fairseqs = searched(toy, corpus, sources, 4, 1.0, longest=6, stepwise=False)
    assert sum(a[0][0] != b[0][0] for a, b in zip(ours, fairseqs)) >= 3


def test_what_falls_out_of_the_beam_is_no_padding(toy):
    """A beam of two with one word possible: the rest must not put holes in the decoder's input."""
    search = StepwiseLengthPenaltyBeamSearch(toy.dictionary, 1)
    lprobs = torch.full((1, 2, len(toy.dictionary)), -math.inf)
    lprobs[:, :, toy.first] = -1.0
    scores, tokens, _ = search.step(0, lprobs, None)
    assert scores.tolist() == [[-1, -math.inf, -math.inf, -math.inf]]
    assert tokens.tolist() == [[toy.first, toy.eos, toy.eos, toy.eos]]


def test_a_generator_of_ones_own(toy, corpus):
    class Own(StepwiseLengthPenaltyGenerator):
        pass

    args = SimpleNamespace(beam=2, lenpen=1.0, max_len_b=6, min_len=0)
    task = task_of(corpus, stepwise_lenpen=True)
    task.tgt_dict = toy.dictionary
    assert type(task.build_generator(toy, args, Own)) is Own


@pytest.mark.parametrize("alpha", [0, 0.9, 2.5])
def test_a_beam_for_everything_finds_the_best_there_is(toy, corpus, alpha):
    """A beam of 60 holds all 31 hypotheses of at most two words: nothing is left out."""
    found = searched(toy, corpus, [0, 1, 2], 60, alpha, longest=2)
    for source, hypotheses in enumerate(found):
        prefixes = {(): 0.0}
        for _ in range(2):
            prefixes |= {
                tokens + (token,): logprob + more
                for tokens, logprob in prefixes.items()
                for token, more in toy.choices(source, tokens).items()
                if token != toy.eos
            }
        every = {
            tokens + (toy.eos,): (logprob + toy.choices(source, tokens)[toy.eos])
            / ((5 + len(tokens) + 1) / 6) ** alpha
            for tokens, logprob in prefixes.items()
        }
        assert len(every) == len(hypotheses) == 1 + WORDS + WORDS**2
        assert tuple(hypotheses[0][0]) == max(every, key=every.get)
        assert hypotheses[0][1] == pytest.approx(max(every.values()), abs=1e-5)


def test_the_penalty_is_that_of_wu_et_al():
    assert length_penalty(1, 0.6) == 1
    assert length_penalty(7, 0.6) == pytest.approx((5 + 7) ** 0.6 / (5 + 1) ** 0.6)
    assert length_penalty(7, 0) == 1


# --- scripts/evaluate_rouge.sh ---


@pytest.fixture
def files(tmp_path):
    """A hypothesis and a reference file of 30 summaries, each of 1 to 3 sentences."""
    generator = random.Random(0)
    words = "the dogs were running , houses burned in 1990 and cats' tails aren't 3.5".split()

    def summary():
        sentences = (generator.choices(words, k=generator.randint(1, 8)) for _ in "abc")
        return " . ".join(" ".join(s) for s in list(sentences)[: generator.randint(1, 3)])

    for name in ("hypotheses", "references"):
        (tmp_path / name).write_text("".join(summary() + "\n" for _ in range(30)))
    return tmp_path / "hypotheses", tmp_path / "references"


@pytest.mark.parametrize("separator", [None, " . "])
def test_scores_are_the_librarys(files, separator):
    hypotheses, references = (path.read_text().splitlines() for path in files)
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    want = dict.fromkeys(KINDS, 0.0)
    for hypothesis, reference in zip(hypotheses, references):
        if separator:
            hypothesis, reference = (
                "\n".join(text.split(separator)) for text in (hypothesis, reference)
            )
        scores = scorer.score(target=reference, prediction=hypothesis)
        for kind, name in KINDS.items():
            want[kind] += scores[name].fmeasure * 100 / 30
    got = score_rouge.score(*files, separator)
    assert {kind: got[kind] for kind in KINDS} == pytest.approx(want, abs=1e-4)
    assert (got["rouge_l"] == got["rouge_lsum"]) == (separator is None)


def test_scores_are_the_librarys_commands(files, tmp_path):
    subprocess.run(
        [sys.executable, "-m", "rouge_score.rouge", "--use_stemmer", "--noaggregate",
         f"--target_filepattern={files[1]}", f"--prediction_filepattern={files[0]}",
         f"--output_filename={tmp_path / 'scores.csv'}"],
        check=True, capture_output=True,
    )  # fmt: skip
    rows = list(csv.DictReader(open(tmp_path / "scores.csv")))
    got = score_rouge.score(*files)
    for kind in ("rouge_1", "rouge_2", "rouge_l"):
        mean = sum(float(row[f"{KINDS[kind]}-F"]) for row in rows) / len(rows)
        assert got[kind] == pytest.approx(100 * mean, abs=2e-4)  # six digits in the file


def test_printed(files, capsys):
    assert score_rouge.main([str(path) for path in files]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"ROUGE-1 +\d+\.\d\d\nROUGE-2 +\d+\.\d\d\nROUGE-L +\d+\.\d\d\nROUGE-Lsum ", printed
    )
    assert "of 30 summaries (rouge-score 0.1.2, stemming, a summary is one sentence)" in printed
    assert score_rouge.main([*map(str, files), "--json", "--sentence-separator", " . "]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["tool"], result["version"]) == ("rouge-score", "0.1.2")
    assert result["sentence_separator"] == " . " and result["summaries"] == 30
    assert f"ROUGE-1    {result['rouge_1']:.2f}" in printed


GENERATED = (
    "S-1\tx y\nT-1\tthe <<unk>> sat\nH-1\t-0.5\tthe <unk> sat\nD-1\t-0.5\tthe <unk> sat\n"
    "P-1\t-0.1 -0.2\nS-0\tz\nT-0\ta dog\nH-0\t-0.1\ta dog\nD-0\t-0.1\ta dog\nD-0\t-0.9\tworse\n"
    "Generate test with beam=5: BLEU4 = 0.00\n"
)


def test_output_of_fairseq_generate(tmp_path):
    (tmp_path / "generate-test.txt").write_text(GENERATED)
    (tmp_path / "printed.log").write_text(GENERATED)
    (tmp_path / "references").write_text("a dog\nthe cat sat\n")
    # 2/3 of the words and none of the pairs: an unknown word matches nothing.
    for path in (tmp_path, tmp_path / "generate-test.txt", tmp_path / "printed.log"):
        for references in (None, tmp_path / "references"):
            got = score_rouge.score(path, references)
            assert got["rouge_1"] == pytest.approx(100 * (1 + 2 / 3) / 2, abs=1e-3)
            assert got["rouge_2"] == 50


@pytest.mark.parametrize(
    "hypotheses, references, message",
    [
        ("a\nb\n", "a\n", "hypotheses: expected one for each of 1 references, got 2"),
        ("a\n", "a\n\n", "hypotheses: expected one for each of 2 references, got 1"),
        ("", "a\n", "hypotheses: expected one for each of 1 references, got 0"),
        ("a\n", "", "references: expected summaries, got none"),
        (b"\xff\xfe\n", "a\n", "'utf-8' codec can't decode"),
        ("a\n", None, "REFERENCES: expected a file, got none"),
        (None, "a\n", "No such file"),
        (GENERATED.replace("D-0", "X-0"), None, "expected D-0 of fairseq-generate, got none"),
        (GENERATED.replace("T-0", "X-0"), None, "expected T-0 of fairseq-generate, got none"),
        (GENERATED, "a\n", "hypotheses: expected one for each of 1 references, got 2"),
    ],
)
def test_files_that_do_not_fit(tmp_path, capsys, hypotheses, references, message):
    arguments = []
    for name, content in (("hypotheses", hypotheses), ("references", references)):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        if content is not None or name == "hypotheses":
            arguments.append(str(path))
    assert score_rouge.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert message in printed.err


def test_folder_without_output(tmp_path, capsys):
    assert score_rouge.main([str(tmp_path)]) == 2
    assert "expected one generate-*.txt, got none" in capsys.readouterr().err
    for split in ("test", "valid"):
        (tmp_path / f"generate-{split}.txt").touch()
    assert score_rouge.main([str(tmp_path)]) == 2
    assert "got generate-test.txt, generate-valid.txt" in capsys.readouterr().err


def test_more_hypotheses_than_references_is_an_error_for_the_library_too():
    with pytest.raises(ValueError, match="hypotheses: expected one for each of 1 references"):
        rouge_sums(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="references: expected summaries, got none"):
        rouge([], [])


def test_a_longest_summary_may_grow_with_its_source(corpus, toy):
    args = SimpleNamespace(max_len_a=1.0, max_len_b=8, min_len=9)
    task = task_of(corpus)
    task.tgt_dict = toy.dictionary
    assert task.build_generator(toy, args).min_len == 9
