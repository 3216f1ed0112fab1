"""The published TaLK models in plain PyTorch, and checkpoints such as their code wrote.

Our models are checked against these when they load such a checkpoint. They follow the paper and the
names that the published code gave its options and parameters, in float64, with the oracle's
windows. No code is shared with fairseq or with talk_fairseq.
"""

import math
from argparse import Namespace

import torch
import torch.nn.functional as F

import oracle

PAD = 1

# --- Options: what fairseq 0.9 and 0.10 kept of a training run ---

_TRAINING = dict(
    no_progress_bar=True, log_interval=100, log_format=None, tensorboard_logdir="", seed=1024,
    cpu=False, fp16=True, memory_efficient_fp16=False, fp16_init_scale=128,
    fp16_scale_window=None, fp16_scale_tolerance=0.0, min_loss_scale=1e-4,
    threshold_loss_scale=None, user_dir="talkconv/talkconv_fairseq", empty_cache_freq=0,
    tokenizer=None, bpe=None, num_workers=1, skip_invalid_size_inputs_valid_test=False,
    max_tokens=4000, max_sentences=None, required_batch_size_multiple=8, dataset_impl=None,
    train_subset="train", valid_subset="valid", validate_interval=1, fixed_validation_seed=None,
    disable_validation=False, max_tokens_valid=4000, max_sentences_valid=None, curriculum=0,
    distributed_world_size=8, distributed_rank=0, distributed_backend="nccl",
    distributed_init_method=None, distributed_port=-1, device_id=0, distributed_no_spawn=True,
    ddp_backend="no_c10d", bucket_cap_mb=25, fix_batches_to_gpus=False,
    find_unused_parameters=False, fast_stat_sync=False, max_epoch=52, max_update=85000,
    clip_norm=0.0, sentence_avg=False, update_freq=[16], lr=[0.0005], min_lr=1e-09,
    use_bmuf=False, save_dir="checkpoints/talkconv", restore_file="checkpoint_last.pt",
    reset_dataloader=False, reset_lr_scheduler=False, reset_meters=False, reset_optimizer=False,
    optimizer_overrides="{}", save_interval=1, save_interval_updates=0, keep_interval_updates=-1,
    keep_last_epochs=-1, no_save=False, no_epoch_checkpoints=False, no_last_checkpoints=False,
    no_save_optimizer_state=False, best_checkpoint_metric="loss",
    maximize_best_checkpoint_metric=False, optimizer="adam", adam_betas="(0.9, 0.98)",
    adam_eps=1e-08, weight_decay=0.0001, lazy_load=False, raw_text=False,
)  # fmt: skip
_INVERSE_SQRT = dict(lr_scheduler="inverse_sqrt", warmup_updates=4000, warmup_init_lr=1e-07)
_COSINE = dict(
    lr_scheduler="cosine", warmup_updates=10000, warmup_init_lr=1e-07, max_lr=0.001, lr=[1e-07],
    t_mult=1, lr_period_updates=20000, lr_shrink=1.0,
)  # fmt: skip
_TRANSLATION = dict(
    task="translation", data="data-bin/no-longer-there", source_lang="es", target_lang="en",
    load_alignments=False, left_pad_source="False", left_pad_target="False",
    max_source_positions=1024, max_target_positions=1024, upsample_primary=1,
    truncate_source=False, criterion="label_smoothed_cross_entropy", label_smoothing=0.1,
)  # fmt: skip
_LANGUAGE_MODELING = dict(
    task="language_modeling", data="data-bin/no-longer-there", sample_break_mode="none",
    tokens_per_sample=64, output_dictionary_size=-1, self_target=False, future_target=False,
    past_target=False, add_bos_token=False, max_target_positions=None, criterion="adaptive_loss",
)  # fmt: skip


