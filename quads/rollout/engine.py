"""What a rollout engine is: prompts in, sampled responses with their log-probs out, weights replaced in place.

Two implementations: `native.NativeEngine` (plain PyTorch, anywhere) and `vllm_engine.VLLMEngine`.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from quads.errors import UserError
from quads.model.config import ModelConfig
from quads.types import Completion, Sampling

# Told a prompt's number and all its responses as soon as the last of them is drawn, while other prompts go on.
OnGroup = Callable[[int, list[Completion]], None]


def ignore(prompt: int, group: list[Completion]) -> None:
    """The `OnGroup` of a caller who waits for all groups."""


class Engine(Protocol):
    """Weights are undefined until the first `update_weights`, and `policy_version` is -1 until then."""

    policy_version: int

    def generate(
        self,
        prompts: list[list[int]],
        n: int,
        sampling: Sampling,
        seeds: list[int],
        routed_experts: bool = False,
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        """`n` responses to each prompt. `seeds[p * n + j]` alone decides the random numbers of response j to prompt p.

        `on_group(p, group)` is called once for each prompt, in the order in which groups are complete; it must not
        call the engine. Log-probs are those of the distribution that was sampled from, softmax(logits / temperature).

        Raises:
            UserError: a prompt and its response do not fit, or the engine cannot do what is asked.
        """
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Overwrite all weights in place, drop everything cached, and take the new version last.

        `weights` are (parameter name, tensor or quantized tensor), each parameter once; engines never quantize.

        Raises:
            UserError: a tensor is missing, unknown, misshaped or there twice. Generating is then refused until a
                whole set has arrived.
        """
        ...

    def checksums(self) -> dict[str, int]:
        """Name -> `sync.checksum` of every tensor as it lies in the engine."""
        ...

    def sleep(self) -> None:
        """Give memory back to the trainer between rollouts."""
        ...

    def wake(self) -> None:
        """Take it again, before the next `generate`."""
        ...

    def close(self) -> None:
        """Free everything; the engine is not used again."""
        ...


def check_request(
    prompts: list[list[int]], n: int, sampling: Sampling, seeds: list[int], max_len: int, vocabulary: int
) -> None:
    """What every engine refuses. `max_len` tokens hold a prompt and its response; ids are below `vocabulary`.

    Raises:
        UserError: a prompt that is empty, too long or of another vocabulary; a sampling that cannot be done.
        ValueError: not one seed a response.
    """
    if n < 1 or len(seeds) != len(prompts) * n:
        raise ValueError(f"{len(prompts)} prompts x {n} responses need as many seeds, got {len(seeds)}")
    if sampling.max_new_tokens < 1 or not sampling.temperature >= 0.0:
        raise UserError(f"cannot sample with {sampling}; max_new_tokens must be >= 1 and temperature >= 0")
    if not 0 <= sampling.top_logprobs <= vocabulary or (sampling.top_logprobs and not sampling.temperature):
        raise UserError(
            f"cannot return top_logprobs = {sampling.top_logprobs} at temperature {sampling.temperature}; it is at "
            f"most the vocabulary of {vocabulary}, and temperature 0 has no distribution to return"
        )
    longest = max((len(prompt) for prompt in prompts), default=0)
    if longest + sampling.max_new_tokens > max_len:
        raise UserError(
            f"a prompt of {longest} tokens and {sampling.max_new_tokens} new ones exceed the {max_len} "
            "tokens of a KV slot; raise rollout.max_prompt_tokens or rollout.max_new_tokens"
        )
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {i} is empty; it needs at least one token to condition on")
        if not (0 <= min(prompt) and max(prompt) < vocabulary):
            raise UserError(f"prompt {i} has a token id outside the vocabulary of {vocabulary}; check the tokenizer")


def check_tensor_parallel(size: int, config: ModelConfig, num_processes: int) -> None:
    """Raises UserError where `size` ranks cannot share a model of this shape, naming what can."""
    fix = "change rollout.tensor_parallel"
    if num_processes % size:
        raise UserError(
            f"rollout.tensor_parallel = {size} needs a multiple of {size} processes, not {num_processes}; "
            f"start them with torchrun, or {fix}"
        )
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise UserError(
            f"rollout.tensor_parallel = {size} does not divide {heads} attention heads and {kv_heads} KV heads; {fix}"
        )
    if config.moe_intermediate_size % size or (config.num_heads * config.head_dim) % size:
        raise UserError(f"rollout.tensor_parallel = {size} does not divide the model's widths; {fix}")
