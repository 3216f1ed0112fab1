"""Entries of torch.hub: ``torch.hub.load(checkout, "talkconv", folder, source="local")``."""

from talk_fairseq.models.talkconv import TaLKConvModel
from talk_fairseq.models.talkconv_lm import TaLKConvLanguageModel

dependencies = ["torch", "fairseq"]


def talkconv(folder, **options):
    """A translator: ``.translate(["…"])`` of the checkpoint ``model.pt`` in `folder`.

    Options are those of ``TaLKConvModel.from_pretrained``, such as ``checkpoint_file=``,
    ``data_name_or_path=`` (the dictionaries), ``bpe="sentencepiece"`` and ``sentencepiece_model=``.
    """
    return TaLKConvModel.from_pretrained(folder, **options)


def talkconv_lm(folder, **options):
    """A language model: ``.sample(["…"])`` and ``.score(["…"])``; options as for `talkconv`."""
    return TaLKConvLanguageModel.from_pretrained(folder, **options)