def translation_args(arch, **changes):
    """The options of a small encoder-decoder, with every entry that the published code set."""
    options = dict(
        arch=arch, dropout=0.3, attention_dropout=0.1, relu_dropout=0.0, input_dropout=0.1,
        weight_dropout=0.1, encoder_embed_path=None, decoder_embed_path=None,
        encoder_learned_pos=False, decoder_learned_pos=False, encoder_normalize_before=False,
        decoder_normalize_before=False, share_decoder_input_output_embed=False,
        share_all_embeddings=False, adaptive_softmax_cutoff=None, adaptive_softmax_dropout=0,
        no_token_positional_embeddings=False, encoder_layers=4, decoder_layers=3,
        encoder_kernel_size_list=[1, 3, 7, 15, 15, 15, 15],
        decoder_kernel_size_list=[1, 3, 7, 15, 15, 15], encoder_glu=True, decoder_glu=True,
    )  # fmt: skip
    for side in ("encoder", "decoder"):
        options |= {f"{side}_embed_dim": 32, f"{side}_conv_dim": 32}
        options |= {f"{side}_ffn_embed_dim": 48, f"{side}_attention_heads": 4}
    options |= dict(decoder_input_dim=32, decoder_output_dim=32)
    return Namespace(**{**_TRAINING, **_INVERSE_SQRT, **_TRANSLATION, **options, **changes})


PUBLISHED = {
    "iwslt": lambda: translation_args(
        "talkconv_iwslt_de_en", encoder_glu=False, decoder_glu=False, input_dropout=0.0
    ),
    "wmt": lambda: translation_args(
        "talkconv_wmt_en_de_big",
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_kernel_size_list=[3, 7, 15, 31, 31, 31, 31],
        decoder_kernel_size_list=[3, 7, 15, 31, 31, 31],
        share_all_embeddings=True,
        share_decoder_input_output_embed=True,
        **_COSINE,
    ),
    "cnndm": lambda: translation_args(
        "talkconv_cnndm_deep",
        decoder_layers=4,
        encoder_kernel_size_list=[3, 7, 15, 31],
        decoder_kernel_size_list=[3, 7, 31, 31],
        share_all_embeddings=True,
        share_decoder_input_output_embed=True,
        truncate_source=True,
        **_COSINE,
    ),
    "pre-norm": lambda: translation_args(
        "talkconv",
        encoder_normalize_before=True,
        decoder_normalize_before=True,
        encoder_glu=False,
        decoder_learned_pos=True,
        max_target_positions=50,
    ),
    "language model": lambda: language_model_args("talkconv_lm"),
    "adaptive language model": lambda: language_model_args(
        "talkconv_lm_wiki103",
        adaptive_input=True,
        adaptive_input_cutoff="20,60",
        adaptive_softmax_cutoff="20,60",
        tie_adaptive_weights=True,
        tie_adaptive_proj=True,
        activation_dropout=0.2,
        no_decoder_final_norm=True,
    ),
}


def language_model_args(arch, **changes):
    """Likewise of a small language model."""
    options = dict(
        arch=arch, dropout=0.3, attention_dropout=0.1, relu_dropout=0.1, input_dropout=0.1,
        weight_dropout=0.2, decoder_embed_dim=32, decoder_input_dim=32, decoder_output_dim=32,
        decoder_conv_dim=32, decoder_ffn_embed_dim=48, decoder_layers=3,
        decoder_attention_heads=4, decoder_normalize_before=True, decoder_learned_pos=False,
        decoder_glu=True, decoder_kernel_size_list=[3, 5, 63, 63], adaptive_softmax_cutoff=None,
        adaptive_softmax_dropout=0.2, adaptive_softmax_factor=4, adaptive_input=False,
        adaptive_input_factor=4, adaptive_input_cutoff=None, tie_adaptive_weights=False,
        tie_adaptive_proj=False, character_embeddings=False, character_embedding_dim=4,
        character_filters="[(1, 64), (2, 128), (3, 192), (4, 256), (5, 256), (6, 256), (7, 256)]",
        char_embedder_highway_layers=2, no_token_positional_embeddings=False,
        share_decoder_input_output_embed=False,
    )  # fmt: skip
    given = {**_TRAINING, **_COSINE, **_LANGUAGE_MODELING, **options, **changes}
    if given["adaptive_softmax_cutoff"] is None:
        given["criterion"] = "cross_entropy"
    return Namespace(**given)


