"""Entries of torch.hub: ``torch.hub.load(checkout, "talkconv", folder, source="local")``."""

dependencies = ["torch", "fairseq", "numba"]  # which torch.hub looks for before it calls an entry


def talkconv(folder, **options):
    """Return a translator, with ``.translate(["…"])``, of the checkpoint ``model.pt`` in `folder`.

    Options are those of ``TaLKConvModel.from_pretrained``, such as ``checkpoint_file=``,
    ``data_name_or_path=`` (the dictionaries), ``bpe="sentencepiece"`` and ``sentencepiece_model=``.
    """
    from talk_fairseq.models.talkconv import TaLKConvModel

    return TaLKConvModel.from_pretrained(folder, **options)


def talkconv_lm(folder, **options):
    """Return a language model: ``.sample(["…"])``, ``.score(["…"])``; options as for `talkconv`."""
    from talk_fairseq.models.talkconv_lm import TaLKConvLanguageModel

    return TaLKConvLanguageModel.from_pretrained(folder, **options)
