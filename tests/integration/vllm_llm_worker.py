"""Runs in a process of its own for test_vllm_served.py: `vllm.LLM` as docs/vllm.md shows it, in vLLM's default mode or,
with VLLM_ENABLE_V1_MULTIPROCESSING=0, with the engine in this process.

python -m tests.integration.vllm_llm_worker FOLDER    prints a line of JSON
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

import json
import sys

import torch

DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"  # the kernels of a GPU serve bf16
GPU_SHARE = 0.05  # of its memory; others may use the rest
PROMPT = list(range(5, 300, 13))
NEW_TOKENS = 4


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        quantization="quads",
        dtype=DTYPE,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        **({"gpu_memory_utilization": GPU_SHARE} if torch.cuda.is_available() else {}),
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=0, prompt_logprobs=0)
    output = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
    answer = output.outputs[0]
    prompt = [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)]
    new = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    client = type(llm.llm_engine.engine_core).__name__
    print(json.dumps({"client": client, "tokens": list(answer.token_ids), "logprobs": prompt + new}))


if __name__ == "__main__":  # vLLM's engine process imports this file again
    main()
