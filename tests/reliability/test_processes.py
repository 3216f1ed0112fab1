"""Several processes and hosts: torchrun with gloo on the CPU, and fairseq's own processes.

Two hosts are two agents of torchrun that have an address of the loopback each.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_train import NO_DROPOUT, SMALL, planned, verses  # noqa: F401  a fixture

from conftest import PLUGIN, ROOT

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
UPDATES = 8
SOON = 60  # seconds in which a job must end after one of its processes has


def test_restarts(capsys):
    plan = planned("wmt16_en_de/talkconv", *"--devices 2 --restarts 3".split())
    torchrun = "--standalone --max-restarts 3 --nproc-per-node 2"
    assert " ".join(plan.command[1:6]) == torchrun
    assert "--max-restarts" not in planned("wmt16_en_de/talkconv", "--devices", "2").command
    alone = planned("iwslt14_de_en/talkconv", *"--cpu --restarts 1".split())
    assert alone.command[0].endswith("/torchrun")  # which starts it again
    with pytest.raises(SystemExit):
        planned("iwslt14_de_en/talkconv", "--restarts=-1")
    assert "--restarts: expected a whole number of at least 0, got -1" in capsys.readouterr().err


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


class Hosts:
    """Two torchrun agents, each with one process of a job; `command` takes the options."""

    def __init__(self, folder, command):
        port = free_port()
        self.logs = [folder / f"host{number}.txt" for number in (0, 1)]
        self.agents = []
        for number, log in enumerate(self.logs):
            here = {"PET_LOCAL_ADDR": f"127.0.0.{number + 1}"}  # torchrun's --local-addr
            with open(log, "w") as output:
                self.agents.append(
                    subprocess.Popen(
                        [str(word) for word in command(f"127.0.0.1:{port}")],
                        stdout=output, stderr=output, env=ENVIRONMENT | here, cwd=ROOT,
                    )
                )  # fmt: skip

    def kill(self, rank):
        """Kill the process with this rank."""
        for agent in self.agents:
            for children in Path(f"/proc/{agent.pid}/task").glob("*/children"):
                for child in children.read_text().split():
                    environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                    if f"RANK={rank}".encode() in environment:
                        return os.kill(int(child), signal.SIGKILL)
        raise AssertionError(f"no rank {rank}")

    def wait(self, seconds):
        """The exit statuses and what was printed. Raises AssertionError if there is one left."""
        end = time.time() + seconds
        try:
            return [agent.wait(end - time.time()) for agent in self.agents], self.printed()
        except subprocess.TimeoutExpired:
            raise AssertionError("a hang\n" + "\n".join(self.printed())) from None

    def end(self):
        """Leave nothing behind."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)  # which it hands on
                agent.wait()

    def printed(self):
        return [log.read_text() for log in self.logs]


def wait_until(happens, hosts, seconds=500):
    end = time.time() + seconds
    while not happens():
        gone = any(agent.poll() is not None for agent in hosts.agents)
        assert not gone and time.time() < end, "\n".join(hosts.printed())
        time.sleep(0.02)


def recipe(data, save_dir, *more):
    return [
        sys.executable, ROOT / "scripts/run.py", "recipes.train", "iwslt14_de_en/talkconv", "--cpu",
        "--data", data, "--save-dir", save_dir, *SMALL, *NO_DROPOUT,
        f"optimization.max_update={UPDATES}", "+checkpoint.save_interval_updates=1", *more,
    ]  # fmt: skip


@pytest.fixture
def start_two_hosts(verses, tmp_path):  # noqa: F811
    """A function that starts a job over both hosts, and waits until it has made two updates.

    Its updates are as large as those of one process with two steps.
    """
    started = []

    def start(*more):
        two = ["--nodes", 2, "optimization.update_freq=[1]", *more]
        started.append(
            Hosts(
                tmp_path,
                lambda address: recipe(verses, tmp_path / "two", *two, "--rendezvous", address),
            )
        )
        wait_until(lambda: list((tmp_path / "two").glob("checkpoint_1_2.pt")), started[0])
        return started[0]

    yield start
    for hosts in started:
        hosts.end()


