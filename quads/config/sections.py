"""The sections of a run's config, one frozen dataclass each: every key with its default, meaning and range.

A section is what a component receives (`Learner(model, cfg.optim, cfg.rl)`), never the root `Config`. Defaults are
those of the paper's 25.5B recipe (arXiv 2607.15810, section 4.1) where it gives them. Reading and checking live in
`quads.config`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


def key(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    length: int | None = None,
) -> Any:
    """A config key. `low` and `high` are inclusive, `above` is not; in a list they bind each element.

    A type Literal["a", "b"] names the allowed words; an empty one among them means the default in the help.
    """
    limits = {"low": low, "above": above, "high": high, "length": length}
    metadata = {"help": help, **{name: limit for name, limit in limits.items() if limit is not None}}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelSettings:
    """[model]: which weights and tokenizer, and the compute dtype."""

    path: str = key("", "Hugging Face folder (config.json + safetensors) to start from")
    arch: str = key("", "name of a built-in architecture to start from random weights instead")
    tokenizer: str = key("", "folder with tokenizer.json (default: the model folder)")
    dtype: Literal["bfloat16", "float32"] = key("bfloat16", "compute dtype; master weights are always float32")


@dataclass(frozen=True)
class QuantSettings:
    """[quant]: one word, `recipe`, sets both sides; the other keys override it."""

    recipe: Literal["bf16", "fp8", "naive", "qat", "symmetric", "quads", "resq", "4bitter", "qarl", "qerl"] = key(
        "quads", "precision of both sides: docs/recipes.md"
    )
    format: Literal["nvfp4", "nvfp4_46", "mxfp4", "hif4"] = key(
        "nvfp4", "the 4-bit format: what 4 stands for in a recipe or precision"
    )
    learner_weights: Literal["", "bf16", "fp8", "nvfp4", "nvfp4_46", "mxfp4", "hif4"] = key(
        "", "weights in the learner's forward (default: the recipe)"
    )
    learner_activations: Literal["", "bf16", "fp8", "nvfp4", "nvfp4_46", "mxfp4", "hif4"] = key(
        "", "activations in the learner's forward (default: the recipe)"
    )
    rollout: Literal["", "bf16", "fp8", "w4a16", "w4a8", "w16a4", "w4a4", "w4a4_residual"] = key(
        "", "precision of the rollout (default: the recipe)"
    )
    targets: tuple[Literal["experts", "attention"], ...] = key(
        (), "layer groups that are quantized (default: the recipe; both but for 4bitter)"
    )
    bf16_layers: str = key(
        "",
        'layers that stay unquantized on both sides: "last 15%", "first 2", numbers as in "0, 1, 39", or "none" '
        "(default: the recipe; none but for 4bitter)",
    )
    backward: Literal["quantized", "high_precision"] = key(
        "quantized",
        "what the learner's backward pass multiplies: the quantized values of the forward pass (elsewhere called a "
        "dequantized backward), or weights and activations before they were quantized",
    )
    residual_sites: tuple[Literal["w13", "w2", "qkv", "o"], ...] = key(
        (), "matrix inputs that get a residual pass (default: the recipe; w13 but for resq)"
    )
    residual_ratio: float = key(0.5, "fraction of channels in the residual pass", low=0.0, high=1.0)
    residual_scale: float = key(
        1.0, "what the residual is multiplied by before it is subtracted (outlier fallback: 0.5)", above=0.0, high=1.0
    )
    residual_selection: Literal["", "batch", "block", "token", "2:4", "all"] = key(
        "",
        "how residual channels are chosen: one set per forward, whole blocks of the format, one set per token, two of "
        "each four neighbours, or all of them, whatever residual_ratio says (default: the recipe; batch but for resq)",
    )
    residual_operand: Literal["auto", "folded", "two"] = key(
        "auto",
        "the residual pass is a second operand, or folded into the first one in fp16 (auto: folded by kernels that "
        "decode 4-bit numbers, two on FP4 tensor cores and in plain torch)",
    )
    global_scale: Literal["pow2", "amax"] = key("pow2", "NVFP4 global scale: power of two, or 2688 / amax")
    four_over_six: Literal["", "none", "mse", "mae"] = key(
        "",
        "NVFP4 blocks map their maximum to 4 where that errs less than 6, by squares or absolutely (2512.02010) "
        "(default: the recipe; none but for 4bitter)",
    )
    scale_rule: str = key("", "how the format chooses the scale of a block (default: the format's own rule)")
    norm_noise: float = key(
        -1.0,
        "standard deviation at the start of the noise on the rollout's norms; 0: none; -1: the recipe (0.01 in qerl)",
        low=-1.0,
        high=10.0,
    )
    norm_noise_end: float = key(1e-4, "standard deviation of that noise at the end", above=0.0, high=10.0)
    norm_noise_stages: int = key(10, "equal parts of the run; the first is silent", low=3, high=1_000_000)
    all_gather: Literal["auto", "bf16", "packed"] = key(
        "auto",
        "what FSDP gathers for quantized weights, to the same result: bf16 masters or 4-bit bytes; auto: packed where "
        "the learner has 4-bit weights that divide evenly",
    )


@dataclass(frozen=True)
class RolloutSettings:
    """[rollout]: the engine that draws responses."""

    engine: Literal["native", "vllm"] = key("native", "native (plain PyTorch) or vllm (needs the extra `vllm`)")
    max_batch: int = key(256, "responses decoded at once (KV cache slots)", low=1, high=1_000_000)
    max_prompt_tokens: int = key(3072, "longest prompt; a longer one is an error", low=1, high=10_000_000)
    max_new_tokens: int = key(32768, "longest response", low=1, high=10_000_000)
    temperature: float = key(1.0, "softmax temperature of training rollouts", above=0.0, high=100.0)
    kernel: Literal["auto", "reference", "triton"] = key("auto", "kernels of the native engine")
    verify_sync: bool = key(False, "compare a checksum of every tensor after each weight sync")
    cuda_graphs: bool = key(True, "capture decoding in CUDA graphs (GPU, bf16; the engine prints whether it does)")
    tensor_parallel: int = key(
        1, "processes that hold one copy of the vllm engine's weights between them", low=1, high=1024
    )
    gpu_memory_gib: float = key(
        0.0, "KV cache budget of the vllm engine, per GPU; 0: sized for max_batch", low=0.0, high=10_000.0
    )


@dataclass(frozen=True)
class TaskSettings:
    """[task]: which sources are trained and tested on, and how a prompt is worded."""

    train: tuple[str, ...] = key((), "sources of training prompts: a [sources.NAME] table or configs/sources/NAME.toml")
    weights: tuple[float, ...] = key((), "share of each training source (default: equal)", above=0.0, high=1e9)
    eval: tuple[str, ...] = key((), "sources of held-out prompts (default: those of `train`)")
    prompt_template: str = key("{prompt}", "text around a row's prompt; must contain {prompt}")
    system: str = key("", "system message; needs chat = true")
    chat: bool = key(False, "wrap prompts in the tokenizer's chat template")
    chat_variables: dict[str, Any] = key({}, "variables for the chat template, such as enable_thinking = false")


# Who judges a response, by word. The file quads/rl/rewards/WORD.py has the class of the same name.
REWARDS = {
    "task": "the own scorer of the reasoning_gym data set",
    "exact": "equal text",
    "math": "equal final answers; math-verify's grammar reads expressions, quads checks shapes and units around them",
    "code": "tests that run the response's program in a sandbox",
}


@dataclass(frozen=True)
class WeightedReward:
    """One of several rewards of a source."""

    reward: str = key("", "a word or FILE.py:FUNCTION, as in `reward`")
    weight: float = key(1.0, "its share in the total; below 0 it is a penalty, 0 only logs it", low=-1e6, high=1e6)


@dataclass(frozen=True)
class SourceSettings:
    """[sources.NAME]: where rows come from and how a response to one is scored."""

    kind: Literal["", "reasoning_gym", "jsonl", "datasets"] = key("", "where rows come from")
    dataset: str = key(
        "",
        "reasoning_gym: dataset name; datasets: Hugging Face id, local folder, or parquet, json(l), csv or arrow files",
    )
    subset: str = key("", "datasets: configuration name")
    split: str = key("train", "datasets: split that is trained on")
    eval_split: str = key("", "datasets: split that is tested on (default: rows held out of `split`)")
    path: str = key("", "jsonl: file of training rows")
    eval_path: str = key("", "jsonl and local files: file of test rows (default: rows held out)")
    eval_rows: int = key(256, "rows held out for the test when no test split or file is given", low=0, high=10_000_000)
    streaming: bool = key(False, "datasets: read rows as they are needed, in a shuffled stream, instead of all at once")
    size: int = key(
        0, "reasoning_gym: number of training problems; 0: fresh ones for the whole run", low=0, high=1_000_000_000
    )
    params: dict[str, Any] = key({}, "reasoning_gym: difficulty settings, passed on by name")
    prompt_column: str = key("prompt", "column with the prompt: text or chat messages; `a.0.b` reaches into a value")
    answer_column: str = key(
        "answer",
        "column with the answer, or with the tests when reward = code; empty where a FILE.py:FUNCTION needs none",
    )
    id_column: str = key("id", "column with a unique id, used where rows have it")
    answer_pattern: str = key("", "regular expression; its first group, last match, is the answer inside the column")
    answer_tag: str = key("", "score only the text inside the response's last <TAG>...</TAG> (reward task or exact)")
    code_format: Literal["pairs", "livecodebench"] = key(
        "pairs", "how tests are stored: {input, output} pairs (or inputs, outputs, fn_name), or LiveCodeBench's columns"
    )
    reward: str = key(
        "",
        "who judges a response. "
        + "; ".join(f"{word}: {judge}" for word, judge in REWARDS.items())
        + "; or FILE.py:FUNCTION, your function of (prompt, response, answer, row), in a file named from the current "
        "folder (default: task for reasoning_gym, none elsewhere)",
    )
    rewards: tuple[WeightedReward, ...] = key(
        (), 'several in place of `reward`, summed by weight: [{ reward = "math", weight = 0.8 }, ...]'
    )
    confined: bool = key(
        False, "FILE.py:FUNCTION: judge each response in a fork without files, network and your environment"
    )
    percent_as_unit: bool = key(False, "reward math: 25% also answers 25, as where a question asks for a percentage")
    code_score: Literal["all", "fraction"] = key("all", "reward code: 1 if all tests pass, or the fraction that does")
    code_tolerance: float = key(
        -1.0,
        "reward code: how far decimals of an output may be from the expected ones, absolutely or relatively, as 1e-6; "
        "0: not at all; -1: 1e-6 for tables of inputs and outputs (APPS, TACO), else 0",
        low=-1.0,
        high=1.0,
    )
    bad_rows: Literal["error", "drop"] = key("error", "rows that cannot be used: stop and list them, or drop and count")
    where: dict[str, Any] = key({}, "keep rows whose column has this value, or one of these values")
    language: Literal["", "en", "zh"] = key("", "keep prompts written in this language, judged by their script")
    min_prompt_tokens: int = key(0, "drop shorter prompts", low=0, high=10_000_000)
    max_prompt_tokens: int = key(0, "drop longer prompts; 0: [rollout] max_prompt_tokens", low=0, high=10_000_000)
    prompt_template: str = key("", "overrides [task] prompt_template for this source")
    system: str = key("", "overrides [task] system for this source")


@dataclass(frozen=True)
class RewardSettings:
    """[reward]: the processes that score responses beside the rollout, and their limits."""

    workers: int = key(0, "processes of each kind; 0: one for each CPU core, at most 64", low=0, high=1024)
    judge_time_s: float = key(
        5.0,
        "seconds to judge one answer (math, task, functions); then the process is killed: no verdict",
        above=0.0,
        high=3600.0,
    )
    sandbox: Literal["auto", "namespaces", "landlock", "none"] = key(
        "auto",
        "isolation of programs and of answers (math, task, confined functions): auto takes the first that works; none: "
        "limits only",
    )
    code_time_s: float = key(6.0, "seconds one test of a program may take", above=0.0, high=3600.0)
    code_total_s: float = key(60.0, "seconds all tests of a program may take", above=0.0, high=86_400.0)
    code_memory_mib: int = key(1024, "memory of a program", low=64, high=1_048_576)
    code_output_mib: float = key(4.0, "output of a program in one test", above=0.0, high=1024.0)
    code_disk_mib: int = key(16, "files of a program", low=1, high=1_048_576)
    code_threads: int = key(16, "threads of a program; it cannot start processes", low=1, high=4096)


@dataclass(frozen=True)
class RLSettings:
    """[rl]: GRPO."""

    prompts_per_step: int = key(256, "prompts in one step", low=1, high=1_000_000)
    group_size: int = key(16, "responses to one prompt; at least 2, as a group is its own baseline", low=2, high=65_536)
    minibatch_prompts: int = key(128, "prompts in one optimizer step; divides prompts_per_step", low=1, high=1_000_000)
    epochs: int = key(1, "passes over a step's responses", low=1, high=1000)
    microbatch_tokens: int = key(
        35840, "tokens in one forward; holds at least one longest prompt + response", low=1, high=100_000_000
    )
    advantage: Literal["group_std", "group_mean"] = key(
        "group_std", "reward minus the group's mean, over the group's standard deviation or not"
    )
    clip_low: float = key(0.2, "ratio clip: 1 - clip_low below", low=0.0, high=1.0)
    clip_high: float = key(0.27, "ratio clip: 1 + clip_high above", low=0.0, high=1e6)
    cumulative_ratio_clip: float = key(
        0.0,
        "mask a response from where the product of its ratios leaves [1/c, c] (paper: 90); 0: off",
        low=0.0,
        high=1e9,
    )
    loss_average: Literal["sample", "token"] = key(
        "sample", "mean over each response's tokens and then over responses, or over all tokens"
    )
    old_logprobs: Literal["rollout", "learner"] = key(
        "rollout",
        "denominator of the ratio: the engine's log-probs, or the learner's own with a correction for the engine's",
    )
    correction: Literal["", "none", "tis", "mis", "ais"] = key(
        "",
        "weight w = exp(learner - rollout) of a token's loss, at most correction_cap: truncated, masked outside "
        "[1/cap, cap], or mixed in by its effective sample size (default: tis with old_logprobs = learner, else none)",
    )
    correction_level: Literal["token", "sequence", "geometric"] = key(
        "token", "whose w: each token's, the product over its response, or the geometric mean over it"
    )
    correction_cap: float = key(2.0, "cap of the correction's weight", low=1.0, high=1e6)
    surrogate: Literal["ppo", "acr", "tbpo"] = key(
        "ppo",
        "ppo: clipped ratio; acr: its upper clip widens where tis weighs below 1 (QuRL); tbpo: one mean ratio a "
        "response, dropped outside [1 - clip_low, 1 + clip_high] (QaRL)",
    )
    dual_clip: float = key(
        0.0, "a negative advantage counts at most this often, whatever its ratio; above 1, or 0: off", low=0.0, high=1e6
    )
    score_centering: int = key(
        0,
        "subtract what the correction leaves of the expected score, over this many most likely tokens of the rollout, "
        "whose log-probs the engine then returns (8 bytes each a token; published: 128); 0: off",
        low=0,
        high=1_000_000,
    )
    kl_coef: float = key(
        0.0, "weight of the KL term to the starting model; 0: off, no reference model is kept", low=0.0, high=1e6
    )
    truncated: Literal["wrong", "mask"] = key(
        "wrong", "responses cut at max_new_tokens: reward 0, or left out of the loss"
    )
    routing_replay: bool = key(False, "replay the rollout's expert choices in the learner (R3)")


@dataclass(frozen=True)
class OptimSettings:
    """[optim]: AdamW on float32 master weights."""

    lr: float = key(1e-6, "peak learning rate", low=0.0, high=1e30)
    betas: tuple[float, ...] = key((0.9, 0.95), "decay rates of the two moments", low=0.0, high=1.0, length=2)
    eps: float = key(1e-15, "added to the root of the second moment", above=0.0, high=1.0)
    weight_decay: float = key(0.0, "decoupled weight decay of matrices (never norms)", low=0.0, high=1e6)
    warmup_steps: int = key(0, "steps of linear warm-up", low=0, high=1_000_000_000)
    schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "after the warm-up: constant, or falling to 0 at train.steps"
    )
    max_grad_norm: float = key(1.0, "global gradient norm is clipped to this; 0: off", low=0.0, high=1e9)
    moments: Literal["float32", "cpu", "8bit"] = key(
        "float32", "Adam's moments: float32, float32 in CPU memory, or block-quantized to 8 bits (torchao)"
    )


@dataclass(frozen=True)
class TrainSettings:
    """[train]: the run."""

    steps: int = key(260, "steps of rollout and update", low=1, high=1_000_000_000)
    seed: int = key(0, "seed of every random choice", low=0, high=2**31 - 1)
    out: str = key("", "run folder (default: runs/<name of the config file>)")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto takes the GPU if there is one")
    threads: int = key(
        0, "CPU threads of a process; 1 is fastest for tiny models; 0: torch's own choice", low=0, high=4096
    )


@dataclass(frozen=True)
class EvalSettings:
    """[eval]: pass@1 on held-out prompts."""

    every: int = key(10, "evaluate after every so many steps and after the last; 0: never", low=0, high=1_000_000_000)
    prompts: int = key(128, "held-out prompts", low=1, high=10_000_000)
    samples: int = key(4, "responses to each, averaged", low=1, high=65_536)
    temperature: float = key(1.0, "softmax temperature of evaluation", above=0.0, high=100.0)


@dataclass(frozen=True)
class CheckpointSettings:
    """[checkpoint]: save and resume."""

    every: int = key(
        10, "save after every so many steps; 0: only when the run ends or is stopped", low=0, high=1_000_000_000
    )
    final: bool = key(True, "save when the run ends or is stopped; false: only every `every` steps, 0 then never")
    keep: int = key(
        2,
        "newest complete checkpoints kept, and one more until a healthy step has followed; 0: all",
        low=0,
        high=1_000_000,
    )
    resume: str = key("", "checkpoint folder, or `latest` (the flag alone means latest); empty: start afresh")
    async_save: bool = key(False, "write in the background while training goes on")


@dataclass(frozen=True)
class LogSettings:
    """[log]: what a run writes besides metrics.jsonl."""

    samples_every: int = key(
        10, "write some responses to samples.jsonl every so many steps; 0: never", low=0, high=1_000_000_000
    )
    samples: int = key(4, "prompts written each time, all their responses with them", low=1, high=1_000_000)
    router_agreement: bool = key(
        False, "log how many of the rollout's expert choices the learner repeats; always with rl.routing_replay"
    )
    tensorboard: bool = key(True, "write TensorBoard events to <out>/tb")
    wandb_project: str = key("", "also log to this Weights & Biases project (needs the package wandb)")


@dataclass(frozen=True)
class ParallelSettings:
    """[parallel]: how the processes of torchrun split the learner."""

    ep: int = key(1, "expert parallel size", low=1, high=65_536)
    fsdp: int = key(
        0, "FSDP shards of the dense weights, a multiple of ep; 0: world size / replicate", low=0, high=1_000_000
    )
    replicate: int = key(1, "copies of the sharded model (HSDP)", low=1, high=1_000_000)
    activation_checkpointing: Literal["none", "full", "selective", "moe"] = key(
        "none", "what is recomputed in the backward"
    )
    compile: bool = key(False, "torch.compile each decoder layer of the learner")
