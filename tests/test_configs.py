"""The recipes under configs/: what each must say, and that it builds the model it says."""

import re
import sys
import warnings
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from fairseq import models, tasks
from fairseq.data import Dictionary
from fairseq.dataclass import initialize
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import talk_fairseq  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import train
from train import CONFIGS

NAMES = sorted(str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("*/*.yaml"))

# --- What the papers and the published commands say; each row adds to these ---

COMMON = {
    "common.seed": 1,
    "common.log_interval": 100,
    "distributed_training.distributed_world_size": 8,
    "checkpoint.keep_last_epochs": 10,
}
LABEL_SMOOTHING = {
    "criterion._name": "label_smoothed_cross_entropy",
    "criterion.label_smoothing": 0.1,
}
ADAM = {
    "optimizer._name": "adam",
    "optimizer.adam_betas": "(0.9, 0.98)",
    "optimizer.weight_decay": 0.0,
    "optimization.clip_norm": 0.0,
}


def translation(source, target, **options):
    task = {"_name": "translation", "source_lang": source, "target_lang": target, **options}
    return COMMON | {f"task.{name}": value for name, value in task.items()}


def batch(max_tokens, update_freq, max_update, fp16=True):
    return ({"common.fp16": True} if fp16 else {}) | {
        "dataset.max_tokens": max_tokens,
        "optimization.update_freq": [update_freq],
        "optimization.max_update": max_update,
    }


def inverse_sqrt(lr):
    return {
        "optimization.lr": [lr],
        "lr_scheduler._name": "inverse_sqrt",
        "lr_scheduler.warmup_updates": 4000,
        "lr_scheduler.warmup_init_lr": 1e-7,
    }


def cosine(period):
    return {
        "optimization.lr": [0.001],
        "lr_scheduler._name": "cosine",
        "lr_scheduler.warmup_updates": 10000,
        "lr_scheduler.warmup_init_lr": 1e-7,
        "lr_scheduler.min_lr": 1e-9,
        "lr_scheduler.lr_period_updates": period,
        "lr_scheduler.t_mult": 1,
        "lr_scheduler.lr_shrink": 1,
    }


def beam(size, lenpen, **more):
    generation = {"beam": size, "lenpen": lenpen, **more}
    return {f"generation.{name}": value for name, value in generation.items()}


def model(name, dropout=None, attention=None, **options):
    given = {"_name": name, "dropout": dropout, "attention_dropout": attention, **options}
    return {f"model.{key}": value for key, value in given.items() if value is not None}


def talk(arch, dropout, attention, offsets, inputs, **options):
    dropouts = {"offset_dropout": offsets, "input_dropout": inputs}
    return model(arch, dropout, attention, **dropouts, **options)


def conv(kind, arch, dropout, attention, glu=True, **options):
    """LightConv (`kind` lightweight) or DynamicConv (dynamic)."""
    return model(
        arch, dropout, attention, weight_dropout=attention,
        encoder_conv_type=kind, decoder_conv_type=kind, encoder_glu=glu, decoder_glu=glu,
        **options,
    )  # fmt: skip


def fconv(arch, dropout):
    """ConvS2S and its optimiser, the same on all three data sets."""
    return {
        **model(arch, dropout),
        "optimizer._name": "nag",
        "optimizer.weight_decay": 0.0,
        "optimization.clip_norm": 0.1,
        "optimization.lr": [0.5],
        "optimization.stop_min_lr": 1e-5,
        "lr_scheduler._name": "fixed",
        "lr_scheduler.force_anneal": 50,
        "lr_scheduler.lr_shrink": 0.1,
    }


SHARED = {"share_all_embeddings": True}

# --- IWSLT14 De-En: one GPU, dictionaries of the two languages apart ---

IWSLT = translation("de", "en") | LABEL_SMOOTHING | {
    "distributed_training.distributed_world_size": 1
}  # fmt: skip
IWSLT_ADAM = IWSLT | ADAM | {"optimizer.weight_decay": 0.0001} | inverse_sqrt(0.0005)
IWSLT_TALK = (
    IWSLT_ADAM
    | {"task.left_pad_source": False}
    | batch(4000, 1, 50000, fp16=False)
    | beam(5, 1.6)
    | talk("talkconv_iwslt_de_en", 0.3, 0.1, 0.1, 0.0)
)
IWSLT_CONV = IWSLT_ADAM | batch(4000, 1, 50000, fp16=False) | beam(4, 1)
IWSLT_TRANSFORMER = (
    IWSLT_ADAM
    | batch(4096, 1, 50000, fp16=False)
    | beam(5, 1)
    | model("transformer_iwslt_de_en", 0.3, share_decoder_input_output_embed=True)
)


