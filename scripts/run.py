"""Run a module of the pipeline as a program: ``run.py recipes.train --help``."""

import importlib
import sys


def run(module):
    """Run a module, such as ``"recipes.train"``, and end with its exit status; Ctrl-C is 130."""
    try:
        sys.exit(importlib.import_module(f"pipeline.{module}").main())
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run(sys.argv.pop(1))
