"""What of a response is scored: linear scans over text that may be hostile."""

import re


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last <tag>...</tag>, or without a tag the whole text; None where the tag is missing."""
    if not tag:
        return text.strip()
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None
