#!/usr/bin/env python3
"""Draw the windows that a model chooses; --help says how."""

from run import run

run("plots.windows")
