#!/usr/bin/env python3
"""Check a corpus and cut it into pieces; --help says how."""

from run import run

run("data.corpus")
