#!/usr/bin/env python3
"""Measure decoding of TaLK and its peers; --help says how."""

from run import run

run("benchmarks.decoding")