def rdrop(max_update):
    return {
        "criterion._name": "label_smoothed_cross_entropy_with_rdrop",
        "criterion.rdrop_alpha": 5.0,
        "optimization.max_update": max_update,
    }


def ablation(heads, dropout, windows=("1,3,7,15x4", "1,3,7,15x3"), **options):
    """A row of Table 7."""
    return IWSLT_TALK | talk(
        "talkconv_iwslt_de_en", 0.3, 0.1, dropout, 0.0,
        encoder_talk_heads=heads, decoder_talk_heads=heads,
        encoder_max_left=windows[0], decoder_max_left=windows[1], **options,
    )  # fmt: skip


ONE_WINDOW = ("1x7", "1x6")

# --- WMT: eight GPUs, half precision, one dictionary ---

BIG_ADAM = LABEL_SMOOTHING | ADAM
EN_DE = translation("en", "de") | batch(3584, 16, 30000)
EN_DE_COSINE = EN_DE | BIG_ADAM | cosine(20000)
EN_FR = translation("en", "fr") | batch(3584, 16, 80000)
EN_FR_COSINE = EN_FR | BIG_ADAM | cosine(70000)
ZH_EN = translation("zh", "en") | batch(3584, 16, 40000) | BIG_ADAM | cosine(30000) | beam(8, 1)

TALK_EN_DE = EN_DE_COSINE | {"task.left_pad_source": False} | beam(4, 0.35)


def talk_big(arch="talkconv_wmt_en_de_big", dropout=0.3, **options):
    return talk(arch, dropout, 0.1, 0.1, 0.1, **options)


# --- CNN-DM ---

CNN_DM = (
    COMMON
    | LABEL_SMOOTHING
    | ADAM
    | {"optimizer.weight_decay": 0.001}
    | batch(3584, 4, 30000)
    | cosine(20000)
    | beam(5, 1, max_len_a=0, max_len_b=140, min_len=55, no_repeat_ngram_size=3)
    | {
        "task._name": "talk_summarization",
        "task.truncate_source": True,
        "task.max_source_positions": 400,
        "task.stepwise_lenpen": True,
    }
)

# --- Language models ---


def language_model(block, context, **more):
    return (
        COMMON
        | {
            "task._name": "language_modeling",
            "task.sample_break_mode": "none",
            "task.tokens_per_sample": block,
            "dataset.skip_invalid_size_inputs_valid_test": True,
            "dataset.data_buffer_size": 0,
            "checkpoint.keep_last_epochs": 1,
            "distributed_training.ddp_backend": "legacy_ddp",
            "criterion._name": "adaptive_loss",
            "optimizer._name": "nag",
            "optimizer.weight_decay": 0.0,
            "optimization.lr": [1.0],
            "optimization.clip_norm": 0.1,
            "lr_scheduler._name": "cosine",
            "lr_scheduler.warmup_updates": 16000,
            "lr_scheduler.warmup_init_lr": 1e-7,
            "lr_scheduler.min_lr": 0.0001,
            "lr_scheduler.lr_period_updates": 270000,
            "lr_scheduler.t_mult": 2,
            "lr_scheduler.lr_shrink": 0.75,
            "eval_lm.context_window": context,
        }
        | batch(3072, 3, 286000, fp16=False)
        | more
    )


WIKITEXT = language_model(512, 400)
BILLION_WORD = language_model(512, 0) | {"task.sample_break_mode": "eos"}


def adaptive(cutoff, softmax_dropout):
    return {
        "adaptive_input": True,
        "adaptive_input_cutoff": cutoff,
        "adaptive_softmax_cutoff": cutoff,
        "adaptive_softmax_dropout": softmax_dropout,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
    }


def conv_lm(kind, dropout, softmax_dropout, cutoff, relu_dropout):
    return model(
        "lightconv_lm", dropout, 0.1, weight_dropout=0.1, relu_dropout=relu_dropout,
        input_dropout=0.1, decoder_conv_type=kind,
        decoder_kernel_size_list=[15] * 2 + [31] * 4 + [63] * 11, decoder_layers=17,
        decoder_embed_dim=1024, decoder_ffn_embed_dim=4096, decoder_attention_heads=16,
        **adaptive(cutoff, softmax_dropout),
    )  # fmt: skip


