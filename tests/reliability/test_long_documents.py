"""Documents of 100,000 tokens: memory that is linear in the length, and errors that name a flag."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from test_numbers import batch, trainer_of

PEAKS = """
    import gc, json, re
    import torch
    from test_numbers import trainer_of
    from talk_fairseq import talk_conv

    torch.set_num_threads(1)

    def memory(entry):
        with open("/proc/self/status") as status:
            return int(re.search(entry + r":\\s+(\\d+) kB", status.read())[1]) * 1024

    def growth(function, T):
        gc.collect()
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # the peak is from now on
        before = memory("VmRSS")
        function(T)
        return memory("VmHWM") - before

    def operator(T):
        x, left, right = torch.randn(T, 1, 64), torch.rand(T, 1, 4), torch.rand(T, 1, 4)
        inputs = [tensor.requires_grad_() for tensor in (x, left, right)]
        talk_conv(*inputs, 31, 31).backward(torch.ones_like(x))
        assert x.grad.isfinite().all()

    @torch.no_grad()
    def encode(T):
        tokens = torch.randint(4, 40, (1, T))
        out = encoder(tokens, torch.tensor([T]))["encoder_out"][0]
        assert out.shape == (T, 1, 32) and out.isfinite().all()

    encoder = trainer_of("none").model.encoder.eval()
    for name, function in (("operator", operator), ("encoder", encode)):
        function(100)
        print(json.dumps([name, growth(function, 50_000), growth(function, 100_000)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_linear_in_the_length(figure):
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAKS)],
        # Freed memory goes back to the system at once.
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PATH": "",
             "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    peaks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [name for name, *_ in peaks] == ["operator", "encoder"]
    for name, half, full in peaks:
        figure(f"{name}: {full / 2**20:.0f} MiB for 100,000 tokens, {half / 2**20:.0f} for half")
        # A (T, T) matrix of bytes would be 10,000 MB.
        assert 5e6 < full < 400e6 and 1.5 < full / half < 2.6


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_more_tokens_than_learned_positions(tmp_path, side):
    trainer = trainer_of(
        tmp_path, f"--{side}-learned-pos", "--max-source-positions", "8",
        "--max-target-positions", "8",
    )  # fmt: skip
    message = (
        "expected at most 8 tokens.* got 10: train with a larger --max-source-positions, --max-t"
    )
    with pytest.raises(ValueError, match=message):
        trainer.train_step([batch(0)])
    inputs = batch(0)["net_input"]
    fitting = {"src_tokens": inputs["src_tokens"][:, :8], "src_lengths": torch.full((4,), 8)}
    trainer.model(**fitting, prev_output_tokens=inputs["prev_output_tokens"][:, :8])


def test_sinusoidal_positions_have_no_end(tmp_path):
    model = trainer_of(tmp_path, "--max-source-positions", "8").model.eval()
    tokens = torch.randint(4, 40, (1, 3000))
    assert model.encoder(tokens, torch.tensor([3000]))["encoder_out"][0].isfinite().all()


def test_a_sentence_over_the_maximum(tmp_path):
    """As fairseq-generate, fairseq-interactive and .translate meet it, which drop no sentence."""
    task = trainer_of(tmp_path).task
    sentences = [torch.tensor([4, 5, 2]), torch.tensor([4] * 9 + [2])]
    dataset = task.build_dataset_for_inference(sentences, [3, 10])
    message = (
        "max_positions=\\(8, 8\\).* or raise --max-source-positions, --max-target-positions"
        " .* in --model-overrides"
    )
    with pytest.raises(ValueError, match=message):
        task.get_batch_iterator(dataset=dataset, max_positions=(8, 8))
