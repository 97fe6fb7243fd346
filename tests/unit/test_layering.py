"""The import rule, read from the source: base <- model <- quant <- rollout; rl sees base, model and quant."""

import ast
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY

PACKAGE = REPOSITORY / "quads"
SEEN = {
    "base": {"base", "config"},
    "config": {"base", "config"},
    "run": {"base", "config", "run"},
    "data": {"base", "config", "data"},
    "sandbox": {"base", "config", "sandbox"},
    "model": {"base", "config", "model"},
    "quant": {"base", "config", "model", "quant"},
    "rollout": {"base", "config", "model", "quant", "rollout"},
    "rl": {"base", "config", "run", "data", "sandbox", "model", "quant", "rl"},
}
# Files beside the folders are base, except these.
ESTIMATES = {
    "memory.py": "quant",
    "memory_learner.py": "quant",
}  # need the shapes of models and the sizes of precisions
JOINS = {"assemble.py", "export.py", "plan.py", "plot.py"}  # wiring above the layers, like train.py
KNOW_OTHER_PROCESSES = {
    "model/parallelize.py",
    "model/dispatch.py",
    "distributed.py",
    "run/checkpoint.py",
    "run/checkpoint_state.py",
    "rollout/sync.py",
    "rollout/vllm/engine.py",  # vLLM's tensor-parallel groups span the trainer's processes
    "rollout/vllm/groups.py",
    "rollout/vllm/guest.py",  # makes the default group before vLLM would
}


def imports(file: Path) -> list[tuple[str, bool]]:
    """(module, inside a function) of every import in a file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    late = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found += [(f"{node.module}.{alias.name}", id(node) in late) for alias in node.names]
    return found


def layer(relative: str) -> str:
    head, slash, _ = relative.partition("/")
    return head if slash else ESTIMATES.get(relative, "base")


def layer_of_module(module: str) -> str:
    """`quads.model.moe.Experts` -> model; `quads.config.Config` -> base."""
    second = module.split(".")[1]
    return second if (PACKAGE / second).is_dir() else ESTIMATES.get(f"{second}.py", "base")


FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("relative", FILES)
def test_imports_go_one_way(relative: str) -> None:
    if layer(relative) == "lab" or relative in JOINS:
        return
    allowed = SEEN[layer(relative)]
    for module, late in imports(PACKAGE / relative):
        if module == "quads.assemble.build_parts" and late:
            continue  # the command at the end of a file of rl, which needs a whole run
        if module.startswith("quads."):
            assert layer_of_module(module) in allowed, f"quads/{relative} imports {module}"
            assert module.split(".")[1] + ".py" not in JOINS, f"quads/{relative} imports {module}"


def test_only_a_few_files_know_that_there_are_other_processes() -> None:
    knowing = {
        relative
        for relative in FILES
        if any(module.startswith("torch.distributed") for module, _ in imports(PACKAGE / relative))
    }
    assert {name for name in knowing if not name.startswith("lab/")} <= KNOW_OTHER_PROCESSES


def test_heavy_and_optional_packages_are_imported_late() -> None:
    for relative in FILES:
        for module, late in imports(PACKAGE / relative):
            root = module.split(".")[0]
            if root in ("wandb", "transformers"):
                assert late, f"quads/{relative} imports {module} at the top"


def test_only_one_room_imports_vllm() -> None:
    for relative in FILES:
        if not relative.startswith("rollout/vllm/"):
            assert not [m for m, _ in imports(PACKAGE / relative) if m.split(".")[0] == "vllm"], f"quads/{relative}"


def replaced(source: str) -> list[str]:
    """What a file assigns to: attributes of names that it imports from vLLM, as `Sampler.forward`."""
    tree = ast.parse(source)
    theirs = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0] == "vllm"
    }
    targets = [t for node in ast.walk(tree) if isinstance(node, ast.Assign) for t in node.targets]
    targets += [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr"
    ]
    found = []
    for target in targets:
        root = target
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in theirs:
            found.append(ast.unparse(target))
    return found


def test_vllm_is_replaced_in_one_file() -> None:
    for line in ("Sampler.forward = 3", "setattr(Sampler, name, 3)"):
        assert replaced(f"from vllm.v1.sample.sampler import Sampler\n{line}")
    assert replaced("import vllm.v1.engine.core as core\ncore.cleanup = None")
    for relative in FILES:
        if relative.startswith("rollout/vllm/") and relative != "rollout/vllm/patches.py":
            assert not replaced((PACKAGE / relative).read_text(encoding="utf-8")), f"quads/{relative}"
