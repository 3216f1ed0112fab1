"""Probes of the patches in compat/amp.py, cpu.py, training.py and updates.py."""

import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest

pytest.importorskip("fairseq")


import torch
from fairseq import options, utils
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.dataclass.configs import EMAConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.models import distributed_fairseq_model
from fairseq.models.ema.ema import EMA
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder, LayerDropModuleList
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin as MixedPrecision
from probing import breaks, dictionary, one_process_of_a_group, tiny_transformer, trainer_of
from torch.utils._python_dispatch import TorchDispatchMode


@breaks("AssertionError: tpu")
def the_bf16_flag_does_not_ask_for_a_tpu(tmp_path):
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, ["x", "--arch", "transformer", "--bf16"])
    assert args.bf16 and not args.tpu, "tpu"


@breaks("Torch not compiled with CUDA enabled|NVIDIA")
def fp16_on_a_cpu_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a GPU for --fp16, got a CPU"):
        trainer_of("--fp16").optimizer  # noqa: B018 (which is made when it is read)


class CountCalls(TorchDispatchMode):
    """Counts the calls of PyTorch's operators, except those that only make a view of a tensor."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def updated_together(update, flat=False):
    """Assert that `update` of an optimizer of 20 parameters makes fewer calls than that."""
    halves = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(20)]
    wide = [torch.nn.Parameter(torch.ones(2)) for _ in range(20)]
    if flat:
        wide = {None: torch.nn.Parameter(torch.ones(40))}
    for p in [*halves, *(wide.values() if flat else wide)]:
        p.grad = torch.ones_like(p)
    optimizer = SimpleNamespace(
        fp16_params=halves, fp32_params=wide, has_flat_params=flat, scaler=None, _needs_sync=True
    )
    with CountCalls() as calls:
        update(optimizer)
    assert calls.count < 20, "a call for each"


@breaks("AssertionError: a call for each")
def gradients_are_widened_together(tmp_path):
    updated_together(MixedPrecision._sync_fp16_grads_to_fp32)
    updated_together(MixedPrecision._sync_fp16_grads_to_fp32, flat=True)


@breaks("AssertionError: a call for each")
def parameters_are_rounded_together(tmp_path):
    updated_together(MixedPrecision._sync_fp32_params_to_fp16)
    updated_together(MixedPrecision._sync_fp32_params_to_fp16, flat=True)


@breaks("AssertionError: a call for each")
def gradients_are_cleared_together(tmp_path):
    updated_together(MixedPrecision.zero_grad)


@breaks("AssertionError: a call for each")
def gradients_are_measured_together(tmp_path):
    updated_together(lambda optimizer: utils.clip_grad_norm_(optimizer.fp32_params, 1))


@breaks("AssertionError: divided again")
def gradients_of_amp_are_divided_by_the_scale_once(tmp_path):
    optimizer = trainer_of("--amp", "--optimizer", "sgd", "--lr", "1").optimizer
    optimizer._grad_scaler = torch.amp.GradScaler("cpu", init_scale=128.0)  # as on a GPU
    params = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    optimizer.backward(sum(p.sum() for p in params))
    assert optimizer.clip_grad_norm(0) > 0
    optimizer.step()
    for old, new in zip(before, params):
        assert torch.allclose(old - new, torch.ones(())), "divided again"


@breaks("AssertionError: begins anew")
def the_scale_of_amp_is_saved(tmp_path):
    first, second = (trainer_of("--amp").optimizer for _ in range(2))
    first._grad_scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)  # as on a GPU
    second._grad_scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    second.load_state_dict(first.state_dict())
    assert second.scaler.get_scale() == 4096, "begins anew"
    second.load_state_dict(first.fp32_optimizer.state_dict())  # as saved without a scale
    assert second.scaler.get_scale() == 4096


@breaks("AssertionError: trains from nothing")
def a_file_to_restore_has_to_be_there(tmp_path):
    trainer = trainer_of("--save-dir", str(tmp_path / "run"))
    said = ""
    try:
        trainer.load_checkpoint(str(tmp_path / "checkpoint_lst.pt"))
    except FileNotFoundError as error:
        said = str(error)
    assert "--restore-file: expected a checkpoint, got /" in said, "trains from nothing"
    assert trainer.load_checkpoint(str(tmp_path / "run/checkpoint_last.pt")) is None


@breaks("AssertionError: other options")
def the_scale_of_amp_has_its_own_options(tmp_path):
    with patch.object(torch.cuda.amp, "GradScaler", lambda **options: options):
        flags = ["--amp-init-scale", "64", "--amp-scale-window", "500", "--fp16-init-scale", "4"]
        given = trainer_of("--amp", *flags).optimizer.scaler
        assert given == {"init_scale": 64, "growth_interval": 500}, "other options"
        assert trainer_of("--amp").optimizer.scaler == {"init_scale": 128}


@breaks("Index put requires the source and destination dtypes match")
def embeddings_of_several_widths_are_looked_up_with_autocast(tmp_path):
    tables = (
        AdaptiveInput(24, 1, 8, 2, 8, [10]),
        CharacterTokenEmbedder(dictionary(), [(1, 4)], 4, 8, 1),
    )
    for table in tables:
        with torch.autocast("cpu", torch.bfloat16):
            table(torch.tensor([[5, 20, 2, 1]])).sum().backward()


@breaks("AdaptiveLoss is not compatible")
def one_process_trains_with_adaptive_loss(tmp_path):
    class Derived(AdaptiveLoss):
        """A user's criterion, which must stay what it is."""

    cfg = SimpleNamespace(ddp_backend="pytorch_ddp", sentence_avg=False)
    task = SimpleNamespace(target_dictionary=dictionary())
    for criterion in (AdaptiveLoss, Derived):
        assert type(criterion.build_criterion(cfg, task)) is criterion
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_utils, "get_global_world_size", lambda: 2)
        with pytest.raises(Exception, match="AdaptiveLoss is not compatible"):
            AdaptiveLoss.build_criterion(cfg, task)


