"""Memory of one process by phase, estimated from shapes alone, so that a run that cannot fit stops before it allocates.

A step has three phases that never overlap: the rollout holds the engine with its KV cache, the sync the engine's
weights, an update activations and gradients. What the learner keeps is there in all of them, and the largest phase
counts. (An evaluation is a rollout; a save needs nothing more.)

What FSDP shards is divided by the number of shards. What an update needs beside weights and optimizer state is counted
at the largest of its three peaks:

    the loss      all activations are there and the logits of a chunk of tokens come on top
    first layer   the backward pass has freed the other layers' activations, and left all gradients but the last ones
    optimizer     all gradients

Activations are numbers of elements in their own dtype; an fp32 tensor beside bf16 counts twice. They list what autograd
saves; tests/unit/test_memory.py holds them against peaks measured on GPUs.
"""

from dataclasses import dataclass

import torch

from quads.config.sections import ParallelSettings, RLSettings, RolloutSettings
from quads.errors import UserError
from quads.model.config import ModelConfig
from quads.model.logprobs import LOGITS_CHUNK
from quads.quant.backend import kernels_of
from quads.quant.formats import FORMATS
from quads.quant.recipes import QuantSpec, precision
from quads.quant.sites import bf16_layers

GIB = 2**30
MOMENT_BYTES = {"float32": 8.0, "8bit": 2.0 + 8 / 256, "cpu": 0.0}  # both moments of a parameter, on a GPU


