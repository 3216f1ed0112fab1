"""The recipes under configs/: the numbers of the papers' rows, and the models that they build."""

import contextlib
import re
import warnings
from itertools import chain
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
from pipeline.common.paths import CONFIGS
from pipeline.recipes import config as configs

NAMES = configs.rows()

# What the papers and the published commands say. Each row is the arch, its dropouts in the order of
# DROPOUTS, beam and length penalty, and what differs from the rest of its benchmark: options of the
# model, where no section is named; null leaves one out.
TABLE = yaml.safe_load("""
iwslt14_de_en:
  talkconv:    [talkconv_iwslt_de_en, [0.3, 0.1, 0.1, 0.0], 5, 1.6]
  transformer: [transformer_iwslt_de_en, [0.3], 5, 1, &transformer {
                dataset.max_tokens: 4096, share_decoder_input_output_embed: true}]
  lightconv:   [lightconv_iwslt_de_en, [0.3, 0.1, 0.1], 4, 1, &ungated {
                encoder_glu: false, decoder_glu: false}]
  dynamicconv: [lightconv_iwslt_de_en, [0.3, 0.1, 0.1], 4, 1, *ungated]
  fconv:       [fconv_iwslt_de_en, [0.2], 5, 1]
  # Table 7
  ablation_1_one_window:     [talkconv_iwslt_de_en, [0.3, 0.1, 0.0, 0.0], 5, 1.6, &one_window {
                              encoder_talk_heads: 1, decoder_talk_heads: 1,
                              encoder_max_left: 1x7, decoder_max_left: 1x6, talk_normalize: false}]
  ablation_2_normalised:     [talkconv_iwslt_de_en, [0.3, 0.1, 0.0, 0.0], 5, 1.6, {
                              <<: *one_window, talk_normalize: null}]
  ablation_3_windows:        [talkconv_iwslt_de_en, [0.3, 0.1, 0.0, 0.0], 5, 1.6, &windows {
                              encoder_talk_heads: 1, decoder_talk_heads: 1,
                              encoder_max_left: "1,3,7,15x4", decoder_max_left: "1,3,7,15x3"}]
  ablation_4_offset_dropout: [talkconv_iwslt_de_en, [0.3, 0.1, 0.1, 0.0], 5, 1.6, *windows]
  ablation_5_head_a_channel: [talkconv_iwslt_de_en, [0.3, 0.1, 0.1, 0.0], 5, 1.6, {
                              <<: *windows, encoder_talk_heads: 512, decoder_talk_heads: 512}]
  ablation_6_four_heads:     [talkconv_iwslt_de_en, [0.3, 0.1, 0.1, 0.0], 5, 1.6, &four {
                              <<: *windows, encoder_talk_heads: 4, decoder_talk_heads: 4}]
  ablation_7_relu:           [talkconv_iwslt_de_en, [0.3, 0.1, 0.1, 0.0], 5, 1.6, {
                              <<: *four, activation_fn: relu}]
  # beyond the papers
  talkconv_rdrop:        [talkconv_iwslt_de_en, [0.3, 0.1, 0.1, 0.0], 5, 1.6, &rdrop {
                          criterion._name: label_smoothed_cross_entropy_with_rdrop,
                          criterion.rdrop_alpha: 5.0, optimization.max_update: 300000}]
  transformer_rdrop:     [transformer_iwslt_de_en, [0.3], 5, 1, {<<: [*transformer, *rdrop]}]
  talkconv_simcut:       [talkconv_iwslt_de_en, [0.3, 0.1, 0.1, 0.0], 5, 1.6, {
                          criterion._name: label_smoothed_cross_entropy_with_simcut,
                          criterion.simcut_alpha: 3.0, criterion.simcut_cutoff: 0.05,
                          optimization.max_update: 300000}]
  talkconv_deep_shallow: [talkconv_iwslt_de_en, [0.3, 0.1, 0.1, 0.0], 5, 1.6, {
                          encoder_layers: 12, encoder_max_left: "1,3,7,15x9",
                          decoder_layers: 1, decoder_max_left: "15"}]
  talkconv_wide:         [talkconv_iwslt_de_en, [0.3, 0.1, 0.1, 0.0], 5, 1.6, {
                          encoder_max_left: "3,7,15,31,63,127x2",
                          decoder_max_left: "3,7,15,31,63,127"}]
  talkconv_ema:          [talkconv_iwslt_de_en, [0.3, 0.1, 0.1, 0.0], 5, 1.6, {
                          checkpoint.keep_last_epochs: 1, ema.store_ema: true,
                          ema.ema_decay: 0.999, ema.ema_fp32: true}]
wmt16_en_de:
  talkconv:    [talkconv_wmt_en_de_big, [0.3, 0.1, 0.1, 0.1], 4, 0.35]
  transformer: [transformer_vaswani_wmt_en_de_big, [0.3], 4, 0.6, {
                lr_scheduler._name: inverse_sqrt}]
  lightconv:   [lightconv_wmt_en_de_big, [0.3, 0.1, 0.1], 5, 0.5]
  dynamicconv: [lightconv_wmt_en_de_big, [0.3, 0.1, 0.1], 5, 0.5]
  fconv:       [fconv_wmt_en_de, [0.2], 5, 1, {dataset.max_tokens: 4000}]
  # small decoders, for speed: beam 1
  talkconv_1_decoder_layer:  [talkconv_wmt_en_de_big_1_decoder_layer, [0.3, 0.1, 0.1, 0.1], 1, 1]
  talkconv_3_decoder_layers: [talkconv_wmt_en_de_big_3_decoder_layers, [0.3, 0.1, 0.1, 0.1], 1, 1]
  dynamicconv_1_decoder_layer:  [lightconv_wmt_en_de_big, [0.3, 0.1, 0.1], 1, 1, {
                                 decoder_layers: 1, decoder_kernel_size_list: [31]}]
  dynamicconv_3_decoder_layers: [lightconv_wmt_en_de_big, [0.3, 0.1, 0.1], 1, 1, {
                                 decoder_layers: 3, decoder_kernel_size_list: [7, 15, 31]}]
  talkconv_deep_shallow:     [talkconv_wmt_en_de_big, [0.3, 0.1, 0.1, 0.1], 4, 0.35, {
                              encoder_layers: 12, encoder_max_left: "3,7,15,31x9",
                              decoder_layers: 1, decoder_max_left: "31"}]
  # Table 3 of Wu et al., 2019
  ablation_01_self_attention:  [transformer_wmt_en_de_big, [0.3, 0.1], 5, 0.5]
  ablation_02_limited_windows: [transformer_limited_wmt_en_de_big, [0.3, 0.1], 5, 0.5, &ablated {
                                common.user_dir: configs/models/ablated}]
  ablation_03_cnn:             [lightconv_cnn_wmt_en_de_big, [0.3, 0.1, 0.0], 5, 0.5, &three {
                                <<: [*ablated, *ungated],
                                encoder_kernel_size_list: [3, 3, 3, 3, 3, 3, 3],
                                decoder_kernel_size_list: [3, 3, 3, 3, 3, 3]}]
  ablation_04_depthwise:       [lightconv_depthwise_wmt_en_de_big, [0.3, 0.1, 0.0], 5, 0.5, *three]
  ablation_05_increasing_kernel: [lightconv_depthwise_wmt_en_de_big, [0.3, 0.1, 0.0], 5, 0.5, {
                                  <<: [*ablated, *ungated]}]
  ablation_06_dropconnect:     [lightconv_depthwise_wmt_en_de_big, [0.3, 0.1, 0.1], 5, 0.5, {
                                <<: [*ablated, *ungated]}]
  ablation_07_weight_sharing:  [lightconv_wmt_en_de_big, [0.3, 0.1, 0.1], 5, 0.5, {
                                <<: *ungated, weight_softmax: false}]
  ablation_08_lightconv:       [lightconv_wmt_en_de_big, [0.3, 0.1, 0.1], 5, 0.5, *ungated]
  ablation_09_dynamicconv:     [lightconv_wmt_en_de_big, [0.3, 0.1, 0.1], 5, 0.5, &dynamic {
                                <<: *ungated, encoder_conv_type: dynamic,
                                decoder_conv_type: dynamic,
                                distributed_training.ddp_backend: legacy_ddp}]
  ablation_10_without_softmax: [lightconv_wmt_en_de_big, [0.3, 0.1, 0.1], 5, 0.5, {
                                <<: *dynamic, weight_softmax: false}]
  ablation_11_averaged_decoder: [transformer_averaged_decoder_wmt_en_de_big, [0.3, 0.1], 5, 0.5,
                                 *ablated]
  ablation_12_averaged:        [transformer_averaged_wmt_en_de_big, [0.3, 0.1], 5, 0.5, *ablated]
wmt14_en_fr:
  talkconv:    [talkconv_wmt_en_fr_big, [0.1, 0.1, 0.1, 0.1], 6, 0.65, {
                dataset.max_tokens: 1800, optimization.update_freq: [32]}]
  transformer: [transformer_vaswani_wmt_en_fr_big, [0.1], 4, 0.6, {
                lr_scheduler._name: inverse_sqrt}]
  lightconv:   [lightconv_wmt_en_fr_big, [0.1, 0.1, 0.1], 5, 0.9]
  dynamicconv: [lightconv_wmt_en_fr_big, [0.1, 0.1, 0.1], 5, 0.9]
  fconv:       [fconv_wmt_en_fr, [0.1], 5, 1, {dataset.max_tokens: 3000}]
wmt17_zh_en:
  talkconv:    [talkconv_wmt_en_de_big, [0.25, 0.1, 0.1, 0.1], 8, 1]
  lightconv:   [lightconv_wmt_zh_en_big, [0.25, 0.2, 0.2], 8, 1]
  dynamicconv: [lightconv_wmt_zh_en_big, [0.25, 0.2, 0.2], 8, 1]
cnn_dm:
  talkconv:      [talkconv_cnndm_std, [0.3, 0.1, 0.1, 0.1], 5, 1]
  talkconv_deep: [talkconv_cnndm_deep, [0.3, 0.1, 0.1, 0.1], 5, 1]
  transformer:   [transformer_wmt_en_de, [0.3, 0.1], 5, 1]
  lightconv:     [lightconv_wmt_en_de, [0.3, 0.1, 0.1], 5, 1]
  dynamicconv:   [lightconv_wmt_en_de, [0.3, 0.1, 0.1], 5, 1]
wikitext103:
  talkconv:    [talkconv_lm_wiki103, [0.3, 0.1, 0.2, 0.1, 0.1], null, null]
  transformer: [transformer_lm, [0.3, 0.1, 0.1], null, null, { # transformer_lm_wiki103
                task.tokens_per_sample: 3072, eval_lm.context_window: 2560, decoder_layers: 16,
                decoder_embed_dim: 1024, decoder_input_dim: 1024, decoder_output_dim: 1024,
                decoder_ffn_embed_dim: 4096, decoder_attention_heads: 8,
                decoder_normalize_before: true, no_decoder_final_norm: true}]
  lightconv:   [lightconv_lm, [0.3, 0.1, 0.1, 0.1, 0.1], null, null, &kernels {
                decoder_embed_dim: 1024, decoder_ffn_embed_dim: 4096, decoder_attention_heads: 16,
                decoder_layers: 17, decoder_kernel_size_list:
                [15, 15, 31, 31, 31, 31, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63]}]
  dynamicconv: [lightconv_lm, [0.3, 0.1, 0.1, 0.1, 0.1], null, null, *kernels]
billion_word:
  talkconv:    [talkconv_lm_wiki103, [0.1, 0.1, 0.1, 0.1, 0.0], null, null, {
                decoder_max_left: "15x2,31x4,63x11"}]
  lightconv:   [lightconv_lm, [0.1, 0.1, 0.1, 0.0, 0.1], null, null, *kernels]
  dynamicconv: [lightconv_lm, [0.1, 0.1, 0.1, 0.0, 0.1], null, null, *kernels]
""")
DROPOUTS = {
    "talkconv": "dropout attention_dropout offset_dropout input_dropout activation_dropout",
    "transformer": "dropout attention_dropout activation_dropout",
    "lightconv": "dropout attention_dropout weight_dropout relu_dropout input_dropout",
    "dynamicconv": "dropout attention_dropout weight_dropout relu_dropout input_dropout",
    "fconv": "dropout",
}

