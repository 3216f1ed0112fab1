#!/usr/bin/env python3
"""Draw the curves of training runs; --help says how."""

from run import run

run("plots.curves")
