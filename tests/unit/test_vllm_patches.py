"""What is replaced inside vLLM: refused, with a message that says why, where vLLM is no longer what was checked."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from quads.errors import UserError
from quads.rollout.vllm import patches

pytestmark = pytest.mark.vllm

REFUSED = r"vLLM 0\.\d+.* is not one that quads works with: {}, which quads replaces, {}.*checked with vLLM 0\.26"


def apply_keeping_group() -> None:
    with patches.keeping_default_group():
        pass


PATCHES: dict[str, tuple[patches.Place, Callable[[], None]]] = {
    "forward": (patches.FORWARD_STEP, lambda: patches.call_before_forward(lambda config, count: None)),
    "sampler": (patches.SAMPLER, patches.install_sampler),
    "experts": (patches.LOAD_EXPERTS, lambda: patches.load_experts_with(nn.Identity(), lambda layer, weights: None)),
    "cleanup": (patches.CLEANUP, apply_keeping_group),
    "sleep": (patches.SLEEP, patches.check_sleep),
}


@pytest.fixture(params=PATCHES)
def patch(request: pytest.FixtureRequest) -> Iterator[tuple[patches.Place, Callable[[], None], Any, str]]:
    """(place, what applies the patch, holder, name); afterwards vLLM is as it was."""
    place, apply = PATCHES[request.param]
    holder, name, original = place.find()
    yield place, apply, holder, name
    setattr(holder, name, original)


def test_the_vllm_here_is_one_that_was_checked(patch: Any) -> None:
    _, apply, _, _ = patch
    apply()
    apply()  # any number of times


def test_another_signature_is_refused(patch: Any) -> None:
    place, apply, holder, name = patch

    def newer(self: Any, something_else: int) -> None: ...

    setattr(holder, name, newer)
    takes = r"takes \(self, something_else\), not \(" + ", ".join(place.parameters)
    with pytest.raises(UserError, match=REFUSED.format(f"{place.module}.{place.name}", takes)):
        apply()
    assert getattr(holder, name) is newer  # nothing half done


def test_a_function_that_is_gone_is_refused(patch: Any) -> None:
    place, apply, holder, name = patch
    delattr(holder, name)
    with pytest.raises(UserError, match=REFUSED.format(f"{place.module}.{place.name}", "is gone")):
        apply()


def test_groups_under_other_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state  # pyright: ignore[reportMissingImports]

    monkeypatch.delattr(parallel_state, "_NODE_COUNT")
    with pytest.raises(UserError, match=REFUSED.format(r"vllm\.distributed\.parallel_state\._NODE_COUNT", "is gone")):
        patches.destroy_own_groups()


def test_a_sleep_that_measures_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    holder, name, _ = patches.SLEEP.find()

    def sleep(self: Any, level: int = 1) -> None:
        torch.cuda.mem_get_info()

    monkeypatch.setattr(holder, name, sleep)
    with pytest.raises(UserError, match="Worker.sleep, which quads replaces, does not read torch.accelerator"):
        patches.check_sleep()


def test_each_forward_is_told_its_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the replaced function, which still does what it did."""
    from types import SimpleNamespace

    holder, name, _ = patches.FORWARD_STEP.find()

    def execute_model(self: Any, scheduler_output: Any) -> str:
        return f"ran {scheduler_output.total_num_scheduled_tokens}"

    monkeypatch.setattr(holder, name, execute_model)
    heard = []
    for _ in range(2):
        patches.call_before_forward(lambda config, count: heard.append((config, count)))
    worker, output = SimpleNamespace(vllm_config="the config"), SimpleNamespace(total_num_scheduled_tokens=7)
    assert getattr(holder, name)(worker, output) == "ran 7"
    assert heard == [("the config", 7)]


def test_versions_named_are_those_of_the_package() -> None:
    """The range in the message is the one in pyproject.toml."""
    import tomllib

    from tests.helpers import REPOSITORY

    extra = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    assert f"'{extra[0]}'" in patches.SAMPLER.changed("is gone")
