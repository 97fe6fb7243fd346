"""Dense to mixture: the same logits as transformers' dense model, from a folder and from a GGUF file."""

import json

import pytest
import torch

from quads.data.tokenizer import Tokenizer
from quads.errors import UserError
from quads.lab.smollm2 import upcycle
from quads.lab.smollm2.dense import read_dense
from quads.lab.smollm2.dense_gguf import LAYER_NAMES, TOP_NAMES, half_layout, packaged_smollm2
from quads.model.hf import load_model
from tests.helpers import assert_bitwise, assert_close

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=261,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    max_position_embeddings=128,
    eos_token_id=256,
)


def dense_folder(folder, model_type="llama", tied=True):
    """A tiny random model of transformers, with a byte-level tokenizer that has one special token."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    config_type, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[model_type]
    torch.manual_seed(1)
    model = model_class(config_type(**SIZES, head_dim=8, tie_word_embeddings=tied)).eval()
    for parameter in model.parameters():  # the default start leaves logits too small to tell layouts apart
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return model


def logits_of(folder, ids):
    return upcycle.logits_of(load_model(folder), ids)


@pytest.mark.parametrize(
    "model_type, tied, layout",
    [
        ("llama", True, "--replicas 3 --active 2"),
        ("llama", False, "--slices 4 --replicas 2 --active 1"),
        ("qwen3", True, "--slices 3 --replicas 3 --active 2"),
    ],
)
def test_without_noise_the_mixture_has_the_logits_of_transformers_dense_model(tmp_path, model_type, tied, layout):
    (tmp_path / "dense").mkdir()
    reference = dense_folder(tmp_path / "dense", model_type, tied)
    out = tmp_path / "moe"
    upcycle.main([str(tmp_path / "dense"), str(out), *layout.split(), "--noise", "0", "--dtype", "float32"])
    ids = [5, 77, 12, 200, 31, 8, 8, 150]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    assert_close(logits_of(out, ids), expected, atol=1e-4 * float(expected.abs().max()))  # fp32, another order of sums
    assert Tokenizer(out).eos_ids == (256,)
    facts = json.loads((out / "upcycle.json").read_text())
    assert facts["logit_difference_before_noise"] < 1e-4 * facts["logit_abs_max"]


def test_noise_makes_experts_differ_and_is_reproducible(tmp_path):
    (tmp_path / "dense").mkdir()
    dense_folder(tmp_path / "dense")
    for out, seed in (("a", 3), ("b", 3), ("c", 4)):
        upcycle.main(
            [str(tmp_path / "dense"), str(tmp_path / out), "--noise", "0.1", "--seed", str(seed), "--dtype", "float32"]
        )
    a, b, c = (dict(load_model(tmp_path / out).named_parameters()) for out in "abc")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    dense = read_dense(str(tmp_path / "dense")).tensors["model.layers.1.mlp.gate_proj.weight"]
    assert_bitwise(a[name].data, b[name].data)
    assert not torch.equal(a[name], c[name]) and not torch.equal(a[name][0], a[name][1])
    deviation = (a[name].detach()[:, :48] - dense).std() / dense.std()
    assert 0.08 < float(deviation) < 0.12


def test_half_layout_undoes_the_permutation_of_gguf():
    """llama.cpp's conversion: [heads, 2, D/2, K] -> swap -> [heads, D/2, 2, K]."""
    weight = torch.randn(3 * 8, 5)
    permuted = weight.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)
    assert_bitwise(half_layout(permuted, 3), weight)


def test_gguf_file_has_the_logits_of_the_model_it_was_made_of(tmp_path):
    gguf = pytest.importorskip("gguf")
    (tmp_path / "dense").mkdir()
    reference = dense_folder(tmp_path / "dense", tied=False)
    path = tmp_path / "model.gguf"
    write_gguf(gguf, path, reference)
    upcycle.main([str(path), str(tmp_path / "moe"), "--noise", "0", "--dtype", "float32"])
    ids = [1, 2, 3, 250, 17]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    assert_close(logits_of(tmp_path / "moe", ids), expected, atol=1e-4 * float(expected.abs().max()))
    tokenizer = Tokenizer(tmp_path / "moe")
    assert tokenizer.eos_ids == (256,)
    assert tokenizer.decode(tokenizer.encode("héllo 42<end>"), skip_special=False) == "héllo 42<end>"
    assert tokenizer.encode("a<end>")[-1] == 256


def write_gguf(gguf, path, model):
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(261)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*letters, "<end>", "ab", *(f"<spare{i}>" for i in range(3))])
    writer.add_token_types([1] * 256 + [3, 1, 3, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(256)
    to_gguf = {hf: f"blk.{{}}.{name}" for name, hf in LAYER_NAMES.items()}
    to_top = {hf: name for name, hf in TOP_NAMES.items()}
    for name, value in model.state_dict().items():
        stem = name.removesuffix(".weight")
        array = value.float()
        if stem in to_top:
            writer.add_tensor(f"{to_top[stem]}.weight", array.numpy())
            continue
        _, _, layer, kind = stem.split(".", 3)
        if kind in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = 4 if kind == "self_attn.q_proj" else 2
            array = array.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"{to_gguf[kind].format(layer)}.weight", array.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_smollm2_as_transformers_reads_the_same_file(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")  # transformers wants it for GGUF files
    try:
        path = packaged_smollm2()
    except UserError as error:
        pytest.skip(str(error))
    upcycle.main(["smollm2", str(tmp_path), "--replicas", "2", "--active", "1", "--noise", "0", "--dtype", "float32"])
    reference = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    reference.eval()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    text = tokenizer.apply_chat_template(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text)
    assert ids == theirs(text, add_special_tokens=False).input_ids
    assert len(tokenizer.encode("2048")) == 4  # digits stay single
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    assert_close(logits_of(tmp_path, ids), expected, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--slices", "5"], "does not divide"),
        (["--active", "9"], "--active 9"),
    ],
)
def test_sizes_that_do_not_fit_are_named(tmp_path, arguments, words):
    (tmp_path / "dense").mkdir()
    dense_folder(tmp_path / "dense")
    with pytest.raises(UserError, match=words):
        upcycle.main([str(tmp_path / "dense"), str(tmp_path / "out"), *arguments])
    assert not (tmp_path / "out").exists()


def test_sources_that_are_no_dense_model_are_refused(tmp_path):
    with pytest.raises(UserError, match="no dense model at"):
        read_dense(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match="gpt2.*can upcycle llama"):
        read_dense(str(tmp_path))
