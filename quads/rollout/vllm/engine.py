"""The vLLM engine: `vllm.LLM` in the trainer's own process, one engine a rank, weights written in place after every
step.

Nothing goes through a server, a checkpoint or a second process: `update_weights` hands the tensors of the sync to the
loaders of the live model. vLLM computes with its stock model classes; the quantization method `quads`
(plugin.py) puts this project's 4-bit layers into them.

Log-probs are those of the distribution that was sampled from (`processed_logprobs`: temperature applied, no
truncation). Every request has its own seed, so a response depends on its prompt, its seed and the weights; other than
in the native engine, the numbers may move in the last bits with the composition of a batch, because vLLM's kernels
do.

The trainer's process group, if there is one, must exist before the engine. Making and closing engines is collective
over its ranks; generating is not, but for the ranks of one tensor-parallel group (groups.py).
"""

# pyright: reportMissingImports=false
# vLLM is an extra.

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quads.config.sections import RolloutSettings
from quads.distributed import in_process_group
from quads.errors import UserError
from quads.model.config import ModelConfig
from quads.quant.recipes import QuantSpec
from quads.rollout.engine import OnGroup, check_request, check_tensor_parallel, ignore
from quads.rollout.vllm.guest import abandon, close, free_memory, guest, make_group_of_one, untouched_rng
from quads.rollout.vllm.options import METHOD, write_options
from quads.rollout.vllm.patches import check_sleep, install_sampler, others_on_the_gpu
from quads.rollout.vllm.plugin import register
from quads.rollout.vllm.readback import checksums, forget_waiting, track_plain_parameters
from quads.rollout.vllm.setup import (
    cache_root,
    check_cpu_attention,
    check_settings,
    graph_sizes,
    kv_cache_bytes,
    model_folder,
    refuse_second_engine,
    register_models,
)
from quads.types import Completion, Sampling


