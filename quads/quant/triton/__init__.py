"""The Triton kernels: one source for Hopper and Blackwell, each with its plain-torch reference in the room above.

You may stop at ops.py unless you write kernels: it is the door, and says what each call computes. Below it, in reading
order: layout.py, decode.py, gemm.py and launch.py (the matmul on Hopper; gemm_fp4.py on Blackwell), weight.py (a weight
in that layout), activations.py with activation_rows.py and codes.py (quantizing what is multiplied), select.py and
selected.py (which channels get a second pass), routing.py (experts), pack.py and fp8.py (weights of the learner),
dense.py and tune.py. math.py is the ground floor: it imports none of the others.
"""