def options_of_one_process():
    """As fairseq has them before it looks for other processes."""
    return SimpleNamespace(
        distributed_init_method=None, distributed_world_size=1, distributed_backend="nccl",
        distributed_no_spawn=False, pipeline_model_parallel=False, tpu=False,
    )  # fmt: skip


def find_others(cfg, patch, **variables):
    """Let fairseq look for the other of two processes that torchrun has started."""
    started = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"}
    for name, value in {**started, **variables}.items():
        patch.setenv(name, value)
    distributed_utils.infer_init_method(cfg)
    assert cfg.distributed_init_method == "env://", cfg.distributed_init_method
    assert (cfg.distributed_world_size, cfg.distributed_rank) == (2, 1)
    assert cfg.distributed_no_spawn


@breaks("AssertionError: None")
def processes_of_torchrun_find_each_other(tmp_path):
    cfg, single = options_of_one_process(), options_of_one_process()
    distributed_utils.infer_init_method(single)
    assert single == cfg
    with pytest.MonkeyPatch.context() as patch:
        find_others(cfg, patch)
    assert cfg.distributed_backend == "gloo"


@breaks("AssertionError: None")
def processes_of_torchrun_with_a_gpu_each_find_each_other(tmp_path):
    cfg = options_of_one_process()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        find_others(cfg, patch, TORCHELASTIC_RUN_ID="job")
    assert cfg.distributed_backend == "nccl" and cfg.device_id == 0


@breaks("device_ids")
def pytorch_ddp_runs_on_a_cpu(tmp_path):
    with one_process_of_a_group(tmp_path) as distributed:
        model = distributed(torch.nn.Linear(2, 2), "pytorch_ddp")
        assert model(torch.ones(1, 2)).shape == (1, 2)


class DropsItsLayers(torch.nn.Module):
    def __init__(self, p):
        super().__init__()
        self.layers = LayerDropModuleList(p, [torch.nn.Linear(2, 2)])
        self.last = torch.nn.Linear(2, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@breaks("Expected to have finished reduction")
def layers_are_dropped_in_several_processes(tmp_path):
    def on_a_cpu(module, device_ids, output_device, **options):
        return torch.nn.parallel.DistributedDataParallel(module, **options)

    def train(model):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()

    with (
        one_process_of_a_group(tmp_path) as distributed,
        patch.object(distributed_fairseq_model, "DistributedDataParallel", on_a_cpu),
    ):
        train(distributed(DropsItsLayers(0), "pytorch_ddp"))
        train(distributed(DropsItsLayers(1), "legacy_ddp"))
        for backend in ("pytorch_ddp", "c10d"):
            try:
                train(distributed(DropsItsLayers(1), backend))
            except ValueError as error:
                assert "--ddp-backend: expected legacy_ddp to drop layers" in str(error)


@breaks("AssertionError: no norm")
def averages_keep_the_norm_after_the_last_layer(tmp_path):
    model = tiny_transformer(encoder_normalize_before=True, decoder_normalize_before=True)
    average = EMA(model, EMAConfig(store_ema=True, ema_decay=0.5))
    average.step(model, 1)
    for part in (average.model.encoder, average.model.decoder):
        assert part.layer_norm is not None, "no norm"
    assert average.model.state_dict().keys() == model.state_dict().keys()


@breaks("AssertionError: averaged again")
def averages_of_shared_embeddings_are_taken_once(tmp_path):
    model = tiny_transformer(share_all_embeddings=True)
    average = EMA(model, EMAConfig(store_ema=True, ema_decay=0.5))
    start = {name: value.clone() for name, value in average.model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    average.step(model, 1)
    assert average.model.decoder.embed_tokens is average.model.encoder.embed_tokens
    for name, value in average.model.state_dict().items():
        if "version" not in name:
            assert torch.allclose(value, start[name] / 2), "averaged again"


@breaks("AssertionError: the noise stayed")
def noise_that_would_stay_is_refused(tmp_path):
    fits = ["--bf16"]
    for flags in ([], ["--memory-efficient-bf16"], [*fits, "--update-freq=2"],
                  [*fits, "--checkpoint-activations"]):  # fmt: skip
        try:
            model = trainer_of("--quant-noise-pq=0.5", *flags).model.train()
        except ValueError as error:
            assert re.search("expected .* with --quant-noise-pq, got", str(error))
            continue
        before = [parameter.clone() for parameter in model.parameters()]
        tokens = torch.full((2, 3), 5)
        model(tokens, torch.tensor([3, 3]), tokens)
        assert all(map(torch.equal, before, model.parameters())), "the noise stayed"
