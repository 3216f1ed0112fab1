"""Patches that let fairseq 0.12.3 run with today's Python, torch and numpy.

fairseq has had no release since 2022. Importing this package patches what a user of its commands
meets; ``--user-dir`` imports it before any checkpoint or data set is read. The docstring of each
patch says what breaks without it. Files are always loaded with ``weights_only=True``.

====================================================================================================
patch                                      reason
====================================================================================================
../checkpoint_files.py
    allow_checkpoint_types                 torch >= 2.6 refuses all of fairseq's checkpoints
checkpoints.py
    read_checkpoints_safely                errors about truncated or foreign files name no file
    name_file_of_bad_options               errors about a checkpoint's options name no file
    name_file_of_bad_model                 of several models, errors do not name the wrong one
    name_file_of_bad_training_state        errors about an optimizer's state name no file
    unpack_archives_inside_a_folder        archives are unpacked wherever their names lead
    reject_integers_as_parameters          integers are copied into parameters silently
    translate_published_options            options of the published TaLK code are dropped
    evaluate_options_without_running_code  options of a checkpoint are passed to eval
    unpickle_broadcasts_fully              several processes cannot resume
    save_checkpoints_whole                 a second try to save follows the first in one file
    copy_checkpoints_whole                 a killed run leaves part of checkpoint_last.pt
    remove_unfinished_checkpoints          what a killed run was writing stays
data.py
    keep_last_batch                        a last batch that is no multiple of 8 is dropped
    make_same_batches_when_resuming        a resumed run trains on other batches
    group_batches_from_resumed_position    another --update-freq loses the end of an epoch
    shuffle_epochs_after_curriculum        no epoch is shuffled after --curriculum
    save_number_of_shards                  for resume_epoch_with_other_world_size
    resume_epoch_with_other_world_size     an epoch cannot be resumed in more processes
    restore_old_numpy_names                names that numpy 2 has removed are used
text.py
    end_lines_at_line_feeds                preprocess ends lines at carriage returns too
    read_lines_of_input                    interactive ends lines at carriage returns too
    check_corpora_first                    preprocess writes before it finds a missing file
    name_flags_that_limit_lengths          errors about long sentences name no flag
    check_learned_positions                too long a sentence is an IndexError
models.py
    end_commands_in_one_line               a wrong option ends in 50 lines of traceback
    return_swish_as_function               swish is a class, which cannot be applied
    apply_arch_defaults_in_yaml            an arch that a YAML names is not applied
    build_legacy_models_from_yaml          older models do not build from YAML
    require_multi_model                    the multilingual task names no model that it takes
decoding.py
    score_every_token                      eval-lm skips blocks that are too long
    block_repeated_ngrams                  --no-repeat-ngram-size blocks nothing
    index_diverse_beams_by_row             --diverse-beam-groups takes wrong sentences
cpu.py
    train_bf16_without_tpu                 --bf16 asks for a TPU
    refuse_fp16_on_cpu                     --fp16 on a CPU fails in the optimizer
    keep_overflows_on_cpu                  --memory-efficient-fp16 ends at an overflow
    clip_gradients_without_scaler          --amp on a CPU hides NaN in an AttributeError
    join_torchrun_on_cpu                   torchrun on a CPU runs independent jobs
    omit_device_ids_on_cpu                 DistributedDataParallel refuses a CPU
training.py
    hook_gradients_of_outputs              the search for NaN fails itself
    remember_first_non_finite              for name_module_where_nan_began
    name_module_where_nan_began            the error about NaN does not say where
    allow_adaptive_loss_in_one_process     adaptive_loss asks for legacy_ddp
    require_legacy_ddp_for_layerdrop       dropped layers end a run in several processes
    leave_finished_runs_alone              a finished run makes one more update
    set_matmul_precision                   no flag for the precision of matrix products
    silence_hydra_warnings                 a screenful of warnings from each command
====================================================================================================

Out of reach, because fairseq imports no user directory there, or too late:

- ``fairseq-score --sacrebleu`` and ``--sentence-bleu`` raise TypeError with sacrebleu 2: score
  with the ``sacrebleu`` command. Plain ``fairseq-score`` works.
- ``fairseq-preprocess`` without ``--user-dir`` (see `check_corpora_first`).
- ``fairseq-hydra-train`` under torchrun on a CPU: the process group is set up before the user
  directory is imported. Pass ``--distributed-init-method env://`` and the rank by hand.
"""

from talk_fairseq.compat import checkpoints, cpu, data, decoding, models, text, training
from talk_fairseq.compat.patching import applies

__all__ = ["checkpoints", "cpu", "data", "decoding", "models", "text", "training"]

# Last: it reaches the modules of fairseq that are imported by now.
applies(checkpoints.evaluate_options_without_running_code)
