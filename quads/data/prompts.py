"""From a row's prompt to what the model reads: template, system message, chat template, token ids."""

from collections.abc import Iterable

from quads.config.sections import SourceSettings, TaskSettings
from quads.data.rows import Prompt, Row
from quads.data.tokenizer import Tokenizer
from quads.errors import UserError


class PromptBuilder:
    """Words prompts as [task] and the source say.

    Example: with `prompt_template = "Q: {prompt}\\nA:"` and no chat, the row "3 + 4" gives the ids of "Q: 3 + 4\\nA:".
    """

    def __init__(self, task: TaskSettings, tokenizer: Tokenizer):
        self.task, self.tokenizer = task, tokenizer
        if task.chat:  # a missing or broken template shows before any data is read
            tokenizer.apply_chat_template([{"role": "user", "content": "?"}], **task.chat_variables)

    def word(self, source: str, settings: SourceSettings, row: Row) -> Prompt:
        """The row's prompt in its template: text, or with [task] chat = true a conversation."""
        template = settings.prompt_template or self.task.prompt_template
        if not self.task.chat:
            if not isinstance(row.prompt, str):
                raise UserError(f"{row.where} has chat messages for a prompt; set [task] chat = true")
            if settings.system:
                raise UserError(f"[sources.{source}] system is set but [task] chat is false")
            return template.replace("{prompt}", row.prompt)
        messages = (
            [{"role": "user", "content": row.prompt}]
            if isinstance(row.prompt, str)
            else [dict(message) for message in row.prompt]
        )
        messages[-1]["content"] = template.replace("{prompt}", messages[-1]["content"])
        system = settings.system or self.task.system
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return messages

    def far_longer(self, prompt: Prompt, max_tokens: int) -> bool:
        """Does a part of the prompt, before any template, have over twice this many tokens already?

        Parts grow until they have, or are all of it; so the work is bounded by max_tokens, whatever the prompt is.
        Twice, as the tokens at the end of a part may not be those of the whole.
        """
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        part = 16 * max_tokens + 4096
        while len(text) > part:
            if len(self.tokenizer.encode(text[:part])) > 2 * max_tokens:
                return True
            part *= 2
        return False

    def ids(self, prompts: Iterable[Prompt]) -> list[list[int]]:
        """Token ids of worded prompts, [number of prompts][length]."""
        texts = [
            prompt
            if isinstance(prompt, str)
            else self.tokenizer.apply_chat_template(prompt, **self.task.chat_variables)
            for prompt in prompts
        ]
        # A chat template writes its own special tokens. Around plain text the tokenizer may put a BOS; an EOS it puts
        # at the end would close the prompt before the response.
        all_ids = self.tokenizer.encode_batch(texts, special_tokens=not self.task.chat)
        if not self.task.chat:
            for ids in all_ids:
                while len(ids) > 1 and ids[-1] in self.tokenizer.eos_ids:
                    ids.pop()
        return all_ids
