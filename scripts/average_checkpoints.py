#!/usr/bin/env python3
"""Average the parameters of checkpoints; --help says how."""

from run import run

run("recipes.average")
