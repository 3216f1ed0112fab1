"""The encoder-decoder in fairseq's generator: batches, searches, ensembles."""

import functools
import io
import re
import shutil

import pytest
import torch

from conftest import PLUGIN, SMALL, fairseq, train_a_little

pytest.importorskip("fairseq")

import fairseq_cli.generate
import fairseq_cli.interactive
from building import configured, dictionary, from_flags, task
from fairseq import options
from fairseq.models import build_model
from fairseq.search import (
    DiverseBeamSearch,
    DiverseSiblingsSearch,
    LexicallyConstrainedBeamSearch,
    Sampling,
)
from fairseq.sequence_generator import SequenceGenerator
from fairseq.token_generation_constraints import pack_constraints


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """The checkpoint of a small model whose attention copies, aligns and follows."""
    model = [*SMALL, "--copy-attention", "--align-attention", "--follow-attention"]
    return train_a_little(tmp_path_factory.mktemp("trained"), corpus, model, max_tokens=2000)


@pytest.fixture(scope="module")
def transformer(corpus, tmp_path_factory):
    """The checkpoint of a small Transformer after a few updates."""
    folder = tmp_path_factory.mktemp("transformer")
    sizes = SMALL[SMALL.index("--encoder-embed-dim") :]
    fairseq(
        "train", corpus, "--arch", "transformer", "--encoder-layers", 1, "--decoder-layers", 1,
        *sizes, "--optimizer", "adam", "--lr", 0.01, "--max-tokens", 2000, "--max-update", 6,
        "--save-dir", folder, "--no-epoch-checkpoints", "--log-format", "none",
    )  # fmt: skip
    return folder / "checkpoint_last.pt"


def hypotheses(printed):
    """{sentence: (score, text)} of what fairseq-generate printed."""
    lines = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", printed, re.M)
    return {int(sentence): (float(score), text) for sentence, score, text in lines}


def generate(corpus, path, *flags):
    """What fairseq-generate prints, without the seconds that a process of its own takes.

    Nor has it a process that loads data: PyTorch waits 5 seconds for one whose iterator is garbage.
    """
    flags = [corpus, "--path", path, "--max-len-b", 15, "--user-dir", PLUGIN, *flags]
    flags += ["--num-workers", 0]
    printed = io.StringIO()
    fairseq_cli.generate._main(configured(options.get_generation_parser(), *flags), printed)
    return printed.getvalue()


@pytest.fixture(scope="module")
def searched(corpus, trained):
    """A function to the hypotheses of a plain search with so many beams, which is made once."""
    return functools.cache(lambda beam: hypotheses(generate(corpus, trained, "--beam", beam)))


def test_batch_and_padding_change_nothing(corpus, trained):
    """Alone, in a batch, and with padding on either side: the same hypotheses and scores."""
    alone = hypotheses(generate(corpus, trained, "--batch-size", 1, "--beam", 3))
    assert len(alone) == 43
    for flags in (["--batch-size", 43], ["--batch-size", 7, "--left-pad-source"]):
        batched = hypotheses(generate(corpus, trained, "--beam", 3, *flags))
        assert batched.keys() == alone.keys()
        for sentence, (score, text) in batched.items():
            assert text == alone[sentence][1]
            # printed to four digits; the scores themselves are compared below
            assert score == pytest.approx(alone[sentence][0], abs=1.1e-4)


def repeats(text):
    """Return whether two words that stand together do so again."""
    words = text.split()
    return len(set(zip(words, words[1:]))) < len(words) - 1


