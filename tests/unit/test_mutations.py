"""The list of mutations stays true: every text it breaks stands in the sources once, every test it names exists."""

from tests.helpers import run_command


def test_the_list_is_current() -> None:
    done = run_command(["scripts/mutate.py", "--only", "a text of no mutation"])
    assert done.stdout == "0 mutations: 0 killed, 0 argued, 0 survived\n", done.stderr
