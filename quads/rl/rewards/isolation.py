"""The user's side of the sandbox: limits from the config, and errors that name the key to change."""

from quads.config.sections import RewardSettings
from quads.errors import UserError
from quads.sandbox.confinement import Limits
from quads.sandbox.helpers import HelperError
from quads.sandbox.isolation import NoIsolation, find_isolation


def isolation(wanted: str = "auto") -> str:
    """The mechanism that confines programs and answers here. UserError if there is none."""
    try:
        return find_isolation(wanted)
    except NoIsolation as reason:
        raise UserError(
            f"generated programs and answers cannot be isolated here ({reason}). Allow user namespaces or Landlock, or "
            'set [reward] sandbox = "none" to run them with limits only, on a machine that may be harmed'
        ) from None


def program_limits(settings: RewardSettings) -> Limits:
    """What one generated program may use."""
    return Limits(
        time_s=settings.code_time_s,
        memory=settings.code_memory_mib << 20,
        output=int(settings.code_output_mib * (1 << 20)),
        disk=settings.code_disk_mib << 20,
        threads=settings.code_threads,
    )


def user_error(error: BaseException) -> BaseException:
    """A process that cannot start is for the user to see to; other errors are what they are."""
    return UserError(str(error)) if isinstance(error, HelperError) else error