KEPT_CACHE = 0.02  # of the GPU's memory: up to this size the native engine keeps its KV cache while it sleeps


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB on one device, by phase and by what holds them. A part is equally large in every phase that has it."""

    phases: dict[str, dict[str, float]]

    def of(self, phase: str) -> float:
        """GiB of one phase."""
        return sum(self.phases[phase].values())

    @property
    def largest(self) -> str:
        """The phase that decides whether the run fits."""
        return max(self.phases, key=self.of)

    @property
    def total(self) -> float:
        """GiB of the largest phase."""
        return self.of(self.largest)

    @property
    def parts(self) -> dict[str, float]:
        """Everything that is there in some phase. Its sum is more than any moment needs."""
        return {name: gib for phase in self.phases.values() for name, gib in phase.items()}


@dataclass(frozen=True)
class ProcessShape:
    """What the memory of one process of a run follows from."""

    model: ModelConfig
    spec: QuantSpec
    rollout: RolloutSettings
    rl: RLSettings
    dtype: torch.dtype  # of activations and of what is not quantized
    parallel: ParallelSettings = ParallelSettings()
    num_processes: int = 1
    all_gather: str = "bf16"  # what FSDP gathers: "bf16" or "packed"
    device_type: str = "cuda"
    moments: str = "float32"  # [optim] moments
    held: int | None = None  # parameters that this process holds, where an equal share is not exact
    device_bytes: float = 139.8 * GIB  # memory of the GPU; an H200
    accumulated: bool = True  # False if one micro-batch makes an update: activations and gradients never peak together

    @property
    def shards(self) -> int:
        """Over how many processes FSDP shards the weights."""
        return self.num_processes // self.parallel.replicate

    @property
    def local_parameters(self) -> float:
        """How many parameters this process holds."""
        return self.model.num_parameters()[0] / self.shards if self.held is None else self.held


def targeted_parameters(config: ModelConfig, targets: tuple[str, ...], plain: str = "none") -> int:
    """Parameters in quantized matrices. plain: [quant] bf16_layers."""
    counts = config.parts()
    experts = config.num_experts * counts.expert
    layers = config.num_layers - len(bf16_layers(plain, config.num_layers))
    return layers * (("attention" in targets) * counts.attention + ("experts" in targets) * experts)


def kv_cache_bytes(config: ModelConfig, slots: int, max_len: int, element_bytes: int) -> int:
    """Keys and values of every slot."""
    return 2 * config.num_layers * slots * max_len * config.num_kv_heads * config.head_dim * element_bytes


def estimate_memory(run: ProcessShape) -> MemoryEstimate:
    """The learner (fp32 master, two Adam moments, its quantized weights), in an update what forward and backward need,
    the engine and its KV cache. Where no kernel multiplies, the native engine keeps the values of quantized weights as
    well, on a CPU in float64; there it keeps keys and values in float64 in fp32 runs.
    """
    spec, rollout, local, shards = run.spec, run.rollout, run.local_parameters, run.shards
    total, targeted = run.model.num_parameters()[0], targeted_parameters(run.model, spec.targets, spec.bf16_layers)
    compute = run.dtype.itemsize
    per_weight = {"bf16": float(compute), **{name: row.bits_per_weight / 8 for name, row in FORMATS.items()}}
    rolled_out = precision(spec.rollout, spec.format)
    engine_weight = per_weight[rolled_out.weights]
    served = rollout.kernel != "reference" and spec.rollout in kernels_of(spec.format, spec.residual_scale)
    cached = compute
    if run.device_type == "cpu":
        engine_weight += 8.0 * (spec.rollout != "bf16")
        cached = 8 if run.dtype == torch.float32 else compute
    elif rollout.engine == "native" and rolled_out.weights != "bf16" and not served:
        engine_weight += 4.0 if rolled_out.residual or compute == 4 else 2.0
    learner_copy = 0.0 if spec.learner_weights == "bf16" else per_weight[spec.learner_weights]
    slot_length = rollout.max_prompt_tokens + rollout.max_new_tokens
    kv_cache = float(kv_cache_bytes(run.model, rollout.max_batch, slot_length, cached)) / rollout.tensor_parallel
    if rollout.engine == "vllm" and rollout.gpu_memory_gib:
        kv_cache = rollout.gpu_memory_gib * GIB
    kept = {
        "master weights": 4.0 * local,
        "Adam moments": (8.0 if run.device_type == "cpu" else MOMENT_BYTES[run.moments]) * local,
        "learner's quantized weights": learner_copy * targeted / shards,
    }
    if run.rl.kl_coef > 0:
        kept["reference model"] = (4.0 * total + learner_copy * targeted) / shards
    engine = {"engine weights": (engine_weight * targeted + compute * (total - targeted)) / rollout.tensor_parallel}
    cache = {"KV cache": kv_cache}
    # vLLM sleeps without its weights on a GPU; on a CPU it keeps everything. The native engine keeps its weights, and a
    # small cache that CUDA graphs point into.
    gpu, vllm = run.device_type == "cuda", rollout.engine == "vllm"
    asleep = {} if vllm and gpu else engine
    if (vllm and not gpu) or (gpu and not vllm and rollout.cuda_graphs and kv_cache <= KEPT_CACHE * run.device_bytes):
        asleep = asleep | cache
    phases = {
        "rollout": {**kept, **engine, **cache},
        "sync": {**kept, **engine, **(asleep if not vllm else {}), "a tensor on its way": largest_tensor_bytes(run)},
        "learn": {**kept, **update_peak(run), **asleep},
    }
    return MemoryEstimate({name: {part: size / GIB for part, size in parts.items()} for name, parts in phases.items()})


def largest_tensor_bytes(run: ProcessShape) -> float:
    """The largest matrix as the sync ships it, whole: w13 or w2 of all experts of a layer packed, or the embedding."""
    counts, word = run.model.parts(), precision(run.spec.rollout, run.spec.format).weights
    bits = (
        FORMATS[word].bits_per_weight if word in FORMATS and "experts" in run.spec.targets else 8 * run.dtype.itemsize
    )
    return max(run.model.num_experts * counts.w13 * bits / 8, float(counts.head * run.dtype.itemsize))


@dataclass(frozen=True)
class Layer:
    """Elements for one token of one layer."""

    kept: int  # from the forward to the backward pass
    again: int  # computed again when the backward pass reaches the layer
    gradients: int  # of activations, at the same time, where they are largest: in the experts


def layer_activations(config: ModelConfig, checkpointing: str, compiled: bool) -> Layer:
    """What the backward pass of one layer needs for one token.

    Eager: each norm saves its fp32 input and the normed value, and its result is a matmul's input; likewise those of q
    and k. Compiled: a norm saves its input alone and is computed again, as is silu(gate).
    """
    c = config
    h, d, g = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    if compiled:
        attention = 4 * h + 3 * d + 3 * g  # two norms' inputs and results; q and k before their norm; q, k, v, output
        experts = c.top_k * (2 * h + 3 * c.moe_intermediate_size) + 2 * c.num_experts  # x, y, gate and up, w2's input
    else:
        attention = 8 * h + 5 * d + 5 * g
        experts = c.top_k * (2 * h + 4 * c.moe_intermediate_size) + 2 * h + 2 * c.num_experts  # and the fp32 router
    products = 2 * h + 3 * d + c.top_k * (2 * h + 2 * c.moe_intermediate_size)
    everything = attention + experts
    kept = {"none": everything, "moe": attention + h, "selective": products, "full": h}[checkpointing]
    return Layer(
        kept, everything - kept if checkpointing != "none" else 0, c.top_k * (2 * h + 2 * c.moe_intermediate_size)
    )


# Of score centering, a token and candidate: its id, two log-probs, two gradients, and five float64 numbers on the way
# to its coefficient.
CENTERING_BYTES = 64


def logits_bytes(config: ModelConfig, tokens: int, dtype: torch.dtype, device_type: str) -> float:
    """The loss's own memory at its peak: a chunk's logits and their gradient, and the head's gradient in fp32.

    On a GPU fused kernels turn fp32 logits into a gradient in the activation dtype. Plain torch holds three fp32
    tensors of that size at a time.
    """
    chunk = min(LOGITS_CHUNK, tokens)
    head = config.parts().head
    fused = device_type == "cuda" and dtype != torch.float64
    return float(chunk * config.vocab_size * (4 + dtype.itemsize if fused else 12) + 4 * head)


def update_peak(run: ProcessShape) -> dict[str, float]:
    """Bytes of gradients, weights in the compute dtype, activations and logits at the largest peak of an update."""
    config, spec, parallel, dtype = run.model, run.spec, run.parallel, run.dtype
    counts, tokens = config.parts(), run.rl.microbatch_tokens
    experts, rest = config.num_experts * counts.expert, counts.attention + counts.norms + counts.router
    head = counts.head
    embeddings = head * (1 if config.tie_embeddings else 2)
    sharded = run.num_processes > 1
    copied = not (dtype == torch.float32 and spec.learner_weights == "bf16")  # else the masters are multiplied
    # Matmuls keep their weight for the backward pass. Where that is not what FSDP gathers (and frees, and gathers
    # again) but a cast of the master or a decoded weight, every layer that is not computed again keeps its own.
    # Experts with one owner are not gathered: it casts or decodes them itself, and keeps them like a single process.
    owned = sharded and run.num_processes == parallel.ep
    packed = run.all_gather == "packed"
    freed = sharded and (spec.learner_weights == "bf16" or packed)
    own_experts = experts // parallel.ep
    kept_rest, kept_experts = 0 if freed else rest, 0 if freed and not owned else own_experts
    kept = {"full": 0, "moe": kept_rest}.get(parallel.activation_checkpointing, kept_rest + kept_experts)
    kept_weights = config.num_layers * kept if copied else 0
    root = embeddings if sharded else head * copied
    shape = layer_activations(config, parallel.activation_checkpointing, parallel.compile)
    size, all_gradients = dtype.itemsize, 4.0 * run.local_parameters
    last = (experts + rest + head) / (run.num_processes // parallel.replicate)  # whose gradients come last
    at_loss = {
        "gradients": all_gradients if run.accumulated else 0.0,
        "weights in the compute dtype": float(size * (root + kept_weights)),
        "activations": float(tokens * size * config.num_layers * shape.kept),
        "logits": logits_bytes(config, tokens, dtype, run.device_type)
        + float(CENTERING_BYTES * run.rl.score_centering * tokens),
    }
    layer = own_experts + rest
    ahead = 0 if not sharded else rest if owned else layer  # FSDP has gathered the next layer's, too
    at_first_layer = {
        "gradients": all_gradients if run.accumulated else all_gradients - 4.0 * last,
        # one layer's weights and gradients; the latter before they are reduced (and in fp32)
        "weights in the compute dtype": float(size * (root + 2 * layer + ahead) + sharded * 4 * layer),
        "activations": float(tokens * size * (shape.kept + shape.again + shape.gradients)),
        "logits": 0.0,
    }
    at_optimizer = {name: 0.0 for name in at_loss} | {"gradients": all_gradients}
    return max(at_loss, at_first_layer, at_optimizer, key=lambda parts: sum(parts.values()))


def available_gib(device: torch.device) -> float:
    """Free memory of the GPU, or what Linux says a new process can have."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / GIB
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 / GIB


