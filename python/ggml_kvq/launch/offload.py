"""-ngl N of the user: which weights stay on the CPU. The cache of every layer lies on KVQ0 all the same."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .. import cpu_layers
from . import refusals
from .flags import LaunchError, User, without

OT = ("-ot", "--override-tensor")
NGL, NGL_ENV = ("-ngl", "--gpu-layers", "--n-gpu-layers"), "LLAMA_ARG_N_GPU_LAYERS"


@dataclass
class Offload:
    """What -ngl comes to: the user's other arguments, ours, options of the method, notes. whole: no layer keeps
    llama.cpp's own cache, where -ngl would have left it.
    """

    rest: list[str]
    added: list[str] = field(default_factory=list)
    opts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole: bool = False


def of(user: User, choice: refusals.Choice, n_layer: int, *, bench: bool, alone: bool, opts: str) -> Offload:
    """alone: one model, on this machine. opts: of the method, calibrated data's among them. LaunchError for -ngl 0,
    which leaves no layer to KVQ0.
    """
    out = Offload(list(user.args))
    values = user.values(NGL, NGL_ENV)
    # over several devices llama.cpp shares layers out by number, those of the CPU too
    alone = alone and not re.search("[,/]", user.last(("-dev", "--device"), "LLAMA_ARG_DEVICE"))
    alone = alone and not (bench and user.has(OT))  # there it is a list of cases
    parts = [part for value in (values if bench else values[-1:]) for part in value.split(",")]
    for n in (int(part) for part in parts if part.isdigit()):
        if n == 0:
            raise LaunchError(
                f"-ngl {','.join(parts)} leaves the KV cache of every layer to llama.cpp, so {choice.words} would not"
                " be used: drop -ngl"
            )
        left = cpu_layers.on_cpu(n, n_layer) if n_layer else 0
        if left and (len(parts) > 1 or not alone or choice.method == cpu_layers.EXACT):
            out.notes.append(
                f"-ngl {n}: {left} of {n_layer} layers keep llama.cpp's own f16 cache; drop -ngl to compress all"
            )
        elif left:
            out.whole = True
            _, out.rest = without(user.args, NGL)
            out.notes.append(
                f"-ngl {n}: weights of {left} of {n_layer} layers stay on the CPU, caches of all layers on KVQ0"
            )
            if refusals.on_gpu():
                theirs, out.rest = without(out.rest, OT)  # first: llama.cpp takes the first that matches
                rules = [*theirs[1::2], f"{cpu_layers.weights_of(left)}=CPU"]
                out.added = ["-ngl", "99999", "-ot", ",".join(rules)]
                grows = "window=auto" in opts.replace(" ", "")  # such a window takes room that blocks do not take yet
                if refusals.takes_place(choice.method) and not refusals.place(opts) and not grows:
                    out.opts = ["place=auto"]  # there is little room on the device, or -ngl would not be asked for
    return out
