"""scripts/train.sh: what it runs, what it refuses, and small runs; one of scripts/ablation.sh."""

import errno
import gzip
import itertools
import json
import os
import re
import shutil
import subprocess
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from conftest import ROOT, fairseq

pytest.importorskip("fairseq")
from pipeline.common import folder as folders
from pipeline.common.command import BadInput
from pipeline.recipes import config, evaluate, train


def planned(*arguments):
    """The command of a dry run, and its options as a dictionary."""
    command, environment, _, _ = train.plan(train.parse([*arguments, "--dry-run"]))
    words = dict(word.removeprefix("++").split("=", 1) for word in command if "=" in word)
    return SimpleNamespace(command=command, environment=environment, words=words)


def refused(*arguments, dry_run=True):
    with pytest.raises(BadInput) as error:
        train.plan(train.parse([*arguments, *(["--dry-run"] if dry_run else [])]))
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.fixture
def folder(tmp_path):
    """A folder that passes for binarised data."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/dict.de.txt").write_text("a 1\n")
    return tmp_path / "bin"


def test_a_precision_among_the_overrides_counts_and_is_recorded():
    words = ["iwslt14_de_en/talkconv", "--cpu", "common.bf16=true"]
    *_, trained = train.plan(train.parse([*words, "--dry-run"]))
    assert trained.common.bf16 is True
    assert planned(*words).words["common.bf16"] == "true"


def test_a_file_of_ones_own_comes_before_a_row(tmp_path, monkeypatch):
    """As in a copy of configs/."""
    own = tmp_path / "iwslt14_de_en/talkconv.yaml"
    own.parent.mkdir()
    own.write_text("model: {}\n")
    monkeypatch.chdir(tmp_path)
    assert config.find_config("iwslt14_de_en/talkconv.yaml") == ("talkconv", own)
    assert config.find_config("iwslt14_de_en/talkconv")[0] == "iwslt14_de_en/talkconv"


# --- Accumulation ---


@pytest.mark.parametrize(
    "name, arguments, steps",
    [
        ("iwslt14_de_en/talkconv", "--devices 1", 1),
        ("iwslt14_de_en/talkconv", "--devices 4 dataset.max_tokens=500", 2),
        ("wmt16_en_de/talkconv", "--devices 1", 128),
        ("wmt16_en_de/talkconv", "--devices 8", 16),
        ("wmt16_en_de/talkconv", "--devices 8 dataset.max_tokens=1792", 32),
        ("wmt16_en_de/talkconv", "--devices 8 --nodes 4 --rendezvous node1", 4),
        ("wmt14_en_fr/talkconv", "--devices 2", 128),
        ("wikitext103/talkconv", "--devices 6", 4),
        ("wikitext103/talkconv", "--devices 24", 1),
        ("wmt16_en_de/talkconv", "--cpu", 128),
        ("wmt16_en_de/talkconv", "--cpu --devices 2", 64),
    ],
)
def test_the_batch_is_the_recipes(name, arguments, steps):
    plan = planned(name, *arguments.split())
    assert plan.words["optimization.update_freq"] == f"[{steps}]"
    # counted otherwise: tokens per step, times steps, times processes
    recipe = OmegaConf.load(ROOT / f"configs/{name}.yaml")
    tokens = int(plan.words.get("dataset.max_tokens", recipe.dataset.max_tokens))
    processes = int(plan.words["distributed_training.distributed_world_size"])
    assert tokens * steps * processes == (
        recipe.dataset.max_tokens
        * recipe.optimization.update_freq[0]
        * recipe.distributed_training.distributed_world_size
    )


def test_devices_that_cannot_share_the_batch():
    message = refused("wmt16_en_de/talkconv", "--devices", "3")
    assert "458,752 tokens" in message and "1, 2, 4, 8" in message
    assert "(1), got 2" in refused("iwslt14_de_en/talkconv", "--devices", "2")
    # another batch on purpose
    given = planned("wmt16_en_de/talkconv", "--devices", "3", "optimization.update_freq=[5]")
    assert given.words["optimization.update_freq"] == "[5]"


@pytest.mark.parametrize(
    "name, arguments, tokens",
    [
        ("wmt16_en_de/talkconv", "--devices 3 optimization.update_freq=[5]", 3 * 5 * 3584),
        ("wmt16_en_de/talkconv", "--devices 1 optimization.update_freq=[16]", 16 * 3584),
        ("wmt16_en_de/talkconv", "--devices 8 optimization.update_freq=[16]", None),
        ("wmt16_en_de/talkconv", "--devices 8 dataset.max_tokens=1792", None),
        ("iwslt14_de_en/talkconv", "--devices 8 optimization.update_freq=[1]", 8 * 4000),
    ],
)
def test_another_batch_is_not_the_recipe(name, arguments, tokens):
    *_, trained = train.plan(train.parse([name, *arguments.split(), "--dry-run"]))
    assert trained.get("batch_tokens") == tokens


@pytest.mark.parametrize(
    "name, found, used",
    [
        ("iwslt14_de_en/talkconv", 8, 1),
        ("wmt16_en_de/talkconv", 8, 8),
        ("wmt16_en_de/talkconv", 6, 4),
        ("wikitext103/talkconv", 6, 6),
    ],
)
def test_all_gpus_that_can_share_are_used(monkeypatch, name, found, used):
    monkeypatch.setattr("torch.cuda.device_count", lambda: found)
    plan = planned(name)
    assert plan.words["distributed_training.distributed_world_size"] == str(used)
    assert "common.cpu" not in plan.words and plan.environment.keys() == {"PYTHONWARNINGS"}


# --- Devices, nodes, precision ---


def test_one_process_needs_no_torchrun(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    plan = planned("iwslt14_de_en/talkconv")
    assert plan.command[0].endswith("/fairseq-hydra-train")
    assert plan.words["common.cpu"] == "true" and plan.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "distributed_training.distributed_backend" not in plan.words


def test_several_gpus_and_nodes():
    plan = planned("wmt16_en_de/talkconv", "--devices", "4")
    assert plan.command[0].endswith("/torchrun")
    assert plan.command[1:4] == ["--standalone", "--nproc-per-node", "4"]
    plan = planned("wmt16_en_de/talkconv", *"--devices 8 --nodes 2 --rendezvous node1:7".split())
    torchrun = " ".join(plan.command[1:11])
    assert torchrun.startswith("--nnodes 2 --rdzv-backend c10d --rdzv-id wmt16_en_de.talkconv-")
    assert "--rdzv-endpoint node1:7 --nproc-per-node 8" in torchrun
    assert plan.words["distributed_training.distributed_world_size"] == "16"
    assert "--rendezvous" in refused("wmt16_en_de/talkconv", "--devices", "8", "--nodes", "2")
    assert "got node1" in refused("wmt16_en_de/talkconv", "--rendezvous", "node1")


def test_runs_on_the_same_nodes_do_not_meet(tmp_path, monkeypatch):
    def meeting(name, *arguments):
        nodes = "--devices 8 --nodes 2 --rendezvous node1".split()
        command = planned(name, *nodes, *arguments).command
        return command[command.index("--rdzv-id") + 1]

    monkeypatch.chdir(tmp_path)
    here, en_de = str(tmp_path / "run"), "wmt16_en_de/talkconv"
    assert meeting(en_de, "--save-dir", "run") == meeting(en_de, "--save-dir", here)
    others = [meeting(en_de), meeting(en_de, "--save-dir", here), meeting("wmt14_en_fr/talkconv"),
              meeting(en_de, "--save-dir", str(tmp_path / "seed_2"))]  # fmt: skip
    assert len(set(others)) == 4


@pytest.mark.parametrize(
    "arguments, fp16, bf16",
    [
        ("--devices 8", None, None),  # the config's
        ("--devices 8 --precision fp16", "true", "false"),
        ("--devices 8 --precision bf16", "false", "true"),
        ("--devices 8 --precision fp32", "false", "false"),
        ("--cpu", "false", "false"),
        ("--cpu --precision bf16", "false", "true"),
    ],
)
def test_precision(arguments, fp16, bf16):
    arguments = train.parse(["wmt16_en_de/talkconv", *arguments.split(), "--dry-run"])
    command, _, _, trained = train.plan(arguments)
    for half, asked in (("fp16", fp16), ("bf16", bf16)):
        assert (f"++common.{half}={asked}" in command) == (asked is not None)
        assert f"++common.{half}={'false' if asked == 'true' else 'true'}" not in command
    # A run that is no longer the recipe's, which is in float16, says so.
    _, recipe = config.read_config("wmt16_en_de/talkconv")
    changed = {"common.fp16": (True, False)} if fp16 == "false" else {}
    changed |= {"common.bf16": (None, True)} if bf16 == "true" else {}
    trained.pop("name")
    assert config.differences(recipe, trained) == changed


def test_paths_are_absolute_and_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = planned(
        *"iwslt14_de_en/talkconv --devices 1 --data d --save-dir a=b/it's".split()
    ).words
    assert words["task.data"] == f"{tmp_path}/d"
    assert words["checkpoint.save_dir"] == words["hydra.run.dir"]
    assert words["checkpoint.save_dir"] == f"'{tmp_path}/a=b/it\\'s'"
    assert words["common.tensorboard_logdir"] == f"'{tmp_path}/a=b/it\\'s/tensorboard'"
    words = planned("iwslt14_de_en/talkconv", "--devices", "1").words
    assert words["task.data"] == config.hydra_value(ROOT / "data-bin/iwslt14_de_en")
    assert words["checkpoint.save_dir"] == config.hydra_value(
        ROOT / "checkpoints/iwslt14_de_en/talkconv"
    )


def test_paths_of_overrides_are_absolute(tmp_path, monkeypatch):
    """Hydra runs fairseq in the folder of the run; a user directory begins at the root."""
    monkeypatch.chdir(tmp_path)
    given = ["common.user_dir=configs/models/retention", "+task.data=d", "checkpoint.save_dir=r"]
    plan = planned("iwslt14_de_en/talkconv", "--devices", "1", *given)
    assert plan.words["common.user_dir"] == str(ROOT / "configs/models/retention")
    assert plan.words["task.data"] == f"{tmp_path}/d"
    assert plan.words["checkpoint.save_dir"] == f"{tmp_path}/r"
    for key in ("common.user_dir", "task.data", "checkpoint.save_dir"):
        assert sum(f"++{key}=" in word for word in plan.command) == 1


def test_overrides_need_no_quotes_of_hydra():
    words = planned(
        "iwslt14_de_en/talkconv", "--devices", "1", "model.decoder_max_left=1,3x5",
        "+optimization.lr=[0.1]", "model.encoder_layers_to_keep='0,2'", "common.seed=7",
    ).words  # fmt: skip
    assert words["model.decoder_max_left"] == "'1,3x5'"
    assert words["optimization.lr"] == "[0.1]"
    assert words["model.encoder_layers_to_keep"] == "'0,2'"
    assert words["common.seed"] == "7"


@pytest.mark.parametrize(
    "override, value",
    [
        ("model.encoder_max_left=1x2,3x5", "1x2,3x5"),
        ("optimizer.adam_betas=(0.9, 0.98)", "(0.9, 0.98)"),
        ("checkpoint.save_dir=/tmp/a=b", "/tmp/a=b"),
        ("checkpoint.save_dir=/home/josé/[x]/y", "/home/josé/[x]/y"),
        (r"checkpoint.save_dir=/runs\a's", r"/runs\a's"),
    ],
)
def test_training_and_evaluation_take_the_same_overrides(override, value):
    key = override.partition("=")[0]
    recipe = config.read_config("iwslt14_de_en/talkconv")[1]
    composed = evaluate.composed(config.with_overrides(recipe, [override]))
    assert OmegaConf.select(composed, key) == value
    (word,) = config.hydra_words([override])
    assert OverridesParser.create().parse_override(word).value() == value
    assert (
        planned("iwslt14_de_en/talkconv", "--devices", "1", override).words[key]
        == (word.partition("=")[2])
    )


# --- Mistakes ---


def test_mistakes(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    name = "iwslt14_de_en/talkconv"
    assert "a config such as iwslt14_de_en/talkconv" in refused("iwslt14_de_en/talkcnv")
    assert "got 'xyz'" in refused("xyz")
    assert "at most the 2 GPUs" in refused(name, "--devices", "3", dry_run=False)
    assert "GROUP.KEY=VALUE, got 'dropout=0'" in refused(name, "dropout=0")
    assert "overrides: no viable alternative at input '${x'" in refused(name, "task.data=${x")
    assert "on the CPU, got fp16" in refused(name, "--cpu", "--precision", "fp16")
    both = refused(name, "--cpu", "--precision", "bf16", "common.fp16=true")
    assert "--precision: expected none beside common.fp16=true, got both" in both
    assert "--data: expected a path without ':', got" in refused(name, "--data", "run_12:30")
    assert "--save-dir: expected a path without ':'" in refused(name, "--save-dir", "a:b")
    message = refused(name, "--data", str(tmp_path / "none"), dry_run=False)
    assert "expected binarised data, with dict*.txt, in" in message
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "--cpu uses processes" in refused(name, "--devices", "2", dry_run=False)


TALK, LIGHT = "iwslt14_de_en/talkconv", "iwslt14_de_en/lightconv"  # LightConv has no dataclass


@pytest.mark.parametrize(
    "name, override, message",
    [
        (TALK, "optimization.max_updat=3", "optimization.max_updat: Key 'max_updat' not in"),
        (TALK, "model.encoder_tlak_heads=4", "model.encoder_tlak_heads: Key "),
        (TALK, "optimisation.lr=[1]", "options: expected groups "),
        (TALK, "criterion.rdrop_alpha=5", "criterion.rdrop_alpha: Key "),
        (TALK, "bpe.sentencepiece_model=x", "bpe._name: expected one that fairseq registers"),
        (TALK, "model._name=talkcnv", "expected one that fairseq registers, got 'talkcnv'"),
        (TALK, "hydra.rnu.dir=x", "hydra.rnu: Key "),
        (LIGHT, "model.encoder_layer=3", "model.encoder_layer: Key "),
        (LIGHT, "model.offset_dropout=0", "model.offset_dropout: Key "),
        (TALK, "optimization.max_update=x", "max_update: Value 'x' of type 'str' could not be"),
        (TALK, "optimization.update_freq=8", "optimization.update_freq: "),
        (TALK, "model.dropout=high", "model.dropout: Value 'high' of type 'str' could not be"),
        (TALK, "common.fp16=maybe", "common.fp16: Value 'maybe' is not a valid bool"),
        (TALK, "distributed_training.ddp_backend=x", "distributed_training.ddp_backend: "),
        (TALK, "dataset.max_tokens=null", "dataset.max_tokens: expected a number"),
        (TALK, "dataset.max_tokens=0", "dataset.max_tokens: expected a number"),
    ],
)
def test_options_that_fairseq_does_not_know_or_take(name, override, message):
    """Hydra would add them, and the run would go on without."""
    assert message in refused(name, "--cpu", override)


def test_a_file_that_has_the_name_of_a_group(folder, tmp_path):
    """Hydra would take what fairseq stores by that name for it."""
    shutil.copy(ROOT / f"configs/{TALK}.yaml", tmp_path / "model.yaml")
    message = refused(str(tmp_path / "model.yaml"), "--cpu", "--data", str(folder), dry_run=False)
    assert "expected another name than of fairseq's options, got model.yaml" in message


@pytest.mark.parametrize("name", [TALK, LIGHT])
def test_options_that_fairseq_takes(name):
    planned(
        name, "--cpu", "model.dropout=0", "++common.fp16=True", "dataset.curriculum=2",
        "optimization.lr=[1]", "model.encoder_embed_path=null", "hydra.run.dir=x",
        "ema.ema_decay=1", "model.base_layers=0" if name == TALK else "model.decoder_layers=2",
        "scoring._name=bleu", "optimizer.adam_eps=1e-9",
        "task.num_batch_buckets=3", "model.decoder_layers=1", "checkpoint.patience=-1",
        "checkpoint.keep_last_epochs=-1", "optimization.stop_min_lr=-1",
        "distributed_training.ddp_backend=legacy_ddp",
    )  # fmt: skip


def test_options_of_the_config_itself(folder, tmp_path, monkeypatch):
    """A dry run without overrides does not look, so that it is quick; training does."""
    monkeypatch.setattr(config, "CONFIGS", tmp_path)
    (tmp_path / "mine").mkdir()
    text = (ROOT / f"configs/{LIGHT}.yaml").read_text()
    text = text.replace("encoder_conv_type:", "wieght_dropout: 0.1\n  encoder_conv_type:")
    (tmp_path / "mine/light.yaml").write_text(text)
    planned("mine/light", "--cpu")
    message = refused("mine/light", "--cpu", "--data", str(folder), dry_run=False)
    assert message.startswith("model.wieght_dropout: Key ")


OWN = """
task: {_name: translation, data: "${oc.env:PWD}/bin"}
dataset: {max_tokens: 1000}
criterion: {_name: label_smoothed_cross_entropy}
optimizer: {_name: adam}
lr_scheduler: {_name: inverse_sqrt}
model: {_name: talkconv_iwslt_de_en}
"""


def test_ones_own_yaml(tmp_path, monkeypatch):
    """By its path, from any folder, with fairseq's defaults for what it lacks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/mine.yaml").write_text(OWN)
    for name in ("own/mine.yaml", str(tmp_path / "own/mine.yaml")):
        plan = planned(name)
        command = plan.command
        assert command[command.index("--config-dir") + 1] == str(tmp_path / "own")
        assert command[command.index("--config-name") + 1] == "mine"
        assert plan.words["task.data"] == str(tmp_path / "bin")
        assert plan.words["checkpoint.save_dir"] == config.hydra_value(ROOT / "checkpoints/mine")
        assert plan.words["optimization.update_freq"] == "[1]"
        assert plan.words["distributed_training.distributed_world_size"] == "1"
    assert planned("own/mine.yaml", "--data", "d").words["task.data"] == str(tmp_path / "d")
    message = refused("own/mine.yaml", "--devices", "2")
    assert "share the batch of 1,000 tokens" in message
    planned("own/mine.yaml", "--devices", "2", "optimization.update_freq=[1]")
    message = refused("own/mine.yaml", "--cpu", "model.encoder_tlak_heads=4")
    assert message.startswith("model.encoder_tlak_heads: Key ")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/dict.en.txt").write_text("a 1\n")
    args = train.parse(["own/mine.yaml", "--cpu", "--save-dir", str(tmp_path / "run")])
    assert train.plan(args)[3].name == "mine"

    (tmp_path / "own/mine.yaml").write_text(OWN.replace("max_tokens: 1000", "batch_size: 8"))
    assert refused("own/mine.yaml", "--cpu").startswith("dataset.max_tokens: expected a number")
    planned("own/mine.yaml", "--cpu", "optimization.update_freq=[1]")
    plan = planned("own/mine.yaml", "optimization.update_freq=[1]")
    assert plan.words["distributed_training.distributed_world_size"] == "4"  # all there are


