"""Configs: precedence, what is refused and with which words, the round trip, ready-made sources, a fast --help."""

import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quads.config import SECTIONS, Config, config_changes, config_to_toml, describe_keys, load_config
from quads.config.sections import REWARDS, SourceSettings, TrainSettings, WeightedReward
from quads.errors import UserError, main_guard
from tests.helpers import REPOSITORY, command_env

MINIMAL = """
[model]
path = "folder"

[task]
train = ["rows"]

[train]
steps = 7
seed = 3

[sources.rows]
kind = "jsonl"
path = "rows.jsonl"
reward = "exact"
"""
LIST = ("--sources.rows.reward", "", "--sources.rows.rewards")


@pytest.fixture
def toml(tmp_path: Path) -> str:
    return write(tmp_path, MINIMAL)


def write(folder: Path, text: str) -> str:
    file = folder / "run.toml"
    file.write_text(text)
    return str(file)


def refused(*argv: str) -> str:
    with pytest.raises(UserError) as error:
        load_config(list(argv))
    return str(error.value)


def test_command_line_over_file_over_default(toml: str) -> None:
    cfg = load_config(["--config", toml, "--train.steps", "9", "--train.steps=11"])
    assert (cfg.train.steps, cfg.train.seed, cfg.rl.group_size) == (11, 3, 16)
    assert not cfg.dry_run and load_config(["--dry-run", "--config", toml]).dry_run


def test_derived_values(toml: str) -> None:
    cfg = load_config(["--config", toml])
    assert (cfg.train.out, cfg.model.tokenizer, cfg.task.eval) == ("runs/run", "folder", ("rows",))


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("optim.betas", "0.8,0.99", (0.8, 0.99)),
        ("optim.betas", "[0.8, 0.99]", (0.8, 0.99)),
        ("optim.lr", "1e-3", 1e-3),
        ("optim.lr", "1", 1.0),
        ("quant.targets", '["experts"]', ("experts",)),
        ("quant.targets", "attention, experts", ("attention", "experts")),
        ("quant.residual_sites", "", ()),
        ("rollout.verify_sync", "true", True),
        ("log.tensorboard", "False", False),
        ("train.out", "runs/a=b c", "runs/a=b c"),
        ("task.chat_variables.enable_thinking", "false", {"enable_thinking": False}),
    ],
)
def test_words_become_the_type_of_their_key(toml: str, option: str, text: str, value: object) -> None:
    section, name, *_ = option.split(".")
    for argv in ([f"--{option}", text], [f"--{option}={text}"]):
        assert getattr(getattr(load_config(["--config", toml, *argv]), section), name) == value


