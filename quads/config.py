"""Command line and TOML -> one checked, frozen `Config`.

Order of precedence: `--section.key value` over the TOML of `--config` over the defaults in `quads.config_sections`. Everything is
strict: an unknown key, a wrong type, a value out of range or a contradiction is a `UserError` that names the place and the fix.
This module imports no torch, so that `--help` and config errors answer at once.
"""

import dataclasses
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quads.config_sections import (
    CheckpointSettings,
    EvalSettings,
    LogSettings,
    ModelSettings,
    OptimSettings,
    ParallelSettings,
    QuantSettings,
    RLSettings,
    RolloutSettings,
    SourceSettings,
    TaskSettings,
    TrainSettings,
)
from quads.config_values import check_table, check_value, describe_range, nearest, parse_text, toml_key, toml_table
from quads.errors import UserError

REPOSITORY_CONFIGS = Path(__file__).resolve().parent.parent / "configs"


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
    rl: RLSettings = field(default_factory=RLSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    dry_run: bool = False  # --dry-run: check everything, print the plan, stop. Not a TOML key.


SECTIONS: dict[str, type] = {
    f.name: f.default_factory  # type: ignore[misc]  # a section's default factory is its class
    for f in dataclasses.fields(Config)
    if f.name not in ("sources", "dry_run")
}


def load_config(argv: list[str]) -> Config:
    """`["--config", "x.toml", "--train.steps", "5", "--dry-run"]` -> Config. `--help` prints all keys and exits 0."""
    if "--help" in argv or "-h" in argv:
        print(describe_keys())
        raise SystemExit(0)
    config_path, overrides, dry_run = _split_arguments(argv)
    tables = read_toml(config_path) if config_path else {}
    _check_names(tables, str(config_path))
    sources = _source_tables(tables, overrides, config_path)
    for dotted, text in overrides:
        _apply_override(tables, sources, dotted, text)
    sections = {name: check_table(cls, f"[{name}]", tables.get(name, {})) for name, cls in SECTIONS.items()}
    checked = {name: check_table(SourceSettings, f"[sources.{name}]", table) for name, table in sources.items()}
    return resolve(Config(**sections, sources=checked, dry_run=dry_run), config_path)


def resolve(cfg: Config, config_path: Path | None = None) -> Config:
    """Fill in the keys that derive from others and check those that bind each other."""
    model, task, rl, rollout = cfg.model, cfg.task, cfg.rl, cfg.rollout
    if not model.path and not model.arch:
        raise UserError(
            "[model] has neither path nor arch; set path to a Hugging Face folder, or arch to start from random weights"
        )
    if model.path and model.arch:
        raise UserError(f"[model] has both path = {model.path!r} and arch = {model.arch!r}; keep one")
    if not model.tokenizer and not model.path:
        raise UserError("[model] tokenizer is empty; with arch it must name a folder with tokenizer.json")
    if not task.train:
        raise UserError(
            f"[task] train is empty; name at least one source, known: {_known_sources(cfg.sources, config_path)}"
        )
    if task.weights and len(task.weights) != len(task.train):
        raise UserError(
            f"[task] weights has {len(task.weights)} numbers for {len(task.train)} training sources; give one each"
        )
    if "{prompt}" not in task.prompt_template:
        raise UserError(f"[task] prompt_template = {task.prompt_template!r} must contain {{prompt}}")
    if task.system and not task.chat:
        raise UserError("[task] system is set but chat is false; a system message needs chat = true")
    for name, source in cfg.sources.items():
        _check_source(name, source)
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
    if 0 < rl.cumulative_ratio_clip <= 1:
        raise UserError(f"[rl] cumulative_ratio_clip = {rl.cumulative_ratio_clip} must be 0 (off) or above 1")
    if cfg.optim.warmup_steps > cfg.train.steps:
        raise UserError(
            f"[optim] warmup_steps = {cfg.optim.warmup_steps} is more than [train] steps = {cfg.train.steps}"
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


def describe_keys() -> str:
    """The text of `--help`: every key with its default, allowed values and meaning."""
    lines = [
        "usage: torchrun train.py --config FILE [--section.key value ...] [--dry-run]",
        "",
        "  --config FILE    TOML file with the sections below",
        "  --dry-run        check config, data, tokenizer and memory, then stop",
        "  --help           this text",
        "",
        'Lists: a,b,c or ["a", "b"]. A later override wins. `--checkpoint.resume` alone means the latest complete checkpoint.',
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


def read_toml(path: Path) -> dict[str, Any]:
    """Parse one TOML file; every way it can fail is a UserError with the file and, where there is one, the line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"config file not found: {path}") from None
    except OSError as error:
        raise UserError(f"config file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"config file {path} is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"config file {path} is not valid TOML: {error}") from None


def _split_arguments(argv: list[str]) -> tuple[Path | None, list[tuple[str, str]], bool]:
    """-> (config file, [(section.key, text)], dry run)."""
    config_path: Path | None = None
    overrides: list[tuple[str, str]] = []
    dry_run = False
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if not word.startswith("--"):
            raise UserError(f"unexpected argument {word!r}; options look like --section.key value")
        name, equals, value = word[2:].partition("=")
        if name == "dry-run" and not equals:
            dry_run = True
            continue
        if not equals:
            if at < len(argv) and not argv[at].startswith("--"):
                value = argv[at]
                at += 1
            elif name == "checkpoint.resume":
                value = "latest"
            elif name == "config" or name in _all_keys():
                raise UserError(f"--{name} needs a value")
        if name == "config":
            config_path = Path(value)
        elif "." in name:
            overrides.append((name, value))
        else:
            raise UserError(
                f"unknown option --{name}; nearest valid one: --{nearest(name, ['config', 'dry-run', 'help', *_all_keys()])}"
            )
    return config_path, overrides, dry_run


def _check_names(tables: dict[str, Any], where: str) -> None:
    """Every name in the TOML must be a known section and, in it, a known key."""
    for section, table in tables.items():
        if section == "sources":
            continue  # names are free; the keys of each are checked in check_table
        if section not in SECTIONS:
            kind = "section" if isinstance(table, dict) else "key"
            raise UserError(
                f"{where}: unknown {kind} {section!r}; nearest valid one: {nearest(section, [*SECTIONS, 'sources'])}"
            )
        if not isinstance(table, dict):
            raise UserError(f"{where}: {section} = {table!r} must be a table: write [{section}] and its keys below it")
        for name in table:
            if f"{section}.{name}" not in _all_keys():
                raise UserError(f"{where}: unknown key {name!r} in [{section}]; {_suggest_key(section, name)}")


def _source_tables(
    tables: dict[str, Any], overrides: list[tuple[str, str]], config_path: Path | None
) -> dict[str, dict[str, Any]]:
    """The config's own [sources.NAME] tables, and ready-made files for the other names that [task] or an override uses."""
    own = tables.get("sources", {})
    for name, table in own.items() if isinstance(own, dict) else [("", own)]:
        if not isinstance(table, dict):
            raise UserError(f"[sources] {name} = {table!r} must be a table: write [sources.NAME] and its keys below it")
    sources: dict[str, dict[str, Any]] = {name: dict(table) for name, table in own.items()}
    task = dict(tables.get("task", {}))
    created = []
    for dotted, text in overrides:
        section, _, rest = dotted.partition(".")
        if section == "task" and rest in ("train", "eval"):
            task[rest] = parse_text(TaskSettings, "[task]", rest, text)
        if section == "sources" and dotted.count(".") >= 2:
            created.append(rest.split(".")[0])
    used = [
        name for part in ("train", "eval") for name in check_value(TaskSettings, "[task]", part, task.get(part, ()))
    ]
    for name in dict.fromkeys([*used, *created]):
        if name in sources:
            continue
        file = next((f for f in _ready_made(config_path) if f.stem == name), None)
        if file is not None:
            sources[name] = read_toml(file)
        elif name in created:
            sources[name] = {}  # defined on the command line alone
        else:
            known = _known_sources(sources, config_path)
            raise UserError(
                f"[task] names the source {name!r}, which is neither [sources.{name}] nor a ready-made one; known: {known}"
            )
    return sources


def _apply_override(tables: dict[str, Any], sources: dict[str, dict[str, Any]], dotted: str, text: str) -> None:
    """Parse `text` by the key's declared type and put it into the right table."""
    parts = dotted.split(".")
    if parts[0] == "sources" and len(parts) == 3:
        sources[parts[1]][parts[2]] = parse_text(SourceSettings, f"[sources.{parts[1]}]", parts[2], text)
    elif parts[0] == "sources" and len(parts) == 4 and parts[2] == "params":
        table = sources[parts[1]]
        table["params"] = {**table.get("params", {}), parts[3]: _free_value(text)}
    elif dotted in _all_keys():
        section, name = parts
        table = tables.setdefault(section, {})
        table[name] = parse_text(SECTIONS[section], f"[{section}]", name, text)
    else:
        section, _, name = dotted.partition(".")
        raise UserError(f"unknown option --{dotted}; {_suggest_key(section, name)}")


def _free_value(text: str) -> Any:
    """A value without a declared type (difficulty settings): TOML syntax, else plain text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _check_source(name: str, source: SourceSettings) -> None:
    where = f"[sources.{name}]"
    if not source.kind:
        raise UserError(f"{where} kind is missing; one of reasoning_gym, jsonl, datasets")
    needs = "path" if source.kind == "jsonl" else "dataset"
    if not getattr(source, needs):
        raise UserError(f"{where} {needs} is missing; kind = {source.kind!r} needs it")
    if source.reward == "task" and source.kind != "reasoning_gym":
        raise UserError(
            f"{where} reward = 'task' needs kind = 'reasoning_gym'; for {source.kind!r} choose exact, math or code"
        )
    if source.prompt_template and "{prompt}" not in source.prompt_template:
        raise UserError(f"{where} prompt_template = {source.prompt_template!r} must contain {{prompt}}")


def _ready_made(config_path: Path | None) -> list[Path]:
    """Source files beside the config first, then the repository's."""
    folders = [config_path.resolve().parent / "sources"] if config_path else []
    folders.append(REPOSITORY_CONFIGS / "sources")
    return [file for folder in folders for file in sorted(folder.glob("*.toml"))]


def _known_sources(sources: dict[str, Any], config_path: Path | None) -> str:
    names = sorted({*sources, *(file.stem for file in _ready_made(config_path))})
    return ", ".join(names) or "none"


def _all_keys() -> list[str]:
    return [f"{section}.{f.name}" for section, cls in SECTIONS.items() for f in dataclasses.fields(cls)]


def _suggest_key(section: str, name: str) -> str:
    """The likeliest meaning of an unknown `section.name`: the same word in another section, else the nearest spelling."""
    if section not in SECTIONS and section != "sources":
        section = nearest(section, [*SECTIONS])
    if section == "sources":
        return "source keys are sources.NAME." + ", sources.NAME.".join(
            f.name for f in dataclasses.fields(SourceSettings)
        )
    here = [f.name for f in dataclasses.fields(SECTIONS[section])]
    elsewhere = [dotted for dotted in _all_keys() if dotted.split(".")[1] == name]
    if name in here or not elsewhere:
        elsewhere = [f"{section}.{nearest(name, here)}"]
    return f"nearest valid one: {elsewhere[0]}"