WIKI_CUTOFF, BILLION_CUTOFF = "20000,60000", "60000,160000"

ROWS = {
    "iwslt14_de_en/talkconv": IWSLT_TALK,
    "iwslt14_de_en/transformer": IWSLT_TRANSFORMER,
    "iwslt14_de_en/lightconv": IWSLT_CONV
    | conv("lightweight", "lightconv_iwslt_de_en", 0.3, 0.1, glu=False),
    "iwslt14_de_en/dynamicconv": IWSLT_CONV
    | conv("dynamic", "lightconv_iwslt_de_en", 0.3, 0.1, glu=False),
    "iwslt14_de_en/fconv": IWSLT
    | batch(4000, 1, 0, fp16=False)
    | beam(5, 1)
    | fconv("fconv_iwslt_de_en", 0.2),
    # Table 7
    "iwslt14_de_en/ablation_1_one_window": ablation(1, 0.0, ONE_WINDOW, talk_normalize=False),
    "iwslt14_de_en/ablation_2_normalised": ablation(1, 0.0, ONE_WINDOW),
    "iwslt14_de_en/ablation_3_windows": ablation(1, 0.0),
    "iwslt14_de_en/ablation_4_offset_dropout": ablation(1, 0.1),
    "iwslt14_de_en/ablation_5_head_a_channel": ablation(512, 0.1),
    "iwslt14_de_en/ablation_6_four_heads": ablation(4, 0.1),
    "iwslt14_de_en/ablation_7_relu": ablation(4, 0.1, activation_fn="relu"),
    # beyond the papers
    "iwslt14_de_en/talkconv_rdrop": IWSLT_TALK | rdrop(300000),
    "iwslt14_de_en/transformer_rdrop": IWSLT_TRANSFORMER | rdrop(300000),
    "iwslt14_de_en/talkconv_simcut": IWSLT_TALK
    | {
        "criterion._name": "label_smoothed_cross_entropy_with_simcut",
        "criterion.simcut_alpha": 3.0,
        "criterion.simcut_cutoff": 0.05,
        "optimization.max_update": 300000,
    },
    "iwslt14_de_en/talkconv_deep_shallow": IWSLT_TALK
    | model(
        "talkconv_iwslt_de_en", encoder_layers=12, encoder_max_left="1,3,7,15x9",
        decoder_layers=1, decoder_max_left="15",
    ),  # fmt: skip
    "iwslt14_de_en/talkconv_wide": IWSLT_TALK
    | model(
        "talkconv_iwslt_de_en", encoder_max_left="3,7,15,31,63,127x2",
        decoder_max_left="3,7,15,31,63,127",
    ),  # fmt: skip
    "iwslt14_de_en/talkconv_ema": IWSLT_TALK
    | {
        "checkpoint.keep_last_epochs": 1,
        "ema.store_ema": True,
        "ema.ema_decay": 0.999,
        "ema.ema_fp32": True,
    },
    "wmt16_en_de/talkconv": TALK_EN_DE | talk_big(**SHARED),
    "wmt16_en_de/transformer": EN_DE
    | BIG_ADAM
    | inverse_sqrt(0.001)
    | beam(4, 0.6)
    | model("transformer_vaswani_wmt_en_de_big", 0.3, **SHARED),
    "wmt16_en_de/lightconv": EN_DE_COSINE
    | beam(5, 0.5)
    | conv("lightweight", "lightconv_wmt_en_de_big", 0.3, 0.1, **SHARED),
    "wmt16_en_de/dynamicconv": EN_DE_COSINE
    | beam(5, 0.5)
    | conv("dynamic", "lightconv_wmt_en_de_big", 0.3, 0.1, **SHARED),
    "wmt16_en_de/fconv": EN_DE
    | LABEL_SMOOTHING
    | beam(5, 1)
    | fconv("fconv_wmt_en_de", 0.2)
    | batch(4000, 1, 0),
    # small decoders, for speed: beam 1
    "wmt16_en_de/talkconv_1_decoder_layer": TALK_EN_DE
    | beam(1, 1)
    | talk_big("talkconv_wmt_en_de_big_1_decoder_layer", **SHARED),
    "wmt16_en_de/talkconv_3_decoder_layers": TALK_EN_DE
    | beam(1, 1)
    | talk_big("talkconv_wmt_en_de_big_3_decoder_layers", **SHARED),
    "wmt16_en_de/dynamicconv_1_decoder_layer": EN_DE_COSINE
    | beam(1, 1)
    | conv(
        "dynamic", "lightconv_wmt_en_de_big", 0.3, 0.1, **SHARED,
        decoder_layers=1, decoder_kernel_size_list=[31],
    ),  # fmt: skip
    "wmt16_en_de/dynamicconv_3_decoder_layers": EN_DE_COSINE
    | beam(1, 1)
    | conv(
        "dynamic", "lightconv_wmt_en_de_big", 0.3, 0.1, **SHARED,
        decoder_layers=3, decoder_kernel_size_list=[7, 15, 31],
    ),  # fmt: skip
    "wmt16_en_de/talkconv_deep_shallow": TALK_EN_DE
    | talk_big(
        **SHARED, encoder_layers=12, encoder_max_left="3,7,15,31x9",
        decoder_layers=1, decoder_max_left="31",
    ),  # fmt: skip
    "wmt14_en_fr/talkconv": EN_FR_COSINE
    | {"task.left_pad_source": False}
    | batch(1800, 32, 80000)
    | beam(6, 0.65)
    | talk_big("talkconv_wmt_en_fr_big", 0.1, **SHARED),
    "wmt14_en_fr/transformer": EN_FR
    | BIG_ADAM
    | inverse_sqrt(0.001)
    | beam(4, 0.6)
    | model("transformer_vaswani_wmt_en_fr_big", 0.1, **SHARED),
    "wmt14_en_fr/lightconv": EN_FR_COSINE
    | beam(5, 0.9)
    | conv("lightweight", "lightconv_wmt_en_fr_big", 0.1, 0.1, **SHARED),
    "wmt14_en_fr/dynamicconv": EN_FR_COSINE
    | beam(5, 0.9)
    | conv("dynamic", "lightconv_wmt_en_fr_big", 0.1, 0.1, **SHARED),
    "wmt14_en_fr/fconv": EN_FR
    | LABEL_SMOOTHING
    | beam(5, 1)
    | fconv("fconv_wmt_en_fr", 0.1)
    | batch(3000, 1, 0),
    "wmt17_zh_en/talkconv": ZH_EN | {"task.left_pad_source": False} | talk_big(dropout=0.25),
    "wmt17_zh_en/lightconv": ZH_EN
    | conv("lightweight", "lightconv_wmt_zh_en_big", 0.25, 0.2),
    "wmt17_zh_en/dynamicconv": ZH_EN | conv("dynamic", "lightconv_wmt_zh_en_big", 0.25, 0.2),
    "cnn_dm/talkconv": CNN_DM
    | {"task.left_pad_source": False}
    | talk_big("talkconv_cnndm_std", **SHARED),
    "cnn_dm/talkconv_deep": CNN_DM
    | {"task.left_pad_source": False}
    | talk_big("talkconv_cnndm_deep", **SHARED),
    "cnn_dm/transformer": CNN_DM
    | model("transformer_wmt_en_de", 0.3, 0.1, **SHARED),
    "cnn_dm/lightconv": CNN_DM
    | conv("lightweight", "lightconv_wmt_en_de", 0.3, 0.1, **SHARED),
    "cnn_dm/dynamicconv": CNN_DM | conv("dynamic", "lightconv_wmt_en_de", 0.3, 0.1, **SHARED),
    "wikitext103/talkconv": WIKITEXT
    | talk(
        "talkconv_lm_wiki103", 0.3, 0.1, 0.2, 0.1, activation_dropout=0.1,
        **adaptive(WIKI_CUTOFF, 0.2),
    ),  # fmt: skip
    "wikitext103/transformer": language_model(3072, 2560)
    | model(
        "transformer_lm_wiki103", 0.3, 0.1, activation_dropout=0.1, **adaptive(WIKI_CUTOFF, 0.2)
    ),
    "wikitext103/lightconv": WIKITEXT | conv_lm("lightweight", 0.3, 0.2, WIKI_CUTOFF, 0.1),
    "wikitext103/dynamicconv": WIKITEXT | conv_lm("dynamic", 0.3, 0.2, WIKI_CUTOFF, 0.1),
    "billion_word/talkconv": BILLION_WORD
    | talk(
        "talkconv_lm_wiki103", 0.1, 0.1, 0.1, 0.1, activation_dropout=0.0,
        decoder_max_left="15x2,31x4,63x11", **adaptive(BILLION_CUTOFF, 0.0),
    ),  # fmt: skip
    "billion_word/lightconv": BILLION_WORD
    | conv_lm("lightweight", 0.1, 0.0, BILLION_CUTOFF, 0.0),
    "billion_word/dynamicconv": BILLION_WORD
    | conv_lm("dynamic", 0.1, 0.0, BILLION_CUTOFF, 0.0),
}  # fmt: skip

