"""What fairseq is told in a comparison: the flags of its commands."""

from pipeline.common.paths import PLUGIN
from pipeline.common.systems import words


def data_flags(args):
    """Return the task, how its text is read, and the device: flags of every command."""
    flags = {"user-dir": str(PLUGIN)}
    if args.task == "lm":
        # A queue of batches that is open at the end aborts a run of a language model now and then.
        flags |= {"task": "language_modeling", "sample-break-mode": "none"}
        flags |= {"tokens-per-sample": args.schedule.block, "data-buffer-size": 0}
    else:
        source, target = args.languages
        flags |= {"task": "talk_summarization"} if args.task == "summ" else {}
        flags |= {"source-lang": source, "target-lang": target}
        flags |= {"max-source-positions": args.schedule.source, "max-target-positions": 1024}
    if args.device == "cuda":
        return flags | {"fp16": True, "num-workers": 2}
    return flags | {"cpu": True, "num-workers": 0}


def training_flags(args, system, rate):
    """Return the flags of a training at a peak learning rate, without seed and folder.

    Those of the `system` come last, and replace what all systems share.
    """
    schedule, updates = args.schedule, args.updates
    interval = max(1, updates // schedule.checkpoints)
    criterion = {"criterion": "cross_entropy"}
    if args.task != "lm":
        criterion = {"criterion": "label_smoothed_cross_entropy", "label-smoothing": 0.1}
    return {
        **data_flags(args),
        **criterion,
        "optimizer": "adam",
        "adam-betas": "(0.9, 0.98)",
        "clip-norm": 1.0,
        "weight-decay": 1e-4 if args.device == "cuda" else 0,
        "lr": rate,
        "lr-scheduler": "polynomial_decay",
        "warmup-updates": min(schedule.warmup, max(1, updates // 4)),
        "total-num-update": updates,
        "max-update": updates,
        "max-tokens": schedule.max_tokens,
        "max-tokens-valid": 4 * schedule.max_tokens,
        "validate-interval": 1_000_000,
        "validate-interval-updates": interval,
        "save-interval": 1_000_000,
        "save-interval-updates": interval,
        "keep-interval-updates": schedule.averaged,
        "no-epoch-checkpoints": True,
        "log-format": "json",
        "log-interval": min(interval, 20),
        **system,
    }


def training_words(args, data, system, rate=1):
    """Return the words after fairseq-train, on the binarised text `data`."""
    return [str(data), *words(training_flags(args, system, rate))]


def search(args):
    """Return the beam search, as keys of fairseq's group `generation`."""
    if args.task == "summ":
        return {"beam": 5, "lenpen": 1, "max_len_b": 100, "no_repeat_ngram_size": 3}
    return {"beam": 5, "lenpen": 1}


def evaluation_words(args, data, checkpoint, results):
    """Return the words of the command that runs a model over the test set.

    Hypotheses go to the folder `results`; the perplexity of a language model is printed.
    """
    flags = {**data_flags(args), "path": checkpoint, "gen-subset": "test"}
    if args.task == "lm":
        command, flags["max-tokens"] = "fairseq-eval-lm", 4 * args.schedule.max_tokens
    else:
        command, flags["max-tokens"] = "fairseq-generate", generated_tokens(args)
        flags |= {key.replace("_", "-"): value for key, value in search(args).items()}
        flags |= {"remove-bpe": "sentencepiece", "results-path": results, "log-interval": 1}
    return [command, str(data), *words(flags)]


def generated_tokens(args):
    """Return the most tokens of a batch from which is generated."""
    return 2 * args.schedule.max_tokens
