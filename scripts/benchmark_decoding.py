#!/usr/bin/env python3
"""Measure decoding of TaLK and its peers; --help says how."""

import sys

from pipeline.benchmarks.decoding import main

if __name__ == "__main__":
    sys.exit(main())