# What a benchmark's rows have in common; then what goes with each task, schedule and system.
BENCHMARKS = yaml.safe_load("""
iwslt14_de_en: {task: {_name: translation, source_lang: de, target_lang: en},
  dataset: {max_tokens: 4000}, common: {fp16: null}, optimizer: {weight_decay: 0.0001},
  optimization: {lr: [0.0005], update_freq: [1], max_update: 50000},
  lr_scheduler: {_name: inverse_sqrt}, distributed_training: {distributed_world_size: 1}}
wmt16_en_de: {task: {_name: translation, source_lang: en, target_lang: de},
  dataset: {max_tokens: 3584}, optimization: {update_freq: [16], max_update: 30000},
  model: {share_all_embeddings: true}}
wmt14_en_fr: {task: {_name: translation, source_lang: en, target_lang: fr},
  dataset: {max_tokens: 3584}, optimization: {update_freq: [16], max_update: 80000},
  model: {share_all_embeddings: true}}
wmt17_zh_en: {task: {_name: translation, source_lang: zh, target_lang: en},
  dataset: {max_tokens: 3584}, optimization: {update_freq: [16], max_update: 40000}}
cnn_dm: {task: {_name: talk_summarization, truncate_source: true, max_source_positions: 400,
  stepwise_lenpen: true}, dataset: {max_tokens: 3584}, optimizer: {weight_decay: 0.001},
  optimization: {update_freq: [4], max_update: 30000}, model: {share_all_embeddings: true},
  generation: {max_len_a: 0, max_len_b: 140, min_len: 55, no_repeat_ngram_size: 3}}
wikitext103: {task: {_name: language_modeling, sample_break_mode: none},
  eval_lm: {context_window: 400}, model: {adaptive_input_cutoff: "20000,60000",
  adaptive_softmax_cutoff: "20000,60000", adaptive_softmax_dropout: 0.2}}
billion_word: {task: {_name: language_modeling, sample_break_mode: eos},
  eval_lm: {context_window: 0}, model: {adaptive_input_cutoff: "60000,160000",
  adaptive_softmax_cutoff: "60000,160000", adaptive_softmax_dropout: 0.0}}
""")
DEFAULTS = yaml.safe_load("""
all: {common: {seed: 1, log_interval: 100}, checkpoint: {keep_last_epochs: 10},
  distributed_training: {distributed_world_size: 8}}
translation: &translation {common: {fp16: true}, lr_scheduler: {_name: cosine},
  criterion: {_name: label_smoothed_cross_entropy, label_smoothing: 0.1},
  optimizer: {_name: fused_adam, adam_betas: "(0.9, 0.98)", weight_decay: 0.0},
  optimization: {clip_norm: 0.0, lr: [0.001]}}
talk_summarization: *translation
language_modeling: {task: {tokens_per_sample: 512}, criterion: {_name: adaptive_loss},
  dataset: {skip_invalid_size_inputs_valid_test: true, max_tokens: 3072},
  checkpoint: {keep_last_epochs: 1}, distributed_training: {ddp_backend: legacy_ddp},
  optimizer: {_name: nag, weight_decay: 0.0},
  optimization: {lr: [1.0], clip_norm: 0.1, update_freq: [3], max_update: 286000},
  lr_scheduler: {_name: cosine, warmup_updates: 16000, min_lr: 0.0001, t_mult: 2,
  lr_shrink: 0.75},
  model: {adaptive_input: true, tie_adaptive_weights: true, tie_adaptive_proj: true}}
inverse_sqrt: {lr_scheduler: {warmup_updates: 4000, warmup_init_lr: 1.0e-7}}
cosine: {lr_scheduler: {warmup_updates: 10000, warmup_init_lr: 1.0e-7, min_lr: 1.0e-9,
  t_mult: 1, lr_shrink: 1}}
fixed: {lr_scheduler: {force_anneal: 50, lr_shrink: 0.1}}
talkconv: {task: {left_pad_source: false}}
transformer: {}
lightconv: {model: {encoder_conv_type: lightweight, decoder_conv_type: lightweight,
  encoder_glu: true, decoder_glu: true}}
dynamicconv: {model: {encoder_conv_type: dynamic, decoder_conv_type: dynamic,
  encoder_glu: true, decoder_glu: true}, distributed_training: {ddp_backend: legacy_ddp}}
fconv: {optimizer: {_name: nag, adam_betas: null, weight_decay: 0.0},
  optimization: {clip_norm: 0.1, lr: [0.5], stop_min_lr: 1.0e-5, update_freq: [1], max_update: 0},
  lr_scheduler: {_name: fixed}, model: {share_all_embeddings: null}}
talkconv_lm: {}
transformer_lm: {}
lightconv_lm: {model: {decoder_conv_type: lightweight}}
dynamicconv_lm: {model: {decoder_conv_type: dynamic}}
""")


