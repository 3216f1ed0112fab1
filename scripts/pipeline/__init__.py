"""The steps from text to scores: data, recipes, comparison, quick starts, benchmarks and plots.

The commands in ``scripts/`` are short programs over it; ``run.py`` starts one of its modules.
"""
