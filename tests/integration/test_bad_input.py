"""What a user can get wrong: each is one message that names it, exit code 2, no traceback, and no trace on the disk."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from quads.model.config import ModelConfig
from tests.helpers import run_command
from tests.tiny_run import CONFIG, make_model, make_world, options, train_rows, write_jsonl

Damage = Callable[[Path], Any]


@dataclass(frozen=True)
class Case:
    """Something wrong with a run, and what the message must say about it.

    Example: `Case("group_size = 1: must be an integer >= 2", {"rl__group_size": 1})`
    """

    says: str  # parts in this order, `...` between them
    values: dict[str, Any] = field(default_factory=dict)
    damage: Damage | None = None  # of the folder with model, data and config
    dry_run: bool = True  # found by --dry-run too


def in_config(old: str, new: str) -> Damage:
    """Replace text in the config file."""

    def damage(world: Path) -> None:
        text = (world / "tiny.toml").read_text()
        assert old in text
        (world / "tiny.toml").write_text(text.replace(old, new, 1))

    return damage


def remove(name: str) -> Damage:
    return lambda world: (world / name).unlink()


def write(name: str, content: str | bytes) -> Damage:
    data = content.encode() if isinstance(content, str) else content
    return lambda world: (world / name).write_bytes(data)


def cut(name: str, missing_bytes: int) -> Damage:
    return lambda world: (world / name).write_bytes((world / name).read_bytes()[:-missing_bytes])


def set_json(name: str, **values: Any) -> Damage:
    return lambda world: (world / name).write_text(json.dumps({**json.loads((world / name).read_text()), **values}))


def weights_of(config: ModelConfig) -> Damage:
    """config.json stays, the tensors are those of another model."""

    def damage(world: Path) -> None:
        make_model(world / "other", config)
        shutil.copy(world / "other" / "model.safetensors", world / "model" / "model.safetensors")

    return damage


def model_of(config: ModelConfig) -> Damage:
    return lambda world: make_model(world / "model", config)


def replace_row(number: int, line: str) -> Damage:
    def damage(world: Path) -> None:
        lines = (world / "train.jsonl").read_text().splitlines()
        lines[number - 1] = line
        (world / "train.jsonl").write_text("\n".join(lines) + "\n")

    return damage


def both(*damages: Damage) -> Damage:
    return lambda world: [damage(world) for damage in damages]


def without_files(world: Path) -> None:
    """The source names no file of rows: other kinds do not read such keys."""
    config = world / "tiny.toml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text(
        "".join(line for line in lines if not line.startswith(("path = ", "eval_path = ")) or "model" in line)
    )


def reasoning_gym(dataset: str, params: str = "{}") -> Damage:
    return both(
        without_files,
        in_config('kind = "jsonl"', f'kind = "reasoning_gym"\ndataset = "{dataset}"\nparams = {params}'),
        in_config('reward = "exact"', 'reward = "task"'),
    )


WEIGHTS = "model/model.safetensors"


def poison_weight(world: Path) -> None:
    """One NaN in one expert."""
    tensors = load_file(world / WEIGHTS)
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][5, 7] = torch.nan
    save_file(tensors, world / WEIGHTS, metadata={"format": "pt"})


CASES = {
    # the config
    "unknown key": Case(
        "tiny.toml: unknown key 'grup_size' in [rl]; nearest valid one: rl.group_size",
        damage=in_config("group_size", "grup_size"),
    ),
    "unknown section": Case("unknown section 'rolout'; nearest valid one: rollout", damage=in_config("[roll", "[rol")),
    "unknown option": Case("unknown option --train.stepz; nearest valid one: train.steps", {"train__stepz": 3}),
    "wrong type": Case("[train] steps = 'many': must be an integer >= 1", {"train__steps": "many"}),
    "wrong type in the file": Case(
        "[train] steps = 2.5: must be an integer", damage=in_config("steps = 3", "steps = 2.5")
    ),
    "out of range": Case("[rl] group_size = 1: must be an integer >= 2", {"rl__group_size": 1}),
    "not a number": Case("[optim] lr = nan: must be a number >= 0", {"optim__lr": "nan"}),
    "no such word": Case("[quant] recipe = 'quad': must be one of bf16, fp8", {"quant__recipe": "quad"}),
    "moment that never moves": Case("[optim] betas = [1.0, 0.95] must be below 1", {"optim__betas": "1.0,0.95"}),
    "contradiction": Case("minibatch_prompts = 3 must divide prompts_per_step = 8", {"rl__minibatch_prompts": 3}),
    "sequence over budget": Case("microbatch_tokens = 4 cannot hold one longest", {"rl__microbatch_tokens": 4}),
    "not TOML": Case("tiny.toml is not valid TOML: ... line", damage=in_config("[train]", "[train")),
    "unknown source": Case("no [sources.sums] ... known: ...parity", {"task__train": "sums"}),
    "no room for the prompt": Case(
        "prompt_template = 'Solve it.' must contain {prompt}", {"task__prompt_template": "Solve it."}
    ),
    # the model
    "no model": Case(
        "no model at ...model/config.json does not exist", damage=lambda world: shutil.rmtree(world / "model")
    ),
    "config.json is not JSON": Case("model/config.json is not valid JSON", damage=write("model/config.json", "{")),
    "another kind of model": Case(
        'model_type is "llama"; only qwen3_moe', damage=set_json("model/config.json", model_type="llama")
    ),
    "field missing": Case(
        "model/config.json: hidden_size is null; it must be a whole number from 1 to 1048576",
        damage=set_json("model/config.json", hidden_size=None),
    ),
    "field of another type": Case(
        'model/config.json: rms_norm_eps is "1e-6"; it must be a number > 0',
        damage=set_json("model/config.json", rms_norm_eps="1e-6"),
    ),
    "yes that says no": Case(
        'model/config.json: norm_topk_prob is "false"; it must be true or false',
        damage=set_json("model/config.json", norm_topk_prob="false"),
    ),
    "rotary base given twice": Case(
        "model/config.json: rope_theta = 10000.0 contradicts rope_parameters.rope_theta = 1000000.0",
        damage=set_json("model/config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    ),
    "beyond the model's context": Case(
        "[rollout] max_prompt_tokens + max_new_tokens = 14 is more than max_position_embeddings = 8 of the model",
        damage=set_json("model/config.json", max_position_embeddings=8),
    ),
    "beyond the tokenizer's context": Case(
        "[rollout] max_prompt_tokens + max_new_tokens = 14 is more than model_max_length = 13 of ...model/tokenizer",
        damage=set_json("model/tokenizer_config.json", model_max_length=13),
    ),
    "head that is not the embedding": Case(
        "tensor lm_head.weight is not the embedding, but tie_word_embeddings of config.json says it is; set",
        damage=set_json("model/config.json", tie_word_embeddings=True),
    ),
    "a weight that is not finite": Case(
        "tensor model.layers.1.mlp.experts.2.up_proj.weight has 1 values of 1024 that are not finite",
        damage=poison_weight,
        dry_run=False,  # which reads no weights
    ),
    "no weights": Case("has 0 safetensors files", damage=remove(WEIGHTS)),
    "weights cut off": Case("model.safetensors cannot be read ... save or download", damage=cut(WEIGHTS, 100)),
    "weights empty": Case("model.safetensors cannot be read ... save or download", damage=write(WEIGHTS, "")),
    "weights overwritten": Case("model.safetensors cannot be read", damage=write(WEIGHTS, b"\xff" * 1000)),
    "shard missing": Case(
        "part-2.safetensors does not exist, but model.safetensors.index.json lists it",
        damage=write("model/model.safetensors.index.json", '{"weight_map": {"lm_head.weight": "part-2.safetensors"}}'),
    ),
    "tensor of another shape": Case(
        "experts.0.gate_proj.weight has shape [48, 32], config.json asks for [32, 32]",
        damage=weights_of(replace(CONFIG, moe_intermediate_size=48)),
    ),
    "tensor missing": Case("tensor model.layers.1. ... is missing", damage=weights_of(replace(CONFIG, num_layers=1))),
    "unknown architecture": Case(
        "[model] arch = 'tinny' is not built in; known: tiny, moe25b_a3b",
        {"model__tokenizer": "{world}/model"},
        in_config("path = ", 'arch = "tinny" # '),
    ),
    # the tokenizer
    "no tokenizer": Case("tokenizer folder /nowhere does not exist", {"model__tokenizer": "/nowhere"}),
    "no tokenizer.json": Case("model has no tokenizer.json", damage=remove("model/tokenizer.json")),
    "broken tokenizer": Case("cannot be read as a tokenizer", damage=write("model/tokenizer.json", "{}")),
    "no EOS": Case(
        "has no EOS token, so a response could never stop; set eos_token",
        damage=both(remove("model/tokenizer_config.json"), set_json("model/config.json", eos_token_id=None)),
    ),
    "EOS is no token": Case(
        "EOS token '</s>' of ... is not in tokenizer.json",
        damage=set_json("model/tokenizer_config.json", eos_token="</s>"),
    ),
    "tokenizer of another model": Case(
        "the tokenizer has 4 tokens but the model's vocabulary is 3", damage=model_of(replace(CONFIG, vocab_size=3))
    ),
    "no chat template": Case("has no chat template", {"task__chat": "true"}),
    # the data
    "no data": Case("train.jsonl' cannot be read: No such file", damage=remove("train.jsonl")),
    "data is a folder": Case("model' cannot be read: Is a directory", {"sources__parity__path": "{world}/model"}),
    "no test data": Case("test.jsonl' cannot be read: No such file", damage=remove("test.jsonl")),
    "two bad rows": Case(
        "[sources.parity] ...train.jsonl: 2 of 48 rows cannot be used; correct or remove them:\n"
        "  line 3: is not JSON: Expecting ',' delimiter (column 19)\n"
        "  line 7: column 'prompt' must hold text or chat messages, has a number (5)",
        damage=both(replace_row(3, '{"prompt": "0110="'), replace_row(7, '{"prompt": 5, "answer": "1"}')),
    ),
    "column missing": Case(
        "1 of 48 rows ...\n  line 2: no column 'answer'; there is: prompt, reply",
        damage=replace_row(2, '{"prompt": "0=", "reply": "0"}'),
    ),
    "prompt empty": Case(
        "1 of 48 rows ...\n  line 1: column 'prompt' is empty", damage=replace_row(1, '{"prompt": " ", "answer": "1"}')
    ),
    "half a character": Case(
        "3 of 48 rows ...\n  line 1: column 'prompt' is not valid UTF-8 (character 1)\n"
        "  line 2: column 'answer' is not valid UTF-8 (character 0)\n"
        "  line 3: column 'id' is not valid UTF-8 (character 0)",
        damage=both(
            both(
                replace_row(1, r'{"prompt": "1\ud800=", "answer": "1"}'),
                replace_row(2, r'{"prompt": "1=", "answer": "\udfff"}'),
            ),
            replace_row(3, r'{"id": "\ud800", "prompt": "10=", "answer": "1"}'),
        ),
    ),
    "a number too long to read": Case(
        "1 of 48 rows ...\n  line 4: is not usable JSON: a number of more than 4300 digits; write it as text",
        damage=replace_row(4, f'{{"prompt": "1=", "answer": {"1" * 5000}}}'),
    ),
    "not a regular expression": Case(
        "[sources.parity] answer_pattern = '(' is not a regular expression: missing )",
        {"sources__parity__answer_pattern": "("},
    ),
    "no rows": Case(
        "[sources.parity] has no usable training rows; left out: none; read from ...train.jsonl",
        damage=write("train.jsonl", ""),
    ),
    "no usable row": Case(
        "no usable test rows; left out: 8 prompt longer than 2 tokens", {"rollout__max_prompt_tokens": 2}
    ),
    "answers missing": Case(
        "no usable training rows; left out: 1 answer missing; read from ...train.jsonl",
        damage=lambda world: write_jsonl(world / "train.jsonl", [{"prompt": "1=", "answer": None}]),
    ),
    "nothing to evaluate on": Case(
        "no source has test rows; raise its eval_rows, or set every = 0",
        {"sources__parity__eval_path": "", "sources__parity__eval_rows": 0},
    ),
    "no such local data set": Case(
        "dataset = '/nowhere/x.parquet': no such file",
        damage=both(without_files, in_config('kind = "jsonl"', 'kind = "datasets"\ndataset = "/nowhere/x.parquet"')),
    ),
    "unknown reasoning-gym task": Case(
        "'chain_sun' is not in reasoning-gym; nearest: chain_sum", damage=reasoning_gym("chain_sun")
    ),
    "unknown difficulty": Case(
        "params.min_term is no setting of 'chain_sum'; nearest: min_terms",
        damage=reasoning_gym("chain_sum", "{min_term = 2}"),
    ),
    # memory, hardware, processes
    "too little memory for the cache": Case(
        "the run needs about ... GiB on cpu but ... are free; largest, in phase rollout: KV cache ... Lower "
        "rollout.max_batch",
        {"rollout__max_batch": 10**6, "rollout__max_new_tokens": 50, "rl__microbatch_tokens": 10**3},
    ),
    "too little memory for the model": Case(
        "the run needs about ... largest, in phase learn: activations ..., engine weights ..., Adam moments ... "
        "use more processes",
        {"model__tokenizer": "{world}/model", "rl__microbatch_tokens": 10**7},  # no machine has so much
        in_config("path = ", 'arch = "qwen3_30b_a3b" # '),
    ),
    "no GPU": Case("device = 'cuda' but torch sees no GPU", {"train__device": "cuda"}),
    "shared weights in the native engine": Case(
        "tensor_parallel = 2 needs engine = 'vllm'", {"rollout__tensor_parallel": 2}
    ),
    "fp8 in vLLM": Case(
        "engine = 'vllm' has no fp8 that matches the learner's; use rollout.engine = 'native'",
        {"rollout__engine": "vllm", "quant__recipe": "fp8"},
    ),
    "routes of vLLM on a CPU": Case(
        "vLLM returns routed experts only on a GPU", {"rollout__engine": "vllm", "log__router_agreement": "true"}
    ),
    "kernels of the native engine in vLLM": Case(
        "kernel = 'reference' is of the native engine; leave it \"auto\"",
        {"rollout__engine": "vllm", "rollout__kernel": "reference"},
    ),
    "kernel without a GPU": Case("the triton backend needs a CUDA GPU", {"rollout__kernel": "triton"}),
    "kernel of another precision": Case(
        '"triton" serves w4a16, w4a4, w4a4_residual, not fp8', {"rollout__kernel": "triton", "quant__recipe": "fp8"}
    ),
    "compiled float32": Case('compile = true needs [model] dtype = "bfloat16"', {"parallel__compile": "true"}),
    "too few processes": Case("ep = 2 do not fit 1 processes", {"parallel__ep": 2}),
    # checkpoints
    "no checkpoint": Case("checkpoint not found: /nowhere", {"checkpoint__resume": "/nowhere"}),
    "no complete checkpoint": Case("model holds no complete checkpoint", {"checkpoint__resume": "{world}/model"}),
    "incomplete checkpoint": Case(
        "step_1 is incomplete (its save was cut off)",
        {"checkpoint__resume": "{world}/good/checkpoints/step_1"},
        remove("good/checkpoints/step_1/COMPLETE"),
    ),
    "checkpoint of another shape": Case(
        "experts.gate_up_proj of shape [4, 64, 32], the model has [4, 96, 32]; set [model]",
        {"checkpoint__resume": "{world}/good"},
        model_of(replace(CONFIG, moe_intermediate_size=48)),
        dry_run=False,
    ),
    **{
        f"checkpoint damaged: {name}": Case(
            f"checkpoint ...step_1 is damaged, use another one ({reason}",
            {"checkpoint__resume": "{world}/good"},
            damage,
            dry_run=False,
        )
        for name, reason, damage in (
            ("shard cut", "__0_0.distcp has ", cut("good/checkpoints/step_1/__0_0.distcp", 200_000)),
            ("shard gone", "FileNotFoundError", remove("good/checkpoints/step_1/__0_0.distcp")),
            ("index gone", "FileNotFoundError", remove("good/checkpoints/step_1/.metadata")),
            ("index overwritten", ".metadata has 2 bytes, ", write("good/checkpoints/step_1/.metadata", "xx")),
            ("state cut", "train_state.json has ", cut("good/checkpoints/step_1/train_state.json", 20)),
            ("state gone", "FileNotFoundError", remove("good/checkpoints/step_1/train_state.json")),
            ("config gone", "FileNotFoundError", remove("good/checkpoints/step_1/config.toml")),
        )
    },
    # the run's folder
    "folder is a file": Case("test.jsonl is a file; choose another folder", {"train__out": "{world}/test.jsonl"}),
    "folder below a file": Case(
        "test.jsonl is a file; choose another folder", {"train__out": "{world}/test.jsonl/run"}
    ),
    "folder that cannot be": Case("[train] out = '/proc/run' cannot be", {"train__out": "/proc/run"}, dry_run=False),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data and config, and in `good` the run of one step that they give."""
    folder = tmp_path_factory.mktemp("bad_input") / "world"
    make_world(folder)
    train_rows(folder / "tiny.toml", folder / "good", train__steps=1)
    return folder


