"""The encoder-decoder in fairseq's commands: training, errors, ways to install it."""

import re
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from conftest import PLUGIN, ROOT, SMALL, fairseq

pytest.importorskip("fairseq")

from building import dictionary, from_flags, units
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from test_talkconv_generation import generate, hypotheses

from talk_fairseq.models.talkconv import TaLKConvModel


@pytest.mark.slow
def test_a_pruned_model_trains_on_and_is_loaded(corpus, trained, tmp_path):
    """From a checkpoint of more layers, then from its own; with the options that it saved."""
    flags = ["--encoder-layers-to-keep", 1, "--decoder-layers-to-keep", 0]
    resumed = ["--restore-file", trained, "--reset-optimizer", "--reset-dataloader"]
    for updates, more in ((1, [*resumed, "--reset-meters"]), (2, [])):
        printed = fairseq(
            "train", corpus, *SMALL, *flags, *more, "--optimizer", "adam", "--lr", 0,
            "--max-tokens", 2000, "--max-update", updates, "--save-dir", tmp_path,
            "--no-epoch-checkpoints", "--disable-validation",
        )  # fmt: skip
        assert "Loaded checkpoint" in printed
    path = tmp_path / "checkpoint_last.pt"
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert state["optimizer_history"][-1]["num_updates"] == 2
    (full,), (pruned,) = (
        checkpoint_utils.load_model_ensemble([str(file)])[0] for file in (trained, path)
    )
    assert [unit.conv.max_left for unit in units(pruned, "encoder")] == [9]
    for side, kept in (("encoder", 1), ("decoder", 0)):
        assert len(units(pruned, side)) == 1
        expected = units(full, side)[kept].linear1.weight
        assert torch.equal(units(pruned, side)[0].linear1.weight, expected)


def test_the_multilingual_task_says_which_models_it_takes():
    multilingual = MultilingualTranslationTask.build_model
    message = "--arch: expected a model of several language pairs, .* got talkconv_iwslt_de_en"
    with pytest.raises(ValueError, match=message):
        multilingual(None, from_flags("--arch", "talkconv_iwslt_de_en"))


@pytest.mark.slow
def test_hydra_train_from_yaml(corpus, tmp_path):
    (tmp_path / "small.yaml").write_text(
        textwrap.dedent(f"""
        common: {{user_dir: {PLUGIN}, log_format: simple}}
        checkpoint: {{save_dir: {tmp_path}/checkpoints}}
        task: {{_name: translation, data: {corpus}}}
        criterion: {{_name: cross_entropy}}
        dataset: {{max_tokens: 2000, num_workers: 0}}
        optimization: {{max_update: 2, lr: [0.001]}}
        optimizer: {{_name: adam}}
        lr_scheduler: {{_name: fixed}}
        model:
          _name: talkconv_iwslt_de_en
          encoder_layers: 2
          decoder_layers: 1
          encoder_embed_dim: 32
          decoder_embed_dim: 32
          encoder_max_left: [3, 9]
          encoder_max_right: [0, 5]
          decoder_max_left: 3
          share_all_embeddings: true
        """)
    )
    fairseq("hydra-train", "--config-dir", tmp_path, "--config-name", "small", cwd=tmp_path)
    path = tmp_path / "checkpoints/checkpoint_last.pt"
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    layer = model.decoder.layers[0]  # what the YAML leaves is of the arch
    assert layer.fc1.out_features == 1024 and not layer.self_attn.glu
    assert len(hypotheses(generate(corpus, path))) == 43


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, message",
    [
        (["--user-dir", "/no/such/plugin"], "/no/such/plugin"),
        (["--max-source-positions", 3], "exceeds|maximum|max_positions|Size of sample"),
        (["--encoder-ffn-embed-dim", 48], "please ensure that the architectures match"),
    ],
)
def test_bad_input_stops_training_with_a_clear_error(corpus, trained, tmp_path, change, message):
    """A plugin that is not there, sentences over the maximum, a checkpoint of another model."""
    printed = fairseq(
        "train", corpus, *SMALL, "--optimizer", "adam", "--max-tokens", 2000, "--max-update", 1,
        "--restore-file", trained, "--save-dir", tmp_path / "new", *change, check=False,
        plugin=change[1] if change[0] == "--user-dir" else PLUGIN,
    )  # fmt: skip
    assert re.search(message, printed.strip().splitlines()[-1]), printed[-2000:]
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.slow
def test_bad_windows_stop_before_training(corpus, tmp_path):
    """With the message alone: `printed` has no traceback."""
    printed = fairseq(
        "train", corpus, *SMALL, "--decoder-max-left", "3", "--optimizer", "adam", "--max-tokens",
        2000, "--save-dir", tmp_path / "checkpoints", check=False,
    )  # fmt: skip
    assert "decoder_max_left: expected 2 windows, one per layer, got 1" in printed
    assert "Traceback" not in printed
    assert not list(tmp_path.rglob("*.pt"))


