"""Speed and memory of trained models, measured in turn in one process."""

import statistics

from pipeline.common.folder import show
from pipeline.compare.flags import build_model, configure, generated_tokens, search


def measure_speeds(args, words, checkpoints):
    """Return ``{system: {"training_tokens_per_second": …, …}}`` of trained models.

    Args:
        args: of the command.
        words: ``{system: the words after fairseq-train}``.
        checkpoints: ``{system: its averaged checkpoint}``.
    """
    from pipeline.benchmarks.decoding import PeakMemory
    from pipeline.benchmarks.training import training_speeds

    trainers, generators, counts, peaks = {}, {}, {}, {}
    for name in words:
        trainers[name], generators[name] = build_measured(args, words[name], checkpoints[name])
    task = next(iter(trainers.values())).task
    batches, samples = training_batches(args, task), test_batches(args, task)

    def train(name, batch):
        trainers[name].train_step([batch], raise_oom=True)
        return batch["ntokens"]

    def generate(name, batch):
        return generators[name](batch)

    rows = {}
    for what, step, work in (("training", train, batches), ("generation", generate, samples)):
        for name in words:
            show(f"{what}: {name}, warming up")
            for batch in work:  # all, so that what is allocated once is there
                step(name, batch)
            with PeakMemory(args.device) as peak:
                counts[what, name] = sum(step(name, batch) for batch in work)
            peaks[what, name] = peak.bytes

        def report(so_far, what=what):
            show(f"{what}: turn {len(next(iter(so_far.values())))} of {args.turns}")

        # Batch by batch in turn, as other work on the machine comes and goes within seconds.
        steps = {
            (name, i): lambda step=step, name=name, batch=batch: step(name, batch)
            for i, batch in enumerate(work)
            for name in words
        }
        speeds = training_speeds(steps, args.turns, report=report)
        for name in words:
            turns = [sum(turn) for turn in zip(*(speeds[name, i] for i in range(len(work))))]
            rows.setdefault(name, {})[what] = {
                "turns": turns,
                "seconds": statistics.median(turns),
                "tokens": counts[what, name],
                "memory": peaks[what, name],
            }
    sentences = sum(sample["id"].numel() for sample in samples)
    for row in rows.values():
        training, generation = row["training"], row["generation"]
        row["seconds_per_update"] = training["seconds"] / len(batches)
        row["training_tokens_per_second"] = training["tokens"] / training["seconds"]
        row["generated_sentences_per_second"] = sentences / generation["seconds"]
        row["generated_tokens_per_second"] = generation["tokens"] / generation["seconds"]
    return rows


def build_measured(args, words, checkpoint):
    """Return ``(trainer, generate(batch))`` of a trained model; each has a copy of it."""
    from fairseq import utils
    from fairseq.dataclass.configs import GenerationConfig
    from fairseq.trainer import Trainer
    from omegaconf import OmegaConf

    from talk_fairseq.checkpoint_files import read_checkpoint

    cfg, task = configure(words)
    trained = read_checkpoint(checkpoint)["model"]
    model, copy = (build_model(cfg.model, task) for _ in range(2))
    for each in (model, copy):
        each.load_state_dict(trained, model_cfg=cfg.model)
    trainer = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
    generation = GenerationConfig(**search(args))
    if args.task == "lm":
        # Continuations of a forced length, as an end is seldom learnt.
        generation = GenerationConfig(beam=5, min_len=64, max_len_b=64)
    copy.eval().prepare_for_inference_(
        OmegaConf.create({"generation": OmegaConf.structured(generation)})
    )
    if args.device == "cuda":
        copy.half().cuda()
    generator = task.build_generator([copy], generation)

    def generate(sample):
        if args.device == "cuda":
            sample = utils.move_to_cuda(sample)
        hypotheses = task.inference_step(generator, [copy], sample)
        return sum(len(beam[0]["tokens"]) for beam in hypotheses)

    return trainer, generate


def training_batches(args, task):
    """Return the first batches of training, the same for every system."""
    task.load_dataset("train")
    batches = task.get_batch_iterator(
        task.dataset("train"),
        max_tokens=args.schedule.max_tokens,
        # As fairseq-train, which leaves out what fills more than a batch.
        max_positions=None if args.task == "lm" else (args.schedule.max_tokens,) * 2,
        ignore_invalid_inputs=True,
        seed=1,
    ).next_epoch_itr(shuffle=True)
    return [batch for batch, _ in zip(batches, range(args.schedule.batches))]


def test_batches(args, task):
    """Return batches of the test set, spread over the lengths; of a language model, beginnings."""
    task.load_dataset("test")
    batches = list(
        task.get_batch_iterator(
            task.dataset("test"), max_tokens=generated_tokens(args)
        ).next_epoch_itr(shuffle=False)
    )
    count = min(args.schedule.generated, len(batches))
    chosen = [batches[len(batches) * (2 * i + 1) // (2 * count)] for i in range(count)]
    if args.task == "lm":
        for batch in chosen:
            tokens = batch["net_input"]["src_tokens"][:, :16]
            words = task.target_dictionary
            tokens = tokens.masked_fill(tokens.eq(words.eos()), words.unk())  # none ends here
            lengths = tokens.new_full((len(tokens),), tokens.shape[1])
            batch["net_input"] = {"src_tokens": tokens, "src_lengths": lengths}
    return chosen
