"""The laboratory: where the mismatch comes from, on any checkpoint. `python -m quads.lab` lists the commands.

Nothing of the trainer imports this room. Each measuring file is one command and can be read alone, with subject.py
(what is measured) and policies.py (the two sides). runs/ compares trainings, report/ makes the page, smollm2/ makes a
mixture of experts from a dense model.
"""