@pytest.fixture
def world(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "world")
    text = (tmp_path / "world" / "tiny.toml").read_text()
    (tmp_path / "world" / "tiny.toml").write_text(text.replace(str(good), str(tmp_path / "world")))
    return tmp_path / "world"


@pytest.mark.parametrize("name", CASES)
def test_each_mistake_is_named_and_nothing_is_left(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    case = CASES[name]
    if case.damage:
        case.damage(world)
    before = snapshot(tmp_path)
    values = {key: str(value).replace("{world}", str(world)) for key, value in case.values.items()}
    args = ["--config", str(world / "tiny.toml"), *options(**{"train__out": tmp_path / "out", **values})]
    for dry_run in [["--dry-run"], []] if case.dry_run else [[]]:
        with pytest.raises(SystemExit) as ended:
            train.main([*args, *dry_run])
        assert ended.value.code == 2
        printed, message = capsys.readouterr()
        assert_says(message, case.says)
        assert ("memory estimate" in printed) or "memory" not in name  # before anything is allocated
        assert snapshot(tmp_path) == before


def assert_says(message: str, parts: str) -> None:
    """One `error: ...`, as the last thing printed, with the parts in their order and no traceback."""
    assert message.count("error: ") == 1 and "Traceback" not in message, message
    text = message[message.index("error: ") :]
    assert len(text.splitlines()) == 1 + parts.count("\n"), message
    at = 0
    for part in parts.split("..."):
        assert part.strip(" ") in text[at:], f"{part!r} is not in {text!r}"
        at = text.index(part.strip(" "), at) + len(part.strip(" "))


def snapshot(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_size) for path in folder.rglob("*") if path.is_file() or path.is_dir()}


