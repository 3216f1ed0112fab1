#!/usr/bin/env python3
"""Measure training steps of TaLK and its peers; --help says how."""

from run import run

run("benchmarks.training")