# --- Parameters ---


class _Parameters(dict):
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def linear(self, name, n_in, n_out, bias=True):
        self[f"{name}.weight"] = self.random(n_out, n_in) * math.sqrt(2 / (n_in + n_out))
        if bias:
            self[f"{name}.bias"] = self.random(n_out) / 5

    def norm(self, name, C):
        self[f"{name}.weight"] = 1 + self.random(C) / 5
        self[f"{name}.bias"] = self.random(C) / 5

    def embedding(self, name, words, C):
        self[name] = self.random(words, C) / math.sqrt(C)
        self[name][PAD] = 0

    def layer(self, name, C, conv, ffn, heads, glu, sides):
        self.linear(f"{name}.linear1", C, 2 * conv if glu else conv)
        self.linear(f"{name}.conv.offsets", conv, sides * heads)
        self.linear(f"{name}.linear2", conv, C)
        self.linear(f"{name}.fc1", C, ffn)
        self.linear(f"{name}.fc2", ffn, C)


def parameters(args, source_words, target_words, seed=0):
    """Random values for what the published model of `args` saves, under the published names."""
    p = _Parameters(seed)
    if args.task == "translation":
        C, ffn, heads = args.encoder_embed_dim, args.encoder_ffn_embed_dim, 0
        p["encoder.version"] = torch.Tensor([2])
        p.embedding("encoder.embed_tokens.weight", source_words, C)
        p["encoder.embed_positions._float_tensor"] = torch.zeros(1)
        for n in range(args.encoder_layers):
            name, heads = f"encoder.layers.{n}", args.encoder_attention_heads
            p.layer(name, C, args.encoder_conv_dim, ffn, heads, args.encoder_glu, sides=2)
            p.norm(f"{name}.layer_norms.0", C)
            p.norm(f"{name}.layer_norms.1", C)
        if args.encoder_normalize_before:
            p.norm("encoder.layer_norm", C)

    C, ffn, heads = args.decoder_embed_dim, args.decoder_ffn_embed_dim, args.decoder_attention_heads
    p["decoder.version"] = torch.Tensor([2])
    if getattr(args, "adaptive_input", False):
        ends = [*map(int, args.adaptive_input_cutoff.split(",")), target_words]
        for band, (start, end) in enumerate(zip([0, *ends], ends)):
            dim = int(C // args.adaptive_input_factor**band)
            name = f"decoder.embed_tokens.embeddings.{band}"
            p[f"{name}.0.weight"] = p.random(end - start, dim) / math.sqrt(dim)
            p.linear(f"{name}.1", dim, C, bias=False)
        p["decoder.embed_tokens.embeddings.0.0.weight"][PAD] = 0
        p["decoder.embed_tokens._float_tensor"] = torch.zeros(1)
    elif getattr(args, "share_all_embeddings", False):
        p["decoder.embed_tokens.weight"] = p["encoder.embed_tokens.weight"]
    else:
        p.embedding("decoder.embed_tokens.weight", target_words, C)
    if args.decoder_learned_pos:
        p.embedding("decoder.embed_positions.weight", args.max_target_positions + PAD + 1, C)
    else:
        p["decoder.embed_positions._float_tensor"] = torch.zeros(1)
    for n in range(args.decoder_layers):
        name = f"decoder.layers.{n}"
        p.layer(name, C, args.decoder_conv_dim, ffn, heads, args.decoder_glu, sides=1)
        p.norm(f"{name}.conv_layer_norm", C)
        if args.task == "translation":
            for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
                p.linear(f"{name}.encoder_attn.{projection}", C, C)
            p.norm(f"{name}.encoder_attn_layer_norm", C)
        p.norm(f"{name}.final_layer_norm", C)
    if args.decoder_normalize_before and args.task == "translation":
        p.norm("decoder.layer_norm", C)
    if args.adaptive_softmax_cutoff is not None:
        softmax, embeddings = "decoder.adaptive_softmax", "decoder.embed_tokens.embeddings"
        p[f"{softmax}.version"] = torch.LongTensor([1])
        p[f"{softmax}.head._float_tensor"] = torch.zeros(1)
        p[f"{softmax}.head.word_proj.weight"] = p[f"{embeddings}.0.0.weight"]
        bands = len(args.adaptive_softmax_cutoff.split(","))
        p.linear(f"{softmax}.head.class_proj", C, bands, bias=False)
        for band in range(bands):
            p[f"{softmax}.tail.{band}.0.weight"] = p[f"{embeddings}.{band + 1}.1.weight"]
            p[f"{softmax}.tail.{band}.2.weight"] = p[f"{embeddings}.{band + 1}.0.weight"]
    elif not args.share_decoder_input_output_embed:
        p["decoder.embed_out"] = p.random(target_words, C) / math.sqrt(C)
    return dict(p)


def checkpoint(args, source_words, target_words=None, seed=0, **changes):
    """What fairseq 0.9 and 0.10 saved of a run, but for the meters of 0.9."""
    model = parameters(args, source_words, target_words or source_words, seed)
    history = {
        "criterion_name": "LabelSmoothedCrossEntropyCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {"best": None},
        "num_updates": 85000,
    }
    trained = [key for key in model if not key.endswith(("version", "_float_tensor"))]
    adam = {
        index: {"step": 85000, "exp_avg": model[key], "exp_avg_sq": model[key] ** 2}
        for index, key in enumerate(trained)
    }
    state = {
        "args": args,
        "model": model,
        "optimizer_history": [history],
        "extra_state": {
            "train_iterator": {"epoch": 52, "iterations_in_epoch": 0, "shuffle": True},
            "val_loss": 3.9,
        },
        "last_optimizer_state": {"state": adam, "param_groups": [{"params": list(adam)}]},
    }
    return {**state, **changes}


# --- The computation ---


def log_probabilities(args, parameters, target_input, source=None):
    """Log probabilities (B, T, words) in float64 of the published model; `source` is (B, S)."""
    p = {key: value.double() for key, value in parameters.items()}
    encoded = padding = None
    if source is not None:
        padding = source.eq(PAD)
        x = math.sqrt(args.encoder_embed_dim) * p["encoder.embed_tokens.weight"][source]
        x = (x + _positions(p, "encoder", source, args.encoder_embed_dim)).transpose(0, 1)
        for n in range(args.encoder_layers):
            x = _encoder_layer(args, p, n, x, padding)
        encoded = _norm(p, "encoder.layer_norm", x) if args.encoder_normalize_before else x

    x = math.sqrt(args.decoder_embed_dim) * _embed_target(args, p, target_input)
    x = (x + _positions(p, "decoder", target_input, args.decoder_embed_dim)).transpose(0, 1)
    for n in range(args.decoder_layers):
        x = _decoder_layer(args, p, n, x, encoded, padding)
    if args.decoder_normalize_before and source is not None:
        x = _norm(p, "decoder.layer_norm", x)
    return _log_softmax(args, p, x.transpose(0, 1))


def _linear(p, name, x):
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def _norm(p, name, x):
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def _positions(p, side, tokens, C):
    """Rows of a table, or sines and then cosines; the first token that is no pad has PAD + 1."""
    known = tokens.ne(PAD)
    position = (known.cumsum(1) * known) + PAD
    if f"{side}.embed_positions.weight" in p:
        return p[f"{side}.embed_positions.weight"][position]
    frequency = 10000 ** -(torch.arange(C // 2).double() / (C // 2 - 1))
    angle = position.unsqueeze(-1) * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1) * known.unsqueeze(-1)


def _residual(p, norm, x, normalize_before, block):
    if normalize_before:
        return x + block(_norm(p, norm, x))
    return _norm(p, norm, x + block(x))


def _feed_forward(p, name, x):
    hidden = _linear(p, f"{name}.fc1", x)
    return _linear(p, f"{name}.fc2", hidden * torch.sigmoid(hidden))


def _unit(p, name, x, heads, max_left, max_right, glu, padding=None):
    x = _linear(p, f"{name}.linear1", x)
    if glu:
        value, gate = x.chunk(2, dim=-1)
        x = value * torch.sigmoid(gate)
    if padding is not None:
        x = x * ~padding.T.unsqueeze(-1)
    offsets = torch.sigmoid(_linear(p, f"{name}.conv.offsets", x))
    left, right = offsets[..., :heads], offsets[..., heads:] if max_right else None
    return _linear(p, f"{name}.linear2", oracle.talk_conv(x, left, right, max_left, max_right))


def _options(args, side, n):
    """The name of layer `n`, and its heads, window, GLU and pre-norm."""
    heads, glu, before = (
        getattr(args, f"{side}_{option}")
        for option in ("attention_heads", "glu", "normalize_before")
    )
    size = getattr(args, f"{side}_kernel_size_list")[n]
    return f"{side}.layers.{n}", heads, size, glu, before


def _encoder_layer(args, p, n, x, padding):
    name, heads, size, glu, before = _options(args, "encoder", n)

    def unit(x):
        return _unit(p, name, x, heads, size, size, glu, padding)

    x = _residual(p, f"{name}.layer_norms.0", x, before, unit)
    return _residual(p, f"{name}.layer_norms.1", x, before, lambda x: _feed_forward(p, name, x))


def _decoder_layer(args, p, n, x, encoded, padding):
    name, heads, size, glu, before = _options(args, "decoder", n)

    def unit(x):
        return _unit(p, name, x, heads, size, 0, glu)

    def attention(x):
        return _attention(p, f"{name}.encoder_attn", x, encoded, padding, heads)

    x = _residual(p, f"{name}.conv_layer_norm", x, before, unit)
    if encoded is not None:
        x = _residual(p, f"{name}.encoder_attn_layer_norm", x, before, attention)
    return _residual(p, f"{name}.final_layer_norm", x, before, lambda x: _feed_forward(p, name, x))


def _attention(p, name, x, encoded, padding, heads):
    def split(x):
        return x.unflatten(-1, (heads, -1))

    query, key, value = (
        split(_linear(p, f"{name}.{which}_proj", given))
        for which, given in (("q", x), ("k", encoded), ("v", encoded))
    )
    scores = torch.einsum("tbhr,sbhr->bhts", query, key) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(padding[:, None, None], -math.inf).softmax(-1)
    return _linear(
        p, f"{name}.out_proj", torch.einsum("bhts,sbhr->tbhr", weights, value).flatten(2)
    )


def _bands(cutoff, words):
    ends = [*map(int, cutoff.split(",")), words]
    return list(zip([0, *ends], ends))


def _embed_target(args, p, tokens):
    if not getattr(args, "adaptive_input", False):
        return p["decoder.embed_tokens.weight"][tokens]
    name = "decoder.embed_tokens.embeddings"
    table = [
        p[f"{name}.{band}.0.weight"] @ p[f"{name}.{band}.1.weight"].T
        for band in range(len(args.adaptive_input_cutoff.split(",")) + 1)
    ]
    return torch.cat(table)[tokens]


def _log_softmax(args, p, x):
    """Over the words of the shortlist and the classes; within each class over its words."""
    if args.adaptive_softmax_cutoff is None:
        name = "embed_tokens.weight" if args.share_decoder_input_output_embed else "embed_out"
        return F.log_softmax(x @ p[f"decoder.{name}"].T, dim=-1)
    name = "decoder.adaptive_softmax"
    head = torch.cat([p[f"{name}.head.word_proj.weight"], p[f"{name}.head.class_proj.weight"]])
    head = F.log_softmax(x @ head.T, dim=-1)
    classes = len(p[f"{name}.head.class_proj.weight"])
    parts = [head[..., :-classes]]
    for band in range(classes):
        hidden = x @ p[f"{name}.tail.{band}.0.weight"]
        tail = F.log_softmax(hidden @ p[f"{name}.tail.{band}.2.weight"].T, dim=-1)
        parts.append(head[..., band - classes, None] + tail)
    return torch.cat(parts, dim=-1)