def flat(config, prefix=""):
    """``{"model": {"dropout": 0.3}}`` as ``{"model.dropout": 0.3}``."""
    nested = [(prefix + key, value) for key, value in config.items()]
    return dict(
        chain.from_iterable(
            flat(value, key + ".").items() if isinstance(value, dict) else [(key, value)]
            for key, value in nested
        )
    )


def row(benchmark, system):
    """The options of a row, as ``{"model.dropout": 0.3}``."""
    arch, dropouts, beam, lenpen, *more = TABLE[benchmark][system]
    family = (arch if system.startswith("ablation") else system).partition("_")[0]
    names = [f"model.{name}" for name in DROPOUTS[family].split()]
    more = {key if "." in key else f"model.{key}": value for key, value in dict(*more).items()}
    given = {"generation.beam": beam, "generation.lenpen": lenpen, "model._name": arch}
    of_benchmark = flat(BENCHMARKS[benchmark])
    of_task = flat(DEFAULTS[of_benchmark["task._name"]])
    of_family = flat(DEFAULTS[family + "_lm" * ("_lm" in arch)])
    options = of_task | of_benchmark | of_family | given | dict(zip(names, dropouts)) | more
    schedule = flat(DEFAULTS[options["lr_scheduler._name"]])
    options = flat(DEFAULTS["all"]) | schedule | options
    if options["lr_scheduler._name"] == "cosine":  # it reaches its floor with the last update
        period = options["optimization.max_update"] - options["lr_scheduler.warmup_updates"]
        options["lr_scheduler.lr_period_updates"] = period
    return {key: value for key, value in options.items() if value is not None}


