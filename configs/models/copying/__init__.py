"""LightConv and DynamicConv whose attention to the encoder is that of ``--copy-attention``.

With ``--align-attention`` and ``--follow-attention`` it is that of these options too. The
hypotheses of a sentence share the encoder's keys, as they do in ``talkconv``.

This is a user directory of fairseq. configs/verses/cpu_seq2seq.yaml uses it to tell what the
attention does apart from the windows.
"""

import talk_fairseq  # noqa: F401 (first, as it patches fairseq)

# isort: split
from fairseq.models import register_model, register_model_architecture
from fairseq.models.lightconv import (
    LightConvDecoder,
    LightConvEncoder,
    LightConvModel,
    base_architecture,
    lightconv_iwslt_de_en,
)

from talk_fairseq.models.encoder_attention import (
    EncoderAttention,
    SharingDecoder,
    SharingEncoder,
    check_padding_of_targets,
    with_tokens,
)


class CopiedEncoder(SharingEncoder, LightConvEncoder):
    """fairseq's, with keys and values for an EncoderAttention in place of its outputs.

    It looks tokens up twice, so the criterion `simcut` would cut the two apart.
    """

    def forward(self, src_tokens, src_lengths=None):
        out = super().forward(src_tokens, src_lengths)
        tokens = self.embed_scale * self.embed_tokens(src_tokens).transpose(0, 1)
        return with_tokens(out, tokens, self.follows)


class CopyingDecoder(SharingDecoder, LightConvDecoder):
    """fairseq's, whose layers have an EncoderAttention."""

    def forward(self, prev_output_tokens, encoder_out=None, incremental_state=None, **kwargs):
        T = prev_output_tokens.shape[1]
        encoder_out = self.shared_encoder_out(encoder_out, incremental_state, T)
        return super().forward(prev_output_tokens, encoder_out, incremental_state, **kwargs)


@register_model("lightconv_copying")
class CopyingLightConvModel(LightConvModel):
    @staticmethod
    def add_args(parser):
        LightConvModel.add_args(parser)
        for option in ("align", "follow"):
            parser.add_argument(f"--{option}-attention", action="store_true", help="as of talkconv")

    @classmethod
    def build_model(cls, args, task):
        aligns = getattr(args, "align_attention", False)
        follows = getattr(args, "follow_attention", False)
        if aligns:
            check_padding_of_targets(task)
        model = super().build_model(args, task)
        # fairseq names the classes that it builds.
        model.encoder.__class__, model.decoder.__class__ = CopiedEncoder, CopyingDecoder
        model.encoder.follows = follows
        for layer in model.decoder.layers:
            layer.encoder_attn = EncoderAttention(
                layer.embed_dim,
                args.decoder_attention_heads,
                dropout=args.attention_dropout,
                encoder_decoder_attention=True,
                copies=True,
                aligns=aligns,
                follows=follows,
            )
        return model


for name, arch in (("", base_architecture), ("_iwslt_de_en", lightconv_iwslt_de_en)):
    register_model_architecture("lightconv_copying", f"lightconv_copying{name}")(arch)
