"""Command line and TOML -> one checked, frozen `Config`.

Order of precedence: `--section.key value` over the TOML of `--config` over the defaults in `quads.config.sections`.
Everything is strict: an unknown key, a wrong type, a value out of range or a contradiction is a `UserError` that names
the place and the fix. This module imports no torch: a program without it reads and checks a config in no time.
"""

import dataclasses
import json
import os
import sys
import tomllib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quads.config.loss import check_loss
from quads.config.sections import (
    CheckpointSettings,
    EvalSettings,
    LogSettings,
    ModelSettings,
    OptimSettings,
    ParallelSettings,
    QuantSettings,
    RewardSettings,
    RLSettings,
    RolloutSettings,
    SourceSettings,
    TaskSettings,
    TrainSettings,
)
from quads.config.sources import build_sources, check_template, known_sources, read_toml
from quads.config.values import check_table, cut, describe_range, is_key, nearest, set_text, toml_key, toml_table
from quads.errors import UserError


@dataclass(frozen=True)
class Config:
    """One run. `Config()` holds the defaults, unchecked; `load_config` returns a checked one."""

    model: ModelSettings = field(default_factory=ModelSettings)
    quant: QuantSettings = field(default_factory=QuantSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    sources: dict[str, SourceSettings] = field(
        default_factory=dict
    )  # by name; exactly those that [task] uses or the TOML has
    reward: RewardSettings = field(default_factory=RewardSettings)
    rl: RLSettings = field(default_factory=RLSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    dry_run: bool = False  # --dry-run: check everything, print the plan, stop. Not a TOML key.
    path: str = field(default="", compare=False)  # the file of --config, for messages

    @property
    def wants_routes(self) -> bool:
        """Whether engines return their expert choices: 2 bytes a token, layer and choice."""
        return self.rl.routing_replay or self.log.router_agreement


# Keys that were called otherwise.
RENAMED = {"rl.tis_clip": "rl.correction_cap"}

SECTIONS: dict[str, type] = {
    f.name: f.default_factory  # type: ignore[misc]  # a section's default factory is its class
    for f in dataclasses.fields(Config)
    if f.name not in ("sources", "dry_run", "path")
}


def load_config(argv: list[str]) -> Config:
    """`["--config", "x.toml", "--train.steps", "5", "--dry-run"]` -> Config. `--help` prints all keys and exits 0."""
    if "--help" in argv or "-h" in argv:
        try:
            print(describe_keys(), flush=True)
        except BrokenPipeError:  # `--help | head`: the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
    config_path, overrides, dry_run = _split_arguments(argv)
    tables = read_toml(config_path) if config_path else {}
    _check_names(tables, str(config_path))
    for dotted, text in overrides:
        section, _, name = dotted.partition(".")
        if section != "sources":
            set_text(SECTIONS[section], f"[{section}]", tables.setdefault(section, {}), name, text)
    sections = {name: check_table(cls, f"[{name}]", tables.get(name, {})) for name, cls in SECTIONS.items()}
    task: TaskSettings = sections["task"]
    source_overrides = [
        (dotted.removeprefix("sources."), text) for dotted, text in overrides if dotted.startswith("sources.")
    ]
    sources = build_sources(tables.get("sources", {}), source_overrides, [*task.train, *task.eval], config_path)
    cfg = Config(**sections, sources=sources, dry_run=dry_run, path=str(config_path or ""))
    return resolve(cfg, config_path)


def resolve(cfg: Config, config_path: Path | None = None) -> Config:
    """Fill in the keys that derive from others and check those that bind each other."""
    model, task, rl, rollout = cfg.model, cfg.task, cfg.rl, cfg.rollout
    if not model.path and not model.arch:
        raise UserError(
            "[model] has neither path nor arch; set path to a Hugging Face folder, or arch to start from random weights"
            + ("" if config_path else ". There is no --config FILE; try --config configs/tiny_quads.toml")
        )
    if model.path and model.arch:
        raise UserError(f"[model] has both path = {cut(repr(model.path))} and arch = {cut(repr(model.arch))}; keep one")
    if not model.tokenizer and not model.path:
        raise UserError("[model] tokenizer is empty; with arch it must name a folder with tokenizer.json")
    if not task.train:
        raise UserError(
            f"[task] train is empty; name at least one source, known: {known_sources(cfg.sources, config_path)}"
        )
    if task.weights and len(task.weights) != len(task.train):
        raise UserError(
            f"[task] weights has {len(task.weights)} numbers for {len(task.train)} training sources; give one each"
        )
    check_template("[task]", task.prompt_template)
    if task.system and not task.chat:
        raise UserError("[task] system is set but chat is false; a system message needs chat = true")
    if rl.prompts_per_step % rl.minibatch_prompts:
        raise UserError(
            f"[rl] minibatch_prompts = {rl.minibatch_prompts} must divide prompts_per_step = {rl.prompts_per_step}"
        )
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    if rl.microbatch_tokens < longest:
        raise UserError(
            f"[rl] microbatch_tokens = {rl.microbatch_tokens} cannot hold one longest sequence; needs at least "
            f"[rollout] max_prompt_tokens + max_new_tokens = {longest}"
        )
    check_loss(rl)
    if cfg.optim.warmup_steps > cfg.train.steps:
        raise UserError(
            f"[optim] warmup_steps = {cfg.optim.warmup_steps} is more than [train] steps = {cfg.train.steps}"
        )
    if max(cfg.optim.betas) >= 1:
        raise UserError(f"[optim] betas = {list(cfg.optim.betas)} must be below 1: a moment would never move")
    if cfg.parallel.compile and model.dtype == "float32":
        raise UserError(
            '[parallel] compile = true needs [model] dtype = "bfloat16": torch compiles the grouped matmul of experts '
            "for bf16 alone"
        )
    if cfg.parallel.fsdp % cfg.parallel.ep:
        raise UserError(f"[parallel] fsdp = {cfg.parallel.fsdp} must be a multiple of ep = {cfg.parallel.ep}, or 0")
    return dataclasses.replace(
        cfg,
        model=dataclasses.replace(model, tokenizer=model.tokenizer or model.path),
        task=dataclasses.replace(task, eval=task.eval or task.train),
        train=dataclasses.replace(
            cfg.train, out=cfg.train.out or f"runs/{config_path.stem if config_path else 'default'}"
        ),
    )


def config_to_toml(cfg: Config) -> str:
    """Every key of every section; `load_config` reads it back to an equal Config."""
    parts = [toml_table(name, dataclasses.asdict(getattr(cfg, name))) for name in SECTIONS]
    parts += [
        toml_table(f"sources.{toml_key(name)}", dataclasses.asdict(source)) for name, source in cfg.sources.items()
    ]
    return "\n".join(parts)


def config_changes(old: str, new: str) -> list[str]:
    """Lines `section.key: old -> new` for what differs between two texts of `config_to_toml`."""
    before, after = (_flat("", tomllib.loads(text)) for text in (old, new))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name, 'absent')!r} -> {after.get(name, 'absent')!r}" for name in names]


