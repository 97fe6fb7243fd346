"""A run that takes a second: a random model of 20 thousand parameters, four tokens, prompts of bits, answers by parity.

A right answer is "0" or "1" and the end: one guess in sixteen is right, so rewards have spread without any training.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import train
from quads.model.config import ModelConfig
from quads.model.hf import save_hf
from quads.model.model import MoEDecoder
from quads.run.folder import read_rows
from tests.helpers import REPOSITORY, command_env, free_port

EOS = "<eos>"
CONFIG = ModelConfig(
    vocab_size=4,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    moe_intermediate_size=32,
    num_experts=4,
    top_k=2,
    rope_theta=1e4,
    max_position=64,
    eos_token_ids=(0,),
)
SETTINGS = """
[model]
path = "{folder}/model"
dtype = "float32"

[rollout]
max_batch = 48
max_prompt_tokens = 8
max_new_tokens = 6
verify_sync = true

[task]
train = ["parity"]

[sources.parity]
kind = "jsonl"
path = "{folder}/train.jsonl"
eval_path = "{folder}/test.jsonl"
reward = "exact"

[rl]
prompts_per_step = 8
minibatch_prompts = 8
group_size = 8
microbatch_tokens = 256

[optim]
lr = 3e-3
eps = 1e-8

[train]
steps = 3

[eval]
every = 2
prompts = 4
samples = 2

[checkpoint]
every = 2

[log]
tensorboard = false
"""
# Measured, not computed: they differ between two runs that do the same.
MEASURED = ("time/", "memory/", "rollout/tokens_per_s", "learn/tokens_per_s", "learn/mfu")


def make_tokenizer(folder: Path) -> None:
    """One character a token; every other character is lost."""
    tokenizer = Tokenizer(models.WordLevel({EOS: 0, "0": 1, "1": 2, "=": 3}, unk_token=EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))


def make_model(folder: Path, config: ModelConfig = CONFIG, seed: int = 0) -> None:
    model = MoEDecoder(config)
    model.init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # activations and routing with some contrast, so that precisions differ
    save_hf(folder, config, model, dtype=torch.float32)


def write_jsonl(file: Path, rows: Sequence[object]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parity_rows(num_bits: int) -> list[dict[str, str]]:
    return [
        {"prompt": "".join(bits) + "=", "answer": str(bits.count("1") % 2)} for bits in product("01", repeat=num_bits)
    ]


def make_world(folder: Path, model_config: ModelConfig = CONFIG) -> Path:
    """Model, tokenizer, data and config below `folder`; returns the config."""
    (folder / "model").mkdir(parents=True)
    make_model(folder / "model", model_config)
    make_tokenizer(folder / "model")
    write_jsonl(folder / "train.jsonl", parity_rows(4) + parity_rows(5))
    write_jsonl(folder / "test.jsonl", parity_rows(3))
    config = folder / "tiny.toml"
    config.write_text(SETTINGS.format(folder=folder))
    return config


def options(**values: Any) -> list[str]:
    """`optim__lr=0.0` -> ["--optim.lr", "0.0"]"""
    return [word for name, value in values.items() for word in (f"--{name.replace('__', '.')}", str(value))]


def train_rows(config: Path, out: Path, **values: Any) -> list[dict[str, Any]]:
    """Train in this process and return the rows of metrics.jsonl."""
    train.main(["--config", str(config), "--train.out", str(out), *options(**values)])
    return read_rows(out / "metrics.jsonl")


def computed(rows: list[dict[str, Any]]) -> list[str]:
    """Rows as text, without what was measured: equal for runs that did the same."""
    return [json.dumps({key: value for key, value in row.items() if not key.startswith(MEASURED)}) for row in rows]


def start_two(config: Path, out: Path, **values: Any) -> list[subprocess.Popen[str]]:
    """A run of two processes, resuming where there is something to resume; no torchrun between them and a test that
    kills."""
    command = [sys.executable, str(REPOSITORY / "train.py"), "--config", str(config), "--checkpoint.resume", "latest"]
    command += options(train__out=out, **values)
    port = str(free_port())
    started = []
    for rank in ("0", "1"):
        env = command_env(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_PORT=port)
        env["MASTER_ADDR"] = "127.0.0.1"
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return started


def signal_after_row(processes: list[subprocess.Popen[str]], out: Path, step: int, number: int) -> list[str]:
    """Signal both once metrics.jsonl has the row of `step`; their output when they have ended."""
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < step:
        assert all(p.poll() is None for p in processes), [p.communicate()[0] for p in processes]
        time.sleep(0.05)
    for process in processes:
        os.kill(process.pid, number)
    return [process.communicate(timeout=60)[0] for process in processes]
