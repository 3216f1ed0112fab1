#!/usr/bin/env python3
"""Measure the operator beside others; --help says how."""

import sys

from pipeline.benchmarks.operator import main

if __name__ == "__main__":
    sys.exit(main())