def test_a_good_config_passes_the_dry_run_and_leaves_nothing(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(tmp_path)
    train.main(["--config", str(world / "tiny.toml"), "--train.out", str(tmp_path / "out"), "--dry-run"])
    assert capsys.readouterr().out.splitlines()[-1] == "dry run: config, data, tokenizer and memory are fine"
    assert snapshot(tmp_path) == before


def test_wandb_without_the_package_stops_a_dry_run(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes `import wandb` fail, installed or not
    with pytest.raises(SystemExit) as ended:
        train.main(["--config", str(world / "tiny.toml"), "--log.wandb_project", "p", "--dry-run"])
    assert ended.value.code == 2
    assert_says(capsys.readouterr().err, "wandb_project needs the package wandb: pip install wandb")


def test_as_a_command() -> None:
    done = run_command(["train.py", "--config", "nowhere.toml"])
    assert (done.returncode, done.stdout) == (2, "")
    assert_says(done.stderr, "config file not found: nowhere.toml")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_vllm_without_the_package(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train.main(["--config", str(world / "tiny.toml"), "--rollout.engine", "vllm", "--dry-run"])
    assert ended.value.code == 2
    assert_says(capsys.readouterr().err, "engine = 'vllm' needs the extra: pip install -e '.[vllm]'")
