"""vLLM with `quantization="quads"` in the modes in which people run it: the engine in a process that vLLM spawns,
behind `LLM(...)` and behind its OpenAI server. Both say what the engine says in the process that asks.
"""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import REPOSITORY, command_env, free_port, run_command
from tests.integration.test_vllm_checkpoints import SHAPE, make_folder
from tests.integration.vllm_llm_worker import DTYPE, GPU_SHARE, NEW_TOKENS, PROMPT
from tests.vllm_models import LOGPROB_TOLERANCE

pytestmark = pytest.mark.vllm

START_S = 240  # imports, a process that looks at the model class, a process for the engine
REQUEST_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 Qwen3-MoE checkpoint with a tokenizer of one word a token."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("served")
    make_folder("qwen3_moe", folder)
    words = Tokenizer(models.WordLevel({word_of(i): i for i in range(SHAPE["vocab_size"])}, unk_token=word_of(0)))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token=word_of(0))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def word_of(token: int) -> str:
    return f"w{token}"


@pytest.fixture(scope="module")
def in_process(folder: Path) -> dict[str, Any]:
    return run_llm(folder, VLLM_ENABLE_V1_MULTIPROCESSING="0")


def run_llm(folder: Path, **env: str) -> dict[str, Any]:
    result = run_command(["-m", "tests.integration.vllm_llm_worker", str(folder)], timeout_s=START_S, **env)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))


def test_llm_with_a_spawned_engine(folder: Path, in_process: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)  # an engine of another test may have set it
    spawned = run_llm(folder)
    assert (spawned["client"], in_process["client"]) == ("SyncMPClient", "InprocClient")
    assert spawned["tokens"] == in_process["tokens"]
    assert spawned["logprobs"] == pytest.approx(in_process["logprobs"], abs=LOGPROB_TOLERANCE)


def serve_command() -> list[str]:
    """`vllm serve`, which asks for the metadata of a package of that name; under another name, the module it starts."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [str(Path(sys.executable).parent / "vllm"), "serve"]


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of vLLM's own OpenAI server with the plugin, on this machine alone; gone at the end."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    options = f"--quantization quads --dtype {DTYPE} --enforce-eager --max-model-len 128 --max-num-seqs 4"
    options += f" --gpu-memory-utilization {GPU_SHARE}" if torch.cuda.is_available() else ""
    options += f" --kv-cache-memory-bytes {16 << 20} --served-model-name tiny --host 127.0.0.1 --port {port}"
    environment = command_env()
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*serve_command(), str(folder), *options.split()],
            cwd=REPOSITORY,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the engine is a process of the server's
        )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def wait_until_ready(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with code {process.returncode}:\n{log.read_text()[-4000:]}"
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                assert answer.status == 200
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(f"no answer within {START_S} s:\n{log.read_text()[-4000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """The server and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)
    except (subprocess.TimeoutExpired, ProcessLookupError):
        pass
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait(20)


def ask(address: str, path: str, **request: Any) -> dict[str, Any]:
    body = json.dumps({"model": "tiny", "temperature": 0, **request}).encode()
    message = urllib.request.Request(f"{address}/v1/{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(message, timeout=REQUEST_S) as answer:
        return json.load(answer)


def test_completions_of_the_server(server: str, in_process: dict[str, Any]) -> None:
    """Prompt and answer, by token ids and by words."""
    for prompt in (PROMPT, " ".join(map(word_of, PROMPT))):
        answer = ask(server, "completions", prompt=prompt, max_tokens=NEW_TOKENS, logprobs=0, echo=True)
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [word_of(token) for token in [*PROMPT, *in_process["tokens"]]]
        assert logprobs["token_logprobs"][0] is None  # nothing comes before the first token
        assert logprobs["token_logprobs"][1:] == pytest.approx(in_process["logprobs"], abs=LOGPROB_TOLERANCE)


def test_chat_of_the_server(server: str, in_process: dict[str, Any]) -> None:
    message = {"role": "user", "content": " ".join(map(word_of, PROMPT))}
    answer = ask(server, "chat/completions", messages=[message], max_tokens=NEW_TOKENS, logprobs=True)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == [word_of(token) for token in in_process["tokens"]]
    expected = in_process["logprobs"][-NEW_TOKENS:]
    assert [item["logprob"] for item in content] == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