def test_resume_alone_means_latest(toml: str) -> None:
    assert load_config(["--config", toml, "--checkpoint.resume"]).checkpoint.resume == "latest"
    assert load_config(["--checkpoint.resume", "--config", toml]).checkpoint.resume == "latest"
    assert load_config(["--config", toml, "--checkpoint.resume", "a/step_3"]).checkpoint.resume == "a/step_3"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--train.stpes", "5"], "unknown option --train.stpes; nearest valid one: train.steps"),
        (["--trian.steps", "5"], "unknown option --trian.steps; nearest valid one: --train.steps"),
        (["--train.lr", "5"], "unknown option --train.lr; nearest valid one: optim.lr"),
        (["--optim", "5"], "unknown option --optim; nearest valid one: optim."),
        (["--drun"], "unknown option --drun; nearest valid one: --dry-run"),
        (["--train.steps.more", "5"], "unknown option --train.steps.more; nearest valid one: train.steps"),
        (["stray"], "unexpected argument 'stray'"),
        (["configs/x.toml"], "unexpected argument 'configs/x.toml'; write --config configs/x.toml"),
        (["--train.steps"], "--train.steps needs a value"),
        (["--train.steps", "five"], "[train] steps = 'five': must be an integer >= 1"),
        (["--train.steps", "1.5"], "[train] steps = '1.5': must be an integer >= 1"),
        (["--train.steps", "0"], "[train] steps = 0: must be an integer >= 1"),
        (["--train.seed", "-1"], "[train] seed = -1: must be an integer >= 0 and <= 2147483647"),
        (["--optim.lr", "nan"], "[optim] lr = nan: must be a number >= 0"),
        (["--optim.lr", "-1e-6"], "[optim] lr = -1e-06: must be a number >= 0"),
        (["--rollout.temperature", "0"], "[rollout] temperature = 0.0: must be a number > 0"),
        (["--quant.residual_ratio", "1.5"], "[quant] residual_ratio = 1.5: must be a number >= 0 and <= 1"),
        (["--quant.recipe", "fp4"], "[quant] recipe = 'fp4': must be one of bf16, fp8, naive, qat, symmetric, quads"),
        (["--quant.targets", "mlp"], "[quant] targets = ['mlp']: must be a list of words out of experts, attention"),
        (["--quant.targets", "experts,experts"], "[quant] targets = ['experts', 'experts']: the same word twice"),
        (["--optim.betas", "0.9"], "[optim] betas = [0.9]: must be a list of 2 numbers >= 0 and <= 1"),
        (["--log.tensorboard", "yes"], "[log] tensorboard = 'yes': must be true or false"),
        (["--rl.group_size", "1"], "[rl] group_size = 1: must be an integer >= 2"),
        (["--rl.minibatch_prompts", "3"], "minibatch_prompts = 3 must divide prompts_per_step = 256"),
        (["--rl.microbatch_tokens", "100"], "microbatch_tokens = 100 cannot hold one longest sequence; needs at least"),
        (["--rl.cumulative_ratio_clip", "0.5"], "must be 0 (off) or above 1"),
        (["--rl.dual_clip", "0.9"], "dual_clip = 0.9 must be 0 (off) or above 1"),
        (["--rl.correction_cap", "0.9"], "[rl] correction_cap = 0.9: must be a number >= 1"),
        (["--rl.tis_clip", "2"], "unknown option --rl.tis_clip; it is rl.correction_cap now"),
        (["--rl.correction", "mis"], '[rl] correction = "mis" needs old_logprobs = "learner"'),
        (["--rl.correction_level", "sequence"], 'correction_level = "sequence" has no correction to act on'),
        (
            ["--rl.old_logprobs", "learner", "--rl.correction", "none", "--rl.correction_level", "geometric"],
            'correction_level = "geometric" has no correction to act on',
        ),
        (["--rl.surrogate", "acr"], '"acr" clips by the truncated weight; it needs old_logprobs = "learner"'),
        (
            ["--rl.surrogate", "acr", "--rl.old_logprobs", "learner", "--rl.correction", "mis"],
            '"acr" clips by the truncated weight; it needs old_logprobs = "learner" and correction = "tis"',
        ),
        (["--rl.score_centering", "4"], 'score_centering = 4 needs old_logprobs = "learner" and correction_level ='),
        (
            ["--rl.score_centering", "4", "--rl.old_logprobs", "learner", "--rl.correction_level", "sequence"],
            'score_centering = 4 needs old_logprobs = "learner" and correction_level = "token"',
        ),
        (
            ["--rl.score_centering", "4", "--rl.old_logprobs", "learner", "--rl.surrogate", "tbpo"],
            'score_centering = 4 does not fit surrogate = "tbpo"',
        ),
        (["--rl.surrogate", "tbpo", "--rl.dual_clip", "3"], "dual_clip = 3.0 would never act under surrogate"),
        (["--optim.warmup_steps", "8"], "warmup_steps = 8 is more than [train] steps = 7"),
        (["--parallel.fsdp", "3", "--parallel.ep", "2"], "fsdp = 3 must be a multiple of ep = 2"),
        (["--model.arch", "tiny"], "has both path = 'folder' and arch = 'tiny'; keep one"),
        (["--task.prompt_template", "Q:"], "must contain {prompt}"),
        (["--task.system", "Be brief"], "needs chat = true"),
        (["--task.weights", "1,2"], "weights has 2 numbers for 1 training sources"),
        (["--sources.rows.kidn", "x"], "unknown key 'kidn' in [sources.rows]; nearest valid one: kind"),
        (
            ["--sources.rows.reward", "maths"],
            "[sources.rows] reward = 'maths': must be one of task, exact, math",
        ),
        (["--sources.rows.reward", "my_rewards:score"], "must be one of task, exact, math, code, or FILE.py:FUNCTION"),
        (["--sources.rows.reward", "a.py:not a name"], "must be one of task, exact, math, code, or FILE.py:FUNCTION"),
        (["--sources.rows.reward", ""], "[sources.rows] reward is missing; one of task, exact"),
        (["--sources.rows.rewards", '[{reward = "math"}]'], "has both reward = 'exact' and rewards; keep one"),
        ([*LIST, '[{reward = "math"}, {reward = "math"}]'], "rewards has 'math' twice"),
        ([*LIST, '[{reward = "a.py:f"}, {reward = "b.py:f"}]'], "rewards has 'f' twice"),
        ([*LIST, '[{reward = "a.py:mean"}]'], "reward/mean is a metric of every run"),
        ([*LIST, '[{reward = "math", weight = 0}]'], "rewards all weigh 0"),
        ([*LIST, "[{weight = 1}]"], "rewards[0].reward is missing"),
        ([*LIST, '[{reward = "math"}, {reward = "meth"}]'], "rewards[1].reward = 'meth': must be one of"),
        (
            [*LIST, '[{reward = "math", weigth = 1}]'],
            "'weigth' in [sources.rows] rewards[0]; nearest valid",
        ),
        ([*LIST, '[{reward = "math", weight = nan}]'], "[sources.rows] rewards[0] weight = nan: must be a number >="),
        ([*LIST, '["math"]'], "rewards = ['math']: must be a list of tables of reward, weight"),
        ([*LIST, "math"], "rewards = 'math': must be a list of tables of reward, weight"),
        (["--sources.rows", "x"], "a source's keys are sources.NAME. followed by one of kind, dataset"),
    ],
)
def test_refusals_name_the_key_the_value_and_the_way_out(toml: str, argv: list[str], words: str) -> None:
    assert words in refused("--config", toml, *argv)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nsteps = 7\nstpes = 8", "unknown key 'stpes' in [train]; nearest valid one: train.steps"),
        ("[rl]\ntis_clip = 2.0", "unknown key 'tis_clip' in [rl]; it is rl.correction_cap now"),
        ("[trian]\nsteps = 7", "unknown section 'trian'; nearest valid one: train"),
        ("steps = 7", "unknown key 'steps'"),
        ("train = 7", "train = 7 must be a table: write [train]"),
        ("[train]\nsteps = 7.0", "[train] steps = 7.0: must be an integer >= 1"),
        ("[train]\nsteps = true", "[train] steps = True: must be an integer >= 1"),
        ("[optim]\nbetas = 0.9", "[optim] betas = 0.9: must be a list of 2 numbers"),
        ("[model]\npath = 3", "[model] path = 3: must be a string"),
        ("[task]\ntrain = ['a', 3]", "[task] train = ['a', 3]: must be a list of strings"),
        ("[train]\nsteps = ", "not valid TOML: Invalid value (at line 2"),
        ("[train]\nsteps = [1,\n\n", "at line 3, the end of the file"),
        ("[train]\nsteps = 1\nsteps = 2", "(at line 3"),
        ("[sources]\nrows = 3", "[sources] must hold tables"),
        ("[model]\npath = 'x'", "[task] train is empty"),
        ("[task]\ntrain = ['a']", "[task] names the source 'a': no [sources.a]"),
        ("", "[model] has neither path nor arch"),
        ("[model]\narch = 'tiny'", "[model] tokenizer is empty"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    file = write(tmp_path, text)
    message = refused("--config", file)
    assert words in message
    if "line" in words or "unknown" in words:
        assert file in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "config file not found: " in refused("--config", str(tmp_path / "none.toml"))
    assert "cannot be read" in refused("--config", str(tmp_path))
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    assert "not UTF-8" in refused("--config", str(tmp_path / "latin.toml"))


def test_saved_config_reads_back_equal(tmp_path: Path, toml: str) -> None:
    cfg = load_config(
        [
            *(
                "--config",
                toml,
                "--optim.eps",
                "1e-15",
                "--optim.lr",
                "3",
                "--task.prompt_template",
                'a "{prompt}"\n\t\\ é',
            ),
            *("--sources.x y.kind", "reasoning_gym", "--sources.x y.dataset", "chain_sum"),
            *("--sources.x y.params.sizes", "[1, 2]", "--sources.x y.params.name", "plain words"),
            *("--sources.x y.params.deep", '{a = {b = true}, "c d" = 1.5}', "--quant.residual_sites", ""),
        ]
    )
    assert cfg.sources["x y"].params == {
        "sizes": [1, 2],
        "name": "plain words",
        "deep": {"a": {"b": True}, "c d": 1.5},
    }
    text = config_to_toml(cfg)
    assert load_config(["--config", write(tmp_path, text)]) == cfg
    for name, cls in [*SECTIONS.items(), ("sources.rows", SourceSettings)]:
        for f in dataclasses.fields(cls):
            assert re.search(rf"^{f.name} = |\.{f.name}\]$", text, re.M), f"{name}.{f.name} is not saved"


def test_changes_between_two_configs(toml: str) -> None:
    old, new = (config_to_toml(load_config(["--config", toml, "--optim.lr", lr])) for lr in ("1", "2"))
    assert config_changes(old, new) == ["optim.lr: 1.0 -> 2.0"]


def test_ready_made_sources_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "sums.toml").write_text(
        'kind = "reasoning_gym"\ndataset = "chain_sum"\n[params]\nmax_terms = 2\nmin_terms = 2\n'
    )
    file = write(tmp_path, '[model]\npath = "x"\n[task]\ntrain = ["sums"]\n')
    cfg = load_config(["--config", file, "--sources.sums.params.max_terms", "3", "--sources.sums.size", "50"])
    assert list(cfg.sources) == ["sums"]
    assert (cfg.sources["sums"].params, cfg.sources["sums"].size) == ({"max_terms": 3, "min_terms": 2}, 50)

    own = MINIMAL.replace("rows", "sums")  # a table of the config wins over the file
    assert load_config(["--config", write(tmp_path, own)]).sources["sums"].kind == "jsonl"
    message = refused("--config", file, "--task.train", "sumz")
    assert "names the source 'sumz'" in message and re.search(r"known: .*\bsums\b", message)

    (tmp_path / "sources" / "sums.toml").write_text('kidn = "reasoning_gym"')
    file = write(tmp_path, '[model]\npath = "x"\n[task]\ntrain = ["sums"]\n')
    assert "unknown key 'kidn' in [sources.sums]" in refused("--config", file)


