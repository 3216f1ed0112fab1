"""The tasks and models that fairseq builds from the words after fairseq-train."""

import argparse
import contextlib
import io
import logging

# PyTorch and fairseq take seconds to import: what needs them does so where it runs.


def parse_words(words):
    """Return fairseq's Namespace of the words after fairseq-train."""
    import talk_fairseq  # noqa: F401 (patches fairseq, and registers the archs)

    from fairseq import options

    logging.getLogger("fairseq").setLevel(logging.WARNING)
    return options.parse_args_and_arch(options.get_training_parser(), words)


def configure(words):
    """Return ``(config, task)`` of the words after fairseq-train."""
    args = parse_words(words)  # which keeps fairseq's import quiet
    from fairseq import tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    cfg = convert_namespace_to_omegaconf(args)
    return cfg, tasks.setup_task(cfg.task)


def build_generator(model, task, **generation):
    """Return fairseq's beam search with these options, for which `model` is prepared in place."""
    from fairseq.dataclass.configs import GenerationConfig

    cfg = argparse.Namespace(generation=GenerationConfig(**generation))
    model.eval().prepare_for_inference_(cfg)
    return task.build_generator([model], cfg.generation)


def build_model(options, task):
    """Return the model, on the default device, without what fairseq prints of CUDA extensions."""
    with contextlib.redirect_stdout(io.StringIO()):
        return task.build_model(options)
