"""What fairseq is told in a comparison: the flags of its commands."""

from pipeline.common.paths import PLUGIN
from pipeline.common.systems import words


def shared_flags(args):
    """Return the task, how its text is read, and the device: flags of every command."""
    sides = zip(("source-lang", "target-lang"), args.languages) if len(args.languages) == 2 else ()
    return {"user-dir": str(PLUGIN), **dict(sides), **args.commands, **args.schedule.flags}


def training_flags(args, system, rate):
    """Return the flags of a training at a peak learning rate, without seed and folder.

    Those of the `system` come last, and replace what all systems share.
    """
    schedule, updates = args.schedule, args.updates
    interval = max(1, updates // schedule.checkpoints)
    return {
        **shared_flags(args),
        **args.training,
        "lr": rate,
        "warmup-updates": min(schedule.warmup, max(1, updates // 4)),
        "total-num-update": updates,
        "max-update": updates,
        "max-tokens": schedule.max_tokens,
        "max-tokens-valid": 4 * schedule.max_tokens,
        "validate-interval-updates": interval,
        "save-interval-updates": interval,
        "keep-interval-updates": schedule.averaged,
        "log-interval": min(interval, 20),
        **system,
    }


def training_words(args, data, system, rate=1):
    """Return the words after fairseq-train, on the binarised text `data`."""
    return [str(data), *words(training_flags(args, system, rate))]


def beam_search(args):
    """Return the beam search, as keys of fairseq's group `generation`."""
    if args.task == "summ":
        return {"beam": 5, "lenpen": 1, "max_len_b": 100, "no_repeat_ngram_size": 3}
    return {"beam": 5, "lenpen": 1}


def evaluation_words(args, data, system, checkpoint, results):
    """Return the words of the command that runs a model of a `system` over the test set.

    Hypotheses go to the folder `results`; the perplexity of a language model is printed.
    """
    flags = {**shared_flags(args), "path": checkpoint, "gen-subset": "test"}
    flags["user-dir"] = system.get("user-dir", flags["user-dir"])  # a variant of one's own
    if args.task == "lm":
        command, flags["max-tokens"] = "fairseq-eval-lm", 4 * args.schedule.max_tokens
    else:
        command, flags["max-tokens"] = "fairseq-generate", generated_tokens(args)
        flags |= {key.replace("_", "-"): value for key, value in beam_search(args).items()}
        flags |= {"remove-bpe": "sentencepiece", "results-path": results, "log-interval": 1}
    return [command, str(data), *words(flags)]


def generated_tokens(args):
    """Return the most tokens of a batch from which is generated."""
    return 2 * args.schedule.max_tokens