# Words of the dictionaries (source, target) at which the parameters are counted.
WORDS = {
    "iwslt14_de_en": (8848, 6632),
    "wmt16_en_de": (32768, 32768),
    "wmt14_en_fr": (40000, 40000),
    "cnn_dm": (30000, 30000),
    "wikitext103": (267744, 267744),
    "wmt17_zh_en": (32000, 32000),
    "billion_word": (793471, 793471),
}

# Parameters in millions, where the papers or fairseq's archs have them.
MILLIONS = {
    "iwslt14_de_en/talkconv": 38.2,
    "wmt16_en_de/talkconv": 209.19,
    "cnn_dm/talkconv": 59.32,
    "cnn_dm/talkconv_deep": 83.79,
    "wikitext103/talkconv": 241.97,
    "wikitext103/transformer": 247,
    "wikitext103/dynamicconv": 255,
}

# What the papers report, as the headers begin to say it.
PAPER = {
    "iwslt14_de_en/talkconv": "35.5",
    "iwslt14_de_en/transformer": "34.4",
    "iwslt14_de_en/lightconv": "34.8",
    "iwslt14_de_en/dynamicconv": "35.2",
    "iwslt14_de_en/ablation_1_one_window": "diverges",
    "iwslt14_de_en/ablation_2_normalised": "35.70 +- .1 ",
    "iwslt14_de_en/ablation_3_windows": "36.23 +- .1 ",
    "iwslt14_de_en/ablation_4_offset_dropout": "36.37 +- .05 ",
    "iwslt14_de_en/ablation_5_head_a_channel": "36.51 +- .07 ",
    "iwslt14_de_en/ablation_6_four_heads": "36.65 +- .05 ",
    "iwslt14_de_en/ablation_7_relu": "36.21 +- .05 ",
    "wmt16_en_de/talkconv": "29.6",
    "wmt16_en_de/transformer": "28.4",
    "wmt16_en_de/lightconv": "28.9",
    "wmt16_en_de/dynamicconv": "29.7",
    "wmt16_en_de/fconv": "25.2",
    "wmt16_en_de/dynamicconv_1_decoder_layer": "26.1",
    "wmt16_en_de/dynamicconv_3_decoder_layers": "27.7",
    "wmt14_en_fr/talkconv": "43.2",
    "wmt14_en_fr/transformer": "41.0",
    "wmt14_en_fr/lightconv": "43.1",
    "wmt14_en_fr/dynamicconv": "43.2",
    "wmt14_en_fr/fconv": "40.5",
    "wmt17_zh_en/lightconv": "24.3",
    "wmt17_zh_en/dynamicconv": "24.4",
    "cnn_dm/talkconv": "ROUGE-1/2/L 40.03/18.45/36.13",
    "cnn_dm/talkconv_deep": "ROUGE-1/2/L 40.59/18.97/36.81",
    "cnn_dm/transformer": "ROUGE-1/2/L 39.26/15.98/36.35",
    "cnn_dm/lightconv": "ROUGE-1/2/L 39.52/15.97/36.51",
    "cnn_dm/dynamicconv": "ROUGE-1/2/L 39.84/16.25/36.73",
    "wikitext103/talkconv": "test perplexity 23.3",
    "wikitext103/transformer": "test perplexity 20.5",
    "wikitext103/dynamicconv": "test perplexity 25.0",
    "billion_word/dynamicconv": "test perplexity 26.67",
}


