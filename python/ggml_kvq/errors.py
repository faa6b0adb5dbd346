"""Errors of ggml_kvq. Every message is one line that names the offending value and the cure."""

from __future__ import annotations


class KvqError(Exception):
    """Base of all errors raised by ggml_kvq."""


class LibraryError(KvqError, ImportError):
    """A native library is missing, of another version, or laid out differently from our declarations."""


class ModelError(KvqError, RuntimeError):
    """A model file cannot be loaded or a context cannot be created."""


class ArgumentTypeError(KvqError, TypeError):
    """An argument of a type that the call does not take."""


class TextError(KvqError, ValueError):
    """A text that cannot be written as UTF-8."""


class BudgetError(KvqError, ValueError):
    """A number of bits or bytes that cannot be met; the message names the smallest that works."""


class MethodError(KvqError, ValueError):
    """A KV method, option or calibration file was refused."""


class DecodeError(KvqError, RuntimeError):
    """llama.cpp could not process a batch."""


class ContextOverflowError(DecodeError):
    """The tokens do not fit the context."""


class BusyError(KvqError, RuntimeError):
    """A Model is generating for another thread, or a generator's tokens were replaced by a newer call."""


class StateError(KvqError, RuntimeError):
    """A saved state cannot be written, read or applied."""


class LabError(KvqError, RuntimeError):
    """A laboratory method failed: its file and line, the layer and pages, and why."""


class DownloadError(KvqError, RuntimeError):
    """A model could not be fetched, from the Hugging Face Hub or the package index."""
