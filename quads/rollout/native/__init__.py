"""The native engine: plain PyTorch on the learner's own model code, and the reference for numerics.

engine.py and generation.py tell the whole story; stop there unless you care how slots are filled (scheduler.py), how a
step becomes a CUDA graph (decode.py) or where keys and values lie (kv_cache.py).
"""
