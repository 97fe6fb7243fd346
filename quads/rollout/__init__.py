"""Rollouts: the interface of an engine, the weight sync and the drawing of tokens.

engine.py says what an engine does, sync.py how weights reach it, sampling.py how a token is drawn. native/ is an engine
to read, vllm/ one for speed: both do the same, so one of them is enough.
"""
