"""All that reads checkpoints, as fixtures."""

import pytest

from conftest import write_dictionaries
from pipeline.common.perplexity import read_model
from pipeline.recipes import average

pytest.importorskip("fairseq")

from building import configured
from fairseq import checkpoint_utils, options, tasks
from fairseq.trainer import Trainer
from hostile import WORDS, generates

from talk_fairseq import checkpoint_files
from talk_fairseq.models.talkconv import TaLKConvModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with dictionaries of WORDS words."""
    folder = tmp_path_factory.mktemp("dictionaries")
    write_dictionaries(folder, WORDS)
    return folder


@pytest.fixture(scope="module")
def trainer(folder):
    """A trainer of the model of `good`."""
    flags = (
        "--arch talkconv_iwslt_de_en --encoder-layers 2 --decoder-layers 1 --encoder-max-left "
        "1,3 --decoder-max-left 1 --encoder-embed-dim 32 --decoder-embed-dim 32 "
        "--encoder-ffn-embed-dim 48 --decoder-ffn-embed-dim 48 --criterion cross_entropy "
        "--optimizer adam --max-tokens 100 --source-lang es --target-lang en --cpu"
    )
    cfg = configured(options.get_training_parser(), folder, *flags.split())
    task = tasks.setup_task(cfg.task)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


@pytest.fixture(scope="module")
def doors(folder, trainer, tmp_path_factory):
    """``{name: function of a path}`` of all that reads checkpoints."""
    output = tmp_path_factory.mktemp("output") / "output.pt"

    def averages(path):
        try:
            average.save(average.average_checkpoints([path]), output)
        finally:
            assert not list(output.parent.iterdir())

    def compares(path):
        path.with_suffix(".txt").write_text(
            "num. model params: 9\nEvaluated 9 tokens\nLoss (base 2): 5.1,\n"
        )
        read_model(path, 9)

    def from_pretrained(path):
        TaLKConvModel.from_pretrained(
            str(path.parent), checkpoint_file=path.name, data_name_or_path=str(folder)
        )

    return {
        "read_checkpoint": checkpoint_files.read_checkpoint,
        "load_checkpoint_to_cpu": lambda path: checkpoint_utils.load_checkpoint_to_cpu(str(path)),
        "fairseq-generate": lambda path: generates(path, folder),
        "from_pretrained": from_pretrained,
        "--restore-file": lambda path: trainer.load_checkpoint(str(path)),
        "average_checkpoints.py": averages,
        "language models scored": compares,
    }
