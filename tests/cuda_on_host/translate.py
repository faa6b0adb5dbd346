"""CUDA sources to C++ that runs on the host (include/cuda_runtime.h): launches become calls, PTX instructions become
functions.

translate(folder, out) writes every .cu as .cpp and every .cuh as it is named, folder by folder, so that includes still
work.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# instruction -> the statement for it; {0}, {1}, ... are its operands in order
INSTRUCTIONS = [
    ("griddepcontrol", ""),
    ("cp.async.wait", ""),
    ("cp.async.commit", ""),
    ("cp.async.bulk.prefetch.L2", ""),
    ("prefetch.global.L2", ""),
    ("cp.async.cg.shared.global [%0], [%1], 16", "host_copy({0}, {1}, 16);"),
    ("cp.async.ca.shared.global [%0], [%1], 8", "host_copy({0}, {1}, 8);"),
    ("cp.async.ca.shared.global [%0], [%1], 4", "host_copy({0}, {1}, 4);"),
    (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "host_mma_f16({0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9});",
    ),
    (
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};",
        "host_mma_s8({0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {0}, {1}, {2}, {3});",
    ),
    (
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32",
        "host_mma_s8_u8({0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9});",
    ),
    (
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
        "host_mma_s8({0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9}, {10}, {10}, {10}, {10});",
    ),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "host_ldmatrix({0}, {1}, {2}, {3}, {4});"),
    ("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "host_ldmatrix_trans({0}, {1}, {2}, {3}, {4});"),
    ("movmatrix.sync.aligned.m8n8.trans.b16", "{0} = host_movmatrix({1});"),
    ("prmt.b32", "{0} = host_prmt({1}, {2}, {3});"),
    ("mov.u32 %0, %%tid.x", "{0} = (int) threadIdx.x;"),
    ("bar.sync", "host_cuda::team_barrier({0}, {1});"),
    ("ex2.approx.ftz.f32", "{0} = exp2f({1});"),
    ("ld.acquire.gpu.global.u64", "{0} = *({1});"),
    ("red.release.gpu.global.add.u64", "(*({0}))++;"),
    ("atom.acq_rel.gpu.global.add.u32", "{0} = (*({1}))++;"),
]


def closing(text: str, at: int) -> int:
    """Index of the bracket that closes the one at `at`."""
    pairs, stack, i = {"(": ")", "[": "]", "{": "}"}, [], at
    while True:
        c = text[i]
        if c == '"':
            i = text.index('"', i + 1)
        elif c in pairs:
            stack.append(pairs[c])
        elif stack and c == stack[-1]:
            stack.pop()
            if not stack:
                return i
        i += 1


def split(text: str, mark: str) -> list[str]:
    """Parts between marks that stand in no bracket and no string."""
    parts, depth, quoted, last, i = [], 0, False, 0, 0
    while i < len(text):
        c = text[i]
        if c == '"':
            quoted = not quoted
        elif not quoted:
            depth += (c in "([{") - (c in ")]}")
            if depth == 0 and c == mark:
                parts.append(text[last:i])
                last = i + 1
        i += 1
    return [*parts, text[last:]]


def instruction(inside: str) -> str:
    """The C++ statement of what stands in asm(...)."""
    parts = split(inside, ":")
    operands = []
    for part in parts[1:3]:
        for operand in split(part, ","):
            if operand.strip():
                operands.append(operand[operand.index("(") + 1 : operand.rindex(")")].strip())
    for name, statement in INSTRUCTIONS:
        if name in parts[0]:
            return statement.format(*operands)
    raise SystemExit(f"no host code for the instruction {parts[0].strip()}: add it to INSTRUCTIONS")


def kernel_start(text: str, end: int) -> int:
    """Where the name of a kernel begins that ends at `end`, template arguments included."""
    depth, i = 0, end - 1
    while i >= 0 and (depth or re.match(r"[\w:>]", text[i])):
        depth += (text[i] == ">") - (text[i] == "<")
        i -= 1
    return i + 1


def fresh(declaration: re.Match[str]) -> str:
    """Shared arrays and numbers, which hold nothing that can be used when a block begins."""
    names = [re.sub(r"\[.*", "", x, flags=re.S).split()[-1] for x in split(declaration[1], ",")]
    return declaration[0] + "".join(f" HOST_FRESH({name});" for name in names)


def translate_text(text: str) -> str:
    """One file."""
    out, at = "", 0
    for match in re.finditer(r"\basm\b(?:\s+volatile)?\s*\(", text):
        end = closing(text, match.end() - 1)
        out += text[at : match.start()] + instruction(text[match.end() : end])
        at = end + 1
        at += text[at] == ";"
    text = re.sub(r"\s+<<<", "<<<", out + text[at:])
    while "<<<" in text:
        start = text.index("<<<")
        end = text.index(">>>", start)
        before = text[:start].rstrip()  # a launch may stand in the line behind the kernel's name
        name = before[kernel_start(before, len(before)) :]
        last = closing(text, end + 3)
        how, arguments = split(text[start + 3 : end], ","), text[end + 4 : last]
        shared = how[2] if len(how) > 2 else "0"
        call = f"host_cuda::launch({how[0]}, dim3({how[1]}), {shared}, [&] {{ {name}({arguments}); }})"
        text = before[: len(before) - len(name)] + call + text[last + 1 :]
    text = re.sub(
        r"extern __shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];",
        r"\1 * const \2 = (\1 *) host_cuda::shared;",
        text,
    )
    text = re.sub(r"^[ ]*__shared__ (?:__align__\(\d+\) )?([^;]+);", fresh, text, flags=re.M)
    return re.sub(r"#pragma unroll.*\n", "\n", text)


def translate(folder: Path, out: Path) -> list[Path]:
    """All sources of a folder and of those in it; the C++ files that came of .cu files."""
    made = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".inc")):
        to = out / path.relative_to(folder)
        to.parent.mkdir(parents=True, exist_ok=True)
        to = to.with_suffix(".cpp") if path.suffix == ".cu" else to
        text = path.read_text() if path.suffix in (".h", ".inc") else translate_text(path.read_text())
        if not to.exists() or to.read_text() != text:
            to.write_text(text)
        if path.suffix == ".cu":
            made.append(to)
    return made


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    translate(Path(sys.argv[1]), Path(sys.argv[2]))