def _flat(prefix: str, table: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, value in table.items():
        flat |= _flat(f"{prefix}{name}.", value) if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def describe_keys() -> str:
    """The text of `--help`: every key with its default, allowed values and meaning."""
    lines = [
        "usage: torchrun train.py --config FILE [--section.key value ...] [--dry-run]",
        "",
        "  --config FILE    TOML file with the sections below",
        "  --dry-run        check config, data, tokenizer and memory, then stop",
        "  --help           this text",
        "",
        'Lists: a,b,c or ["a", "b"]. A later override wins.',
        "`--checkpoint.resume` alone means the latest complete checkpoint.",
    ]
    for name, cls in [*SECTIONS.items(), ("sources.NAME", SourceSettings)]:
        title = (cls.__doc__ or "").partition(": ")[2]
        lines += ["", f"[{name}] {title}"]
        for f in dataclasses.fields(cls):
            default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[misc]
            default = list(default) if isinstance(default, tuple) else default
            lines.append(f"  --{name}.{f.name}  (default {json.dumps(default)})")
            lines.append(f"      {f.metadata['help']} [{describe_range(cls, f.name)}]")
    return "\n".join(lines)


def _split_arguments(argv: list[str]) -> tuple[Path | None, list[tuple[str, str]], bool]:
    """-> (config file, [(section.key, text)], dry run). Every section.key returned is a valid one."""
    config_path: Path | None = None
    overrides: list[tuple[str, str]] = []
    dry_run = False
    words = deque(argv)
    while words:
        word = words.popleft()
        if not word.startswith("--"):
            meant = f"write --config {word}" if word.endswith(".toml") else "options look like --section.key value"
            raise UserError(f"unexpected argument {cut(repr(word))}; {cut(meant)}")
        name, equals, value = word[2:].partition("=")
        if name == "dry-run" and not equals:
            dry_run = True
            continue
        _check_option(name)
        if not equals:
            if words and not words[0].startswith("--"):
                value = words.popleft()
            elif name == "checkpoint.resume":
                value = "latest"
            else:
                raise UserError(f"--{name} needs a value")
        if name == "config":
            config_path = Path(value)
        else:
            overrides.append((name, value))
    return config_path, overrides, dry_run


def _check_option(name: str) -> None:
    section, _, key = name.partition(".")
    if section == "sources" and "." in key:
        return  # the keys of a source are checked where its table is
    if name == "config" or section in SECTIONS and is_key(SECTIONS[section], key):
        return
    if section in SECTIONS or section == "sources":
        raise UserError(f"unknown option --{cut(name)}; {_suggest_key(section, key)}")
    options = ["config", "dry-run", *_all_keys()]
    raise UserError(f"unknown option --{cut(name)}; nearest valid one: --{nearest(name, options)}")


def _check_names(tables: dict[str, Any], where: str) -> None:
    """Every name in the TOML must be a known section and, in it, a known key."""
    for section, table in tables.items():
        if section == "sources":
            continue  # names are free; the keys of each are checked in check_table
        if section not in SECTIONS:
            kind = "section" if isinstance(table, dict) else "key"
            likely = nearest(section, [*SECTIONS, "sources"])
            raise UserError(f"{where}: unknown {kind} {cut(repr(section))}; nearest valid one: {likely}")
        if not isinstance(table, dict):
            raise UserError(
                f"{where}: {section} = {cut(repr(table))} must be a table: write [{section}] and its keys below it"
            )
        for name in table:
            if f"{section}.{name}" not in _all_keys():
                raise UserError(f"{where}: unknown key {cut(repr(name))} in [{section}]; {_suggest_key(section, name)}")


def _all_keys() -> list[str]:
    return [f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)]


def _suggest_key(section: str, name: str) -> str:
    """The likeliest meaning of an unknown key: the same word in another section, else the nearest spelling."""
    if section == "sources":
        keys = ", ".join(f.name for f in dataclasses.fields(SourceSettings))
        return f"a source's keys are sources.NAME. followed by one of {keys}"
    if f"{section}.{name}" in RENAMED:
        return f"it is {RENAMED[f'{section}.{name}']} now"
    elsewhere = [dotted for dotted in _all_keys() if dotted.split(".")[1] == name]
    here = nearest(name, [f.name for f in dataclasses.fields(SECTIONS[section])])
    return f"nearest valid one: {elsewhere[0] if elsewhere else f'{section}.{here}'}"