def test_a_yaml_of_configs_by_its_path(monkeypatch):
    monkeypatch.chdir(ROOT / "docs")
    for name in ("configs/iwslt14_de_en/talkconv.yaml", "../configs/iwslt14_de_en/talkconv.yaml"):
        assert config.read_config(name)[0] == "iwslt14_de_en/talkconv"


def test_a_yaml_that_is_no_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("model: [")
    assert "expected YAML in" in refused("mine.yaml")
    (tmp_path / "mine.yaml").write_text("systems: {}")
    assert "got no model" in refused("mine.yaml")
    assert "got no model" in refused(str(ROOT / "configs/verses/cpu_lm.yaml"))
    assert "got 'configs/my/talkconf.yaml'" in refused("configs/my/talkconf.yaml")
    assert len(refused("nothing/like/it.yaml")) < 200


def test_a_mistake_is_one_line_and_status_2(capsys):
    assert train.main(["iwslt14_de_en/talkcnv"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("train.sh: NAME: expected") and error.count("\n") == 1


SAVING = [  # as docs/cluster.md advises
    "checkpoint.save_interval_updates=1000", "checkpoint.keep_interval_updates=2",
    "dataset.validate_after_updates=5000",
]  # fmt: skip


def test_a_folder_of_another_config(folder, tmp_path, monkeypatch):
    run = tmp_path / "run"
    ran = []
    monkeypatch.setattr(train.os, "execve", lambda *command: ran.append(command))
    start = ["--cpu", "--data", str(folder), "--save-dir", str(run)]
    name = "iwslt14_de_en/talkconv"
    train.main([name, *start, "model.dropout=0.2"])
    assert len(ran) == 1
    assert {path.name for path in run.iterdir()} == {"trained.yaml", "train.lock"}
    # the same goes on, also for longer, in other steps, and saved more often
    train.plan(train.parse([name, *start, "model.dropout=0.2"]))
    longer = ["model.dropout=0.2", "optimization.max_update=9", "dataset.max_tokens=2000"]
    train.plan(train.parse([name, *start, *longer, *SAVING]))
    batch = ["model.dropout=0.2", "optimization.update_freq=[7]"]
    train.main([name, *start, *batch])
    *_, trained = train.plan(train.parse([name, *start, "model.dropout=0.2"]))
    assert trained.batch_tokens == 7 * 4000  # which a session has had
    assert "model.dropout 0.2, not 0.3" in refused(name, *start, dry_run=False)
    other = refused("iwslt14_de_en/talkconv_wide", *start, dry_run=False)
    assert "choose another folder" in other
    (run / "trained.yaml").rename(tmp_path / "away")
    (run / "checkpoint_last.pt").touch()
    assert "checkpoints of something else" in refused(name, *start, dry_run=False)


def test_one_training_at_a_time(folder, tmp_path, monkeypatch, capsys):
    """What fairseq inherits keeps the folder locked for as long as it runs."""
    kept, clock = [], itertools.count()
    monkeypatch.setattr(folders.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(folders.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(train.os, "execve", lambda *_: kept.append(inherited()))

    def inherited():
        files = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
        (lock,) = [path for path in files if path.resolve() == tmp_path / "run/train.lock"]
        assert os.get_inheritable(int(lock.name))
        return os.dup(int(lock.name))

    arguments = [TALK, "--cpu", "--data", str(folder), "--save-dir", str(tmp_path / "run")]
    assert [train.main(arguments) for _ in range(2)] == [0, 2]
    assert "--save-dir: another training" in capsys.readouterr().err
    # A process that outlives a killed training ends while the next one waits.
    monkeypatch.setattr(folders.time, "sleep", lambda seconds: kept and os.close(kept.pop()))
    assert train.main(arguments) == 0
    os.close(kept.pop())

    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(folders.fcntl, "flock", no_locks)  # of such a file system
    assert train.main(arguments) == 0
    os.close(kept.pop())


def test_saving_more_often_is_still_the_recipe():
    name = "wmt16_en_de/talkconv"
    elsewhere = ["checkpoint.save_dir=/runs/a", "task.data=/data"]
    _, recipe = config.read_config(name)
    saving = config.with_overrides(recipe, [*SAVING, *elsewhere])
    assert evaluate.other_settings(name, recipe, saving) == {}


@pytest.mark.parametrize("name", ["train", "ablation"])
def test_help(name):
    shown = subprocess.run(
        [ROOT / f"scripts/{name}.sh", "--help"], capture_output=True, text=True, check=True
    )
    assert f"usage: scripts/{name}.sh" in shown.stdout


# --- Small runs ---


PREPARED = {
    "benchmark": "iwslt14_de_en", "source_lang": "de", "target_lang": "en", "tokenizer": "none",
    "lowercase": False, "subwords": "none", "lines": {"train": 120, "valid": 20},
    "checks": [{"what": "lines of train", "found": 120, "published": [160239]}],
}  # fmt: skip


@pytest.fixture(scope="module")
def verses(tmp_path_factory):
    """A small corpus as scripts/prepare_iwslt14_de_en.sh leaves it; its "German" is Spanish."""
    folder = tmp_path_factory.mktemp("verses")
    for split, lines in (("train", 120), ("valid", 20)):
        for language, suffix in (("es", "de"), ("en", "en")):
            with gzip.open(ROOT / f"data/bible-es-en/{split}.{language}.gz", "rt") as text:
                (folder / f"{split}.{suffix}").write_text("".join(islice(text, lines)))
    fairseq(
        "preprocess", "--source-lang", "de", "--target-lang", "en", "--joined-dictionary",
        "--trainpref", folder / "train", "--validpref", folder / "valid",
        "--destdir", folder / "bin", "--nwordssrc", 500,
    )  # fmt: skip
    (folder / "bin/prepared.json").write_text(json.dumps(PREPARED))
    (folder / "valid.en").rename(folder / "bin/tokenized.valid.en")
    return folder / "bin"


SMALL = (
    "dataset.max_tokens=400 common.log_interval=1 optimization.lr=[0.005] "
    "lr_scheduler.warmup_updates=1 model.encoder_embed_dim=32 model.decoder_embed_dim=32 "
    "model.encoder_ffn_embed_dim=32 model.decoder_ffn_embed_dim=32"
).split()
NO_DROPOUT = "model.dropout=0 model.attention_dropout=0 model.offset_dropout=0".split()


def run(name, *arguments):
    """Run scripts/NAME.sh; returns what it printed."""
    done = subprocess.run(
        [ROOT / f"scripts/{name}.sh", *map(str, arguments)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_train_as_one_with_twice_the_steps(verses, tmp_path):
    """And a run goes on with another number of processes; TensorBoard's logs are there."""
    losses, states = [], []
    for processes, steps in ((2, 1), (1, 2)):
        save_dir = tmp_path / str(processes)
        printed = run(
            "train", "iwslt14_de_en/talkconv", "--cpu", "--devices", processes, "--data", verses,
            "--save-dir", save_dir, *SMALL, *NO_DROPOUT, f"optimization.update_freq=[{steps}]",
            "optimization.max_update=4",
        )  # fmt: skip
        lines = [line for line in printed.splitlines() if "num_updates=" in line]
        losses.append([line.partition(" loss=")[2].split(",")[0] for line in lines])
        states.append(torch.load(save_dir / "checkpoint_last.pt", weights_only=False))
        assert list((save_dir / "tensorboard/train_inner").iterdir())
    assert len(losses[0]) == 4  # logged by one of the two
    assert [float(loss) for loss in losses[0]] == pytest.approx(
        [float(loss) for loss in losses[1]], abs=1.1e-3
    )  # printed to three digits
    for name, two in states[0]["model"].items():
        torch.testing.assert_close(two, states[1]["model"][name], rtol=0, atol=1e-4)
    assert states[0]["optimizer_history"][-1]["num_updates"] == 4

    printed = run(
        "train", "iwslt14_de_en/talkconv", "--cpu", "--data", verses, "--save-dir", tmp_path / "2",
        *SMALL, *NO_DROPOUT, "optimization.update_freq=[2]", "optimization.max_update=5",
    )  # fmt: skip
    updates = [line for line in printed.splitlines() if "num_updates=" in line]
    assert len(updates) == 1 and "num_updates=5" in updates[0]


@pytest.mark.long
@pytest.mark.slow
def test_ablation_scores_a_row(verses, tmp_path):
    """And says what is not the paper's; nothing is averaged that is not there."""
    arguments = [
        "--cpu", "--data", verses, "--save-dir", tmp_path / "runs", "--results",
        tmp_path / "ablation.json", "--rows", "ablation_6_four_heads", "--seeds", 3, "--",
        *SMALL, "optimization.update_freq=[1]", "optimization.max_epoch=1",
    ]  # fmt: skip
    done = subprocess.run(
        [ROOT / "scripts/ablation.sh", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 1 and not (tmp_path / "ablation.json").exists()
    assert "expected 10 files like checkpoint" in done.stderr
    printed = run("ablation", *arguments, "checkpoint.keep_last_epochs=1")
    row = r"ablation_6_four_heads +\| +36.65.* \| +1 \| .*optimization.max_epoch 1.* lines of train"
    assert re.search(row, printed)
    result = json.loads((tmp_path / "ablation.json").read_text())["ablation_6_four_heads"]
    assert result["other_data"] == ["lines of train"]
    assert 0 <= result["seeds"]["3"] < 100
    assert result["changed"]["model.encoder_embed_dim"] == 32
    checkpoint = tmp_path / "runs/ablation_6_four_heads/seed_3/checkpoint_last.pt"
    trained = torch.load(checkpoint, weights_only=False)["cfg"]
    assert trained["common"]["seed"] == 3
