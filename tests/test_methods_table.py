"""The native method table and the Python reference describe the same methods: names, order, option keys, types,
defaults, plans.
"""

from __future__ import annotations

import re
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
from ggml_kvq.core import loader, native
from ggml_kvq.errors import MethodError
from ggml_kvq.reference import METHODS, LayerShape

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def lib() -> Any:
    return loader.libraries().need_kvq()


@pytest.fixture(scope="module")
def table(lib: CDLL) -> Any:
    return {m["name"]: m for m in native.methods(lib)}


def test_registry_parity(table: Any) -> None:
    rows = re.findall(r"^KVQ_METHOD\((\w+)\)", (ROOT / "ggml-kvq/methods.inc").read_text(), re.MULTILINE)
    assert rows == list(table) and sorted(rows) == sorted(METHODS)
    for name in rows:
        assert (ROOT / f"ggml-kvq/methods/{name}.cpp").is_file() and (
            ROOT / f"python/ggml_kvq/reference/{name}.py"
        ).is_file()


@pytest.mark.parametrize("name", list(METHODS))
def test_option_parity(table: Any, name: str) -> None:
    native_options = {o["key"]: o for o in table[name]["options"]}
    assert list(native_options) == list(METHODS[name].options)
    for key, default in METHODS[name].options.items():
        o = native_options[key]
        if o["type"] == "text":
            assert default == o["default_value"]
        elif isinstance(default, str):
            assert "|" in o["type"] and default == o["default_value"] and default in o["type"].split("|")
        else:
            kinds = (type(default).__name__, "int|auto" if key == "window" else "")
            assert o["type"] in kinds and type(default)(o["default_value"]) == default
        assert o["help"] and o["source"], f"{name}.{key} has no help or source"


@pytest.mark.parametrize("name", list(METHODS))
def test_every_row_says_what_it_is(table: Any, name: str) -> None:
    assert table[name]["summary"] and table[name]["paper"]


@pytest.mark.parametrize("name", list(METHODS))
def test_defaults_are_accepted(lib: CDLL, table: Any, name: str) -> None:
    text = ",".join(f"{o['key']}={o['default_value']}" for o in table[name]["options"])
    assert lib.kvq_check(name.encode(), text.encode()) == 0
    assert lib.kvq_check(name.encode(), None) == 0


def refusal(lib: CDLL, method: str, opts: Any) -> Any:
    with pytest.raises(MethodError) as e:
        native.check(lib, lib.kvq_check(method.encode(), opts.encode()))
    line = str(e.value)
    assert line and "\n" not in line
    return line


def test_unknown_method_names_the_known_ones(lib: CDLL) -> None:
    line = refusal(lib, "zip", "")
    assert "'zip'" in line and all(name in line for name in METHODS)


