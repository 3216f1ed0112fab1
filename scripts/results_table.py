#!/usr/bin/env python3
"""Print the papers' tables beside what was measured; --help says how."""

from run import run

run("recipes.paper_tables")