@pytest.mark.parametrize(
    "flags",
    [
        "--beam 4 --nbest 2",
        "--sampling --sampling-topk 5 --beam 2 --nbest 2",
        "--prefix-size 3 --beam 2",
        "--diverse-beam-groups 2 --beam 4",
        "--print-alignment hard --beam 2",
        "--print-alignment soft --beam 2",
        "--print-alignment hard --score-reference",
        "--no-repeat-ngram-size 2 --match-source-len --unkpen 3 --beam 3",
        "--retain-dropout --beam 2",
        "--fp16 --beam 2",
    ],
)
def test_generation_modes(corpus, trained, searched, flags):
    printed = generate(corpus, trained, *flags.split())
    found = hypotheses(printed)
    assert len(found) == 43
    if "alignment" in flags:
        sources = dict(re.findall(r"^S-(\d+)\t(.*)$", printed, re.M))
        alignments = dict(re.findall(r"^A-(\d+)\t(.*)$", printed, re.M))
        assert len(alignments) == 43
        for sentence, alignment in alignments.items():
            words, length = alignment.split(), len(found[int(sentence)][1].split())
            if "hard" in flags:  # source-target, for each word but the last, <eos>
                places = [tuple(map(int, word.split("-"))) for word in words]
                assert [target for _, target in places] == list(range(length))
                assert max(source for source, _ in places) < len(sources[sentence].split())
            else:
                weights = torch.tensor([list(map(float, word.split(","))) for word in words])
                assert weights.shape == (length + 1, len(sources[sentence].split()) + 1)
                assert torch.allclose(weights.sum(dim=1), torch.ones(length + 1), atol=1e-4)
    plain = searched(4 if "--beam 4" in flags else 2)
    if "nbest" in flags:
        assert len(re.findall("^H-", printed, re.M)) == 2 * 43
        if "sampling" not in flags:  # the best comes first, and `found` has the second best
            assert all(found[sentence][0] <= plain[sentence][0] for sentence in found)
            assert any(found[sentence][1] != plain[sentence][1] for sentence in found)
    if any(flag in flags for flag in ("sampling", "diverse", "dropout", "fp16")):
        assert any(found[sentence][0] != plain[sentence][0] for sentence in found)
    if "fp16" in flags:
        alike = [sentence for sentence in found if found[sentence][1] == plain[sentence][1]]
        assert len(alike) >= 40  # where two paths are level, a beam may take the other
        for sentence in alike:
            assert found[sentence][0] == pytest.approx(plain[sentence][0], abs=0.05)
    if "ngram" in flags:
        repeated = [repeats(text) for _, text in plain.values()]
        assert any(repeated) and not any(repeats(text) for _, text in found.values())
    if "prefix" in flags:
        targets = dict(re.findall(r"^T-(\d+)\t(.*)$", printed, re.M))
        for sentence, (_, text) in found.items():
            target = targets[str(sentence)].replace("<<unk>>", "<unk>")
            assert text.split()[:3] == target.split()[:3]


def test_constraints_are_in_the_translations(corpus, trained, tmp_path, capsys):
    (tmp_path / "source").write_text("en el principio\tlight\tthe earth\ny la tierra\n")
    flags = [corpus, "--path", trained, "--max-len-b", 15, "--user-dir", PLUGIN]
    flags += ["--constraints", "--beam", 5, "--input", tmp_path / "source", "--buffer-size", 2]
    flags += ["--batch-size", 2, "--source-lang", "es", "--target-lang", "en", "--num-workers", 0]
    parser = options.get_interactive_generation_parser()
    fairseq_cli.interactive.main(configured(parser, *flags))
    found = hypotheses(capsys.readouterr().out)
    assert re.search(r"\blight\b.*\bthe earth\b", found[0][1]) and len(found) == 2


