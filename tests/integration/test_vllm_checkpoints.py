"""Checkpoints on disk, opened by stock vLLM with `quantization="quads"`: other model classes, against transformers."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quads.quant import nvfp4
from tests.vllm_models import LOGPROB_TOLERANCE

pytestmark = pytest.mark.vllm

transformers = pytest.importorskip("transformers", reason="the reference of these tests")

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
MOE = {"num_experts_per_tok": 2, "head_dim": 32}
MODELS = {
    "qwen3_moe": ("Qwen3MoeConfig", {"moe_intermediate_size": 32, "num_experts": 4, "norm_topk_prob": True, **MOE}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "mixtral": ("MixtralConfig", {"intermediate_size": 48, "num_local_experts": 4, **MOE}),
    "llama": ("LlamaConfig", {"intermediate_size": 48, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"intermediate_size": 48, "head_dim": 32}),
}
PROMPT = list(range(5, 300, 13))


def make_folder(kind: str, folder: Path) -> nn.Module:
    """A random model of this class, saved with bf16 values; returned in fp32 with the same values."""
    class_name, extra = MODELS[kind]
    config = getattr(transformers, class_name)(
        **SHAPE, **extra, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def quantize_dequantize(model: nn.Module) -> int:
    """The W4A16 values of every projection but router, lm_head and shared-expert gate. Returns how many tensors."""
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        stem, _, leaf = name.removesuffix(".weight").rpartition(".")
        if leaf in ("q_proj", "k_proj", "v_proj"):
            groups.setdefault(f"{stem}.qkv", []).append(parameter)
        elif leaf in ("gate_proj", "up_proj"):
            groups.setdefault(f"{stem}.gate_up", []).append(parameter)
        elif leaf in ("o_proj", "down_proj", "gate_up_proj"):
            groups[name] = [parameter]
    for members in groups.values():
        amax = torch.stack([nvfp4.finite_amax(m, dim=(-2, -1)) for m in members]).amax(0)
        for member in members:
            member.copy_(nvfp4.qdq(member, nvfp4.global_scale(amax)[0]))
    return sum(len(members) for members in groups.values())


@contextmanager
def opened(folder: Path, **quantization: Any) -> Iterator[Any]:
    """`vllm.LLM` on a folder with a bf16 checkpoint, in this process."""
    from vllm import LLM

    from quads.rollout.vllm.guest import close
    from quads.rollout.vllm.plugin import register

    register()
    register()  # any number of calls is one
    overrides = {"quantization_config": {"quant_method": "quads", **quantization}} if quantization else {}
    llm = LLM(
        model=str(folder),
        quantization="quads",
        hf_overrides=overrides,
        skip_tokenizer_init=True,
        dtype="float32",
        logprobs_mode="processed_logprobs",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20,
        disable_log_stats=True,
    )
    try:
        yield llm
    finally:
        close(llm, keep_default_group=False)


def prompt_logprobs(llm: Any) -> Tensor:
    """Log-prob of each prompt token but the first, fp64."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    output = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0]
    steps = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return torch.tensor([step[token].logprob for step, token in steps], dtype=torch.float64)


@torch.no_grad()
def expected_logprobs(model: nn.Module) -> Tensor:
    logits = model(torch.tensor([PROMPT])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(-1, torch.tensor(PROMPT[1:])[:, None]).squeeze(-1)


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.mark.parametrize(
    ("kind", "projections"),
    [("qwen3_moe", 2 * 6), ("qwen2_moe", 2 * 9), ("mixtral", 2 * 6), ("llama", 2 * 7), ("qwen3", 2 * 7)],
)
def test_model_classes_from_bf16_checkpoints(kind: str, projections: int, tmp_path: Path) -> None:
    model = make_folder(kind, tmp_path)
    plain = expected_logprobs(model)
    assert quantize_dequantize(model) == projections
    with opened(tmp_path, precision="w4a16") as llm:
        gap = (prompt_logprobs(llm) - expected_logprobs(model)).abs().max()
    assert gap < LOGPROB_TOLERANCE
    assert (expected_logprobs(model) - plain).abs().max() > 1e-2


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_checkpoint_without_an_expert_is_refused(tmp_path: Path) -> None:
    make_folder("qwen3_moe", tmp_path)
    edit_tensors(tmp_path, lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"))
    with pytest.raises(Exception, match=r"layers.1.mlp.experts.w13_weight \(\('w3', 3\)\)"), opened(tmp_path):
        pass
    destroy_groups()


def test_a_checkpoint_packed_in_another_format_is_refused(tmp_path: Path) -> None:
    """Named as such by its config, or only by its tensors."""
    make_folder("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    stock = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": stock}))
    with pytest.raises(Exception, match="the checkpoint is packed by 'modelopt'"), opened(tmp_path):
        pass
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = "model.layers.0.self_attn.o_proj.weight"
    edit_tensors(tmp_path, lambda t: t.update({name: torch.zeros(64, 32, dtype=torch.uint8)}))
    with pytest.raises(Exception, match="neither full precision nor packed by quads"), opened(tmp_path):
        pass
    destroy_groups()


def destroy_groups() -> None:
    """An engine that failed while it was built leaves its process groups behind."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
