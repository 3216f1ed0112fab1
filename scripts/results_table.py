#!/usr/bin/env python3
"""Print the papers' tables beside what was measured; --help says how."""

import sys

from pipeline.recipes.paper_tables import main

if __name__ == "__main__":
    sys.exit(main())