def run_as_a_command(cfg, task_of_command):
    """Build the model of `cfg` as a command of fairseq does."""

    def main(cfg):
        task_of_command.build_model(cfg.model)

    distributed = SimpleNamespace(distributed_init_method=None, tpu=True)  # one process
    cfg = SimpleNamespace(model=cfg, distributed_training=distributed, common=SimpleNamespace())
    cfg.common.tpu = False
    distributed_utils.call_main(cfg, main)


@pytest.mark.parametrize(
    "flags", ["--offset-dropout 1.5", "--encoder-talk-heads 7", "--encoder-max-left 3"]
)
def test_commands_end_in_the_message_alone(flags, monkeypatch):
    """As fairseq-hydra-train and Python do not: hydra has its own way, callers their handlers."""
    monkeypatch.delitem(sys.modules, "fairseq_cli.hydra_train", raising=False)
    translation = TranslationTask(TranslationConfig(), dictionary(20), dictionary(20))
    cfg = from_flags("--arch", "talkconv", *flags.split())
    with pytest.raises(SystemExit, match=r"^ValueError: \w+: expected .*, got "):
        run_as_a_command(cfg, translation)
    monkeypatch.setitem(sys.modules, "fairseq_cli.hydra_train", sys)
    with pytest.raises(ValueError, match=r"^\w+: expected .*, got "):
        run_as_a_command(cfg, translation)


def test_errors_of_others_keep_their_traceback(monkeypatch):
    """Such as those of one's own unit."""
    monkeypatch.delitem(sys.modules, "fairseq_cli.hydra_train", raising=False)

    class Broken:
        def build_model(self, cfg):
            raise ValueError("not enough values to unpack")

    with pytest.raises(ValueError, match="^not enough values to unpack$"):
        run_as_a_command(None, Broken())


@pytest.mark.parametrize("data", ["absent", "../empty", "empty"])
def test_a_folder_without_dictionaries_is_named(trained, tmp_path, monkeypatch, data):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    shutil.copy(trained, tmp_path / "model/model.pt")
    monkeypatch.chdir(tmp_path)
    message = r"data_name_or_path: expected a folder with dictionaries \(dict\*.txt\), got "
    with pytest.raises(ValueError, match=message):
        TaLKConvModel.from_pretrained("model", data_name_or_path=data)
    with pytest.raises(Exception) as error:  # fairseq's, of what is missing there
        TaLKConvModel.from_pretrained("model", data_name_or_path=data, source_dict="elsewhere")
    assert "data_name_or_path" not in str(error.value)


# --- Ways to install it ---


@pytest.mark.slow
def test_from_a_wheel(corpus, trained, tmp_path):
    """The wheel carries the kernels and works as a plugin, in front of the editable install."""
    pytest.importorskip("setuptools", "68")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = tmp_path / "source"
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    for path in tracked.splitlines():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    options = ["--no-deps", "--no-build-isolation"]  # in isolation, setup.sh builds it
    subprocess.run([*pip, "wheel", *options, "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)
    env = {"PYTHONPATH": str(site)}
    code = "import importlib.util; print(importlib.util.find_spec('talk_fairseq').origin)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=env, cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    where = site / "talk_fairseq"
    assert found == str(where / "__init__.py")
    assert (site / "talk_fairseq/kernels/talk_conv.cu").stat().st_size > 0
    printed = fairseq(
        "generate", corpus, "--path", trained, "--max-len-b", 5, plugin=where, env=env, cwd=tmp_path
    )
    assert len(hypotheses(printed)) == 43


@pytest.mark.slow
def test_from_an_editable_install_and_in_spawned_processes(tmp_path):
    """setup.sh installs the checkout as editable; a spawned process imports the plugin anew."""
    program = """
        import argparse, multiprocessing

        def work(user_dir):
            from fairseq import utils
            utils.import_user_module(argparse.Namespace(user_dir=user_dir))
            from fairseq.models import ARCH_MODEL_REGISTRY
            assert "talkconv_iwslt_de_en" in ARCH_MODEL_REGISTRY

        if __name__ == "__main__":
            import talk_fairseq
            (path,) = talk_fairseq.__path__
            work(path)
            process = multiprocessing.get_context("spawn").Process(target=work, args=(path,))
            process.start()
            process.join()
            assert process.exitcode == 0
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True)
