"""Run a module of the pipeline as a program: ``run.py recipes.train --help``."""

import importlib
import sys


def run(module):
    """Run a module, such as ``"recipes.train"``, and end with its exit status."""
    sys.exit(importlib.import_module(f"pipeline.{module}").main())


if __name__ == "__main__":
    run(sys.argv.pop(1))