@pytest.mark.parametrize(
    ("method", "opts", "needle"),
    [
        ("f16", "bits=2", "bits"),
        ("kivi", "bit=2", "'bit'"),
        ("kivi", "bits=5", "bits=5"),
        ("kivi", "bits=0", "bits=0"),
        ("kivi", "bits=two", "bits=two"),
        ("kivi", "bits=2.5", "bits=2.5"),
        ("kivi", "bits=", "bits="),
        ("kivi", "bits", "bits=VALUE"),
        ("kivi", "bits=99999999999999999999", "bits=99999999999999999999"),
        ("kivi", "k_bits=7", "k_bits=7"),
        ("kivi", "k_bits=-1", "k_bits=-1"),
        ("kivi", "eta=0.5", "eta=0.5"),
        ("kivi", "eta=nan", "eta=nan"),
        ("kivi", "eta=-0.1", "eta=-0.1"),
        ("kivi", "levels=middle", "levels=middle"),
        ("kivi", "group=24", "group=24"),
        ("kivi", "group=-1", "group=-1"),
        ("kivi", "group_v=8", "group_v=8"),
        ("kivi", "window=5000", "window=5000"),
        ("kivi", "window=-1", "window=-1"),
        ("kivi", "sinks=65", "sinks=65"),
        ("kivi", "scales=f32", "scales=f32"),
        ("xquant", "preset=1.0", "preset=1.0"),
        ("xquant", "preset=", "preset="),
        ("xquant", "kq=3", "kq=3"),
        ("xquant", "vm=1000", "vm=1000"),
        ("xquant", "eta1=0.6", "eta1=0.6"),
        ("xquant", "eta2=inf", "eta2=inf"),
        ("xquant", "shared=all", "shared=all"),
        ("minikv", "hh=0.9", "hh=0.9 and rw=0.25"),
        ("minikv", "hh=0,rw=0", "hh=0 and rw=0"),
        ("minikv", "depth=0", "depth=0"),
        ("minikv", "bits=5", "bits=5"),
        ("minikv", "group=8", "group=8"),
        ("zipcache", "salient=1.1", "salient=1.1"),
        ("zipcache", "interval=100", "interval=100"),
        ("zipcache", "interval=288", "interval=288"),
        ("zipcache", "hi=5", "hi=5"),
        ("zipcache", "lo=0", "lo=0"),
        ("zipcache", "probe=0", "probe=0"),
        ("zipcache", "eta=0.5", "eta=0.5"),
        ("zipcache", "normalise=yes", "normalise=yes"),
        ("zipcache", "keep=0", "keep=0"),
        ("zipcache", "keep=0.2", "recent=0.25"),
        ("specache", "near=xquant", "near=xquant"),
        ("specache", "top=1025", "top=1025"),
        ("specache", "place=memory", "place=memory"),
        ("specache", "fetch=ahead,kept=63", "kept=63"),
        ("specache", "fetch=ahead,kept=2049", "kept=2049"),
        ("specache", "near=aqua,far=q8", "far=q8"),
        ("auto", "bits=0.4", "bits=0.4"),
        ("auto", "bits=17", "bits=17"),
        ("auto", "at=-1", "at=-1"),
        ("auto", "means=maybe", "means=maybe"),
        ("auto", "order=0.0.0.0", "order"),
        ("auto", "order=0.0.0.0.0.0.1.1.1.1", "order"),
        ("auto", "order=0.0.0.0.0.", "order"),
        ("auto", "order=0,0", "'0'"),
        ("auto", "order=-1.0.0.0.0", "order"),
        ("auto", "far=q2", "far=q2"),
        ("auto", "far=f16,top=1025", "top=1025"),
        ("auto", "far=f16,window=auto", "window=auto cannot go with far=f16"),
        ("auto", "far=f16,state=packed", "state=packed cannot go with far=f16"),
        ("auto", "far=q4,means=on", "means=on cannot go with far=q4"),
        ("lab", "page=48", "page=48"),
        ("lab", "window=5000", "window=5000"),
        ("lab", "bits=2", "'bits'"),
    ],
)
def test_bad_options_are_refused_by_name_and_value(lib: CDLL, method: str, opts: Any, needle: Any) -> None:
    assert needle in refusal(lib, method, opts)


@pytest.mark.parametrize(
    ("shape", "needle"), [((0, 8, 100, 128), "100"), ((0, 8, 128, 4), "4"), ((0, 8, 2048, 128), "2048")], ids=str
)
@pytest.mark.parametrize("method", ["kivi", "xquant"])
def test_shapes_that_no_block_holds_are_refused(lib: CDLL, method: str, shape: Any, needle: Any) -> None:
    with pytest.raises(MethodError, match=needle):
        native.plan(lib, method, "", [shape], 1024)


