"""Run a module of the pipeline as a program: ``run.py recipes.train --help``."""

import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module(f"pipeline.{sys.argv.pop(1)}").main())
