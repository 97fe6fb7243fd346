"""Rewards of one's own: functions of (prompt, response, answer, row) that return a number; see my_rewards.toml."""


def close(prompt, response, answer, row):
    """1 for the right number, and less the farther off it is."""
    try:
        return 1.0 / (1.0 + abs(int(response) - int(answer)))
    except ValueError:
        return 0.0


def short(prompt, response, answer, row):
    return -len(response)