def test_fusion_with_a_language_model(corpus, trained, searched, trained_lm, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    shutil.copy(corpus / "dict.en.txt", data / "dict.txt")  # as the task language_modeling wants
    flags = ["--beam", 3, "--lm-path", trained_lm, "--lm-weight"]
    alone, fused = (hypotheses(generate(data, trained, *flags, weight)) for weight in (0, 0.5))
    assert alone == searched(3)
    assert len(fused) == 43 and fused != alone


# Each search of fairseq's generator, on sentences that end early and late.
SEARCHES = {
    "greedy": dict(beam_size=1),
    "beam": dict(beam_size=4),
    "sampling": dict(beam_size=3, search_strategy=lambda words: Sampling(words, 5)),
    "diverse": dict(
        beam_size=4,
        search_strategy=lambda words: DiverseBeamSearch(words, 2, diversity_strength=0.5),
    ),
    "siblings": dict(
        beam_size=4, search_strategy=lambda words: DiverseSiblingsSearch(words, diversity_rate=0.5)
    ),
    "constraints": dict(
        beam_size=5,
        search_strategy=lambda words: LexicallyConstrainedBeamSearch(words, "unordered"),
        constraints=[[5, 6], [8], [9], [10], [11]],
    ),
    "prefix": dict(
        beam_size=3, prefix_tokens=[[5, 6, 7], [8, 1, 1], [9, 10, 1], [5, 5, 5], [6, 7, 8]]
    ),
    "ngrams": dict(beam_size=3, no_repeat_ngram_size=2, unk_penalty=2.0, temperature=1.5),
    "ngrams in a prefix": dict(
        beam_size=3, no_repeat_ngram_size=1, prefix_tokens=[[5, 5, 5]] * 4 + [[6, 7, 1]]
    ),
    "source length": dict(beam_size=3, match_source_len=True),
}


@pytest.fixture(scope="module")
def ensemble():
    """A TaLK and an attention model whose random weights end sentences after a few words."""
    torch.manual_seed(0)
    attention = "--arch transformer --encoder-normalize-before --decoder-normalize-before".split()
    sizes = SMALL[SMALL.index("--encoder-embed-dim") :]
    models = [
        build_model(from_flags(*flags), task(30)).eval()
        for flags in ([*SMALL, *attention[2:]], [*attention, *sizes, "--decoder-layers", "1"])
    ]
    for model in models:
        tied = model.decoder.output_projection
        model.decoder.output_projection = torch.nn.Linear(tied.in_features, tied.out_features)
        model.decoder.output_projection.weight.data = tied.weight.data * 4
        model.decoder.output_projection.bias.data = 8.0 * (torch.arange(30) == 2)
    return models


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("members", [[0], [0, 1]], ids=["alone", "with a Transformer"])
def test_a_search_step_by_step_equals_full_passes(ensemble, members, name):
    models, words = [ensemble[member] for member in members], dictionary(30)
    tokens = torch.full((5, 11), words.pad())
    generator = torch.Generator().manual_seed(1)
    lengths = [9, 4, 11, 2, 6]
    for row, length in zip(tokens, lengths):
        row[:length] = torch.randint(4, 30, (length,), generator=generator)
        row[length - 1] = words.eos()
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor(lengths)}}

    def search(*, search_strategy=None, constraints=None, prefix_tokens=None, **kwargs):
        strategy = search_strategy and search_strategy(words)
        generator = SequenceGenerator(
            models, words, max_len_b=20, search_strategy=strategy, **kwargs
        )
        generator.model.has_incremental = step_by_step
        if constraints:
            constraints = pack_constraints([[torch.tensor(some)] for some in constraints])
        prefix_tokens = prefix_tokens and torch.tensor(prefix_tokens)
        torch.manual_seed(1)
        found = generator.generate(
            models, sample, constraints=constraints, prefix_tokens=prefix_tokens
        )
        return [hypothesis for best in found for hypothesis in best]

    step_by_step = True
    got = search(**SEARCHES[name])
    step_by_step = False
    expected = search(**SEARCHES[name])
    ended = [len(hypothesis["tokens"]) <= 12 for hypothesis in got]
    assert any(ended) or name == "greedy"
    for ours, full in zip(got, expected, strict=True):
        assert torch.equal(ours["tokens"], full["tokens"])
        scores = ours["positional_scores"], full["positional_scores"]
        assert torch.allclose(*scores, rtol=0, atol=2e-5)


@pytest.mark.parametrize("flags", ["--beam 2", "--score-reference", "--print-alignment hard"])
def test_ensemble_with_a_transformer(corpus, trained, transformer, flags):
    """In either order: fairseq adds up the attention weights of the second to the first's."""
    first, second = (
        hypotheses(generate(corpus, f"{one}:{other}", *flags.split()))
        for one, other in ((trained, transformer), (transformer, trained))
    )
    assert len(first) == 43
    for sentence, (score, text) in first.items():
        assert second[sentence][1] == text
        assert second[sentence][0] == pytest.approx(score, abs=1e-4)


def test_ensemble_of_a_model_with_itself_is_the_model(corpus, trained, searched):
    assert len(searched(2)) == 43
    assert hypotheses(generate(corpus, f"{trained}:{trained}", "--beam", 2)) == searched(2)


@pytest.mark.long
def test_ensemble_of_two_models_scores_between_them(corpus, trained, tmp_path):
    """The ensemble's score of a hypothesis is that of the averaged probabilities."""
    fairseq(
        "train", corpus, *SMALL, "--optimizer", "adam", "--lr", 0.01, "--max-tokens", 2000,
        "--max-update", 12, "--save-dir", tmp_path, "--no-epoch-checkpoints", "--seed", 7,
        "--log-format", "none",
    )  # fmt: skip
    other = tmp_path / "checkpoint_last.pt"

    def scored(path):
        """{sentence: the probability of each word}, of which the logarithms are printed."""
        printed = generate(corpus, path, "--score-reference", "--beam", 1)
        lines = re.findall(r"^P-(\d+)\t(.*)$", printed, re.MULTILINE)
        return {n: torch.tensor([float(p) for p in line.split()]).exp2() for n, line in lines}

    first, second, both = map(scored, (trained, other, f"{trained}:{other}"))
    assert len(both) == 43 and not torch.equal(first["0"], second["0"])
    for n, p in both.items():
        assert torch.allclose(p, (first[n] + second[n]) / 2, rtol=0, atol=2e-4)
