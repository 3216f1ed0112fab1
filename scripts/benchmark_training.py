#!/usr/bin/env python3
"""Measure training steps of TaLK and its peers; --help says how."""

import sys

from pipeline.benchmarks.training import main

if __name__ == "__main__":
    sys.exit(main())