def test_rewards_of_a_source_survive_config_toml(toml: str, tmp_path: Path) -> None:
    """In the file and from the command line alike; the weights reach their place, and config.toml reads back equal."""
    argv = [*LIST, '[{ reward = "math", weight = 0.8 }, { reward = "f/my.py:short", weight = -0.25 }]']
    cfg = load_config(["--config", toml, *argv])
    assert cfg.sources["rows"].rewards == (WeightedReward("math", 0.8), WeightedReward("f/my.py:short", -0.25))
    saved = tmp_path / "config.toml"
    saved.write_text(config_to_toml(cfg))
    assert load_config(["--config", str(saved)]).sources == cfg.sources
    assert WeightedReward("math").weight == 1.0


def test_help_says_what_judges() -> None:
    text = describe_keys()
    assert all(f"{word}: {judge}" in text for word, judge in REWARDS.items()) and "FILE.py:FUNCTION" in text


def test_a_source_can_be_defined_on_the_command_line(toml: str) -> None:
    argv = [
        "--task.eval",
        "new",
        "--sources.new.kind",
        "jsonl",
        "--sources.new.path",
        "p",
        "--sources.new.reward",
        "math",
    ]
    assert load_config(["--config", toml, *argv]).sources["new"].reward == "math"
    assert "[sources.new] kind is missing" in refused("--config", toml, "--sources.new.path", "p")


