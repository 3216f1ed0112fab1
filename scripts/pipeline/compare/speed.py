"""Speed and memory of trained models, measured in turn in one process."""

import math
import statistics
from functools import partial

from pipeline.common.folder import show
from pipeline.common.models import build_generator, build_model, configure
from pipeline.compare.flags import beam_search, generated_tokens


def measure_speeds(args, words, checkpoints):
    """Return ``{system: {"training_tokens_per_second": …, …}}`` of trained models.

    By system, `words` are those after fairseq-train, and `checkpoints` the averaged ones.
    """
    from pipeline.benchmarks.harness import in_turn, peak_memory, timed

    steps = {name: build_measured(args, words[name], checkpoints[name]) for name in words}
    _, task = configure(next(iter(words.values())))
    work = {"training": training_batches(args, task), "generation": test_batches(args, task)}
    rows = {name: {} for name in steps}
    for what, batches in work.items():
        show(f"measuring {what}")
        # Batch by batch in turn, as other work on the machine comes and goes within seconds.
        each = range(len(batches))
        calls = {(name, i): partial(steps[name][what], batches[i]) for i in each for name in words}
        for name, row in rows.items():
            own = [calls[name, i] for i in each]
            with operations_counter() as counter:
                tokens = sum(step() for step in own)  # all, so that what is allocated once is there
            peak = peak_memory(lambda own=own: [step() for step in own], args.device)
            row[what] = {"tokens": tokens, "memory": peak, "operations": counter.get_total_flops()}
        seconds = {call: [] for call in calls}
        for call in in_turn(calls, args.turns):
            seconds[call].append(timed(calls[call]))
        for name, row in rows.items():
            turns = [sum(turn) for turn in zip(*(seconds[name, i] for i in each))]
            row[what] |= {"turns": turns, "seconds": statistics.median(turns)}
    sentences = sum(batch["id"].numel() for batch in work["generation"])
    for row in rows.values():
        training, generation = row["training"], row["generation"]
        row["operations_per_update"] = training["operations"] / len(work["training"])
        row["seconds_per_update"] = training["seconds"] / len(work["training"])
        row["training_tokens_per_second"] = training["tokens"] / training["seconds"]
        row["generated_sentences_per_second"] = sentences / generation["seconds"]
        row["generated_tokens_per_second"] = generation["tokens"] / generation["seconds"]
    return rows


def operations_counter():
    """Return a context that counts operations: two for each product of a matrix product."""
    from torch import ops
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    attention = ops.aten._scaled_dot_product_flash_attention_for_cpu
    attention_backward = ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    uncounted = {  # by the shapes of their arguments
        ops.aten.conv_tbc: lambda x, weight, *_, **__: 2 * math.prod(x) * weight[0] * weight[2],
        ops.aten.addmm_: lambda out, a, b, *_, **__: 2 * math.prod(a) * b[1],  # in its gradient
        attention: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        attention_backward: lambda out, q, k, v, *_, **__: sdpa_backward_flop_count(out, q, k, v),
    }
    return FlopCounterMode(display=False, custom_mapping=uncounted)


def build_measured(args, words, checkpoint):
    """Return the steps of a trained model, each with a copy of it.

    They are ``{"training": step(batch), "generation": step(batch)}``, and return the tokens of the
    batch's target, or of the best hypotheses.
    """
    from talk_fairseq.checkpoint_files import read_checkpoint

    from fairseq import utils
    from fairseq.trainer import Trainer

    cfg, task = configure(words)
    trained = read_checkpoint(checkpoint)["model"]
    model, copy = (build_model(cfg.model, task) for _ in range(2))
    for each in (model, copy):
        each.load_state_dict(trained, model_cfg=cfg.model)
    trainer = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
    if args.device == "cuda":
        copy.half().cuda()
    # Continuations of a forced length, as an end is seldom learnt.
    forced = {"beam": 5, "min_len": 64, "max_len_b": 64}
    generator = build_generator(copy, task, **(forced if args.task == "lm" else beam_search(args)))

    def train(batch):
        trainer.train_step([batch], raise_oom=True)
        trainer.zero_grad()  # else the next step would free what counts as its own
        return batch["ntokens"]

    def generate(batch):
        if args.device == "cuda":
            batch = utils.move_to_cuda(batch)
        hypotheses = task.inference_step(generator, [copy], batch)
        return sum(len(beam[0]["tokens"]) for beam in hypotheses)

    return {"training": train, "generation": generate}


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
    batches = task.get_batch_iterator(task.dataset("test"), max_tokens=generated_tokens(args))
    batches = list(batches.next_epoch_itr(shuffle=False))
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