@pytest.mark.parametrize("method", list(METHODS))
def test_options_have_an_effect(lib: CDLL, table: Any, method: str) -> None:
    """No key is parsed and forgotten: each changes a plan's bytes or headline, or the codec (seen in the
    reference's plan).
    """
    other = {
        "bits": 3,
        "k_bits": 1,
        "v_bits": 1,
        "levels": "mid",
        "eta": 0.1,
        "group": 64,
        "group_v": 64,
        "window": 512,
        "sinks": 64,
        "scales": "u8",
        "precision": "f32",
        "preset": "1.16",
        "kq": 2,
        "vq": 6,
        "km": 2,
        "vm": 0,
        "eta1": 0.3,
        "eta2": 0.2,
        "shared": "none",
        "grid": "d4",
        "predictor": "none",
        "predictors": "on",
        "alone": "0.1.2.3",
        "coords": 8,
        "first_bits": 2,
        "weights": "4",
        "hi": 3,
        "lo": 1,
        "salient": 0.4,
        "interval": 96,
        "probe": 0.2,
        "normalise": False,
        "hh": 0.4,
        "rw": 0.1,
        "budget": "pyramid",
        "depth": 3,
        "keep": 0.5,
        "recent": 0.1,
        "near": "kivi",
        "top": 32,
        "far": "q8",
        "place": "device",
        "fetch": "off",
        "kept": 100,
        "prompt": "near",
        "at": 4096,
        "level": 7,
        "order": ".".join(str(il) for il in range(8) for _ in range(5)),
        "means": "on",
        "pairs": "neox",
        "page": 64,
    }
    shapes = [(il, 4, 64, 64) for il in range(8)]
    layers = [LayerShape(*s) for s in shapes]
    for key in METHODS[method].options:
        if key == "state":  # of files: tests/test_compact_states.py
            continue
        if key == "coordinates":  # of a model's first use: tests/test_coords.py
            continue
        if key == "place" and method != "specache":  # where blocks lie: tests/native/test_caches.cpp
            continue
        if other[key] == METHODS[method].options[key]:
            other[key] = "f16"  # scales of lattice blocks are u8 unless said
        if method == "auto" and key == "predictor":
            other[key] = "full"
        if method == "specache" and key == "preset":
            other[key] = "paper2"
        of_kivi = method == "specache" and key in ("levels", "eta", "group", "group_v")
        by_bytes = method == "auto" and key in ("bits", "at")  # how high the ladder goes follows from bytes
        of_auto: dict[str, dict[str, object]] = {
            "top": {"far": "f16"},
            "prompt": {"far": "f16"},
            "predictor": {"means": "on"},
            "predictors": {"means": "on"},
            "alone": {"means": "on", "predictor": "full"},
            "coords": {"means": "on"},
            "weights": {"means": "on", "predictor": "full"},
        }
        needs: dict[str, dict[str, object]] = {
            "order": {"level": 7},
            "weights": {"predictor": "full"},
            "depth": {"budget": "pyramid"},
            "recent": {"keep": 0.5},
            "kept": {"fetch": "ahead"},
            **(of_auto if method == "auto" else {}),
        }
        more: dict[str, object] = (
            {"near": "kivi"} if of_kivi else needs.get(key, {})
        )  # without these the key has no effect
        base, new = METHODS[method](**more), METHODS[method](**more, **{key: other[key]})
        assert by_bytes or base.plans(layers) != new.plans(layers), f"{method}.{key} changes nothing"
        a, b = (native.plan(lib, method, o, shapes, 8192) for o in (more, {**more, key: other[key]}))
        if key not in (
            "levels",
            "eta",
            "eta1",
            "eta2",
            "precision",
            "shared",
            "grid",
            "probe",
            "normalise",
            "depth",
            "recent",
            "fetch",
            "top",
            "prompt",
        ):  # these change values, not bytes
            assert any(a[k] != b[k] for k in a if k != "options"), f"{method}.{key} changes no byte"


@pytest.mark.parametrize("top", [1, 64, 100, 512, 600, 1024])
def test_as_many_rows_stay_as_the_reference_says(lib: CDLL, top: Any) -> None:
    """specache, kept=0: with 16 heads each of them is 64 bytes of a layer's tables."""
    layer = (0, 16, 64, 64)
    (plan,) = METHODS["specache"](fetch="ahead", top=top).plans([LayerShape(*layer)])
    assert plan.kept == min(4 * top, 2048)
    by_default, said = (
        native.plan(lib, "specache", {"fetch": "ahead", "top": top, "kept": kept}, [layer], 8192)["bytes_tables"]
        for kept in (0, plan.kept)
    )
    assert by_default == said


@pytest.mark.parametrize(
    ("preset", "key", "value"), [("paper1", "bits", 2), ("paper2", "group", 32), ("paper2", "scales", "u8")]
)
def test_a_preset_leaves_what_the_user_named(lib: CDLL, preset: Any, key: Any, value: int) -> None:
    """Also where the user names the default, which the preset would change."""
    layer = (0, 4, 64, 64)
    sets: dict[str, object] = {"near": "kivi", "bits": 1, "eta": 0.25, "group": 64, "sinks": 0, "scales": "f16"}
    sets |= {"bits": 2, "eta": 0.0} if preset == "paper2" else {}
    named, spelt_out = {"preset": preset, key: value}, {**sets, key: value}
    assert sets[key] != value == METHODS["specache"].options[key]
    a, b = (native.plan(lib, "specache", o, [layer], 8192) for o in (named, spelt_out))
    assert {k: v for k, v in a.items() if k != "options"} == {k: v for k, v in b.items() if k != "options"}
    shapes = [LayerShape(*layer)]
    assert METHODS["specache"](**named).plans(shapes) == METHODS["specache"](**spelt_out).plans(shapes)


def test_every_method_is_tried_by_the_walks(table: Any) -> None:
    """A new row cannot be forgotten: the store's own walks and those on a whole model name every method."""
    import test_lattice_features
    import test_llama_features

    walked = {method for method, _, *_ in [*test_llama_features.WALKS, *test_lattice_features.WALKS]}
    assert walked == set(table)
    store = (ROOT / "tests/native/test_store.cpp").read_text() + (ROOT / "tests/native/test_caches.cpp").read_text()
    missing = [name for name in table if f'"{name}"' not in store]
    assert not missing, f"neither test_store.cpp nor test_caches.cpp knows {missing}"
