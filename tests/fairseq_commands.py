"""fairseq's commands, each in a process of its own.

The processes are forked from one that has imported PyTorch and fairseq, but not the plugin: that
saves each the four seconds of their import. tests/test_readme.py runs the installed commands.
"""

import importlib
import multiprocessing
import os
import sys
import tempfile

import torch

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([f"fairseq_cli.{name}" for name in ("eval_lm", "generate", "train")])


def _main(name, arguments, environment, cwd, stdin, output):
    """Be the command, in the forked process."""
    os.environ.clear()
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    if stdin is not None:
        sys.stdin = open(stdin)
    torch.set_num_threads(1)  # the models are too small for more
    sys.argv = [f"fairseq-{name.replace('_', '-')}", *arguments]
    try:
        importlib.import_module(f"fairseq_cli.{name}").cli_main()
    except Exception:
        sys.excepthook(*sys.exc_info())  # which multiprocessing does not call
        sys.exit(1)


def run(name, *arguments, env=None, cwd=None, stdin=None):
    """Run a command such as ``"eval_lm"``; returns ``(exit status, what it printed)``.

    Args:
        env: variables of its environment, beside those of this process.
        cwd: its folder (default: that of this process).
        stdin: the path of a file to read in place of the terminal.
    """
    with tempfile.NamedTemporaryFile(mode="r", suffix=".log") as output:
        process = _FORKS.Process(
            target=_main,
            args=(name, [*map(str, arguments)], os.environ | (env or {}), cwd, stdin, output.name),
        )
        process.start()
        process.join(300)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"{name}: {output.read()[-3000:]}")
        return process.exitcode, output.read()
