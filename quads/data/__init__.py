"""Prompts: from rows of a data set to token ids, as a pure function of the step.

tasks.py is all that the loop calls; stop there unless you bring data of another kind (sources.py, rows.py). order.py
mixes sources, filters.py drops rows, prompts.py writes what the model reads, tokenizer.py wraps its tokens.
"""