ROWS = {f"{data}/{system}": row(data, system) for data in TABLE for system in TABLE[data]}

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
    "wmt16_en_de/ablation_01_self_attention": 210,
    "wmt16_en_de/ablation_04_depthwise": 195,
    "wmt16_en_de/ablation_08_lightconv": 195,
    "wmt16_en_de/ablation_09_dynamicconv": 200,
    "wmt16_en_de/ablation_11_averaged_decoder": 260,
    "cnn_dm/talkconv": 59.32,
    "cnn_dm/talkconv_deep": 83.79,
    "wikitext103/talkconv": 241.97,
    "wikitext103/transformer": 247,
    "wikitext103/dynamicconv": 255,
}

# What the papers report, as the headers begin to say it.
REPORTED = {
    "iwslt14_de_en": "talkconv 35.5, transformer 34.4, lightconv 34.8, dynamicconv 35.2, "
    "ablation_1_one_window diverges, ablation_2_normalised 35.70 +- .1, "
    "ablation_3_windows 36.23 +- .1, ablation_4_offset_dropout 36.37 +- .05, "
    "ablation_5_head_a_channel 36.51 +- .07, ablation_6_four_heads 36.65 +- .05, "
    "ablation_7_relu 36.21 +- .05",
    "wmt16_en_de": "talkconv 29.6, transformer 28.4, lightconv 28.9, dynamicconv 29.7, fconv 25.2, "
    "dynamicconv_1_decoder_layer 26.1, dynamicconv_3_decoder_layers 27.7, "
    "ablation_01_self_attention 26.9, ablation_02_limited_windows 26.9, ablation_03_cnn 25.9, "
    "ablation_04_depthwise 26.1, ablation_05_increasing_kernel 26.4, "
    "ablation_06_dropconnect 26.5, ablation_07_weight_sharing 26.5, ablation_08_lightconv 26.6, "
    "ablation_09_dynamicconv 26.9, ablation_10_without_softmax diverges, "
    "ablation_11_averaged_decoder 26.8, ablation_12_averaged 22.5",
    "wmt14_en_fr": "talkconv 43.2, transformer 41.0, lightconv 43.1, dynamicconv 43.2, fconv 40.5",
    "wmt17_zh_en": "lightconv 24.3, dynamicconv 24.4",
    "cnn_dm": "talkconv ROUGE-1/2/L 40.03/18.45/36.13, "
    "talkconv_deep ROUGE-1/2/L 40.59/18.97/36.81, "
    "transformer ROUGE-1/2/L 39.26/15.98/36.35, lightconv ROUGE-1/2/L 39.52/15.97/36.51, "
    "dynamicconv ROUGE-1/2/L 39.84/16.25/36.73",
    "wikitext103": "talkconv test perplexity 23.3, transformer test perplexity 20.5, "
    "dynamicconv test perplexity 25.0",
    "billion_word": "dynamicconv test perplexity 26.67",
}
PAPER = {
    f"{data}/{system}": score
    for data, scores in REPORTED.items()
    for system, _, score in (entry.partition(" ") for entry in scores.split(", "))
}


