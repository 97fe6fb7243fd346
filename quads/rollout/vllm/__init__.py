"""Rollouts in vLLM: an engine in the trainer's process, and a quantization method that any vLLM can load.

Only this room imports vLLM, and only where it is used: a config is read and checked without it.

engine.py is what the loop sees. Stop there unless you change how 4-bit layers live in vLLM. plugin.py is what vLLM
sees: it asks for every layer, and linear.py and experts.py answer. loading.py brings weights in, site.py multiplies in
plain torch and site_triton.py on the kernels; options.py, state.py, setup.py, groups.py, guest.py, readback.py and
sampler.py each serve one of these. Whatever of vLLM is replaced is in patches.py.
"""