def format_estimate(estimate: MemoryEstimate) -> str:
    """A line: the phases, and what holds the memory of the largest."""
    phases = ", ".join(f"{name} {estimate.of(name):.2f}" for name in estimate.phases)
    parts = ", ".join(f"{name} {gib:.2f}" for name, gib in estimate.phases[estimate.largest].items())
    return f"memory estimate {estimate.total:.2f} GiB ({phases}); {estimate.largest}: {parts}"


def check_memory(estimate: MemoryEstimate, device: torch.device, processes_here: int = 1) -> None:
    """Raises UserError when the estimate is more than what is free, naming the largest parts and what shrinks them.

    `processes_here` share the memory of a CPU; a GPU belongs to one process.
    """
    free = available_gib(device) / (1 if device.type == "cuda" else processes_here)
    if estimate.total <= free:
        return
    largest = sorted(estimate.phases[estimate.largest].items(), key=lambda item: -item[1])[:3]
    raise UserError(
        f"the run needs about {estimate.total:.1f} GiB on {device} but {free:.1f} GiB are free; largest, in phase "
        f"{estimate.largest}: "
        + ", ".join(f"{name} {gib:.1f}" for name, gib in largest)
        + ". Lower rollout.max_batch or max_new_tokens (KV cache), rl.microbatch_tokens (activations), "
        "or use more processes (torchrun --nproc_per_node=N)"
    )