@pytest.mark.slow
@pytest.mark.long
def test_two_hosts_go_on_without_the_one_that_died(start_two_hosts, verses, tmp_path):  # noqa: F811
    """From the last checkpoint, to the parameters of one process that accumulates gradients."""
    hosts = start_two_hosts("--restarts", 1)
    hosts.kill(rank=1)
    statuses, printed = hosts.wait(300)
    assert statuses == [0, 0], "\n".join(printed)
    found = re.search(r"Loaded checkpoint \S+last.pt \(epoch \d+ @ (\d+) updates", "".join(printed))
    assert 1 <= int(found[1]) < UPDATES

    one = recipe(verses, tmp_path / "one", "optimization.update_freq=[2]")
    subprocess.run(list(map(str, one)), env=ENVIRONMENT, check=True, capture_output=True)
    two, one = (
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False)
        for name in ("two", "one")
    )
    assert two["optimizer_history"][-1]["num_updates"] == UPDATES
    for name, parameter in two["model"].items():
        torch.testing.assert_close(parameter, one["model"][name], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job(rank, start_two_hosts):
    hosts = start_two_hosts()
    hosts.kill(rank)
    statuses, printed = hosts.wait(SOON)
    assert 0 not in statuses
    for line in (rf"rank +: {rank} \(local_rank: 0\)", "exitcode +: -9", "Signal 9"):
        assert any(re.search(line, text) for text in printed), "\n".join(printed)
    # The other host names the address and port of the connection that it has lost.
    lost = r"\[[\d.:a-f]+\]:\d+\b.*Connection reset|closed by peer \[[\d.:a-f]+\]:\d+"
    assert any(re.search(lost, text) for text in printed), "\n".join(printed)


FAILS = """
import sys

sys.path.insert(0, {root!r})
import talk_fairseq
import torch.distributed
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion


@register_criterion("fails", dataclass=CrossEntropyCriterion.__dataclass)
class Fails(CrossEntropyCriterion):
    def forward(self, model, sample, reduce=True):
        if torch.distributed.get_rank() == 1 and model.training:
            self.updates = getattr(self, "updates", 0) + 1
            if self.updates == 3:
                open({raised!r}, "w").close()
                raise ArithmeticError("the third update of rank 1")
        return super().forward(model, sample, reduce)
"""
FLAGS = (
    "--cpu --arch talkconv --encoder-layers 1 --decoder-layers 1 --encoder-max-left 3 "
    "--decoder-max-left 3 --encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-ffn-embed-dim 32 "
    "--decoder-ffn-embed-dim 32 --encoder-attention-heads 4 --decoder-attention-heads 4 "
    "--share-all-embeddings --optimizer adam --lr 0.005 --max-tokens 400 --max-update 4 "
    "--num-workers 2 --no-epoch-checkpoints --log-format simple --log-interval 1"
).split()


@pytest.mark.slow
@pytest.mark.long
def test_a_rank_that_raises_ends_the_job(verses, tmp_path):  # noqa: F811
    """With torchrun and fairseq-train, and data from workers."""
    plugin, raised = tmp_path / "fails", tmp_path / "raised"
    plugin.mkdir()
    (plugin / "__init__.py").write_text(FAILS.format(root=str(ROOT), raised=str(raised)))
    programs = Path(sys.executable).parent
    done = subprocess.run(
        [
            programs / "torchrun", "--standalone", "--nproc-per-node", "2",
            programs / "fairseq-train", verses, *FLAGS, "--save-dir", tmp_path / "run",
            "--user-dir", plugin, "--criterion", "fails",
        ],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    ended = time.time()
    printed = done.stdout + done.stderr
    assert done.returncode != 0 and "num_updates=2" in printed.replace(": ", "=").replace('"', "")
    assert "ArithmeticError: the third update of rank 1" in printed
    first = printed.partition("Root Cause")[2]
    assert re.search(r"rank +: 1 \(local_rank: 1\)", first), printed[-3000:]
    assert ended - raised.stat().st_mtime < SOON


SPAWNS = """
import sys, torch
import fairseq_cli.train

if __name__ == "__main__":
    torch.cuda.device_count = lambda: 2  # which is how many fairseq starts
    fairseq_cli.train.cli_main()
"""


@pytest.mark.slow
@pytest.mark.long
def test_processes_that_fairseq_starts(verses, tmp_path):  # noqa: F811
    """Import the plugin again; without torchrun."""
    entry = tmp_path / "train.py"
    entry.write_text(SPAWNS)
    done = subprocess.run(
        [
            sys.executable, entry, verses, *FLAGS, "--save-dir", tmp_path / "run", "--user-dir",
            PLUGIN, "--distributed-world-size", "2", "--distributed-backend", "gloo",
        ],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-3000:]
    assert "initialized host" in printed and "training on 2 devices" in printed
    state = torch.load(tmp_path / "run/checkpoint_last.pt", weights_only=False)
    assert state["optimizer_history"][-1]["num_updates"] == 4
