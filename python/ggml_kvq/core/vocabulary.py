"""What a Model reads of its file besides computing: metadata, text and tokens, the chat template."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ModelError
from . import arguments, chat
from .loader import Libraries


class Vocabulary:
    """The part of Model that does not wait for what is being decoded. close() waits for it (_reading)."""

    path: Path
    n_vocab: int
    bos: int
    eos: int
    _libs: Libraries
    _model: int | None
    _vocab: Any
    _reading: Any  # threading.RLock

    def _open(self) -> int:
        raise NotImplementedError

    def _need_tokenizer(self) -> None:
        """ModelError for a model without a vocabulary, where llama.cpp ends the process."""
        if self._libs.llama.llama_vocab_type(self._vocab) == 0:  # LLAMA_VOCAB_TYPE_NONE
            raise ModelError(f"{self.path} has no tokenizer; pass token ids, or use a model that has one")

    def metadata(self, key: str) -> str | None:
        """Scalar GGUF metadata value as a string, None when absent or an array."""
        with self._reading:
            self._open()
            buf, name = ctypes.create_string_buffer(4096), arguments.utf8(key)
            n = self._libs.llama.llama_model_meta_val_str(self._model, name, buf, len(buf))
            if n >= len(buf):
                buf = ctypes.create_string_buffer(n + 1)
                self._libs.llama.llama_model_meta_val_str(self._model, name, buf, len(buf))
            return buf.value.decode("utf-8", "replace") if n >= 0 else None

    def tokenize(self, text: str, *, add_bos: bool = False, special: bool = False) -> list[int]:
        """Token ids of `text`. add_bos: prepend BOS when the model wants one; special: read <|...|> markers as
        tokens.
        """
        with self._reading:
            self._open()
            self._need_tokenizer()
            data = arguments.utf8(text)
            fn = self._libs.llama.llama_tokenize
            n = -fn(self._vocab, data, len(data), None, 0, add_bos, special)
            if n <= 0:
                return []
            out = (ctypes.c_int32 * n)()
            return list(out[: fn(self._vocab, data, len(data), out, n, add_bos, special)])

    def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of `tokens`; bytes that are no UTF-8 become U+FFFD. special: render control tokens."""
        self._open()
        held = arguments.token_ids(tokens, self.n_vocab)
        with self._reading:
            self._open()
            self._need_tokenizer()
            n, ids = len(held), (ctypes.c_int32 * len(held))(*held)
            size = max(64, n * 16)
            while True:
                buf = ctypes.create_string_buffer(size)
                got = self._libs.llama.llama_detokenize(self._vocab, ids, n, buf, size, False, special)
                if got >= 0:
                    return buf.raw[:got].decode("utf-8", "replace")
                size = -got

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token; they may end inside a UTF-8 character."""
        with self._reading:
            self._open()
            self._need_tokenizer()
            arguments.token_ids([token], self.n_vocab)
            buf = ctypes.create_string_buffer(256)
            n = self._libs.llama.llama_token_to_piece(self._vocab, token, buf, len(buf), 0, special)
            if n < 0:
                buf = ctypes.create_string_buffer(-n)
                n = self._libs.llama.llama_token_to_piece(self._vocab, token, buf, len(buf), 0, special)
            return buf.raw[:n]

    def _ends(self, token: int) -> bool:
        """Does `token` end a generation?"""
        with self._reading:
            self._open()
            return bool(self._libs.llama.llama_vocab_is_eog(self._vocab, token))

    def chat_prompt(self, messages: Sequence[Mapping[str, str]], *, add_assistant: bool = True) -> str:
        """The model's chat template over [{"role": ..., "content": ...}]; ModelError when the model has none."""
        with self._reading:
            self._open()
            template = self._libs.llama.llama_model_chat_template(self._model, None)
            if template is None:
                raise ModelError(f"{self.path.name} has no chat template; use generate() with plain text")
            special = {
                name: self.piece(t, special=True).decode() if t >= 0 else ""
                for name, t in (("bos_token", self.bos), ("eos_token", self.eos))
            }
        return chat.render(self._libs.llama, template.decode(), messages, add_assistant, special)
