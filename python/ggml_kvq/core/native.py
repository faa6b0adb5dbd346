"""C declarations of libggml-kvq (ggml-kvq/include/ggml-kvq.h) and the methods it knows."""

from __future__ import annotations

from ctypes import (
    CDLL,
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

from ..errors import MethodError

#: KVQ_ABI_VERSION of the header these declarations mirror.
ABI_VERSION = 1


class kvq_option_info(Structure):
    _fields_ = [(n, c_char_p) for n in ("key", "type", "default_value", "help", "source")]


class kvq_method_info(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("summary", c_char_p),
        ("paper", c_char_p),
        ("n_options", c_int32),
        ("options", POINTER(kvq_option_info)),
    ]


class kvq_codec(Structure):
    _fields_ = [
        ("type", c_int32),
        ("role", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("scale", c_int32),
        ("levels", c_int32),
        ("eta", c_float),
        ("n_cells", c_int32),
        ("head_size", c_int32),
        ("hi", c_int32),
        ("n_hi", c_int32),
        ("split", c_int32),
        ("fast_bits", c_int32),
        ("coords", c_int32),
        ("reserved", c_int32 * 2),
    ]


class kvq_type_info(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("type", c_int32),
        ("bits", c_int32),
        ("block_cells", c_int32),
        ("bits_per_value", c_double),
    ]


class kvq_page(Structure):
    _fields_ = [
        ("k_codes", c_void_p),
        ("k_params", c_void_p),
        ("v_codes", c_void_p),
        ("v_params", c_void_p),
        ("cell", c_int32),
        ("n_slots", c_int32),
        ("map", POINTER(c_int32)),
    ]


class kvq_rotary(Structure):
    _fields_ = [
        ("n_dims", c_int32),
        ("neox", c_int32),
        ("n_high", c_int32),
        ("high", POINTER(c_float)),
        ("low", POINTER(c_float)),
        ("turns", c_void_p),
    ]


class kvq_far(Structure):
    _fields_ = [
        ("fetch", c_int32),
        ("top", c_int32),
        ("format", c_int32),
        ("n_cells", c_int32),
        ("k_rows", POINTER(c_void_p)),
        ("v_rows", POINTER(c_void_p)),
        ("kept", POINTER(c_int32)),
        ("counts", POINTER(c_uint64)),
        ("buffer", c_void_p),
        ("n_slots", c_int32),
        ("n_kept", c_int32),
    ]


class kvq_order(Structure):
    _fields_ = [
        ("channel", POINTER(c_uint16)),
        ("gain", POINTER(c_float)),
        ("back", POINTER(c_float)),
    ]


class kvq_attn(Structure):
    _fields_ = [
        ("k", kvq_codec),
        ("v", kvq_codec),
        ("n_q", c_int32),
        ("n_head", c_int32),
        ("n_head_kv", c_int32),
        ("n_pages", c_int32),
        ("n_kv", c_int32),
        ("flags", c_int32),
        ("scale", c_float),
        ("max_bias", c_float),
        ("softcap", c_float),
        ("q", POINTER(c_float)),
        ("q_stride_token", c_int64),
        ("q_stride_head", c_int64),
        ("mask", POINTER(c_uint16)),
        ("mask_stride_token", c_int64),
        ("mask_stride_head", c_int64),
        ("sinks", POINTER(c_float)),
        ("dst", POINTER(c_float)),
        ("dst_stride_token", c_int64),
        ("dst_stride_head", c_int64),
        ("pages", POINTER(kvq_page)),
        ("k_mean", POINTER(c_float)),
        ("v_mean", POINTER(c_float)),
        ("rotary", POINTER(kvq_rotary)),
        ("positions", POINTER(c_int32)),
        ("lse", POINTER(c_float)),
        ("sealed", POINTER(c_int32)),
        ("map_stride", c_int64),
        ("far", POINTER(kvq_far)),
        ("k_order", POINTER(kvq_order)),
        ("k_basis", c_void_p),  # kvq_basis: the library's own
        ("v_basis", c_void_p),
    ]


class kvq_layer_shape(Structure):
    _fields_ = [(n, c_int32) for n in ("il", "n_head_kv", "head_size_k", "head_size_v")]


class kvq_stats(Structure):
    _fields_ = [
        ("method", c_char * 32),
        ("options", c_char * 128),
        ("kernel", c_char * 32),
        ("n_layer", c_int32),
        ("n_cells", c_int32),
        ("n_stream", c_int32),
        ("page_cells", c_int32),
        *[
            (n, c_uint64)
            for n in (
                "bytes_f16",
                "bytes_codes",
                "bytes_params",
                "bytes_window",
                "bytes_tables",
                "bytes_calibration",
                "bytes_chain",
                "bytes_total",
                "bytes_scratch",
            )
        ],
        *[(n, c_double) for n in ("bits_k", "bits_v", "bits", "bits_headline")],
        *[(n, c_uint64) for n in ("n_sealed", "n_reopened", "n_forced", "predict_macs")],
        *[(n, c_uint64) for n in ("bytes_far", "n_fetched", "n_wanted", "n_hits", "n_steps")],
        ("type_k", c_char * 8),
        ("type_v", c_char * 8),
    ]


class kvq_request(Structure):
    _fields_ = [
        ("asker", c_int32),
        *[
            (n, c_char_p)
            for n in ("method", "opts", "config", "env_method", "env_opts", "env_config", "number", "model")
        ],
    ]


class kvq_resolved(Structure):
    _fields_ = [
        *[
            (n, c_char_p)
            for n in (
                "method",
                "method_from",
                "method_words",
                "opts",
                "options",
                "options_from",
                "config",
                "config_from",
                "note",
            )
        ],
        ("wants_means", c_int32),
    ]


class kvq_lab_page(Structure):
    _fields_ = [
        ("handle", c_void_p),
        *[
            (n, c_int32)
            for n in (
                "il",
                "ordinal",
                "stream",
                "n_pages",
                "page_cells",
                "n_head",
                "head_size_k",
                "head_size_v",
                "n_dims",
                "neox",
                "before_il",
                "before_head",
                "before_k",
                "before_v",
            )
        ],
        ("pages", POINTER(c_int32)),
        ("positions", POINTER(c_int32)),
        *[(n, POINTER(c_float)) for n in ("keys", "values", "new_keys", "new_values")],
    ]


class kvq_lab_cells(Structure):
    _fields_ = [
        ("handle", c_void_p),
        *[(n, c_int32) for n in ("il", "ordinal", "stream", "n_cells", "n_head", "page_cells")],
        ("positions", POINTER(c_int32)),
        ("sealed", POINTER(c_uint8)),
        ("probabilities", POINTER(c_float)),
        ("held", POINTER(c_uint8)),
        ("n_queries", c_int32),
    ]


#: kvq_lab::seal and kvq_lab::judge.
SEAL = CFUNCTYPE(c_int, c_void_p, POINTER(kvq_lab_page))
JUDGE = CFUNCTYPE(c_int, c_void_p, POINTER(kvq_lab_cells))


class kvq_lab(Structure):
    _fields_ = [("user", c_void_p), ("seal", SEAL), ("judge", JUDGE), ("n_observed", c_int32), ("queries", c_int32)]


STRUCTS: dict[str, type[Structure]] = {
    s.__name__: s
    for s in (
        kvq_option_info,
        kvq_method_info,
        kvq_codec,
        kvq_type_info,
        kvq_page,
        kvq_rotary,
        kvq_far,
        kvq_attn,
        kvq_layer_shape,
        kvq_stats,
        kvq_request,
        kvq_resolved,
        kvq_lab_page,
        kvq_lab_cells,
        kvq_lab,
    )
}

FUNCTIONS: list[tuple[str, Any, list[Any]]] = [
    ("kvq_abi_version", c_int, []),
    ("kvq_version", c_char_p, []),
    ("kvq_last_error", c_char_p, []),
    ("kvq_last_note", c_char_p, []),
    ("kvq_measured", c_int, [c_char_p, c_int, POINTER(c_char_p)]),
    ("kvq_model_sketch", c_size_t, [c_char_p, POINTER(c_float), c_size_t]),
    ("kvq_state_begin", None, [c_uint32]),
    ("kvq_state_tag", c_uint32, []),
    ("kvq_kernel_name", c_char_p, []),
    ("kvq_method_count", c_int, []),
    ("kvq_method_at", POINTER(kvq_method_info), [c_int]),
    ("kvq_check", c_int, [c_char_p, c_char_p]),
    ("kvq_resolve", c_int, [POINTER(kvq_request), POINTER(kvq_resolved)]),
    ("kvq_configure", c_int, [c_char_p, c_char_p, c_char_p, c_char_p]),
    ("kvq_type_count", c_int, []),
    ("kvq_type_at", POINTER(kvq_type_info), [c_int]),
    ("kvq_codec_bytes", c_int, [POINTER(kvq_codec), POINTER(c_size_t), POINTER(c_size_t)]),
    ("kvq_encode", c_int, [POINTER(kvq_codec), POINTER(c_uint16), POINTER(c_uint8), c_void_p, c_void_p, c_void_p]),
    ("kvq_decode", c_int, [POINTER(kvq_codec), c_void_p, c_void_p, POINTER(c_uint16)]),
    ("kvq_image", c_int, [POINTER(kvq_codec), c_void_p, c_void_p, POINTER(c_uint16)]),
    ("kvq_image_match", c_int, [POINTER(kvq_codec), POINTER(c_uint16), c_void_p, c_void_p, c_void_p]),
    ("kvq_far_row_bytes", c_size_t, [c_int, c_int]),
    ("kvq_far_encode", c_int, [c_int, c_int, c_int64, c_void_p, c_void_p]),
    ("kvq_far_decode", c_int, [c_int, c_int, c_int64, c_void_p, c_void_p]),
    ("kvq_coords_encode", c_int, [POINTER(kvq_codec), c_int, *[POINTER(c_float)] * 2, c_void_p]),
    ("kvq_coords_decode", c_int, [POINTER(kvq_codec), c_int, c_int, POINTER(c_float), c_void_p, POINTER(c_float)]),
    ("kvq_basis_new", c_void_p, [c_int, c_int, POINTER(c_float), POINTER(c_float)]),
    ("kvq_basis_free", None, [c_void_p]),
    ("kvq_round_trip", c_int, [POINTER(kvq_codec), c_int, c_int64, POINTER(c_float), c_int]),
    ("kvq_weights_bytes", c_size_t, [c_int, c_int, c_int]),
    ("kvq_weights_pack", c_int, [c_int, c_int, c_int, POINTER(c_float), c_void_p]),
    (
        "kvq_predict",
        c_int,
        [c_int, c_int, c_int, c_void_p, c_int64, POINTER(c_float), POINTER(c_float), POINTER(c_float), c_int],
    ),
    ("kvq_rotary_new", POINTER(kvq_rotary), [c_int, c_int, c_float, c_int]),
    ("kvq_rotary_free", None, [POINTER(kvq_rotary)]),
    ("kvq_attend", c_int, [POINTER(kvq_attn), c_int, c_int]),
    (
        "kvq_column_sums",
        c_int,
        [POINTER(kvq_attn), POINTER(c_int32), c_int, POINTER(c_float), POINTER(c_int32), c_int],
    ),
    ("kvq_probe_rows", c_int, [c_int, c_uint64, c_float, c_int, c_uint32, POINTER(c_int32)]),
    (
        "kvq_plan_window",
        c_int,
        [c_char_p, c_char_p, POINTER(kvq_layer_shape), *[c_int] * 6, POINTER(kvq_stats)],
    ),
    ("kvq_cache_count", c_int, []),
    ("kvq_cache_stats", c_int, [c_int, POINTER(kvq_stats)]),
    ("kvq_cache_fetched", c_int, [c_int, c_int, POINTER(c_int32), POINTER(c_uint64)]),
    ("kvq_cache_rows", c_int, [c_int, c_int, c_int, c_int, c_int, c_int, POINTER(c_float)]),
    ("kvq_cache_split", c_int, [c_int, c_int]),
    ("kvq_observe_queries", None, [c_int]),
    ("kvq_cache_queries", c_int64, [c_int, c_int, c_int, POINTER(c_double)]),
    ("kvq_cache_line", c_char_p, [c_int]),
    ("kvq_lab_set", c_int, [POINTER(kvq_lab)]),
    ("kvq_lab_rows", c_int, [c_void_p, c_int, POINTER(c_float)]),
    ("kvq_lab_turn", c_int, [c_void_p, c_int, c_int, POINTER(c_float)]),
    ("kvq_set_verbosity", None, [c_int]),
    ("kvq_sizeof", c_size_t, [c_char_p]),
    ("kvq_offsetof", c_size_t, [c_char_p, c_char_p]),
]


def bind(lib: CDLL) -> None:
    """Set argument and result types of every function above on `lib`; AttributeError names a missing one."""
    for name, restype, argtypes in FUNCTIONS:
        fn = getattr(lib, name)
        fn.restype, fn.argtypes = restype, argtypes


def merge_options(words: str, *sources: str) -> str:
    """One text "key=value,..." of several such texts, of which the later ones win. A key that one text gives two
    values is a MethodError: which of them was meant? `words`: the texts' name in that message.
    """
    merged: dict[str, str] = {}
    for source in sources:
        own: dict[str, str] = {}
        for part in filter(None, (p.strip() for p in source.split(","))):
            key = part.partition("=")[0].strip()
            if own.setdefault(key, part) != part:
                raise MethodError(f"{words}: {own[key]} and {part} name one option twice; drop one of them")
        merged |= own
    return ",".join(merged.values())


def option_string(opts: dict[str, object] | str | None) -> str:
    """`{"bits": 2, "group": 32}` -> `"bits=2,group=32"`, the form KVQ_OPTS and kvq_configure take."""
    if opts is None:
        return ""
    if isinstance(opts, str):
        return merge_options("kv_opts", opts)
    parts = []
    for key, value in opts.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if any(c in f"{key}{text}" for c in ",=\n"):
            raise MethodError(f"option {key!r}={value!r} holds ',' or '='; pass one plain value per key")
        parts.append(f"{key}={text}")
    return ",".join(parts)


def last_error(lib: CDLL) -> str:
    """kvq_last_error(). It may quote a damaged file, which holds any bytes."""
    return str(lib.kvq_last_error().decode("utf-8", "replace"))


def last_note(lib: CDLL) -> str:
    """kvq_last_note(), likewise."""
    return str(lib.kvq_last_note().decode("utf-8", "replace"))


def check(lib: CDLL, status: int) -> None:
    """Raise MethodError with kvq_last_error() when `status` is not KVQ_OK (0)."""
    if status != 0:
        text = last_error(lib)
        raise MethodError(text or f"libggml-kvq returned status {status} without a message; report this as a bug")


def stats_dict(stats: kvq_stats) -> dict[str, Any]:
    """A kvq_stats as a dict: bytes_* in bytes, bits* in bits per K or V value, n_* counts."""
    out: dict[str, Any] = {}
    for field in stats._fields_:
        value = getattr(stats, field[0])
        out[field[0]] = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return out


def methods(lib: CDLL) -> list[dict[str, Any]]:
    """The registry: one dict per method with name, summary, paper and a list of option dicts."""
    out = []
    for i in range(lib.kvq_method_count()):
        info = lib.kvq_method_at(i).contents
        options = [
            {f[0]: (getattr(o, f[0]) or b"").decode() for f in kvq_option_info._fields_}
            for o in (info.options[j] for j in range(info.n_options))
        ]
        out.append(
            {
                "name": info.name.decode(),
                "summary": (info.summary or b"").decode(),
                "paper": (info.paper or b"").decode(),
                "options": options,
            }
        )
    return out


def plan(
    lib: CDLL,
    method: str,
    opts: dict[str, object] | str | None,
    shapes: list[tuple[int, int, int, int]],
    n_cells: int,
    *,
    n_layer_model: int = 0,
    n_stream: int = 1,
    whole: tuple[list[tuple[int, int, int, int]], int] = ([], 0),
) -> dict[str, Any]:
    """Memory of a cache that does not exist yet (kvq_plan_window).

    shapes: one (layer index, KV heads, K head size, V head size) per attention layer; n_cells: context length in
    tokens; n_layer_model: layers with attention of the model, where shapes are those of one cache of several and their
    layer index counts such layers. whole: of a cache of layers with a sliding window, the layers that see the whole
    context and the cells of their cache. Returns stats_dict(); raises MethodError for a refused method, option or
    shape.
    """
    array = (kvq_layer_shape * len(shapes))(*[kvq_layer_shape(*s) for s in shapes])
    out = kvq_stats()
    status = lib.kvq_plan_window(
        method.encode(),
        option_string(opts).encode(),
        array,
        len(shapes),
        n_layer_model or len(shapes),
        n_cells,
        n_stream,
        sum(heads * (k + v) for _, heads, k, v in whole[0]),
        whole[1],
        byref(out),
    )
    check(lib, status)
    return stats_dict(out)


__all__ = ["ABI_VERSION", "FUNCTIONS", "STRUCTS", "bind", "check", "methods", "option_string", "plan", "stats_dict"]