def test_every_key_is_described() -> None:
    text = describe_keys()
    for name, cls in [*SECTIONS.items(), ("sources.NAME", SourceSettings)]:
        for f in dataclasses.fields(cls):
            assert f"--{name}.{f.name} " in text
            assert len(f.metadata["help"]) > 3
    assert re.search(r"--optim\.lr +\(default 1e-06\)\n +.*>= 0", text)


def test_defaults_satisfy_their_own_ranges(tmp_path: Path, toml: str) -> None:
    everything = config_to_toml(dataclasses.replace(Config(), sources=load_config(["--config", toml]).sources))
    everything = everything.replace('path = ""', 'path = "x"', 1).replace("train = []", 'train = ["rows"]')
    cfg = load_config(["--config", write(tmp_path, everything)])
    assert cfg.rl == Config().rl and cfg.optim == Config().optim


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainSettings().steps = 3  # type: ignore[misc]


def test_config_and_help_need_no_torch() -> None:
    code = "import sys, quads.config; quads.config.describe_keys(); sys.exit('torch' in sys.modules)"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], env=command_env(), cwd=REPOSITORY, check=True)
    assert time.monotonic() - start < 5  # seconds; importing torch alone takes 2 to 10


def test_user_errors_end_a_command_with_code_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @main_guard
    def main(argv: list[str]) -> None:
        load_config(argv)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit_info:
        main(["--train.stpes", "5"])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "error: unknown option --train.stpes; nearest valid one: train.steps\n"
    with pytest.raises(SystemExit) as exit_info:
        main_guard(interrupted)()
    assert exit_info.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    assert "--train.steps" in capsys.readouterr().out


def test_configs_of_the_repository_are_valid() -> None:
    files = sorted((REPOSITORY / "configs").glob("*.toml"))
    assert files
    for file in files:
        load_config(["--config", str(file)])
