"""Patches that let fairseq 0.12.3 run with today's Python, torch and numpy.

fairseq has had no release since 2022. Importing this package patches what a user of its commands
meets; ``--user-dir`` imports it before any checkpoint or data set is read. Each patch says what
breaks without it. Files are always loaded with ``weights_only=True``.

- checkpoints.py: `name_file_of_bad_options`, `name_file_of_bad_training_state`,
  `name_file_of_bad_model`, `unpack_archives_inside_a_folder`, `reject_integers_as_parameters`,
  `translate_published_options`, `save_checkpoints_whole`, `copy_checkpoints_whole`,
  `remove_unfinished_checkpoints`; `torch.load` that is safe and names the file.
- data.py: `keep_last_batch`, `make_same_batches_when_resuming`, `shuffle_epochs_after_curriculum`,
  `group_batches_from_resumed_position`, `save_number_of_shards`,
  `resume_epoch_with_other_world_size`; names that numpy 2 has removed.
- text.py: `read_lines_of_input`, `check_corpora_first`, `name_flags_that_limit_lengths`,
  `check_learned_positions`; lines that end at line feeds alone.
- models.py: `return_swish_as_function`, `apply_arch_defaults_in_yaml`,
  `build_legacy_models_from_yaml`, `require_multi_model`, `end_commands_in_one_line`.
- decoding.py: `score_every_token`, `index_diverse_beams_by_row`; repeated n-grams are blocked.
- cpu.py: `train_bf16_without_tpu`, `refuse_fp16_on_cpu`, `clip_gradients_without_scaler`,
  `join_torchrun_on_cpu`, `omit_device_ids_on_cpu`; overflows that stay on the CPU.
- training.py: `allow_adaptive_loss_in_one_process`, `require_legacy_ddp_for_layerdrop`,
  `leave_finished_runs_alone`; a search for NaN that names the module,
  `TALK_MATMUL_PRECISION`, and hydra's warnings silenced.

Out of reach, because fairseq imports no user directory there, or too late:

- ``fairseq-score --sacrebleu`` and ``--sentence-bleu`` raise TypeError with sacrebleu 2: score
  with the ``sacrebleu`` command. Plain ``fairseq-score`` works.
- ``fairseq-preprocess`` without ``--user-dir`` (see `text.check_corpora_first`).
- ``fairseq-hydra-train`` under torchrun on a CPU: the process group is set up before the user
  directory is imported. Pass ``--distributed-init-method env://`` and the rank by hand.
"""

import sys

from talk_fairseq.checkpoint_files import evaluate
from talk_fairseq.compat import checkpoints, cpu, data, decoding, models, text, training

__all__ = ["checkpoints", "cpu", "data", "decoding", "models", "text", "training"]

# Last, for all modules of fairseq that are imported by now. Without it: loading a model runs what
# its options say, since fairseq calls ``eval`` on some, as on ``--encoder-layers`` of fconv.
for name, module in list(sys.modules.items()):
    if name.startswith("fairseq."):
        vars(module).setdefault("eval", evaluate)