class VLLMEngine:
    """An engine as `quads.rollout.engine` describes it. Weights are undefined until the first `update_weights`."""

    def __init__(
        self,
        model_config: ModelConfig,
        spec: QuantSpec,
        rollout: RolloutSettings,
        dtype: torch.dtype,
        device: torch.device,
        *,
        routed_experts: bool = False,
        top_logprobs: int = 0,
        report: Callable[[str], Any] = print,
        llm_options: dict[str, Any] | None = None,
    ) -> None:
        """
        Args:
            spec: `spec.rollout` is the precision; fp8 is refused (vLLM's own online fp8 is another method).
            rollout: max_batch sequences at once, up to max_prompt_tokens + max_new_tokens long.
            dtype: of activations, KV cache and everything that is not 4-bit.
            routed_experts: make `generate(..., routed_experts=True)` possible (GPU only; a copy a layer and step).
            top_logprobs: the most that `Sampling.top_logprobs` may ask for.
            report: takes the banner, which is the same in every process.
            llm_options: further arguments of `vllm.LLM`, e.g. {"block_size": 32}; they win over what is chosen here.

        Raises:
            UserError: for a model or precision that this engine cannot serve.
        """
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core must live in this process
        self.policy_version = -1
        self._complete = False  # a whole set of weights has arrived
        self._config = model_config
        self._keep_group = in_process_group()  # of the trainer; vLLM makes its own where there is none
        self._asleep: set[str] = set()  # parts of the memory that the trainer has
        self._returns_routing, self._most_top = routed_experts, top_logprobs
        check_settings(spec, rollout, routed_experts, device)
        quantization = write_options(spec)
        self._max_tokens = rollout.max_prompt_tokens + rollout.max_new_tokens
        arguments: dict[str, Any] = {
            "model": str(model_folder(cache_root(), model_config, quantization)),
            "hf_overrides": {"quantization_config": quantization},
            "quantization": METHOD,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": top_logprobs,
            "max_model_len": self._max_tokens,
            "max_num_seqs": rollout.max_batch,
            "kv_cache_memory_bytes": kv_cache_bytes(model_config, rollout, dtype),
            "gpu_memory_utilization": 0.01,  # the size above decides; this share must be free beside the learner
            "disable_log_stats": True,
            "enforce_eager": device.type == "cpu" or not rollout.cuda_graphs,
            "enable_sleep_mode": device.type == "cuda",
            "enable_return_routed_experts": self._returns_routing,
        }
        if device.type == "cpu":  # vLLM rewinds the seed of a prompt that a step cuts in two, and cannot on a CPU
            arguments["enable_chunked_prefill"] = False
        if not arguments["enforce_eager"]:
            arguments["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(rollout.max_batch)}
        self._in_group = rollout.tensor_parallel > 1
        if self._in_group:
            check_tensor_parallel(
                rollout.tensor_parallel, model_config, dist.get_world_size() if self._keep_group else 1
            )
            arguments["tensor_parallel_size"] = rollout.tensor_parallel
        if self._keep_group:
            arguments["distributed_executor_backend"] = "external_launcher"  # this process is rank RANK of the group
        with guest():
            register()
            register_models()
            if device.type == "cpu":
                check_cpu_attention(model_config.head_dim)
            else:
                check_sleep()
                install_sampler()
            refuse_second_engine(device)
            if not self._keep_group:
                make_group_of_one(device)
            from vllm import LLM

            try:
                self._llm = LLM(**arguments | (llm_options or {}))
            except BaseException:
                abandon(self._keep_group)
                raise
        self._quant = self._on_model(lambda model: model.quant_config.state)
        self._on_model(lambda model: track_plain_parameters(model, self._quant.ledger))
        report(self.banner())

    def _on_model(self, function: Any) -> Any:
        """`function(the nn.Module that vLLM runs)`; in process, so nothing is pickled."""
        return self._llm.apply_model(function)[0]

    def banner(self) -> str:
        """The precision and kernel of each kind of layer."""
        return self._quant.banner()

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        n: int,
        sampling: Sampling,
        seeds: list[int],
        routed_experts: bool = False,
        on_group: OnGroup = ignore,
    ) -> list[list[Completion]]:
        """`n` completions of each prompt, as in the protocol. seeds: one for each of len(prompts) * n requests.

        Collective over the ranks of a tensor-parallel group, each with prompts of its own.
        """
        mine = range(len(prompts))
        if self._in_group:
            from quads.rollout.vllm.groups import gather_requests

            prompts, seeds, mine = gather_requests(prompts, n, sampling, seeds)
        self._check(prompts, n, seeds, sampling, routed_experts)
        if not prompts:
            return []
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = [
            SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,  # stops are the caller's, not those of config.json
                seed=seed,
                logprobs=sampling.top_logprobs,  # beside that of the sampled token
                flat_logprobs=True,  # in lists: no object a token
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for seed in seeds
        ]
        done: dict[int, dict[int, Completion]] = {prompt: {} for prompt in range(len(prompts))}
        with untouched_rng():
            for request, param in enumerate(params):
                self._llm.llm_engine.add_request(str(request), {"prompt_token_ids": prompts[request // n]}, param)
            while self._llm.llm_engine.has_unfinished_requests():
                for output in self._llm.llm_engine.step():
                    prompt, j = divmod(int(output.request_id), n)
                    done[prompt][j] = self._completion(output.outputs[0], sampling)
                    if len(done[prompt]) == n and prompt in mine:
                        on_group(prompt - mine.start, in_order(done[prompt]))
        return [in_order(done[prompt]) for prompt in mine]

    def _check(
        self, prompts: list[list[int]], n: int, seeds: list[int], sampling: Sampling, routed_experts: bool
    ) -> None:
        if self._asleep:
            raise RuntimeError("generate() while the engine sleeps; call wake() first")
        if not self._complete:
            raise RuntimeError("generate() before a complete update_weights()")
        check_request(prompts, n, sampling, seeds, self._max_tokens, self._config.vocab_size)
        if routed_experts and not self._returns_routing:
            raise UserError("this engine was made without routed_experts = True")
        if sampling.top_logprobs > self._most_top:
            raise UserError(
                f"this engine was made with top_logprobs = {self._most_top}, fewer than {sampling.top_logprobs}"
            )

    def _completion(self, output: Any, sampling: Sampling) -> Completion:
        ids, width = list(output.token_ids), 1 + sampling.top_logprobs
        top_ids = top_logprobs = None
        if sampling.temperature == 0:
            logprobs = [0.0] * len(ids)  # the distribution that temperature 0 draws from is certain
        else:
            flat = output.logprobs  # of each position: the sampled token, then the most likely ones
            assert flat.token_ids[::width] == ids
            logprobs = flat.logprobs[::width]
            if width > 1:
                top_ids = torch.tensor(flat.token_ids, dtype=torch.int32).view(-1, width)[:, 1:].contiguous()
                top_logprobs = torch.tensor(flat.logprobs).view(-1, width)[:, 1:].contiguous()
        routing = None if output.routed_experts is None else torch.from_numpy(output.routed_experts).to(torch.int16)
        version = self.policy_version
        return Completion(ids, logprobs, output.finish_reason, version, routing, top_ids, top_logprobs)

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Overwrite all weights in place, drop cached prefixes, then take the new version.

        weights: (Hugging Face name, tensor or packed tensor), each parameter of the model once. With more than one
        rank the iterable may hold collectives: every rank consumes all of it.

        Raises:
            UserError: a tensor is missing, unknown, misshaped or there twice. Generating is then refused until a whole
                set has arrived.
        """
        self._wake("weights")
        ledger = self._quant.ledger
        self._complete = False
        ledger.begin()
        self._on_model(forget_waiting)
        try:
            self._on_model(lambda model: model.load_weights(ledger.watch(weights)))
        except (ValueError, AssertionError, AttributeError) as error:  # vLLM's own complaints about names and shapes
            reason = str(error).partition(" The available parameters")[0]
            raise UserError(f"weight sync: vLLM does not take {ledger.latest}: {reason}") from error
        ledger.finish(skipped=["lm_head.weight"] if self._config.tie_embeddings else [])
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: a request is still running during a weight update")
        self._complete = True
        self.policy_version = version

    def checksums(self) -> dict[str, int]:
        """Name -> checksum of each tensor as it lies in the engine, in checkpoint layout."""
        return self._on_model(checksums)

    def sleep(self) -> None:
        """Give the GPU memory of weights and KV cache back to the trainer; what they held is gone. Nothing on a CPU."""
        if self._llm.llm_engine.vllm_config.model_config.enable_sleep_mode and not self._asleep:
            with others_on_the_gpu():
                self._llm.sleep(level=2)
            self._asleep, self._complete = {"weights", "kv_cache"}, False

    def wake(self) -> None:
        """Take all memory again, at its old addresses. Weights are undefined until the next `update_weights`.

        That one wakes their part by itself: with sleep, learn, update_weights, wake the KV cache is away while weights
        travel.
        """
        self._wake("weights")
        self._wake("kv_cache")

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            torch.cuda.empty_cache()  # vLLM maps its memory beside torch's allocator, which still holds the learner's
            self._llm.wake_up(tags=[part])
            self._asleep = self._asleep - {part}

    def close(self) -> None:
        """Shut vLLM down and free its memory; the trainer's process groups live on. Collective over the ranks."""
        if self._llm is not None:
            self.wake()  # vLLM's allocator cannot free memory that is not mapped
            llm, self._llm, self._quant = self._llm, None, None
            close(llm, self._keep_group)
            del llm
            free_memory()
            self._complete = False


def in_order(group: dict[int, Completion]) -> list[Completion]:
    return [group[j] for j in range(len(group))]
