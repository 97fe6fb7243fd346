"""TOML -> frozen dataclasses, strictly. No torch in this room: tools read and check a config in no time.

sections.py lists every key; load.py is what `train.py` calls. Stop there unless you change how values are written.
"""

from quads.config.load import SECTIONS, Config, config_changes, config_to_toml, describe_keys, load_config

__all__ = ["SECTIONS", "Config", "config_changes", "config_to_toml", "describe_keys", "load_config"]