def flat(config, prefix=""):
    """``{"model": {"dropout": 0.3}}`` as ``{"model.dropout": 0.3}``."""
    nested = [(prefix + key, value) for key, value in config.items()]
    return dict(
        chain.from_iterable(
            flat(value, key + ".").items() if isinstance(value, dict) else [(key, value)]
            for key, value in nested
        )
    )


def composed(name, *overrides):
    """The config of `name` as fairseq-hydra-train has it when it builds the model."""
    benchmark, system = name.split("/")
    initialize.hydra_init(system)
    with (
        warnings.catch_warnings(action="ignore"),  # about how fairseq calls hydra
        initialize_config_dir(str(CONFIGS / benchmark), version_base="1.1"),
    ):
        cfg = compose(system, overrides=["++task.data=data", *overrides])
    initialize.add_defaults(cfg)
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


class Words(Dictionary):
    """A dictionary of so many words, without the words."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def __len__(self):
        return self.count


def built(name):
    """The model of `name` at full size, without memory."""
    cfg = composed(name)
    source, target = WORDS[name.split("/")[0]]
    source_dictionary = Words(source)
    target_dictionary = source_dictionary if source == target else Words(target)
    task = SimpleNamespace(
        cfg=cfg.task,
        source_dictionary=source_dictionary,
        target_dictionary=target_dictionary,
        dictionary=source_dictionary,
        output_dictionary=target_dictionary,
    )
    if issubclass(tasks.TASK_REGISTRY[cfg.task._name], tasks.LegacyFairseqTask):
        task.cfg, task.args = None, cfg.task
    with torch.device("meta"):
        return models.build_model(cfg.model, task)


def header(name):
    """The fields of the comments that open a config."""
    fields = {}
    title, table, *notes = (CONFIGS / f"{name}.yaml").read_text().split("\n\n")[0].split("\n#\n")
    for line in table.splitlines():
        field = re.fullmatch(r"# (\w+): +(\S.*)", line)
        if field:
            fields[field[1]] = field[2]
    return fields


def test_every_config_is_a_row_and_every_row_a_config():
    assert sorted(ROWS) == NAMES
    assert not [path for path in CONFIGS.rglob("*.yaml") if path.parent.parent != CONFIGS]


@pytest.mark.parametrize("name", NAMES)
def test_hyperparameters(name):
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert "defaults" not in config
    # repr: 1 is not True, and 1e-7, which YAML reads as text, is not 1.0e-7
    assert {key: repr(value) for key, value in flat(config).items()} == {
        key: repr(value) for key, value in ROWS[name].items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_header(name):
    first, *rest = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    assert re.fullmatch(r"# \S.*\.", first) and rest[0] == "#"
    fields = header(name)
    assert list(fields) == ["command", "hardware", "hours", "parameters", "paper", "measured"]
    assert fields["command"] == f"scripts/train.sh {name}"
    devices = ROWS[name]["distributed_training.distributed_world_size"]
    precision = "fp16" if ROWS[name].get("common.fp16") else "fp32"
    assert re.match(rf"{devices} GPUs?\b.*, {precision}\b", fields["hardware"])
    assert re.match(r"about \d+ ", fields["hours"])
    assert fields["paper"].startswith(PAPER.get(name, "none"))


@pytest.mark.parametrize("name", NAMES)
def test_builds_at_full_size(name):
    million = sum(parameter.numel() for parameter in built(name).parameters()) / 1e6
    if name in MILLIONS:
        digits = len(str(MILLIONS[name]).partition(".")[2])
        assert abs(million - MILLIONS[name]) < (0.6 if digits == 0 else 0.6 * 10**-digits)
    counted, _, words = header(name)["parameters"].partition(" at ")
    assert counted == f"{million:.2f}M"
    counts = {int(count.replace(",", "")) for count in re.findall(r"\d+,\d+", words)}
    assert counts == set(WORDS[name.split("/")[0]])


@pytest.mark.parametrize("name", NAMES)
def test_every_option_exists(name):
    """What is misspelt, or of another type, would train something else or nothing."""
    train.check_options(OmegaConf.load(CONFIGS / f"{name}.yaml"))


# Rows of which papers or published commands have every setting; the others say what is ours.
PUBLISHED = {
    "iwslt14_de_en/talkconv",
    "iwslt14_de_en/lightconv",
    "iwslt14_de_en/dynamicconv",
    "wmt16_en_de/talkconv",
    "wmt16_en_de/dynamicconv",
    "wmt14_en_fr/talkconv",
    "wmt14_en_fr/dynamicconv",
    "wikitext103/transformer",
}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_ours_is_marked(name):
    said = " ".join((CONFIGS / f"{name}.yaml").read_text().split("\n\n")[0].split("\n# "))
    marked = "Not the papers' but ours: " in said or "those here are ours" in said
    assert marked != (name in PUBLISHED)


def test_schedules_end_where_the_updates_do():
    """A cosine schedule reaches its floor with the last update."""
    for name, row in ROWS.items():
        if row["lr_scheduler._name"] == "cosine":
            warmup, period = (
                row["lr_scheduler.warmup_updates"],
                row["lr_scheduler.lr_period_updates"],
            )
            assert warmup + period == row["optimization.max_update"], name
