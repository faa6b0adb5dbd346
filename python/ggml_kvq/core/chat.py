"""Chat templates: upstream's built-in ones, else the model's own Jinja text."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import ModelError
from . import arguments, llama


def render(
    lib: Any, template: str, messages: Sequence[Mapping[str, str]], add_assistant: bool, special: Mapping[str, str]
) -> str:
    """Prompt text of `messages` ([{"role", "content"}]) under `template` (tokenizer.chat_template of the model).

    special: bos_token and eos_token text for Jinja. llama_chat_apply_template knows the common templates by their
    shape; others are rendered by jinja2 in its sandbox. Raises ModelError naming the cure.
    """
    given = messages
    messages = [] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if (not messages and not isinstance(given, list | tuple)) or not all(isinstance(m, Mapping) for m in messages):
        raise ModelError(f"messages={given!r:.60} is no list of dicts; write [{{'role': 'user', 'content': '...'}}]")
    texts = []
    for m in messages:
        if not {"role", "content"} <= set(m):
            raise ModelError(f"message {dict(m)!r} lacks role or content; write {{'role': 'user', 'content': '...'}}")
        texts.append((arguments.utf8(m["role"]), arguments.utf8(m["content"])))
    n = len(messages)
    array = (llama.llama_chat_message * max(1, n))()
    for i, (role, content) in enumerate(texts):
        array[i].role, array[i].content = role, content
    size = 256 + 2 * sum(len(role) + len(content) + 16 for role, content in texts)
    while True:
        buf = ctypes.create_string_buffer(size)
        got = lib.llama_chat_apply_template(template.encode(), array, n, add_assistant, buf, size)
        if got < 0:
            return _jinja(template, messages, add_assistant, special)
        if got <= size:
            return buf.raw[:got].decode("utf-8", "replace")
        size = got


def _jinja(
    template: str, messages: Sequence[Mapping[str, str]], add_assistant: bool, special: Mapping[str, str]
) -> str:
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as e:
        raise ModelError(
            "this chat template is not one llama.cpp knows by shape; pip install jinja2 to render it"
        ) from e

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.globals["raise_exception"] = raise_exception
    try:
        return env.from_string(template).render(
            messages=[dict(m) for m in messages], add_generation_prompt=add_assistant, **special
        )
    except jinja2.TemplateError as e:
        raise ModelError(f"the model's chat template refuses these messages: {e}; check roles and their order") from e