def composed(name, *overrides):
    """The config of `name` as fairseq-hydra-train has it when it builds the model."""
    configs.import_models(OmegaConf.load(CONFIGS / f"{name}.yaml"))  # as its command does
    benchmark, system = name.split("/")
    initialize.hydra_init(system)
    with (
        warnings.catch_warnings(action="ignore"),  # about how fairseq calls hydra
        initialize_config_dir(str(CONFIGS / benchmark), version_base="1.1"),
    ):
        cfg = compose(system, overrides=["++task.data=data", *overrides])
    # fairseq-hydra-train fills in what fairseq knows before it imports the plugin.
    if models.ARCH_MODEL_REGISTRY[cfg.model._name].__module__.startswith("fairseq."):
        initialize.add_defaults.__wrapped__(cfg)
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
    assert not any(name.startswith("verses/") for name in NAMES)
    assert not [path for path in CONFIGS.rglob("*.yaml") if path.parent.parent != CONFIGS]


@pytest.mark.parametrize("name", NAMES)
def test_hyperparameters(name):
    """A row's YAML and its arch together say what the table does, and the YAML nothing else."""
    config = OmegaConf.load(CONFIGS / f"{name}.yaml")
    assert "defaults" not in config
    resolved = configs.resolved(config)
    # repr: 1 is not True, and 1e-7, which YAML reads as text, is not 1.0e-7
    assert {key: repr(resolved.get(key, "nothing")) for key in ROWS[name]} == {
        key: repr(value) for key, value in ROWS[name].items()
    }
    assert configs.flat(config).keys() <= ROWS[name].keys()


