"""The steps from text to scores, which the commands in ``scripts/`` start by ``run.py``."""
