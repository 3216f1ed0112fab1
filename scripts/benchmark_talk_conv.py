#!/usr/bin/env python3
"""Measure the operator beside others; --help says how."""

from run import run

run("benchmarks.operator")