@pytest.mark.parametrize("name", NAMES)
def test_no_yaml_repeats_its_arch(name):
    """But for the kind of convolution, by which LightConv and DynamicConv differ."""
    config = OmegaConf.load(CONFIGS / f"{name}.yaml")
    resolved, repeated = repr(sorted(configs.resolved(config).items())), []
    for key in config.model.keys() - {"_name", "encoder_conv_type", "decoder_conv_type"}:
        without = OmegaConf.masked_copy(config.model, config.model.keys() - {key})
        with contextlib.suppress(AttributeError, AssertionError):  # of an arch that needs the key
            other = configs.resolved(OmegaConf.create({**config, "model": without}))
            if repr(sorted(other.items())) == resolved:
                repeated.append(key)
    assert repeated == []


@pytest.mark.parametrize("name", ["iwslt14_de_en/talkconv", "wikitext103/transformer"])
def test_what_is_resolved_is_what_is_built(name):
    built = composed(name).model
    resolved = configs.resolved(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    of_model = {key for key in resolved if key.startswith("model.")}
    assert len(of_model) > 10
    for key in of_model:
        assert resolved[key] == built[key.removeprefix("model.")], key


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
    assert re.match(re.escape(PAPER.get(name, "none")) + r"(?![\w.])", fields["paper"])


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
    configs.check_options(OmegaConf.load(CONFIGS / f"{name}.yaml"))


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
    marked = "Not from the papers: " in said or "those here are ours" in said
    assert marked != (name in PUBLISHED)
